"""A worker that trains the model of model.py from wherever its job begins, and writes its parameters.

All workers have the same data, so that their number makes no difference: the mean of equal numbers is exact.

Usage: resume.py OUT_PREFIX OPTIMISER[,OPTIMISER] UNTIL [SECONDS], where SECONDS is the time of a step.
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import model

import jaxrdma


def main() -> None:
    """Train one model per optimiser, in turn, in one session."""
    out, optimisers, until = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    pause = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    with jaxrdma.connect() as session:
        ps_step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
        for optimiser in optimisers:
            state = session.init(model.parameters(), update=model.OPTIMISERS[optimiser]())
            begin = int(state.step)
            print(f"{optimiser} begins at step {begin}", flush=True)
            for step in range(begin, until):
                state = ps_step(state, model.gradient(state.params, 0, step))
                if pause:
                    jax.block_until_ready(state)
                    print(f"step {step + 1}", flush=True)
                    time.sleep(pause)
            assert int(state.step) == max(begin, until)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
            np.savez(f"{out}-{optimiser}-{session.index}.npz", *leaves)


if __name__ == "__main__":
    main()
