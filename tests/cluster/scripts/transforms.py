"""A worker that steps under every transformation that JAX users reach for; each must give the same numbers.

Usage: transforms.py OUT STEPS. Writes the parameters of each way to OUT-INDEX.npz. Raises if an error is not clear.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

LEAVES = {"a": (5, 7), "b": (3,), "c": ()}


def start() -> dict[str, Any]:
    """Parameters, different for each element."""
    rng = np.random.default_rng(11)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in LEAVES.items()
    }


def target(index: int, step: Any) -> Any:
    """Where worker `index` wants the parameters at `step`; exact in float32."""
    return jax.tree.map(lambda x: (index + 1.0) * 0.25 + jnp.float32(0.125) * (step % 8), start())


def loss(params: Any, index: int, step: Any) -> Any:
    """Half the squared distance, whose gradient is one subtraction: the same bits however it is compiled."""
    wanted = target(index, step)
    return sum(
        0.5 * jnp.sum((p - w) ** 2)
        for p, w in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
    )


def main() -> None:
    """Run every way."""
    out, steps = sys.argv[1], int(sys.argv[2])
    ways: dict[str, Any] = {}
    with jaxrdma.connect() as session:
        index = session.index

        def initial() -> jaxrdma.PSState:
            return session.init(start(), update=optax.sgd(0.125, momentum=0.5))

        def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
            return jaxrdma.ps_step(state, jax.grad(loss)(state.params, index, state.step))

        def loop(one: Callable[[Any], Any]) -> Any:
            state = initial()
            for _ in range(steps):
                state = one(state)
            return state

        ways["eager"] = loop(step)
        ways["jit"] = loop(jax.jit(step))
        ways["scan"] = jax.jit(
            lambda s: jax.lax.scan(lambda c, _: (step(c), None), s, None, length=steps)[0]
        )(initial())
        ways["while"] = jax.jit(lambda s: jax.lax.while_loop(lambda c: c.step < steps, step, s))(
            initial()
        )

        # Donation: the parameters stay where they are.
        donating = jax.jit(step, donate_argnums=0)
        state = donating(initial())
        before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)]
        for _ in range(steps - 1):
            state = donating(state)
        after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)]
        assert before == after, (before, after)
        ways["donate"] = state

        # Inside custom_vjp: the primal steps, the rule differentiates something else.
        @jax.custom_vjp
        def distance(params: Any, state: Any) -> Any:
            return loss(params, index, state.step), step(state)

        distance.defvjp(
            lambda p, s: (distance(p, s), p),
            lambda p, ct: (jax.tree.map(lambda x: ct[0] * jnp.ones_like(x), p), None),
        )

        @jax.jit
        def through_vjp(state: Any) -> Any:
            value, pullback, new = jax.vjp(lambda p: distance(p, state), state.params, has_aux=True)
            slopes = pullback(jnp.ones_like(value))[0]
            return new, slopes

        state = initial()
        for _ in range(steps):
            state, slopes = through_vjp(state)
        assert all(bool((s == 1).all()) for s in jax.tree.leaves(slopes))
        ways["custom_vjp"] = state

        def remat_step(state: Any) -> Any:
            checkpointed = jax.checkpoint(lambda p: loss(p, index, state.step))
            return jaxrdma.ps_step(state, jax.grad(checkpointed)(state.params))

        ways["checkpoint"] = loop(jax.jit(remat_step))

        def halves(state: Any) -> Any:
            ticket = jaxrdma.push(state, jax.grad(loss)(state.params, index, state.step))
            return jaxrdma.pull(ticket)

        ways["halves"] = loop(jax.jit(halves))

        # What cannot be: clear errors, and the session goes on.
        pair = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        for name, wrong in {
            "under vmap": lambda: jax.vmap(step)(pair),
            "cannot be differentiated": lambda: jax.grad(
                lambda p: (
                    step(jaxrdma.PSState(p, state.step, state.dropped, state.session, state.flow))
                    .params["b"]
                    .sum()
                )
            )(state.params),
        }.items():
            try:
                wrong()
            except TypeError as error:
                assert name in str(error), error
            else:
                raise AssertionError(name)

        np.savez(
            f"{out}-{index}.npz",
            **{
                f"{way}.{leaf}": np.asarray(state.params[leaf])
                for way, state in ways.items()
                for leaf in LEAVES
            },
        )


if __name__ == "__main__":
    main()
