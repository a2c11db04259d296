"""A worker that trains every kind of leaf, and asks for what must be refused.

Usage: leaves.py BIG_BYTES. Each result is compared with float64 NumPy here, on the worker.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

STEPS = 3
RATE = 0.5  # exact in every type
PIECE = 1 << 22  # elements checked at one time


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """Parameters as a dataclass."""

    weight: Any
    bias: Any


def values(begin: int, end: int, worker: int, step: int) -> np.ndarray:
    """Gradients of one worker, elements `begin` to `end` of a leaf, float64: multiples of 1/8 below 4, exact in every
    float type; different for each element."""
    places = np.arange(begin, end, dtype=np.int64)
    return (places * 7 + worker * 3 + step) % 31 / 8.0


def gradient(like: Any, dtype: Any, worker: int, step: int) -> Any:
    """The gradient of leaf `like`, made in pieces: float64 of all of a large leaf would not fit."""
    made = np.empty(like.size, dtype)
    for begin in range(0, like.size, PIECE):
        end = min(begin + PIECE, like.size)
        made[begin:end] = values(begin, end, worker, step)
    return jnp.asarray(made.reshape(like.shape))


def check(session: jaxrdma.Session, name: str, params: Any, grad_dtype: str = "") -> None:
    """Train `params` for a few steps and compare."""
    state = session.init(params, update=optax.sgd(RATE))
    assert jax.tree.structure(state.params) == jax.tree.structure(params), name
    step_function = jax.jit(jaxrdma.ps_step, donate_argnums=0)
    expected = [np.array(x).reshape(-1) for x in jax.tree.leaves(params)]
    for before, after in zip(expected, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(before, np.asarray(after).reshape(-1), err_msg=name)
    for step in range(STEPS):
        leaves, tree = jax.tree.flatten(state.params)
        mine = [gradient(leaf, grad_dtype or leaf.dtype, session.index, step) for leaf in leaves]
        grads = jax.tree.unflatten(tree, mine)
        del leaves, mine  # else the large leaf is there once more
        state = step_function(state, grads)
        for i, leaf in enumerate(jax.tree.leaves(state.params)):
            got = np.asarray(leaf).reshape(-1)
            for begin in range(0, leaf.size, PIECE):
                end = min(begin + PIECE, leaf.size)
                everybody = [values(begin, end, w, step) for w in range(session.num_workers)]
                # The mean and the update round to the parameter's type once each.
                mean = (sum(everybody) / session.num_workers).astype(leaf.dtype).astype(np.float64)
                before = expected[i][begin:end].astype(np.float64)
                expected[i][begin:end] = before - RATE * mean
                np.testing.assert_array_equal(
                    got[begin:end], expected[i][begin:end], err_msg=f"{name}, leaf {i}"
                )
    print(f"ok: {name}", flush=True)


def refused(session: jaxrdma.Session, name: str, params: Any, *words: str) -> None:
    """`init` must raise PlanError with all `words`. Agreed nowhere: every worker refuses by itself."""
    try:
        session.init(params, update=optax.sgd(RATE))
    except jaxrdma.PlanError as error:
        for word in words:
            assert word in str(error), (name, word, str(error))
        print(f"refused: {name}: {error}", flush=True)
    else:
        raise AssertionError(f"{name} was not refused")


def cases(big_bytes: int) -> dict[str, Callable[[], Any]]:
    """What must train."""
    rng = np.random.default_rng(5)

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jnp.asarray(rng.integers(-64, 64, size=shape) / 8.0, dtype)

    linear = eqx.nn.Linear(5, 3, key=jax.random.key(0))
    flat, _ = eqx.partition(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(1)), eqx.is_inexact_array)

    def eighths(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.round(x * 8) / 8, tree)

    ways: dict[str, Callable[[], Any]] = {
        "float32": lambda: {"w": array((33, 7))},
        "bfloat16": lambda: {"w": array((33, 7), jnp.bfloat16)},
        "float16": lambda: {"w": array((33, 7), jnp.float16)},
        "mixed": lambda: [array((65,), jnp.bfloat16), array((9, 9)), array((3,), jnp.float16)],
        "scalar": lambda: {"w": array(())},
        "size 0": lambda: {"w": array((0, 4)), "v": array((3,))},
        "only size 0": lambda: {"w": array((0, 4))},
        "None": lambda: {"w": array((3,)), "nothing": None},
        "tuple": lambda: (array((3,)), (array((2, 2)),)),
        "bare array": lambda: array((17,)),
        "dataclass": lambda: Model(array((4, 4)), array((4,))),
        "flax": lambda: eighths(nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 4)))["params"]),
        "equinox": lambda: eighths(linear),
        "equinox partitioned": lambda: eighths(flat),
        "NumPy": lambda: {"w": np.asarray(array((6, 2)))},
        "1000 leaves": lambda: {f"w{i:04}": array((1024,)) for i in range(1000)},
        "big": lambda: {"w": array((big_bytes // 4,))},
    }
    if jax.config.jax_enable_x64:
        ways["float64"] = lambda: {"w": array((33, 7), jnp.float64), "v": array((3,))}
        ways["float64 NumPy"] = lambda: {"w": np.asarray(array((5,)), np.float64)}
    return ways


def main() -> None:
    """Train what can be, ask for what cannot."""
    with jaxrdma.connect() as session:
        for name, make in cases(int(sys.argv[1])).items():
            check(session, name, make())
        weights = {"w": jnp.ones((40,), jnp.float32)}
        check(session, "bfloat16 gradients of float32", weights, "bfloat16")
        check(session, "float16 gradients of float32", weights, "float16")
        check(
            session,
            "float32 gradients of bfloat16",
            {"w": jnp.ones((40,), jnp.bfloat16)},
            "float32",
        )

        good = jnp.ones((3,))
        refused(
            session,
            "integer",
            {"good": good, "count": jnp.zeros((), jnp.int32)},
            "['count']",
            "int32",
        )
        refused(session, "bool", {"good": good, "mask": jnp.ones((2,), bool)}, "['mask']", "bool")
        refused(session, "complex", [good, jnp.ones((2,), jnp.complex64)], "[1]", "complex64")
        refused(
            session, "function", {"act": jax.nn.relu, "good": good}, "['act']", "cannot be averaged"
        )
        refused(session, "key", {"key": jax.random.key(0)}, "['key']", "PRNG")
        if not jax.config.jax_enable_x64:
            refused(
                session,
                "float64, x64 off",
                {"w": np.ones((2,), np.float64)},
                "['w']",
                "float64",
                "x64",
            )

        state = session.init(weights, update=optax.sgd(RATE))
        wrong: dict[str, Any] = {
            "another shape": {"w": jnp.ones((41,), jnp.float32)},
            "another dtype": {"w": jnp.ones((40,), jnp.int32)},
            "another tree": {"v": jnp.ones((40,))},
        }
        for name, grads in wrong.items():
            try:
                jaxrdma.ps_step(state, grads)
            except jaxrdma.MismatchError as error:
                assert "grads" in str(error), error
                print(f"refused: gradients of {name}: {error}", flush=True)
            else:
                raise AssertionError(name)
    print("done", flush=True)


if __name__ == "__main__":
    main()
