"""A worker that forks processes beside its steps, as a data loader does. Prints what they were told.

Usage: forking.py STEPS. Each step's gradient is loaded by a forked process. Others try what only their parent may do,
are signalled, and end in every way.
"""

import contextlib
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import sys
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import jaxrdma

SIZE = 64

# JAX warns of every fork.
warnings.filterwarnings("ignore", message=".*fork")


def load(step: int) -> NDArray[np.float32]:
    """In a forked process."""
    return np.full(SIZE, step % 7, np.float32)


def attempt(name: str, what: Callable[[], object]) -> None:
    """Prints what becomes of it."""
    try:
        what()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    else:
        print(f"{name}: went well", flush=True)


def wait(ready: "multiprocessing.synchronize.Event") -> None:
    """In a forked process, until a signal ends it."""
    ready.set()
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def fork(child: Callable[[], None]) -> int:
    """The exit code of a child that does `child`."""
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(7)  # to leave as programs do is more than a forked JAX can bear
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Step beside all of these."""
    steps = int(sys.argv[1])
    session = jaxrdma.connect()
    params = {"w": jnp.zeros(SIZE)}
    state = session.init(params, update=optax.sgd(1.0))
    step = jax.jit(jaxrdma.ps_step)
    first = {"w": jnp.asarray(load(0))}
    for _ in range(2):  # a child cannot compile
        state = jax.block_until_ready(step(state, first))

    def wrong() -> None:
        attempt("step", lambda: jax.block_until_ready(step(state, first)))
        attempt("init", lambda: session.init(params, update=optax.sgd(1.0)))
        session.close()

    print("child ended with", fork(wrong), flush=True)
    fork_context = multiprocessing.get_context("fork")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        ready = fork_context.Event()

        child = fork_context.Process(target=wait, args=(ready,))
        child.start()
        ready.wait()
        os.kill(child.pid, number)
        child.join()
        print(f"{number.name} ended a child", flush=True)
    with fork_context.Pool(2) as pool:
        loaded = pool.imap(load, range(1, steps))
        for grads in loaded:
            state = step(state, {"w": jnp.asarray(grads)})
        loads = [load(0), *(load(s) for s in range(steps))]
        expected = -np.sum(np.asarray(loads, np.float64), axis=0)
        np.testing.assert_array_equal(np.asarray(state.params["w"]), expected)
        # While they live: nothing of the session is theirs to keep open.
        session.close()
        print("closed", flush=True)


if __name__ == "__main__":
    main()
