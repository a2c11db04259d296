"""Custom calls that are always made, in programs that JAX still calls by its fast path.

JAX calls a compiled program in C++, unless the program has side effects: then it does so in Python, which handles each
array that goes in or comes out and takes ten times as long for a model of many leaves. But a step with the servers is
a side effect: it must be made although nobody looks at what it brings. So the effect is there as long as it matters,
and gone when the program is compiled.

`kept_call` puts a custom call into a program, with JAX's effect of custom calls: while a program is traced and
transformed it is as if `jax.ffi.ffi_call` had been called. The last that JAX does before it compiles is to drop what
nobody needs. It asks each primitive, and ours answers that it is needed, and gives its effect back where JAX no longer
has to know of it: XLA goes on knowing. The effect stays where

- no result of the call is used: what it is in (a function jitted inside another, a scan) may have no result that is
  used either, and its effect is then all that keeps it. By induction the rest follows: whatever is left without effect
  leads to a result that is used, or to a call that has its effect. The state that a scan carries is used by the next
  round, whoever uses the last one; JAX finds that out by asking again, so the first answer counts;
- something is being traced: JAX drops things then too, when it differentiates, and will look at the rest again;
- the program runs on several devices: see `await_programs`;
- JAX does not ask: in `lax.while_loop`, and under `jit(keep_unused=True)`.

There everything is as it was, and slower. The price is that JAX does not know of such programs afterwards:
`jax.effects_barrier` does not wait for them. `await_programs` does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,
    JaxprEqn,
    Primitive,
    get_opaque_trace_state,
    jaxpr_as_fun,
    no_effects,
)
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import SingleDeviceSharding


class _Asked:
    """Whether JAX has once asked for a call of which no result was used. One for each call, whatever program it is in."""

    unused = False


def kept_call(
    call: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    *,
    devices: int,
    vmapped: str,
    differentiated: str,
) -> list[Any]:
    """The results of `call`, an `ffi_call` with side effects, of which the program runs on so many devices.

    **Raises:** `TypeError` of these texts under `vmap` and `grad`.
    """
    return _kept_p.bind(
        *operands,
        body=jax.make_jaxpr(call)(*operands),
        asked=_Asked(),
        devices=devices,
        effect=True,
        vmapped=vmapped,
        differentiated=differentiated,
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which makes a `kept_call`, compiled once for eager use.

    Inside a program it is traced each time: what is known of a call is known of all that were traced together.
    """
    jitted = jax.jit(function)

    def run(*args: Any) -> Any:
        return (jitted if _nothing_is_traced() else function)(*args)

    return run


def await_programs() -> None:
    """Wait for every program that this thread has begun, as `jax.effects_barrier` does for those with effects.

    A device of XLA's CPU client runs the programs of a thread one after another, so that the end of one that is begun
    now is the end of all. (Those on several devices are in no such order; their calls keep their effects.) Their errors
    are not told here.
    """
    if _effects_given_back:
        for device in jax.local_devices(backend="cpu"):
            jax.block_until_ready(_nothing(device)())
    jax.effects_barrier()


@functools.cache
def _nothing(device: jax.Device) -> Callable[[], jax.Array]:
    """A compiled program for `device` that does nothing."""
    program = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=SingleDeviceSharding(device))
    return program.lower().compile()


_OUTSIDE = get_opaque_trace_state(convention="nnx")
# Once there is a program of which JAX does not know that it has effects.
_effects_given_back = False


def _nothing_is_traced() -> bool:
    return get_opaque_trace_state(convention="nnx") == _OUTSIDE


_kept_p = Primitive("jaxrdma_call")
_kept_p.multiple_results = True


def _type(*_: Any, body: ClosedJaxpr, effect: bool, **__: Any) -> tuple[Any, Any]:
    return body.out_avals, body.effects if effect else no_effects


def _run(*operands: Any, body: ClosedJaxpr, **_: Any) -> Sequence[Any]:
    return jaxpr_as_fun(body)(*operands)


def _run_eagerly(*operands: Any, body: ClosedJaxpr, **_: Any) -> Sequence[Any]:
    with jax.disable_jit(False):  # by which one gets here
        return jax.jit(jaxpr_as_fun(body))(*operands)


def _refuse_vmap(*_: Any, vmapped: str, **__: Any) -> Any:
    raise TypeError(vmapped)


def _refuse_jvp(*_: Any, differentiated: str, **__: Any) -> Any:
    raise TypeError(differentiated)


def _keep(used: list[bool], call: JaxprEqn) -> tuple[list[bool], JaxprEqn]:
    """JAX asks what of a call is needed: all of it, always. Gives its effect back if that is safe."""
    global _effects_given_back
    asked: _Asked = call.params["asked"]
    if not any(used):
        asked.unused = True
    if _nothing_is_traced() and not asked.unused and call.params["devices"] == 1:
        _effects_given_back = True
        call = call.replace(params=call.params | {"effect": False}, effects=no_effects)
    return [True] * len(call.invars), call


_kept_p.def_effectful_abstract_eval(_type)
_kept_p.def_impl(_run_eagerly)
mlir.register_lowering(_kept_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_kept_p] = _refuse_vmap
ad.primitive_jvps[_kept_p] = _refuse_jvp
partial_eval.dce_rules[_kept_p] = _keep
