"""Custom calls that are always made, in programs that JAX still calls by its fast path.

JAX calls a compiled program in C++, unless the program has side effects: then it does so in Python, which handles each
array that goes in or comes out and takes ten times as long for a model of many leaves. But a step with the servers is
a side effect: it must be made although nobody looks at what it brings. So the effect is there as long as it matters,
and gone when the program is compiled.

`kept_call` puts a custom call into a program, with JAX's effect of custom calls: while a program is traced and
transformed it is as if `jax.ffi.ffi_call` had been called. The last that JAX does before it compiles is to drop what
nobody needs. It asks each primitive, and ours answers that it is needed, and gives its effect back: XLA goes on knowing
of it. The effect stays where that would not be safe, or JAX does not ask:

- in what is inside the program (a function jitted within another, `lax.scan`, `lax.cond`, `shard_map`): where nobody
  wants a result of such a part, it is dropped unless it has an effect. JAX also keeps what became of a part, and takes
  it again when it next meets it, be it in a function that it differentiates, of which it then drops more;
- while something is traced, for the same reason;
- in `lax.while_loop`, and under `jit(keep_unused=True)`;
- where the call has few operands, so that nothing is won, or XLA is to run programs in the thread that calls: see
  `_laboured`;
- in a program on several devices: see `await_programs`.

There everything is as it was, and slower. One hole is left, with jax from 0.11 on, which keeps what became of whole
programs too: a jitted function with a call in it that has run by itself, and is then called in a jitted function that
is differentiated, its result being handed out (`has_aux`) and used by nobody. There the call may be left out.

The price is that JAX does not know of a program without effects afterwards:
`jax.effects_barrier` does not wait for it. `await_programs` does.
"""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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


def kept_call(
    call: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    *,
    devices: int,
    vmapped: str,
    differentiated: str,
) -> list[Any]:
    """The results of `call`, an `ffi_call` with side effects, of which the program runs on so many devices.

    The first operand is an int32 scalar.

    **Raises:** `TypeError` of these texts under `vmap` and `grad`.
    """
    return _kept_p.bind(
        *operands,
        body=jax.make_jaxpr(call)(*operands),
        devices=devices,
        effect=True,
        vmapped=vmapped,
        differentiated=differentiated,
    )


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, jitted where it is called by itself, and a piece of the program where one is traced.

    `jit(inline=True)` would do, but for jax from 0.11 on: there it is a program inside the program when JAX drops what
    nobody needs.
    """
    jitted = jax.jit(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        by_itself = get_opaque_trace_state(convention="nnx") == _OUTSIDE
        return (jitted if by_itself else function)(*args)

    return call


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
def _nothing(device: Any) -> Callable[[], jax.Array]:
    """A compiled program for `device` that does nothing."""
    program = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=SingleDeviceSharding(device))
    return program.lower().compile()


# From so many operands on JAX's fast path is worth it: each array costs some 10 us without it.
_MANY = 32
# Where nothing is traced.
_OUTSIDE = get_opaque_trace_state(convention="nnx")
# What JAX calls for a program, and again for each that is inside it, to drop what nobody needs.
_DROP = getattr(partial_eval.dce_jaxpr, "__code__", None)
# Once there is a program of which JAX does not know that it has effects.
_effects_given_back = False

_kept_p = Primitive("jaxrdma_call")
_kept_p.multiple_results = True


def _type(*_: Any, body: ClosedJaxpr, effect: bool, **__: Any) -> tuple[Any, Any]:
    return body.out_avals, body.effects if effect else no_effects


def _run(step: Any, *operands: Any, body: ClosedJaxpr, effect: bool, **_: Any) -> Sequence[Any]:
    return jaxpr_as_fun(body)(step if effect else _laboured(step), *operands)


def _laboured(step: Any) -> Any:
    """`step`, by so much arithmetic that XLA runs the program in a thread of its own.

    It takes up to 1000 operations for so little that it runs them in the thread that calls; what fails there raises
    `ValueError` on JAX's fast path, not `jax.errors.JaxRuntimeError`. (A forked process has no such thread, and would
    wait for ever; a program of few arrays that is as short still raises its error there.)
    """
    return lax.reduce_max(lax.optimization_barrier(lax.broadcast(step, (2048,))), (0,))


def _run_eagerly(*operands: Any, body: ClosedJaxpr, **_: Any) -> Sequence[Any]:
    with jax.disable_jit(False):  # by which one gets here
        return jax.jit(jaxpr_as_fun(body))(*operands)


def _refuse_vmap(*_: Any, vmapped: str, **__: Any) -> Any:
    raise TypeError(vmapped)


def _refuse_jvp(*_: Any, differentiated: str, **__: Any) -> Any:
    raise TypeError(differentiated)


def _keep(*asked: Any) -> tuple[list[bool], JaxprEqn]:
    """JAX asks what of a call is needed: all of it, always. Gives its effect back if that is safe.

    `asked`: which results are used; from jax 0.12 on, which operands are looked at later; the call.
    """
    global _effects_given_back
    call: JaxprEqn = asked[-1]
    threads = jax.config.read("jax_cpu_enable_async_dispatch")
    many = len(call.invars) >= _MANY
    if many and threads and call.params["devices"] == 1 and _is_last_and_outermost():
        _effects_given_back = True
        call = call.replace(params=call.params | {"effect": False}, effects=no_effects)
    return [True] * len(call.invars), call


def _is_last_and_outermost() -> bool:
    """Whether JAX asks about a program that it is about to compile, not about one inside it or one to transform."""
    if get_opaque_trace_state(convention="nnx") != _OUTSIDE:
        return False
    # There is nothing else that tells how deep inside a program it is; where it looks otherwise, this is False.
    return sum(frame.f_code is _DROP for frame, _ in traceback.walk_stack(None)) == 1


_kept_p.def_effectful_abstract_eval(_type)
_kept_p.def_impl(_run_eagerly)
mlir.register_lowering(_kept_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_kept_p] = _refuse_vmap
ad.primitive_jvps[_kept_p] = _refuse_jvp
partial_eval.dce_rules[_kept_p] = _keep
