"""Everybody on one core, and JAX with one thread: no wait for the network may hold the thread that would end it."""

import os
import re
from collections.abc import Callable

import pytest

from tests.cluster.job import Job

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
STEPS = 1000


def train_on_one_core(job: Job, threads: str) -> float:
    """All processes of the job on one core. `threads`: PJRT_NPROC of the workers; the launcher sets 8.

    **Returns:** the seconds that the slower worker's steps took.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of what it starts
    try:
        job.start_coordinator()
        for server in range(job.servers):
            job.start_server(server)
        for worker in range(job.workers):
            job.start_worker(
                worker, "one_layer.py", STEPS, XLA_FLAGS=ONE_THREAD, PJRT_NPROC=threads
            )
    finally:
        os.sched_setaffinity(0, cores)
    job.succeed(100)
    seconds: list[float] = []
    for worker in range(job.workers):
        told = re.search(
            rf"^{STEPS} steps in ([0-9.]+) s$", job.output(f"worker {worker}"), re.MULTILINE
        )
        assert told is not None, job.outputs()
        seconds.append(float(told[1]))
    return max(seconds)


@pytest.mark.timeout(115)
@pytest.mark.parametrize("threads", ["1", "8"])
def test_a_thousand_steps_with_one_thread_on_one_core(
    make_job: Callable[..., Job], threads: str
) -> None:
    print(f"{STEPS} steps in {train_on_one_core(make_job(1, 2), threads):.2f} s")
