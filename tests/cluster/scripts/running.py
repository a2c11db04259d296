"""A worker that trains in the way named, and checks what comes back against float64 NumPy.

Usage: running.py WAY [ARGUMENT]...
  alternate STEPS       two models in one program, by turns, not equally often
  recreate STEPS        gradients in new arrays at each step, states donated, garbage collected in between
  sleeper STEPS PAUSE   worker 1 sleeps before each step; prints when each step began and ended
  push-and-die POLICY   worker 1 is killed between its push and its pull, in its fifth step
  large STEPS BYTES     one leaf of so many bytes; says each step
  halves STEPS          gradients of 16 bits, which one process alone would get wrong
"""

import gc
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from numpy.typing import NDArray

import jaxrdma
from jaxrdma.policy import Policy

Array = NDArray[Any]


def gradient(like: Array, worker: int, step: int) -> NDArray[np.float64]:
    """Multiples of 1/8 below 4, exact in every float type; different for each element, worker and step."""
    places = np.arange(like.size, dtype=np.int64).reshape(like.shape)
    return (places * 7 + worker * 3 + step * 5) % 31 / 8.0


def mean(like: Array, workers: int, step: int) -> NDArray[np.float64]:
    return np.mean([gradient(like, worker, step) for worker in range(workers)], axis=0)


def alternate(session: jaxrdma.Session, steps: int) -> None:
    first = {"w": np.zeros((30, 40), np.float32), "b": np.zeros(7, np.float32)}
    second = {"w": np.zeros(3001, np.float32)}
    states = [session.init(params, update=optax.sgd(0.5)) for params in (first, second)]
    done = [0, 0]
    step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
    for turn in range(steps):
        which = turn % 3 // 2  # the first, the first, the second
        params = (first, second)[which]
        grads = {k: gradient(p, session.index, done[which]) for k, p in params.items()}
        states[which] = step(
            states[which], {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}
        )
        for leaf in params.values():
            leaf -= (0.5 * mean(leaf, session.num_workers, done[which])).astype(np.float32)
        done[which] += 1
        assert int(states[which].step) == done[which]
        for i, params in enumerate((first, second)):
            for name, leaf in params.items():
                np.testing.assert_array_equal(np.asarray(states[i].params[name]), leaf)
    print("done", done, flush=True)


def recreate(session: jaxrdma.Session, steps: int) -> None:
    expected = np.zeros(50_000, np.float32)
    state = session.init({"w": expected}, update=optax.sgd(1.0))
    step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
    chance = np.random.default_rng(session.index)
    kept: list[Any] = []
    for number in range(steps):
        # What is allocated between, and freed later, moves each step's arrays.
        kept.append(jnp.zeros(int(chance.integers(1, 60_000))))
        if chance.random() < 0.5:
            kept.pop(int(chance.integers(len(kept))))
        grads = {"w": jnp.asarray(gradient(expected, session.index, number), jnp.float32)}
        state = step(state, grads)
        del grads
        gc.collect()
        expected -= mean(expected, session.num_workers, number).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(state.params["w"]), expected)
    print("done", flush=True)


def sleeper(session: jaxrdma.Session, steps: int, pause: float) -> None:
    state = session.init({"w": np.zeros(100, np.float32)}, update=optax.sgd(1.0))
    step = jax.jit(jaxrdma.ps_step)
    for number in range(steps):
        if session.index == 1:
            time.sleep(pause)
        print("began", number, time.monotonic(), flush=True)
        state = jax.block_until_ready(step(state, {"w": jnp.ones(100)}))
        print("ended", number, time.monotonic(), flush=True)


def push_and_die(session: jaxrdma.Session, policy: str) -> None:
    policies: dict[str, Policy] = {
        "all": jaxrdma.SyncReplicas(),
        "backup": jaxrdma.SyncReplicas(1),
        "async": jaxrdma.Async(),
    }
    like = np.zeros(1000, np.float32)
    state = session.init({"w": like}, update=optax.sgd(1.0), policy=policies[policy])
    grads = {"w": jnp.full(1000, 4.0**session.index)}
    push, pull = jax.jit(jaxrdma.push), jax.jit(jaxrdma.pull)
    number = 0
    before = 0.0
    while int(state.step) < 30:
        ticket = jax.block_until_ready(push(state, grads))
        if session.index == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state = jax.block_until_ready(pull(ticket))
        (value,) = set(np.asarray(state.params["w"]).tolist())
        print("step", int(state.step), before - value, flush=True)
        before = value
        number += 1


def large(session: jaxrdma.Session, steps: int, size: int) -> None:
    like = np.zeros(size // 4, np.float32)
    state = session.init({"w": like}, update=optax.sgd(1.0))
    step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
    grads = {"w": jnp.asarray(gradient(like, session.index, 0), jnp.float32)}
    change = mean(like, session.num_workers, 0)  # its multiples are exact for thousands of steps
    for number in range(1, steps + 1):
        state = jax.block_until_ready(step(state, grads))
        assert int(state.step) == number
        np.testing.assert_array_equal(np.asarray(state.params["w"]), -number * change)
        print("step", number, flush=True)
    print("done", flush=True)


def halves(session: jaxrdma.Session, steps: int) -> None:
    dtypes = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
    expected = {name: np.zeros(513, dtype) for name, dtype in dtypes.items()}
    state = session.init(expected, update=optax.sgd(1.0))
    step = jax.jit(jaxrdma.ps_step)
    for number in range(steps):
        # Large in one worker, small in the others: summed in 16 bits the small ones would be lost.
        mine = 2048.0 if session.index == number % session.num_workers else 1.0
        grads = {name: jnp.full(513, mine, dtype) for name, dtype in dtypes.items()}
        state = step(state, grads)
        right = (2048.0 + session.num_workers - 1) / session.num_workers
        for name, leaf in expected.items():
            new = leaf.astype(np.float64) - np.float64(np.asarray(right).astype(leaf.dtype))
            expected[name] = new.astype(leaf.dtype)
            np.testing.assert_array_equal(np.asarray(state.params[name]), expected[name], name)
            assert np.isfinite(expected[name].astype(np.float64)).all()
    print("done", flush=True)


def main() -> None:
    """Train in the way named."""
    way, arguments = sys.argv[1], sys.argv[2:]
    with jaxrdma.connect() as session:
        if way == "push-and-die":
            push_and_die(session, arguments[0])
        elif way == "large":
            large(session, int(arguments[0]), int(arguments[1]))
        elif way == "sleeper":
            sleeper(session, int(arguments[0]), float(arguments[1]))
        else:
            ways = {
                "alternate": alternate,
                "recreate": recreate,
                "halves": halves,
            }
            ways[way](session, int(arguments[0]))


if __name__ == "__main__":
    main()
