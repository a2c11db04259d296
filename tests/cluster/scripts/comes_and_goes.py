"""A worker that joins a running job, makes a step, and is lost, so many times. Usage: comes_and_goes.py TIMES.

Each time it raises an error: the job goes on without it, and lets the next one have its place.
"""

import contextlib
import sys
import time

import jax
import psutil
from followed import POLICIES, gradient, parameters, update

import jaxrdma


class Gone(Exception):
    """Ends a life."""


def main() -> None:
    """Each life is a session of its own."""
    times, me = int(sys.argv[1]), psutil.Process()
    for life in range(times):
        begin = time.perf_counter()
        with contextlib.suppress(Gone), jaxrdma.connect() as session:
            state = session.init(parameters(), update=update(), policy=POLICIES["shrink"]())
            jax.block_until_ready(jaxrdma.ps_step(state, gradient()))
            raise Gone
        seconds = time.perf_counter() - begin
        print(f"life {life} {seconds:.3f} s {me.num_fds()} {me.num_threads()}", flush=True)


if __name__ == "__main__":
    main()
