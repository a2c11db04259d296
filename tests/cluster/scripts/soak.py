"""A worker that trains until the step that a file will have, late now and then, and writes its parameters.

Usage: soak.py OUT_PREFIX UNTIL_FILE.

All wait for a worker that is lost; who comes in its place goes on where the parameters are. Worker w's gradient is
GRADIENT[w] times 1 to 7, by the step: sums and means are exact in float32, and tell of every gradient that was left out
or counted twice.
"""

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

GRADIENT = 1, 4, 16


def factor(step: int) -> int:
    """Of the gradients of a step."""
    return 1 + step % 7


def expected(until: int, workers: int) -> float:
    """Every element of the parameters after so many steps."""
    return -float(sum(map(factor, range(until))) * sum(GRADIENT[:workers]) // workers)


def main() -> None:
    """Train."""
    out, file = sys.argv[1], Path(sys.argv[2])
    session = jaxrdma.connect()
    state: Any = session.init(
        {"a": jnp.zeros((40, 13)), "b": jnp.zeros(1001), "c": jnp.zeros(())},
        update=optax.sgd(1.0),
        policy=jaxrdma.SyncReplicas(on_loss="wait"),
    )

    @jax.jit
    def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
        size = GRADIENT[session.index] * (1.0 + state.step % 7)
        return jaxrdma.ps_step(state, jax.tree.map(lambda leaf: leaf * 0 + size, state.params))

    chance = random.Random()
    for number in itertools.count(int(state.step)):
        if file.exists() and number >= int(file.read_text()):
            break
        if chance.random() < 0.002:
            time.sleep(chance.uniform(0, 0.05))
        state = jax.block_until_ready(step(state))
        if (number + 1) % 100 == 0:
            print(f"step {int(state.step)}", flush=True)
    np.savez(f"{out}-{session.index}.npz", **{k: np.asarray(v) for k, v in state.params.items()})
    session.leave()


if __name__ == "__main__":
    main()
