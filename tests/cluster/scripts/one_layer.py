"""A worker that trains a model of one layer. Usage: one_layer.py STEPS."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxrdma


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)


def main() -> None:
    """Train, and say how long it took."""
    steps = int(sys.argv[1])
    with jaxrdma.connect() as session:
        inputs = jax.random.normal(jax.random.key(session.index), (16, 32))
        targets = inputs[:, :4] * 2 - 1
        state = session.init({"w": jnp.zeros((32, 4)), "b": jnp.zeros(4)}, update=optax.sgd(0.05))

        @jax.jit
        def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
            return jaxrdma.ps_step(state, jax.grad(loss)(state.params, inputs, targets))

        before = float(loss(state.params, inputs, targets))
        begin = time.perf_counter()
        for _ in range(steps):
            state = step(state)
        jax.block_until_ready(state)
        print(f"{steps} steps in {time.perf_counter() - begin:.2f} s", flush=True)
        assert int(state.step) == steps
        after = float(loss(state.params, inputs, targets))
        assert after < before / 10, (before, after)


if __name__ == "__main__":
    main()
