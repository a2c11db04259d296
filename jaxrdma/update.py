"""optax transformation -> exported XLA programs -> run on a server's shard.

On a worker, `analyse` traces an update and finds what it needs of each leaf; `export_update`, on the chief,
makes one program per server. On a server, `ServerUpdate` runs it on the parameters the server holds. State
never leaves the server; the worker keeps the tree structure. JAX is imported only inside functions.

Leaves that are treated alike and are small are packed: one array holds them all, one after the other, and
the program has one kernel for it instead of hundreds. The bits are those of a single-process run: each
element goes through the same operations.
"""

import enum
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxrdma.averages import track_average
from jaxrdma.control import LeafSpec
from jaxrdma.dataflow import (
    ELEMENTWISE,
    WHOLE,
    Class,
    Classified,
    classify,
    convert,
    evaluate,
    flatten,
    signatures,
)
from jaxrdma.errors import UpdateError
from jaxrdma.plan import Plan

# Leaves of at most this many elements on a server are packed. One kernel on 64 Ki elements takes about as
# long as the copies into and out of the pack; below, the kernels' number is what costs.
PACK_ELEMENTS = 1 << 16

_ALTERNATIVES = (
    "use one server, or jaxrdma.average_gradients(session) in an optax.chain, where each worker applies its "
    "own update"
)


class UpdateKind(enum.StrEnum):
    """What the new value of one element depends on."""

    ELEMENTWISE = (
        "elementwise"  # the same element of its leaf: any piece of a leaf can be updated alone
    )
    LEAFWISE = "leafwise"  # anything in its leaf: leaves stay whole
    GLOBAL = "global"  # other leaves: one server holds all of them


@dataclass(frozen=True)
class Analysis:
    """What is known of an update for one set of leaves. Made by `analyse`, on every worker.

    - `kind`: what the new value of one element depends on.
    - `fingerprint`: equal on two workers if their updates are, for the same leaves.
    - `why`: for a GLOBAL update, a text that names two leaves it mixes.
    """

    kind: UpdateKind
    fingerprint: str
    why: str
    leaves: tuple[LeafSpec, ...]
    init: Classified
    step: Classified
    state_classes: tuple[Class, ...]
    state_paths: tuple[str, ...]
    treatments: tuple[str, ...]  # per leaf: leaves with equal texts are updated alike
    averaged: (
        bool  # the last arrays of the state, one per leaf, are the parameters' moving averages
    )
    x64: bool

    @property
    def whole_leaves(self) -> bool:
        """What `assign_partitions` must be called with."""
        return self.kind is not UpdateKind.ELEMENTWISE

    def check_servers(self, servers: int) -> None:
        """Raise `UpdateError` if this update cannot run on so many servers."""
        if self.kind is UpdateKind.GLOBAL and servers > 1:
            raise UpdateError(
                f"the update mixes leaves ({self.why}), as gradient clipping by global norm does, and "
                f"cannot run on {servers} servers that each see only their share: {_ALTERNATIVES}"
            )


@dataclass(frozen=True)
class Exported:
    """The update as programs: one per server, empty where a server holds nothing."""

    kind: UpdateKind
    programs: list[bytes]
    fingerprint: str


class Pack(msgspec.Struct, frozen=True):
    """Leaves that one array of a program holds, one after the other.

    - `leaves`: their indices; the elements of each that this server holds are `elements`.
    - `shape`: of the array in the program.
    """

    leaves: list[int]
    elements: list[int]
    dtype: str
    shape: list[int]


class StateEntry(msgspec.Struct, frozen=True):
    """One array of a server's optimizer state: where it comes from. For checkpoints and error texts.

    - `path`: in the optax state, of the first leaf of the pack.
    - `pack`: index of the pack it belongs to, element by element or as a whole; -1 if to none.
    """

    path: str
    pack: int
    shape: list[int]
    dtype: str


class StatePart(msgspec.Struct, frozen=True):
    """One leaf's share of an array of a server's optimizer state, the same for every number of servers.

    - `leaf`: whose state it is, -1 if of no single leaf; `slot`: which of the arrays of that leaf, or of no leaf.
    - `dtype`, `elements`: what the server holds of it.
    - `along`: whether its elements are the leaf's, so that they lie where those lie; else the server has all of it.
    """

    leaf: int
    slot: int
    dtype: str
    elements: int
    along: bool


class Program(msgspec.Struct, frozen=True):
    """The content of one server's blob."""

    jax_version: str
    x64: bool
    kind: str
    leaves: int  # of the whole flow
    packs: list[Pack]
    state: list[StateEntry]
    averages: list[int]  # by pack, which of `state` is the moving average; or empty
    init: bytes
    step: bytes


def analyse(
    update: Any, treedef: Any, leaves: Sequence[LeafSpec], ema: float | None = None
) -> Analysis:
    """Trace an optax transformation, and find what the new value of each element depends on.

    **Arguments:**

    - `update`: an `optax.GradientTransformation`.
    - `treedef`, `leaves`: from `plan.describe_leaves(params)`.
    - `ema`: the decay of the parameters' moving averages, which are then a part of its state.

    **Raises:** `UpdateError` if it is no transformation, needs more than gradients and parameters, calls
    back into Python, or its state changes shape or dtype from step to step; `ConfigError` for an `ema` that is no
    decay.
    """
    import jax

    _require_transformation(update)
    if ema is not None:
        update = track_average(update, ema)
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    keys: dict[int, Any] = {}  # position in the state -> implementation of the PRNG key there
    state_paths: list[str] = []
    state_treedef: list[Any] = []

    def init(params: list[Any]) -> list[Any]:
        state = update.init(jax.tree.unflatten(treedef, params))
        flat, structure = jax.tree_util.tree_flatten_with_path(state)
        state_treedef.append(structure)
        state_paths.extend(f"state{jax.tree_util.keystr(path)}" for path, _ in flat)
        return [_unwrap_key(keys, i, leaf) for i, (_, leaf) in enumerate(flat)]

    def step(grads: list[Any], state: list[Any], params: list[Any]) -> tuple[list[Any], list[Any]]:
        tree = jax.tree.unflatten(treedef, params)
        wrapped = [
            jax.random.wrap_key_data(leaf, impl=keys[i]) if i in keys else leaf
            for i, leaf in enumerate(state)
        ]
        updates, new_state = update.update(
            jax.tree.unflatten(treedef, grads), jax.tree.unflatten(state_treedef[0], wrapped), tree
        )
        if jax.tree.structure(updates) != treedef:
            raise UpdateError(
                f"the update returned updates of another structure, {jax.tree.structure(updates)}, than "
                f"the parameters', {treedef}"
            )
        if jax.tree.structure(new_state) != state_treedef[0]:
            raise UpdateError(
                f"the update returned a state of another structure, {jax.tree.structure(new_state)}, than "
                f"its init, {state_treedef[0]}: it cannot be compiled once for all steps"
            )
        new = [
            (param + change).astype(param.dtype)  # as optax.apply_updates
            for param, change in zip(params, jax.tree.leaves(updates), strict=True)
        ]
        flat = [_unwrap_key({}, i, leaf) for i, leaf in enumerate(jax.tree.leaves(new_state))]
        return flat, new

    init_jaxpr = _trace("init", init, avals)
    state_avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in init_jaxpr.out_avals
    ]
    step_jaxpr = _trace("update", step, avals, state_avals, avals)
    _check_fixed_point(state_paths, state_avals, step_jaxpr.out_avals[: len(state_avals)])
    for leaf, aval in zip(leaves, step_jaxpr.out_avals[len(state_avals) :], strict=True):
        if tuple(aval.shape) != tuple(leaf.shape):
            raise UpdateError(
                f"the update would change {leaf.path} from shape {list(leaf.shape)} to {list(aval.shape)}"
            )

    sizes = [math.prod(leaf.shape) for leaf in leaves]
    own = [Class(ELEMENTWISE, 1 << index) for index in range(len(leaves))]
    init_classified = classify(flatten(init_jaxpr), own, sizes)
    step_program = flatten(step_jaxpr)
    state_classes = init_classified.outputs
    while True:  # a state array depends on what it was made of, and on what every step adds to it
        step_classified = classify(step_program, [*own, *state_classes, *own], sizes)
        outputs = step_classified.outputs
        joined = [a | b for a, b in zip(state_classes, outputs, strict=False)]
        if joined == state_classes:
            break
        state_classes = joined
    new_classes = [a | b for a, b in zip(outputs[len(state_avals) :], own, strict=True)]

    kind, why = _kind(leaves, new_classes, state_classes, state_paths)
    init_texts = signatures(init_classified, ["own"] * len(leaves))
    treatments, step_texts = _treatments(leaves, step_classified, state_classes, init_texts)
    content = [str(kind), *init_texts, *step_texts, *map(str, leaves)]
    return Analysis(
        kind=kind,
        fingerprint=hashlib.sha256("\n".join(content).encode()).hexdigest(),
        why=why,
        leaves=tuple(leaves),
        init=init_classified,
        step=step_classified,
        state_classes=tuple(state_classes),
        state_paths=tuple(state_paths),
        treatments=tuple(treatments),
        averaged=ema is not None,
        x64=jax.dtypes.canonicalize_dtype("float64") == "float64",
    )


def _require_transformation(update: Any) -> None:
    if isinstance(update, type) or not (
        callable(getattr(update, "init", None)) and callable(getattr(update, "update", None))
    ):
        hint = ""
        if callable(update):
            name = getattr(update, "__name__", "it")
            hint = f"; call it first, e.g. optax.{name}(1e-3)"
        raise UpdateError(
            "update= takes an optax.GradientTransformation, with init and update functions, but got "
            f"{update!r}{hint}"
        )


def _trace(what: str, function: Any, *arguments: Any) -> Any:
    import jax

    try:
        jaxpr = jax.make_jaxpr(function)(*arguments)
    except UpdateError:
        raise
    except Exception as error:
        raise UpdateError(
            f"the update's {what} function failed while it was traced with "
            + ("the parameters" if what == "init" else "gradients, state and parameters alone")
            + f": {type(error).__name__}: {error}. If it needs the loss or other arguments, it must run on "
            "the workers: use jaxrdma.average_gradients(session)"
        ) from error
    if jaxpr.effects:
        names = ", ".join(sorted(str(effect) for effect in jaxpr.effects))
        raise UpdateError(
            f"the update's {what} function has side effects ({names}), such as printing or a call back "
            "into Python, and cannot run on a server: take them out of the update"
        )
    return jaxpr


def _unwrap_key(keys: dict[int, Any], position: int, leaf: Any) -> Any:
    """A PRNG key as plain numbers, which programs can take and return; other leaves as they are."""
    import jax
    import jax.numpy as jnp

    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        keys[position] = jax.random.key_impl(array)
        return jax.random.key_data(array)
    return array


def _check_fixed_point(paths: list[str], before: Sequence[Any], after: Sequence[Any]) -> None:
    for path, old, new in zip(paths, before, after, strict=True):
        if (tuple(old.shape), old.dtype) != (tuple(new.shape), new.dtype):
            raise UpdateError(
                f"the update's {path} begins as {old.dtype.name}{list(old.shape)} and is "
                f"{new.dtype.name}{list(new.shape)} after one step: it must keep its shape and dtype. "
                "With 16-bit parameters, look for an option like mu_dtype"
            )


def _kind(
    leaves: Sequence[LeafSpec], new: Sequence[Class], state: Sequence[Class], paths: Sequence[str]
) -> tuple[UpdateKind, str]:
    kind = UpdateKind.ELEMENTWISE
    named = [
        (f"the new value of {leaf.path}", known) for leaf, known in zip(leaves, new, strict=True)
    ]
    named += zip(paths, state, strict=True)
    for position, (name, known) in enumerate(named):
        if known.leaves.bit_count() > 1:
            own = position if position < len(leaves) else -1
            mixed = [
                leaf.path for i, leaf in enumerate(leaves) if known.leaves >> i & 1 and i != own
            ]
            others = " and ".join(mixed[: 1 if own >= 0 else 2])
            return UpdateKind.GLOBAL, f"{name} depends on {others}"
        if known.leaves and known.level == WHOLE:
            kind = UpdateKind.LEAFWISE
    return kind, ""


def _treatments(
    leaves: Sequence[LeafSpec], step: Classified, state: Sequence[Class], init_texts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Per leaf a text that says how it and its state are made; and a text for each result of the step."""
    count = len(leaves)
    seen = [0] * count
    names: list[str] = []
    for position, known in enumerate(state):
        if known.leaves.bit_count() == 1:
            names.append(f"state {seen[known.leaf]} of its leaf")
            seen[known.leaf] += 1
        else:
            names.append(f"state {position}")
    texts = signatures(step, [*["gradient"] * count, *names, *["parameter"] * count])
    per_leaf = [[leaf.dtype, texts[len(state) + index]] for index, leaf in enumerate(leaves)]
    for position, known in enumerate(state):
        if known.leaves.bit_count() == 1:
            per_leaf[known.leaf] += [init_texts[position], texts[position]]
    return ["\n".join(parts) for parts in per_leaf], texts


def export_update(analysis: Analysis, plan: Plan) -> Exported:
    """Compile-ready programs for the servers of a plan. Only the chief needs them.

    **Raises:** `UpdateError` if the update needs more than a server has, or cannot be exported.
    """
    analysis.check_servers(plan.servers)
    if analysis.whole_leaves and not plan.whole_leaves:
        raise UpdateError(
            f"the update is {analysis.kind}: its plan must be made with whole_leaves=True"
        )
    programs = [_export_server(analysis, plan, server) for server in range(plan.servers)]
    return Exported(analysis.kind, programs, analysis.fingerprint)


def _export_server(analysis: Analysis, plan: Plan, server: int) -> bytes:
    import jax

    packs = _packs(analysis, plan, server)
    if not packs:
        return b""
    flat = analysis.kind is UpdateKind.ELEMENTWISE
    firsts = {pack.leaves[0]: index for index, pack in enumerate(packs)}
    shapes = {leaf: tuple(packs[index].shape) for leaf, index in firsts.items()} if flat else None
    # The state this server keeps: what belongs to the first leaf of a pack, and what belongs to no leaf.
    kept = [
        position
        for position, known in enumerate(analysis.state_classes)
        if analysis.kind is UpdateKind.GLOBAL or not known.leaves or known.leaf in firsts
    ]
    init, step = analysis.init, analysis.step
    count, states = len(analysis.leaves), len(analysis.state_classes)
    new = [states + leaf for leaf in firsts]
    empty = [leaf for leaf in analysis.leaves if analysis.kind is UpdateKind.GLOBAL]

    def spread(arrays: Sequence[Any], whole: int) -> list[Any]:
        result: list[Any] = [None] * whole
        for index, leaf in enumerate(empty):  # leaves without elements lie on no server
            if math.prod(leaf.shape) == 0:
                result[index] = jax.numpy.zeros(leaf.shape, leaf.dtype)
        for leaf, array in zip(firsts, arrays, strict=True):
            result[leaf] = array
        return result

    def as_kept(results: Sequence[Any], classified: Classified) -> list[Any]:
        program = classified.program
        return [
            convert(
                result,
                classified.outputs[position],
                analysis.state_classes[position],
                program.values[program.outputs[position]].aval.shape,
                shapes,
            )
            for result, position in zip(results, kept, strict=True)
        ]

    def run_init(params: list[Any]) -> list[Any]:
        return as_kept(evaluate(init, spread(params, count), kept, shapes)[0], init)

    def run_step(
        grads: list[Any], state: list[Any], params: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        whole_state: list[Any] = [None] * states
        for position, array in zip(kept, state, strict=True):
            whole_state[position] = array
        inputs = [*spread(grads, count), *whole_state, *spread(params, count)]
        results, witnesses = evaluate(step, inputs, [*kept, *new], shapes)
        return as_kept(results[: len(kept)], step), results[len(kept) :], witnesses

    params = [jax.ShapeDtypeStruct(pack.shape, pack.dtype) for pack in packs]
    averages = [kept.index(states - count + leaf) for leaf in firsts] if analysis.averaged else []
    try:
        init_export = jax.export.export(jax.jit(run_init), platforms=["cpu"])(params)
        state = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in init_export.out_avals]
        step_export = jax.export.export(jax.jit(run_step), platforms=["cpu"])(params, state, params)
        program = Program(
            jax_version=jax.__version__,
            x64=analysis.x64,
            kind=str(analysis.kind),
            leaves=count,
            packs=packs,
            state=[
                StateEntry(
                    path=analysis.state_paths[position],
                    pack=firsts[known.leaf] if known.leaves.bit_count() == 1 else -1,
                    shape=list(aval.shape),
                    dtype=aval.dtype.name,
                )
                for position, aval in zip(kept, init_export.out_avals, strict=True)
                for known in [analysis.state_classes[position]]
            ],
            averages=averages,
            init=bytes(init_export.serialize()),
            step=bytes(step_export.serialize()),
        )
    except Exception as error:
        raise UpdateError(
            f"the update cannot be exported for server {server}: {type(error).__name__}: {error}. "
            "Use jaxrdma.average_gradients(session), where each worker applies its own update"
        ) from error
    return msgspec.msgpack.encode(program)


def _packs(analysis: Analysis, plan: Plan, server: int) -> list[Pack]:
    packs: list[Pack] = []
    alike: dict[str, int] = {}
    for index, leaf in enumerate(plan.leaves):
        elements = plan.server_elements(server, index)
        if elements == 0:
            continue
        # A leaf of one element stays what it is: XLA treats a scalar unlike an array, up to the last bit.
        flat = analysis.kind is UpdateKind.ELEMENTWISE and math.prod(leaf.shape) > 1
        if flat and elements <= PACK_ELEMENTS:
            at = alike.setdefault(analysis.treatments[index], len(packs))
            if at < len(packs):
                pack = packs[at]
                pack.leaves.append(index)
                pack.elements.append(elements)
                pack.shape[0] += elements
                continue
        packs.append(
            Pack([index], [elements], leaf.dtype, [elements] if flat else list(leaf.shape))
        )
    return packs


def _accumulator(dtype: str) -> str:
    """The type in which gradients of `dtype` are summed."""
    return "float64" if dtype == "float64" else "float32"


# By pack, its memory, in pieces: where in the pack each begins, and a flat view of it.
_Layout = list[list[tuple[int, Any]]]


class ServerUpdate:
    """One server's share of an update: its compiled program and its optimizer state.

    Not thread-safe: one thread of the server owns it. Views are flat NumPy arrays over the server's own
    memory, one per leaf of the flow, in leaf order, empty where the server holds nothing of a leaf; best
    in one tuple that is given at every step, because how its views lie is found once. The program reads
    large views where they lie and has ended before a call returns, so that memory may change afterwards;
    results and state are always the program's own buffers.
    """

    def __init__(self, blob: bytes, keep_before: bool = False) -> None:
        """Compile the program. An empty `blob` is the program of a server that holds nothing.

        `keep_before`: what a step replaces is kept until the next, at the cost of that memory.

        **Raises:** `UpdateError` if this process cannot run the program.
        """
        self._program = msgspec.msgpack.decode(blob, type=Program) if blob else None
        self._state: list[Any] | None = None
        self._keep_before = keep_before
        self._made: list[Any] | None = None  # the parameters by pack, as the last step made them
        self._before: tuple[list[Any], list[Any]] | None = None  # these and the state, one step ago
        self._layouts: list[tuple[tuple[Any, ...], _Layout]] = []
        if self._program is None:
            return
        import jax
        import ml_dtypes
        import numpy as np

        program = self._program
        self._device = jax.local_devices(backend="cpu")[0]
        # ml_dtypes knows bfloat16, which NumPy does not by itself.
        self._dtypes = [
            np.dtype(ml_dtypes.bfloat16 if pack.dtype == "bfloat16" else pack.dtype)
            for pack in program.packs
        ]
        self._grad_dtypes = [np.dtype(_accumulator(pack.dtype)) for pack in program.packs]
        packed = [pack.leaves if len(pack.leaves) > 1 else [] for pack in program.packs]
        self._grads = [
            _aligned(sum(pack.elements), dtype) if leaves else None
            for pack, leaves, dtype in zip(program.packs, packed, self._grad_dtypes, strict=True)
        ]
        self._params = [
            _aligned(sum(pack.elements), dtype) if leaves else None
            for pack, leaves, dtype in zip(program.packs, packed, self._dtypes, strict=True)
        ]
        try:
            with jax.enable_x64(program.x64), jax.default_device(self._device):
                shapes = [tuple(pack.shape) for pack in program.packs]
                params = _avals(shapes, self._dtypes)
                state = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in program.state]
                init = jax.export.deserialize(bytearray(program.init))
                step = jax.export.deserialize(bytearray(program.step))
                self._init = jax.jit(init.call).lower(params).compile()
                donating = jax.jit(step.call, donate_argnums=() if keep_before else 1)
                self._step = donating.lower(params, state, params).compile()
                # Gradients are rounded to 16 bits by a program of their own: inside the step, XLA would
                # skip it, or choose other places to fuse a product and a sum.
                self._narrow = [
                    index
                    for index, dtype in enumerate(self._dtypes)
                    if dtype != self._grad_dtypes[index]
                ]
                wide = [_avals(shapes, self._grad_dtypes)[index] for index in self._narrow]

                def round_all(arrays: list[Any]) -> list[Any]:
                    pairs = zip(self._narrow, arrays, strict=True)
                    return [array.astype(self._dtypes[index]) for index, array in pairs]

                self._round = jax.jit(round_all).lower(wide).compile()
        except Exception as error:
            raise UpdateError(
                f"the update was exported with jax {program.jax_version} and cannot run with jax "
                f"{jax.__version__} on this server: {type(error).__name__}: {error}"
            ) from error

    @property
    def kind(self) -> UpdateKind | None:
        """Of the update; None where the server holds nothing."""
        return UpdateKind(self._program.kind) if self._program else None

    def initialise(self, params: Sequence[Any]) -> None:
        """Make the optimizer state for these parameters; any former state is dropped."""
        import jax

        if self._program is None:
            return
        inputs = self._gather(self._lay_out(params, self._dtypes), self._dtypes, self._params)
        self._made = self._before = None
        with jax.enable_x64(self._program.x64), jax.default_device(self._device):
            self._state = list(jax.block_until_ready(self._init(self._put(inputs))))

    def step(self, grads: Sequence[Any], params: Sequence[Any]) -> None:
        """One update: reads the mean gradients and the parameters, overwrites the parameters in place."""
        import jax
        import numpy as np

        if self._program is None:
            return
        if self._state is None:
            raise UpdateError(
                "the update has no state: initialise was not called, or a step failed"
            )
        grad_layout = self._lay_out(grads, self._grad_dtypes)
        grad_inputs = self._gather(grad_layout, self._grad_dtypes, self._grads)
        layout = self._lay_out(params, self._dtypes)
        param_inputs = self._gather(layout, self._dtypes, self._params)
        if self._keep_before and self._made is None:
            self._made = [np.array(array) for array in param_inputs]
        state, self._state = self._state, None
        with jax.enable_x64(self._program.x64), jax.default_device(self._device):
            rounded = self._put(grad_inputs)
            if self._narrow:
                narrow = self._round([rounded[index] for index in self._narrow])
                for index, array in zip(self._narrow, narrow, strict=True):
                    rounded[index] = array
            new_state, new_params, _ = jax.block_until_ready(
                self._step(rounded, state, self._put(param_inputs))
            )
        if self._keep_before:
            assert self._made is not None
            # The program's own buffers, which nothing overwrites: the last step's are the parameters before this one.
            self._before, self._made = (self._made, state), list(new_params)
        self._state = list(new_state)
        for runs, array, dtype in zip(layout, new_params, self._dtypes, strict=True):
            result = np.asarray(array).reshape(-1)
            for begin, run in runs:
                np.copyto(run.view(dtype), result[begin : begin + run.size])

    def read_averages(self, views: Sequence[Any]) -> None:
        """Copy the parameters' moving averages into flat `views`, one per leaf, as they are for the parameters.

        **Raises:** `UpdateError` if the update was not made with an `ema`, or there is no state.
        """
        if self._program is None:
            return
        if self._state is None or not self._program.averages:
            raise UpdateError("the update has no moving averages of the parameters")
        for pack, position in zip(self._program.packs, self._program.averages, strict=True):
            dtype = self._program.state[position].dtype
            average, begin = _host_bytes(self._state[position]).view(dtype), 0
            for leaf, elements in zip(pack.leaves, pack.elements, strict=True):
                views[leaf][:] = average[begin : begin + elements]
                begin += elements

    def state_parts(self) -> list[StatePart]:
        """What the optimizer state consists of, leaf by leaf; nothing where the server holds nothing.

        Leaves of one pack have as many arrays each, in one order: those of its first leaf.
        """
        if self._program is None:
            return []
        along = self._program.kind == UpdateKind.ELEMENTWISE
        seen: dict[int, int] = {}
        parts: list[StatePart] = []
        for entry in self._program.state:
            slot = seen.get(entry.pack, 0)
            seen[entry.pack] = slot + 1
            if entry.pack < 0 or not along:
                leaf = self._program.packs[entry.pack].leaves[0] if entry.pack >= 0 else -1
                parts.append(StatePart(leaf, slot, entry.dtype, math.prod(entry.shape), False))
                continue
            pack = self._program.packs[entry.pack]
            for leaf, elements in zip(pack.leaves, pack.elements, strict=True):
                parts.append(StatePart(leaf, slot, entry.dtype, elements, True))
        return parts

    def state(self) -> list[Any]:
        """The bytes of each of `state_parts`, where they lie: to be copied before the next `step`.

        **Raises:** `UpdateError` if there is no state.
        """
        if self._program is None:
            return []
        if self._state is None:
            raise UpdateError("the update has no state to save: initialise was not called")
        arrays = [_host_bytes(array) for array in self._state]
        return self._split(arrays)

    def before(self) -> tuple[list[Any], list[Any]] | None:
        """Parameters and state as they were before the last step: bytes of each leaf, and of each of `state_parts`.

        `None` if there was no step, or what it replaces is not kept.
        """
        import numpy as np

        if self._program is None or self._before is None:
            return None
        made, state = self._before
        params: list[Any] = [np.empty(0, np.uint8)] * self._program.leaves
        for pack, array in zip(self._program.packs, made, strict=True):
            whole, begin = _as_bytes(np.asarray(array)), 0
            item = whole.size // sum(pack.elements)
            for leaf, elements in zip(pack.leaves, pack.elements, strict=True):
                params[leaf] = whole[begin : begin + elements * item]
                begin += elements * item
        return params, self._split([_host_bytes(array) for array in state])

    def load_state(self, fill: Callable[[StatePart, Any], None]) -> None:
        """Make an optimizer state of what `fill` writes into the bytes of each of `state_parts`."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        if self._program is None:
            return
        arrays = [np.empty(entry.shape, jnp.dtype(entry.dtype)) for entry in self._program.state]
        parts = zip(self.state_parts(), self._split(list(map(_as_bytes, arrays))), strict=True)
        for part, view in parts:
            fill(part, view)
        with jax.enable_x64(self._program.x64), jax.default_device(self._device):
            # Copies: the step overwrites its state, and NumPy's memory is not for XLA to keep.
            self._state = [jax.device_put(array, self._device, may_alias=False) for array in arrays]
            jax.block_until_ready(self._state)
        self._made = self._before = None

    def _split(self, arrays: Sequence[Any]) -> list[Any]:
        """Bytes of whole state arrays, as those of `state_parts`."""
        assert self._program is not None
        views: list[Any] = []
        along = self._program.kind == UpdateKind.ELEMENTWISE
        for entry, array in zip(self._program.state, arrays, strict=True):
            if entry.pack < 0 or not along:
                views.append(array)
                continue
            pack, begin = self._program.packs[entry.pack], 0
            item = array.size // sum(pack.elements)
            for elements in pack.elements:
                views.append(array[begin : begin + elements * item])
                begin += elements * item
        return views

    def _gather(self, layout: _Layout, dtypes: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
        """One array per pack: the view itself, or the pack's buffer with the views copied into it."""
        assert self._program is not None
        arrays: list[Any] = []
        packs = zip(self._program.packs, layout, dtypes, buffers, strict=True)
        for pack, runs, dtype, buffer in packs:
            if buffer is None:
                ((_, view),) = runs
                arrays.append(view.view(dtype).reshape(pack.shape))
                continue
            for begin, run in runs:
                buffer[begin : begin + run.size] = run.view(dtype)
            arrays.append(buffer)
        return arrays

    def _lay_out(self, views: Sequence[Any], dtypes: Sequence[Any]) -> _Layout:
        """Where in memory the leaves of each pack lie. Of a tuple, whose views stay what they are, found once."""
        for known, layout in self._layouts:
            if known is views:
                return layout
        assert self._program is not None
        if len(views) != self._program.leaves:
            raise UpdateError(
                f"the update is for {self._program.leaves} leaves, but {len(views)} came"
            )
        layout: _Layout = []
        for pack, dtype in zip(self._program.packs, dtypes, strict=True):
            for leaf, elements in zip(pack.leaves, pack.elements, strict=True):
                view = views[leaf]
                if view.shape != (elements,) or view.dtype.itemsize != dtype.itemsize:
                    raise UpdateError(
                        f"leaf {leaf} should come as {dtype.name}[{elements}], but came as "
                        f"{view.dtype.name}{list(view.shape)}"
                    )
            layout.append(_runs([views[leaf] for leaf in pack.leaves]))
        if isinstance(views, tuple):
            self._layouts.append((views, layout))
        return layout

    def _put(self, arrays: list[Any]) -> list[Any]:
        """Arrays for the program, which read the memory where it lies if it is aligned to 64 bytes."""
        import jax

        return [jax.device_put(array, self._device, may_alias=True) for array in arrays]


def _runs(views: Sequence[Any]) -> list[tuple[int, Any]]:
    """Flat views one after the other, and where each begins; neighbours in memory as one.

    So are those that travel as one: a copy for each of them would cost more than all that is copied.
    """
    import numpy as np

    runs: list[tuple[int, Any]] = []
    begin, end = 0, -1
    for view in views:
        address = view.ctypes.data
        if address == end and view.dtype == runs[-1][1].dtype:
            first, run = runs[-1]
            # Whoever holds the run holds the views too, whose memory it is.
            both = np.lib.stride_tricks.as_strided(
                run.view(np.uint8), (run.nbytes + view.nbytes,), (1,)
            )
            runs[-1] = first, both.view(view.dtype)
        else:
            runs.append((begin, view))
        begin += view.size
        end = address + view.nbytes
    return runs


def _as_bytes(array: Any) -> Any:
    import numpy as np

    return array.reshape(-1).view(np.uint8)


def _host_bytes(array: Any) -> Any:
    """The memory of an array that XLA holds on the CPU.

    Not by `np.asarray`: JAX keeps that view with the array, and XLA cannot give the memory on to the next state.
    """
    import ctypes

    import numpy as np

    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(raw, np.uint8)


def _avals(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> list[Any]:
    import jax

    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _aligned(elements: int, dtype: Any) -> Any:
    """An array whose memory begins at a multiple of 64 bytes, which XLA can read without a copy."""
    import numpy as np

    raw = np.empty(elements * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + elements * dtype.itemsize].view(dtype)
