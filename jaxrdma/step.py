"""The JAX side of the custom calls: `ps_step`, its halves `push` and `pull`, and `average_gradients`.

How a call gets into a program, and stays there: `jaxrdma/dispatch.py`.

What orders the calls of a program is data: each takes the step of a state and returns the next one. So a state threads
through `jit`, `scan`, `while_loop` and donation like any other array, and a program can be cached on disk: it holds the
small numbers of its session and flow, never a pointer.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrdma import _native
from jaxrdma.control import LeafSpec
from jaxrdma.dispatch import in_place, kept_call
from jaxrdma.errors import CancelledError, MismatchError, StepError

if TYPE_CHECKING:
    import optax

    from jaxrdma.session import Session

TARGET = "jaxrdma_operation"

# What a leaf's gradient may be pushed as: everything that is summed in the same precision.
_GRADIENT_DTYPES = {
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("float32", "bfloat16", "float16"),
    "float16": ("float32", "bfloat16", "float16"),
    "float64": ("float64",),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "step", "dropped"],
    meta_fields=["session", "flow"],
)
@dataclasses.dataclass(frozen=True)
class PSState:
    """Parameters and their version, as every worker sees them. A pytree, with nothing hidden.

    **Attributes:**

    - `params`: the tree given to `Session.init`, its leaves as JAX arrays.
    - `step`: int32 scalar, the version of `params`: 0 after `init`, one more after each `ps_step` unless the policy
      says otherwise.
    - `dropped`: int32 scalar: so many gradients of this worker came too late for a mean, and did not count.
    - `session`, `flow`: small numbers that say which connection and which model; static.
    """

    params: Any
    step: jax.Array
    dropped: jax.Array
    session: int
    flow: int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step"], meta_fields=["session", "flow"]
)
@dataclasses.dataclass(frozen=True)
class AverageState:
    """State of `average_gradients`: how many means were formed."""

    step: jax.Array
    session: int
    flow: int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step"], meta_fields=["session", "flow"]
)
@dataclasses.dataclass(frozen=True)
class Ticket:
    """What `push` returns and `pull` takes: gradients that are under way."""

    step: jax.Array
    session: int
    flow: int


class Calls(NamedTuple):
    """The compiled calls of one flow; made once, so that eager use hits JAX's own cache."""

    exchange: Callable[..., Any]
    push: Callable[..., Any]
    pull: Callable[..., Any]


def ps_step(state: PSState, grads: Any) -> PSState:
    """Push gradients, wait for the update on the servers, pull the new parameters.

    Call it once per step on every worker, eagerly or inside `jit`, `lax.scan`, `lax.while_loop`. Donate `state` to the
    jitted function: the parameters are then replaced in place; without donation they are copied once.

    Several devices of this process are one worker: give their mesh to `Session.init`, or call this inside `shard_map`
    with a replicated state (`in_specs=P()`) and gradients that are alike on all devices, by `lax.pmean`. They go to the
    servers once. Devices that are the CPU's, a simulation, need `jax.block_until_ready` on each step's state: XLA locks
    them up where many steps are begun ahead, also without jaxrdma.

    A step is made whether or not its results are used, and before the thread that has begun it closes the session (what
    other threads have begun, they should wait for). But use them in a function that is differentiated: JAX may drop a
    jitted part of it that has run by itself before. With many leaves JAX calls a program fast in which this stands by
    itself, not inside another function that is jitted or in a loop (see `jaxrdma/dispatch.py`), and does not know of
    its side effect: `jax.effects_barrier` does not wait for it, `jax.block_until_ready(state)` does.

    **Arguments:**

    - `state`: what `Session.init` or the last `ps_step` returned.
    - `grads`: a tree like `state.params`; each leaf of the same shape, float32, bfloat16 or float16 (float64 for a
      float64 parameter). Sums are formed in float32 (float64), and the mean over the workers is applied.

    **Returns:** the state of `state.step + 1`; with another policy than `SyncReplicas()`, of the version that this
    worker may go on with.

    **Raises:** `MismatchError` if `grads` does not fit, naming the leaf; `CancelledError` if the session is closed;
    `TypeError` under `vmap` or `grad`. When the program runs, `jax.errors.JaxRuntimeError` with a text that names the
    process that failed, or says that the step is stale.
    """
    flow = find_flow(state.session, state.flow, "ps_step")
    params = flow.flatten("params", state.params, exact=True)
    pushed = flow.flatten("grads", grads)
    step, dropped, results = flow.calls.exchange(state.step, params, pushed)
    return dataclasses.replace(state, params=flow.unflatten(results), step=step, dropped=dropped)


def push(state: PSState, grads: Any) -> Ticket:
    """The first half of `ps_step`: hand the gradients over and go on computing.

    Returns when they are sent. The new parameters arrive meanwhile; `pull` fetches them. One push per pull.

    **Arguments and errors:** those of `ps_step`.
    """
    flow = find_flow(state.session, state.flow, "push")
    step = flow.calls.push(state.step, flow.flatten("grads", grads))
    return Ticket(step, state.session, state.flow)


def pull(ticket: Ticket) -> PSState:
    """The second half of `ps_step`: wait for the parameters that answer a `push`."""
    flow = find_flow(ticket.session, ticket.flow, "pull")
    step, dropped, results = flow.calls.pull(ticket.step)
    return PSState(flow.unflatten(results), step, dropped, ticket.session, ticket.flow)


def average_gradients(session: "Session") -> "optax.GradientTransformation":
    """An optax transformation that replaces gradients by their mean over all workers.

    The servers hold no parameters; each worker applies its own update, the same on all if they started alike:
    `optax.chain(jaxrdma.average_gradients(session), optax.adam(1e-3))`.

    `init` agrees with the other workers on the leaves and so must be called on each of them, in the same order.

    **Raises:** as `ps_step`; from `init` as `Session.init`.
    """
    import optax

    flows: dict[tuple[LeafSpec, ...], int] = {}

    def init(params: Any) -> AverageState:
        flow = session.average_flow(params, flows)
        return AverageState(jnp.zeros((), jnp.int32), session.id, flow)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AverageState]:
        del params
        flow = find_flow(state.session, state.flow, "average_gradients")
        step, _, results = flow.calls.exchange(
            state.step, (), flow.flatten("grads", updates, exact=True)
        )
        return flow.unflatten(results), dataclasses.replace(state, step=step)

    # optax types states and trees as Any-like protocols that a plain function cannot spell.
    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class FlowCalls:
    """What a program needs of a flow: its leaves, its tree, its calls."""

    leaves: tuple[LeafSpec, ...]
    treedef: Any
    calls: Calls
    mesh: Mesh | None = None  # the devices that all have the state

    def flatten(self, what: str, tree: Any, exact: bool = False) -> tuple[Any, ...]:
        """Leaves of `tree`, checked against the flow's. `exact`: the dtypes must be equal."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise MismatchError(
                f"the tree of {what} is not that of the parameters given to init: "
                f"expected {self.treedef}, got {treedef}"
            )
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            aval = jax.typeof(leaf)
            shape, dtype = tuple(aval.shape), str(aval.dtype)
            allowed = (spec.dtype,) if exact else _GRADIENT_DTYPES[spec.dtype]
            if shape != spec.shape or dtype not in allowed:
                name = spec.path.replace("params", what, 1)
                raise MismatchError(
                    f"leaf {name} is {dtype}{list(shape)}, expected {' or '.join(allowed)} of shape {list(spec.shape)}"
                )
        return tuple(leaves)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, leaves)


def make_calls(
    session: int, flow: int, leaves: Sequence[LeafSpec], *, average: bool, mesh: Mesh | None = None
) -> Calls:
    """The three calls of a flow, which all devices of `mesh` make, if there is one.

    In place where XLA can: parameters (update) or gradients (average) are aliased with the results.
    """
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    step_spec = jax.ShapeDtypeStruct((), np.int32)
    told_spec = jax.ShapeDtypeStruct(
        (2,), np.int32
    )  # the step, and how many gradients were dropped

    def call(
        name: str,
        kind: _native.OperationKind,
        first_source: int,
        results: Sequence[Any],
        aliases: dict[int, int],
        operands: Sequence[Any],
    ) -> Any:
        devices = _devices()
        run = functools.partial(
            jax.ffi.ffi_call(TARGET, results, has_side_effect=True, input_output_aliases=aliases),
            session=np.int64(session),
            flow=np.int64(flow),
            kind=np.int64(kind.value),
            first_source=np.int64(first_source),
            leaves=np.int64(len(specs)),
            devices=np.int64(devices),
        )
        return kept_call(
            run,
            operands,
            devices=devices,
            vmapped=(
                f"jaxrdma.{name} under vmap: a step is one exchange of whole gradients with the servers. Call it "
                "outside the vmap, e.g. after the mean over the mapped axis"
            ),
            differentiated=(
                f"jaxrdma.{name} cannot be differentiated: take the gradient of the loss first, "
                f"then hand it to {name}"
            ),
        )

    step_name = "average_gradients" if average else "ps_step"

    def exchange(
        step: Any, params: tuple[Any, ...], grads: tuple[Any, ...]
    ) -> tuple[Any, Any, list[Any]]:
        _check_alike(step_name, (step, *params, *grads))
        operands = (step, *params, *grads)
        like = grads if average else params
        results = [told_spec, *map(jax.typeof, like)]
        aliases = {i + 1: i + 1 for i, x in enumerate(like) if x.size}
        kind = _native.OperationKind.EXCHANGE
        told, *out = call(step_name, kind, len(params), results, aliases, operands)
        return told[0], told[1], out

    def push_call(step: Any, grads: tuple[Any, ...]) -> Any:
        _check_alike("push", (step, *grads))
        (ticket,) = call("push", _native.OperationKind.PUSH, 0, [step_spec], {}, (step, *grads))
        return ticket

    def pull_call(ticket: Any) -> tuple[Any, Any, list[Any]]:
        results = [told_spec, *specs]
        told, *out = call("pull", _native.OperationKind.PULL, 0, results, {}, (ticket,))
        return told[0], told[1], out

    functions = (exchange, push_call, pull_call)
    return Calls(*(in_place(_over(mesh, function)) for function in functions))


def _over(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on every device of `mesh`, unless it is called there already."""
    if mesh is None:
        return function
    # What comes in is replicated, by in_specs; whether it was alike before is then the compiler's business.
    everywhere = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def run(*args: Any) -> Any:
        inside = jax.sharding.get_abstract_mesh().manual_axes
        return (function if inside else everywhere)(*args)

    return run


def _devices() -> int:
    """How many devices of this process run the program that is being traced, each of which makes the call.

    **Raises:** `TypeError` where not all axes of the mesh are `shard_map`'s, or devices are another process's.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return 1
    if rest := [name for name in mesh.axis_names if name not in mesh.manual_axes]:
        raise TypeError(
            f"a step with jaxrdma inside a shard_map that leaves the mesh axes {', '.join(map(repr, rest))} to the "
            "compiler: name all axes in its axis_names, or call jaxrdma outside of it with session.init(mesh=...)"
        )
    if jax.process_count() > 1:
        raise TypeError(
            f"a step with jaxrdma on a mesh of {mesh.size} devices of several processes of jax.distributed: take a "
            "mesh of jax.local_devices(); between processes the servers form the mean"
        )
    return mesh.size


def _check_alike(name: str, operands: Sequence[Any]) -> None:
    """Refuse what `shard_map` knows to differ between its devices: one of them speaks for all.

    **Raises:** `TypeError`, naming the axes.
    """
    axes = {str(axis) for x in operands for axis in _varying(jax.typeof(x))}
    if axes:
        named = ", ".join(map(repr, sorted(axes)))
        raise TypeError(
            f"jaxrdma.{name} inside shard_map: gradients or parameters differ between the devices of axis {named}. "
            f"Take the mean first, jax.lax.pmean(grads, {named}), and give the state in_specs=P()"
        )


def _varying(aval: Any) -> Iterable[Any]:
    """The axes of `shard_map` along which a value is not known to be alike."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", ())


def open_session(session: int) -> dict[int, FlowCalls]:
    """Makes a session known to the calls of this module; returns its table of flows, which the session fills."""
    return _open_sessions.setdefault(session, {})


def close_session(session: int) -> None:
    """From now on the calls refuse states of this session."""
    _open_sessions.pop(session, None)


_open_sessions: dict[int, dict[int, FlowCalls]] = {}


def find_flow(session: int, flow: int, what: str) -> FlowCalls:
    """The flow of a state, for `what`.

    **Raises:** `CancelledError` if its session is not open, `StepError` if it is not a flow of that session.
    """
    flows = check_open(session, what)
    if flow not in flows:
        raise StepError(
            f"{what} of model {flow}, which was not initialised in this session: call session.init first"
        )
    return flows[flow]


def check_open(session: int, what: str) -> dict[int, FlowCalls]:
    """The flows of a session, for `what`.

    **Raises:** `CancelledError` if it is not open.
    """
    flows = _open_sessions.get(session)
    if flows is None:
        raise CancelledError(
            f"{what} of session {session}, which is not open in this process: it was closed, or the state came from "
            "another process without jaxrdma.connect and init"
        )
    return flows
