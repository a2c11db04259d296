"""A worker that steps a small model until it is ended, of which one sleeps before each step.

Usage: late.py INDEX SECONDS
"""

import itertools
import sys
import time

import jax
import jax.numpy as jnp
import optax

import jaxrdma


def main() -> None:
    """Step, for ever."""
    index, seconds = int(sys.argv[1]), float(sys.argv[2])
    session = jaxrdma.connect()
    state = session.init({"w": jnp.ones((64, 64)), "b": jnp.zeros(8)}, update=optax.sgd(0.1))
    step = jax.jit(lambda state: jaxrdma.ps_step(state, state.params))
    for number in itertools.count():
        if session.index == index:
            time.sleep(seconds)
        state = jax.block_until_ready(step(state))
        print(f"step {number}", flush=True)


if __name__ == "__main__":
    main()
