"""A worker that trains two models in turn, one of which has moving averages, the other half as many steps.

In the first attempt of a job with copies it kills server 1 amid that.

Usage: two_models.py OUT_PREFIX UNTIL
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import psutil

import jaxrdma

sys.path.insert(0, str(Path(__file__).parent))
import recover

KILL_AFTER = 13


def kill_server(index: int) -> None:
    """It is a sibling of this process, under one launcher."""
    for process in psutil.Process(os.getppid()).children():
        env = process.environ()
        if (env.get("JAXRDMA_ROLE"), env.get("JAXRDMA_INDEX")) == ("server", str(index)):
            process.kill()


def main() -> None:
    """Train until the first model has made the steps that are asked for."""
    out, until = sys.argv[1], int(sys.argv[2])
    drill = os.environ.get("JAXRDMA_REPLICATE") == "1" and os.environ["JAXRDMA_ATTEMPT"] == "0"
    with jaxrdma.connect() as session:
        ps_step = jax.jit(jaxrdma.ps_step)
        first = session.init(recover.parameters(), update=optax.adam(0.03), ema=0.9)
        weights = {"q": np.ones((40, 40), np.float32)}
        second = session.init(weights, update=optax.sgd(0.1, momentum=0.9))
        print(f"begin at {int(first.step)} and {int(second.step)}", flush=True)
        while (step := int(first.step)) < until:
            first = ps_step(first, recover.gradient(first.params, session.index, step))
            if drill and step == KILL_AFTER and session.index == 0:
                kill_server(1)
            if int(second.step) <= step // 2:
                gradient = {"q": np.full((40, 40), step // 2 + session.index, np.float32)}
                second = ps_step(second, gradient)
            print(f"done {int(first.step)} and {int(second.step)}", flush=True)
        leaves = jax.tree.leaves((first.params, second.params))
        np.savez(f"{out}{session.index}.npz", *map(np.asarray, leaves))


if __name__ == "__main__":
    main()
