"""A worker that trains a model of many small leaves of several types, and writes its parameters.

Usage: small.py OUT_PREFIX WAY[,WAY] UNTIL, where WAY is one of `WAYS`: one model each, in turn, in one session, from
wherever its job begins.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

LEAVES = 80
RATE = 0.5  # exact in every type


def decayed(params: Any) -> Any:
    """Which leaves have weight decay: those with rows and columns."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


UPDATES = {
    "sgd": lambda: optax.sgd(RATE),
    # Treats leaves in two ways, by their shapes.
    "masked": lambda: optax.chain(
        optax.add_decayed_weights(0.1, mask=decayed), optax.sgd(0.05, momentum=0.9)
    ),
    # Needs the whole of a leaf.
    "norms": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(RATE)),
}
# The update on the servers, in one call and in two halves; and on the workers.
WAYS = [*UPDATES, "halves", "average"]


def parameters() -> dict[str, Any]:
    """Small leaves whose types and servers take turns, with one that is cut and an empty one among them."""
    rng = np.random.default_rng(11)
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16]
    leaves: dict[str, Any] = {}
    for i in range(LEAVES):
        shape = [(2 + i,), (1 + i % 7, 13), (2, 3, i % 5 + 1)][i // 4 % 3]
        if i % 20 < 2:
            shape = ()  # of which a program has an array each: they are slow to compile
        values = rng.integers(-32, 32, size=shape) / 8.0
        leaves[f"leaf {i:03}"] = jnp.asarray(values, dtypes[i % 4])
    leaves["leaf 050 large"] = jnp.asarray(rng.integers(-32, 32, size=(70, 101)) / 8.0, jnp.float32)
    leaves["leaf 070 empty"] = jnp.zeros((0, 3), jnp.float32)
    return leaves


def gradient(params: Any, worker: int, step: int) -> Any:
    """One worker's: multiples of 1/8 below 4, exact in every type; another for each element, worker and step."""
    return {
        name: jnp.asarray(
            ((np.arange(leaf.size) * 7 + place * 5 + worker * 3 + step * 11) % 31 / 8.0).reshape(
                leaf.shape
            ),
            leaf.dtype,
        )
        for place, (name, leaf) in enumerate(sorted(params.items()))
    }


def mean(params: Any, workers: int, step: int) -> Any:
    """Of all workers, summed in float32 and rounded to the type of each leaf."""
    each = [gradient(params, worker, step) for worker in range(workers)]
    return {
        name: jnp.asarray(
            sum(np.asarray(one[name], np.float32) for one in each) / np.float32(workers), leaf.dtype
        )
        for name, leaf in params.items()
    }


def optax_step(update: optax.GradientTransformation) -> Callable[[Any, Any, Any], Any]:
    """A step of one process: parameters and state, and the next ones."""

    @jax.jit
    def apply(params: Any, state: Any, grads: Any) -> Any:
        updates, state = update.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return apply


def main() -> None:
    """Train one model for each way."""
    out, ways, until = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    with jaxrdma.connect() as session:
        for way in ways:
            result = average(session, until) if way == "average" else train(session, way, until)
            arrays = {name: np.asarray(leaf, np.float64) for name, leaf in result.items()}
            np.savez(f"{out}-{way}-{session.index}.npz", **arrays)


def train(session: jaxrdma.Session, way: str, until: int) -> Any:
    """With the update on the servers."""
    state = session.init(parameters(), update=UPDATES.get(way, UPDATES["sgd"])())
    print(f"{way} begins at step {int(state.step)}", flush=True)

    @jax.jit
    def whole(state: Any, grads: Any) -> Any:
        return jaxrdma.ps_step(state, grads)

    def halves(state: Any, grads: Any) -> Any:
        return jaxrdma.pull(jaxrdma.push(state, grads))

    for step in range(int(state.step), until):
        grads = gradient(state.params, session.index, step)
        state = (halves if way == "halves" else whole)(state, grads)
    return state.params


def average(session: jaxrdma.Session, until: int) -> Any:
    """Each worker with its own update."""
    update = optax.chain(jaxrdma.average_gradients(session), UPDATES["sgd"]())
    apply = optax_step(update)
    params = parameters()
    state = update.init(params)
    for step in range(until):
        params, state = apply(params, state, gradient(params, session.index, step))
    return params


if __name__ == "__main__":
    main()
