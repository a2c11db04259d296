"""Calls stay in programs that do not use their results, and programs are as fast as without side effects."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrdma import dispatch, session
from jaxrdma.control import LeafSpec
from jaxrdma.step import make_calls

STEP, W = jnp.zeros((), jnp.int32), jnp.ones(4)
LEAVES = 20
SPECS = [LeafSpec(f"params[{leaf}]", (4,), "float32") for leaf in range(LEAVES)]
CALLS = make_calls(1, 0, SPECS, average=False)
MESH = jax.make_mesh((1,), ("data",))
CALLS_OF_MESH = make_calls(1, 0, SPECS, average=False, mesh=MESH)

State = tuple[Any, Any]


def once(state: State) -> State:
    step, _, (w, *_) = CALLS.exchange(state[0], (state[1],) * LEAVES, (state[1],) * LEAVES)
    return step, w


def scanned(state: State) -> State:
    return lax.scan(lambda s, _: (once(s), None), state, length=3)[0]


def repeated(state: State) -> State:
    return lax.while_loop(lambda s: s[0] < 3, once, state)


def branching(state: State) -> State:
    return lax.cond(state[0] < 3, once, lambda s: s, state)


def on_mesh(state: State) -> State:
    step, _, (w, *_) = CALLS_OF_MESH.exchange(state[0], (state[1],) * LEAVES, (state[1],) * LEAVES)
    return step, w


def halves(state: State) -> State:
    step, _, (w, *_) = CALLS.pull(CALLS.push(state[0], (state[1],) * LEAVES))
    return step, w


# A function of its own: from jax 0.11 on, what became of `once` is taken again, and jit(jit(f)) is jit(f).
@jax.jit
def inside(state: State) -> State:
    return once(state)


def nested(state: State) -> State:
    return inside(state)


def lowered(program: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, bool]:
    """How many custom calls are in a program, and whether it has side effects in JAX's eyes."""
    made: Any = jax.jit(program, **options).lower(*args)
    return made.as_text().count("custom_call @jaxrdma_operation"), bool(
        made._lowering.compile_args["unordered_effects"]
    )


def unused(run: Callable[..., Any]) -> Callable[..., int]:
    """`run`, whose results nobody wants."""

    def program(*args: Any) -> int:
        run(*args)
        return 0

    return program


def test_a_program_that_steps_is_one_without_effects() -> None:
    assert lowered(once, (STEP, W)) == (1, False)
    assert lowered(once, (STEP, W), donate_argnums=0) == (1, False)
    assert lowered(unused(once), (STEP, W)) == (1, False)


@pytest.mark.parametrize("run", [nested, scanned, repeated, branching, on_mesh, halves])
def test_what_steps_inside_a_program_or_with_few_operands_keeps_its_effect(run: Any) -> None:
    assert lowered(run, (STEP, W)) == (2 if run is halves else 1, True)


@pytest.mark.parametrize("run", [once, nested, scanned, repeated, branching, on_mesh])
def test_a_call_is_made_though_nobody_wants_its_results(run: Any) -> None:
    ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "directly": (unused(run), ((STEP, W),)),
        "jitted": (unused(jax.jit(run)), ((STEP, W),)),
        "jitted without arguments": (unused(jax.jit(lambda: run((STEP, W)))), ()),
        "without any array": (unused(jax.jit(lambda: run((np.int32(0), jnp.zeros(4))))), ()),
        "in a scan": (
            lambda s: lax.scan(lambda c, _: (unused(run)(c), c)[::-1], s, length=2)[0],
            ((STEP, W),),
        ),
        "in a scan of nobody": (
            unused(lambda s: lax.scan(lambda c, _: (run(c), None), s, length=2)[0]),
            ((STEP, W),),
        ),
        "in a branch": (lambda s: lax.cond(s[0] == 0, unused(run), lambda _: 1, s), ((STEP, W),)),
        "kept": (lambda s: jax.checkpoint(unused(run))(s), ((STEP, W),)),
        "mapped beside": (
            lambda s: jax.vmap(lambda x: (unused(run)(s), x + 1)[1])(jnp.arange(3)),
            ((STEP, W),),
        ),
    }
    for name, (program, args) in ways.items():
        assert lowered(program, *args)[0] == 1, name


def test_a_call_is_made_in_what_is_differentiated_though_nobody_wants_its_results() -> None:
    def part(state: State) -> State:
        return once(state)

    for run in (part, jax.jit(part), jax.jit(jax.jit(part)), scanned):

        def program(state: State, run: Any = run) -> State:
            return run(state)

        def loss(w: Any, state: State, run: Any = run) -> Any:
            return (w * w).sum(), run(state)

        def differentiated(state: State, loss: Any = loss) -> Any:
            return jax.grad(jax.jit(loss), has_aux=True)(state[1], state)[0]

        # JAX keeps what became of a part of a program, and takes it again.
        assert lowered(program, (STEP, W))[0] == 1
        assert lowered(differentiated, (STEP, W))[0] == 1
        assert lowered(unused(jax.jit(differentiated)), (STEP, W))[0] == 1


def test_a_program_is_too_long_for_the_thread_that_calls_it() -> None:
    session._register_target()
    program = jax.jit(once)
    made: Any = program.lower((STEP, W)).compile()
    assert made.cost_analysis()["flops"] >= 1000
    for run in (program, made):
        for _ in range(3):  # JAX's fast path is taken from the second call on
            with pytest.raises(jax.errors.JaxRuntimeError, match="is not open in this process"):
                jax.block_until_ready(run((STEP, W)))


def test_where_programs_run_in_the_thread_that_calls_they_keep_their_effects() -> None:
    assert jax.config.read("jax_cpu_enable_async_dispatch")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        assert lowered(lambda state: once(state), (STEP, W)) == (1, True)
    finally:
        jax.config.update("jax_cpu_enable_async_dispatch", True)


def test_jaxs_own_checks_find_nothing_wrong() -> None:
    with jax.enable_checks(True):
        for run in (once, scanned, branching, unused(once)):
            assert lowered(run, (STEP, W))[0] == 1


def test_programs_of_other_threads_are_without_effects_too() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(lowered(once, (STEP, W))))
    thread.start()
    thread.join()
    assert found == [(1, False)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_what_cannot_be_is_refused(wrap: Any) -> None:
    several = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"ps_step under vmap.*after the mean"):
        wrap(jax.vmap(lambda w: once((STEP, w))))(several)
    with pytest.raises(TypeError, match=r"push under vmap"):
        wrap(jax.vmap(lambda w: CALLS.push(STEP, (w,) * LEAVES)))(several)
    with pytest.raises(TypeError, match=r"ps_step cannot be differentiated"):
        wrap(jax.grad(lambda w: once((STEP, w))[1].sum()))(W)
    with pytest.raises(TypeError, match=r"ps_step cannot be differentiated"):
        wrap(lambda w: jax.jvp(lambda w: once((STEP, w))[1], (w,), (w,)))(W)


def test_programs_that_were_begun_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered(once, (STEP, W))  # from which on JAX does not know of all
    monkeypatch.setattr(jax, "effects_barrier", lambda: None)  # which knows of callbacks
    ended = threading.Event()

    def tell(number: Any) -> Any:
        ended.set()
        return number

    long = jax.jit(lambda w: lax.fori_loop(0, 300, lambda _, x: x @ w, w)[0, 0])
    last = jax.jit(lambda x: jax.pure_callback(tell, jax.ShapeDtypeStruct((), np.float32), x))
    w = jax.block_until_ready(jnp.eye(256))
    last(jax.block_until_ready(long(w)))  # compiled
    ended.clear()
    last(long(w))
    assert not ended.is_set()
    dispatch.await_programs()
    assert ended.is_set()
