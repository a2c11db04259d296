"""What goes wrong elsewhere while a job trains: here the numbers are right, and nobody waits in vain."""

import re
from collections.abc import Callable

import pytest

from tests.cluster.blame import check_all_name
from tests.cluster.job import Job

pytestmark = pytest.mark.timeout(110)


@pytest.mark.parametrize("way", ["alternate", "recreate"])
def test_the_numbers_are_those_of_float64(make_job: Callable[..., Job], way: str) -> None:
    job = make_job(2, 2, partition_bytes=4096, ordered=1).start("running.py", way, 60)
    job.succeed(100)
    for worker in ("worker 0", "worker 1"):
        assert re.search("^done", job.output(worker), re.MULTILINE), job.outputs()


def test_16_bit_gradients_of_eight_workers_are_summed_in_32_bits(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 8).start("running.py", "halves", 16)
    job.succeed(100)


def times(job: Job, worker: str, what: str) -> list[float]:
    """When each step began, or ended, on the one clock of this machine."""
    return [float(t) for t in re.findall(rf"^{what} \d+ (.*)$", job.output(worker), re.MULTILINE)]


def test_nobody_is_ahead_of_a_worker_that_sleeps(make_job: Callable[..., Job]) -> None:
    steps, pause = 6, 1.0
    job = make_job(2, 2).start("running.py", "sleeper", steps, pause)
    job.succeed(60)
    began, ended = times(job, "worker 1", "began"), times(job, "worker 0", "ended")
    assert len(began) == len(ended) == steps
    # A version that worker 0 has is one to which the sleeper has given.
    assert all(end > begin for begin, end in zip(began, ended, strict=True)), job.outputs()
    assert ended[-1] - ended[0] > (steps - 1) * pause * 0.9


@pytest.mark.parametrize("policy", ["all", "backup", "async"])
def test_a_worker_killed_between_push_and_pull_strands_nobody(
    make_job: Callable[..., Job], policy: str
) -> None:
    job = make_job(2, 2, partition_bytes=1024).start("running.py", "push-and-die", policy)
    if policy == "all":
        check_all_name(job, "worker 1 .*died", 40, ["worker 0", "server 0", "server 1"])
        return
    codes = job.wait(60, ["worker 0", "server 0", "server 1", "coordinator"])
    assert set(codes.values()) == {0}, job.outputs()
    # Whole gradients, of one, the other, or, under `Async`, of both between two looks.
    steps = re.findall(r"^step (\d+) (.*)$", job.output("worker 0"), re.MULTILINE)
    assert int(steps[-1][0]) == 30
    last = 0
    for step, change in steps:
        made = int(step) - last
        last = int(step)
        rest = float(change) - made * 1.0
        assert rest % 3 == 0 and 0 <= rest / 3 <= made, job.outputs()
