"""A worker that trains a small model, in a guest. Usage: train.py STEPS [PAUSE_SECONDS]

Says "step N" before each step, and at its end "parameters DIGEST"; worker 0 also "reference DIGEST", of the same
training by one process alone: on one kind of processor, and summed in the workers' order, the digests are equal.
"""

import hashlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

UPDATE = optax.adam(0.01)


def parameters() -> dict[str, Any]:
    """Two layers, 5 KB."""
    rng = np.random.default_rng(7)
    return {
        "hidden": jnp.asarray(rng.normal(size=(16, 64)) / 4, jnp.float32),
        "out": jnp.asarray(rng.normal(size=(64, 4)) / 8, jnp.float32),
        "bias": jnp.zeros((4,), jnp.float32),
    }


def loss(params: Any, inputs: Any) -> Any:
    """Mean squared error of a function of the inputs."""
    outputs = jnp.tanh(inputs @ params["hidden"]) @ params["out"] + params["bias"]
    return jnp.mean((outputs - inputs[:, :4] * inputs[:, 4:8]) ** 2)


_gradient = jax.jit(jax.grad(loss))


def gradient(params: Any, worker: int, step: int) -> Any:
    """Of one worker, on a batch of its own."""
    rng = np.random.default_rng((worker, step))
    return _gradient(params, rng.normal(size=(16, 16)).astype(np.float32))


def digest(params: Any) -> str:
    """The same for the same bits."""
    data = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    return hashlib.sha256(data).hexdigest()


def reference(workers: int, steps: int) -> Any:
    """The parameters after the same steps in this process alone."""
    params = parameters()
    state = UPDATE.init(params)

    @jax.jit
    def apply(params: Any, state: Any, grads: Any) -> Any:
        updates, state = UPDATE.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        each = [gradient(params, worker, step) for worker in range(workers)]
        mean = jax.tree.map(
            lambda *g: np.sum(np.stack(g), 0, dtype=np.float32) / np.float32(workers), *each
        )
        params, state = apply(params, state, mean)
    return params


def main() -> None:
    """Train, and compare."""
    steps = int(sys.argv[1])
    pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    with jaxrdma.connect() as session:
        index, workers = session.index, session.num_workers
        state = session.init(parameters(), update=UPDATE)
        ps_step = jax.jit(jaxrdma.ps_step)
        for step in range(steps):
            print(f"step {step}", flush=True)
            state = jax.block_until_ready(ps_step(state, gradient(state.params, index, step)))
            time.sleep(pause)  # so that a cable can be pulled in the middle
        print(f"transport {session.stats().transport}", flush=True)
    print(f"parameters {digest(state.params)}", flush=True)
    if index == 0:
        print(f"reference {digest(reference(workers, steps))}", flush=True)


if __name__ == "__main__":
    main()
