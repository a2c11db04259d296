"""Many workers to one server, and many that come and go: right numbers, and nothing is left of those that went."""

import re
import statistics
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.job import PATIENCE, Job
from tests.cluster.leaks import Leaks
from tests.cluster.scripts.followed import parameters
from tests.cluster.test_follow import follow, stop_at
from tests.cluster.test_soak import check_leaks


def follow_and_leave(job: Job, stop: Path, times: int) -> list[float]:
    """So many followers, one after the other, each of which takes one version. Files and threads held after each."""
    me = psutil.Process()
    held: list[float] = []
    job.start("followed.py", "sync", stop)
    with follow(job) as follower:
        follower.pull(parameters())
    with Leaks(job, 0.1) as leaks:
        for _ in range(times):
            with follow(job) as follower:
                follower.pull(parameters())
            held.append(me.num_fds() + me.num_threads())
        stop_at(stop, 1)
        job.succeed(60)
    check_leaks(job, leaks)
    return held


def come_and_go(job: Job, stop: Path, times: int, timeout: float) -> list[float]:
    """One worker's place is taken so many times by sessions of one process. Seconds that each life took."""
    job.start_coordinator()
    for server in range(job.servers):
        job.start_server(server)
    job.start_worker(0, "followed.py", "shrink", stop)
    job.start_worker(1, "comes_and_goes.py", times)
    job.wait_for_output("worker 1", "life 0 ")
    with Leaks(job, 0.1) as leaks:
        assert job.wait(timeout, ["worker 1"]) == {"worker 1": 0}, job.outputs()
        stop_at(stop, 1)
        codes = job.wait(60)
    assert set(codes.values()) == {0}, job.outputs()
    check_leaks(job, leaks)
    lives = re.findall(r"^life \d+ ([0-9.]+) s (\d+) (\d+)$", job.output("worker 1"), re.MULTILINE)
    assert len(lives) == times
    check_flat([int(files) + int(threads) for _, files, threads in lives])
    return [float(seconds) for seconds, _, _ in lives]


def check_flat(held: list[float]) -> None:
    """The first third is for what is made once."""
    third = len(held) // 3
    assert min(held[2 * third :]) <= max(held[third : 2 * third]), held


def serve_many(job: Job, steps: int, apart: bool = False, limit_s: float = 100) -> float:
    """All workers of the job, in threads of one process, or `apart`: a process each. Milliseconds for each step."""
    job.start_coordinator()
    for server in range(job.servers):
        job.start_server(server)
    if apart:
        names = [f"worker {index}" for index in range(job.workers)]
        for index in range(job.workers):
            job.start_worker(index, "many.py", job.workers, steps, index)
    else:
        names = ["worker 0"]
        flags = "--xla_force_host_platform_device_count=8"
        job.start_worker(0, "many.py", job.workers, steps, XLA_FLAGS=flags)
    codes = job.wait(limit_s)
    assert set(codes.values()) == {0}, job.outputs()
    told = [re.findall(r" workers, ([0-9.]+) ms", job.output(name)) for name in names]
    return max(float(one) for (one,) in told)


@pytest.mark.timeout(115)
def test_64_workers_and_one_server(make_job: Callable[..., Job]) -> None:
    serve_many(make_job(1, 64), 20)


@pytest.mark.timeout(115)
def test_followers_that_come_and_go_leave_nothing_behind(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    check_flat(follow_and_leave(make_job(2, 1), tmp_path / "stop", 150))


@pytest.mark.timeout(115)
def test_workers_that_come_and_go_leave_nothing_behind(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    seconds = come_and_go(make_job(2, 2), tmp_path / "stop", 20, 90 * PATIENCE)
    print(f"median {statistics.median(seconds):.3f} s")
