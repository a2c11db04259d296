"""A small real model with data for each worker, shared by the scripts and by the single-process references."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

OPTIMISERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "sgd": lambda: optax.sgd(0.05),
}


def parameters() -> dict[str, Any]:
    """Two layers, whose leaves differ in size so that servers get uneven shares."""
    rng = np.random.default_rng(7)
    return {
        "hidden": {
            "w": jnp.asarray(rng.normal(size=(12, 33)) / 4, jnp.float32),
            "b": jnp.zeros((33,), jnp.float32),
        },
        "out": {
            "w": jnp.asarray(rng.normal(size=(33, 3)) / 6, jnp.float32),
            "b": jnp.zeros((3,), jnp.float32),
        },
        "scale": jnp.ones((), jnp.float32),
    }


def batch(worker: int, step: Any) -> tuple[Any, Any]:
    """Inputs [16, 12] and targets [16, 3] of one worker at one step; different for each."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), worker), step)
    inputs = jax.random.normal(key, (16, 12), jnp.float32)
    targets = jnp.stack(
        [inputs[:, 0] * inputs[:, 1], jnp.sin(inputs[:, 2]), inputs[:, 3:6].sum(1)], axis=1
    )
    return inputs, targets


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    """Mean squared error."""
    hidden = jnp.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    outputs = (hidden @ params["out"]["w"] + params["out"]["b"]) * params["scale"]
    return jnp.mean((outputs - targets) ** 2)


@jax.jit
def gradient(params: Any, worker: Any, step: Any) -> Any:
    """Gradient of the loss on one worker's batch; compiled by itself, so that its bits are the same everywhere."""
    return jax.grad(loss)(params, *batch(worker, step))


def reference(optimiser: str, workers: int, steps: int) -> Any:
    """Parameters after `steps` single-process steps on the mean of the workers' gradients, in worker order."""
    update = OPTIMISERS[optimiser]()
    params = parameters()
    state = update.init(params)

    @jax.jit
    def apply(params: Any, state: Any, grads: Any) -> Any:
        updates, state = update.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        total = [np.asarray(g) for g in jax.tree.leaves(gradient(params, 0, step))]
        for worker in range(1, workers):
            total = [
                t + np.asarray(g)
                for t, g in zip(total, jax.tree.leaves(gradient(params, worker, step)), strict=True)
            ]
        mean = jax.tree.unflatten(
            jax.tree.structure(params), [t / np.float32(workers) for t in total]
        )
        params, state = apply(params, state, mean)
    return params


def joined_reference(optimiser: str, workers: int, steps: int) -> Any:
    """Parameters after `steps` single-process steps on the joined batch of all workers."""
    update = OPTIMISERS[optimiser]()
    params = parameters()
    state = update.init(params)

    @jax.jit
    def apply(params: Any, state: Any, step: Any) -> Any:
        parts = [batch(worker, step) for worker in range(workers)]
        inputs = jnp.concatenate([part[0] for part in parts])
        targets = jnp.concatenate([part[1] for part in parts])
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = update.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = apply(params, state, step)
    return params
