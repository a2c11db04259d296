"""A worker that trains from wherever its attempt begins, on data of its own, and writes its parameters.

The data of a step are chosen by its number alone, so that an attempt does what the one before it would have done.

Usage: recover.py OUT_PREFIX UNTIL SECONDS [ON_LOSS], where SECONDS is the time of a step, and ON_LOSS of the policy,
which takes one gradient of every worker.
"""

import os
import sys
import time
from typing import Any, cast

import jax
import numpy as np
import optax

import jaxrdma
from jaxrdma.policy import OnLoss


def parameters() -> dict[str, Any]:
    """Leaves of several partitions, and one of less than one."""
    rng = np.random.default_rng(11)
    shapes = {"w": (24, 16), "b": (16,), "scale": ()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def update() -> optax.GradientTransformation:
    """With a state that counts steps and remembers gradients: lost, it would show."""
    return optax.adam(0.03)


def gradient(params: Any, worker: int, step: int) -> dict[str, Any]:
    """Towards a target that is another for each worker and step. In NumPy: the same bits everywhere."""
    rng = np.random.default_rng((worker, step))
    return {
        name: np.asarray(params[name]) - rng.normal(size=np.shape(params[name])).astype(np.float32)
        for name in sorted(params)
    }


def reference(workers: int, steps: int) -> list[Any]:
    """The parameters after `steps` steps that nothing interrupted, in one process, with optax alone."""
    params = parameters()
    state = update().init(params)

    @jax.jit
    def apply(params: Any, state: Any, grads: Any) -> Any:
        updates, state = update().update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        mean = gradient(params, 0, step)
        for worker in range(1, workers):
            for name, value in gradient(params, worker, step).items():
                mean[name] = mean[name] + value
        mean = {name: value / np.float32(workers) for name, value in mean.items()}
        params, state = apply(params, state, mean)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def main() -> None:
    """Train until the step that is asked for."""
    out, until, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    policy = jaxrdma.SyncReplicas(on_loss=cast(OnLoss, sys.argv[4]) if sys.argv[4:] else None)
    with jaxrdma.connect() as session:
        ps_step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
        state = session.init(parameters(), update=update(), policy=policy)
        step = int(state.step)
        print(f"attempt {os.environ['JAXRDMA_ATTEMPT']} begins at step {step}", flush=True)
        while step < until:
            state = ps_step(state, gradient(state.params, session.index, step))
            step = int(state.step)
            print(f"step {step}", flush=True)
            time.sleep(pause)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
        np.savez(f"{out}{session.index}.npz", *leaves)


if __name__ == "__main__":
    main()
