"""A worker that trains, and reads the servers' parameters meanwhile if it is worker 0.

Usage: read.py STEPS. Over verbs everything that is read is compared with what ps_step returned for that step; over tcp
reading must be refused, and training go on. Both workers print the bits that they have trained to.
"""

import hashlib
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

History = dict[int, list[bytes]]


def parameters() -> dict[str, Any]:
    """Every kind of leaf, one of them cut into many partitions."""
    rng = np.random.default_rng(3)
    params = {
        "float32": jnp.asarray(rng.normal(size=(40, 33)), jnp.float32),
        "bfloat16": jnp.asarray(rng.normal(size=(9, 7)), jnp.bfloat16),
        "float16": jnp.asarray(rng.normal(size=(5,)), jnp.float16),
        "scalar": jnp.ones((), jnp.float32),
        "nothing": jnp.ones((0, 4), jnp.float32),
    }
    if jax.config.jax_enable_x64:
        params["float64"] = jnp.asarray(rng.normal(size=(33,)), jnp.float64)
    return params


def gradients(params: Any, worker: int, step: int) -> Any:
    rng = np.random.default_rng((worker, step))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


def bits(state: jaxrdma.PSState) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]


def kinds(state: jaxrdma.PSState) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), state)


def check(found: jaxrdma.PSState, like: jaxrdma.PSState, history: History) -> int:
    """What was read is the version that its step names, bit for bit. Returns that step."""
    assert jax.tree.structure(found) == jax.tree.structure(like)
    assert kinds(found) == kinds(like)
    step = int(found.step)
    assert bits(found) == history[step], f"not the parameters of step {step}"
    return step


class Reader:
    """Reads in a thread of its own, beside the steps, until it is told to stop."""

    def __init__(self, session: jaxrdma.Session, state: jaxrdma.PSState) -> None:
        self.found: list[jaxrdma.PSState] = []
        self.error: Exception | None = None
        self._session, self._state = session, state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                self.found.append(self._session.read(self._state))
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def refused(kind: type[Exception], *words: str, read: Any) -> None:
    try:
        read()
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError(f"{words}: not refused")


def main() -> None:
    """Train `STEPS` steps."""
    steps = int(sys.argv[1])
    step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
    with jaxrdma.connect() as session:
        verbs = session.stats().transport[0][1].startswith("verbs")
        reads = session.index == 0 and verbs
        state = session.init(parameters(), update=optax.sgd(0.05, momentum=0.9))
        history: History = {0: bits(state)}

        def look() -> None:
            if reads:
                assert check(session.read(state), state, history) == number
            elif session.index == 0:
                refused(
                    jaxrdma.TransportError, "verbs", "ps_step", read=lambda: session.read(state)
                )

        reader = None
        for number in range(steps):
            if number % 3 == 0:
                look()
            if number == 1 and reads:
                state = session.read(state)  # as good as the one of ps_step, also to be donated
            if number == 2 and reads:
                reader = Reader(session, state)
            given = state
            grads = gradients(state.params, session.index, number)
            if number == 4:
                ticket = jaxrdma.push(state, grads)
                between = session.read(state) if reads else None
                state = jaxrdma.pull(ticket)
                history[number + 1] = bits(state)
                if between is not None:
                    assert check(between, state, history) in (number, number + 1)
            else:
                state = step(state, grads)
                history[number + 1] = bits(state)
                if reads:
                    assert given.params["float32"].is_deleted()
                    assert check(session.read(given), state, history) == number + 1
        number = steps
        look()
        assert int(state.step) == steps
        assert session.stats().gradients_accepted == steps
        assert session.stats().steps == steps

        if reader is not None:
            reader.stop()
            assert reader.error is None, reader.error
            versions = [check(found, state, history) for found in reader.found]
            assert versions == sorted(versions) and len(set(versions)) > 1, versions
            print(f"read {len(versions)} times beside {len(set(versions))} steps", flush=True)

        empty = session.init({"w": jnp.ones((0, 4))}, update=optax.sgd(0.1))
        none = {"w": jnp.ones((0, 4))}
        empty = step(empty, none)
        if reads:
            found = session.read(empty)
            assert int(found.step) == 1 and kinds(found) == kinds(empty)
            empty = step(empty, none)
            assert int(found.step) == 1  # not donated with the other
        else:
            empty = step(empty, none)
        assert int(empty.step) == 2

        means: Any = jaxrdma.average_gradients(session).init(state.params)
        refused(jaxrdma.ConfigError, "averaged", read=lambda: session.read(means))
        traced = jax.jit(session.read)
        refused(TypeError, "inside jit", read=lambda: traced(state))
        refused(TypeError, "inside jit", read=lambda: jax.jit(lambda: session.read(state).step)())
    refused(jaxrdma.CancelledError, "closed", read=lambda: session.read(state))
    print(f"trained to {hashlib.blake2b(b''.join(bits(state))).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
