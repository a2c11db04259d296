"""A worker that trains the model of model.py until a file says at which step to stop, and writes its parameters.

Usage: besieged.py OUT_PREFIX STOP.
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import model
from followed import stops

import jaxrdma


def main() -> None:
    """Train until told to stop."""
    out, stop = sys.argv[1], Path(sys.argv[2])
    with jaxrdma.connect() as session:
        state = session.init(model.parameters(), update=model.OPTIMISERS["momentum"]())
        step = jax.jit(jaxrdma.ps_step)
        while not stops(stop, session.index, int(state.step)):
            time.sleep(0.01)  # a step takes a while, so that the reference has fewer to repeat
            state = step(state, model.gradient(state.params, session.index, int(state.step)))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
        np.savez(f"{out}{session.index}.npz", *leaves, step=int(state.step))


if __name__ == "__main__":
    main()
