"""A worker is lost, and a process that is started in its place has a part in the running job."""

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.blame import error_of
from tests.cluster.job import PATIENCE, Job
from tests.cluster.test_follow import stop_at
from tests.cluster.test_loss import sets
from tests.cluster.test_policies import lines, means
from tests.cluster.test_restarts import (
    LAUNCHER,
    check_numbers,
    find,
    launch,
    wait_for_step,
    wait_until,
)

VICTIMS = ("worker 1", "worker 0")
BACK = "takes part in model 0 from step "


def kill_and_rejoin(job: Job, victim: str, step: int) -> float:
    """Kill a worker once a step is done; the launcher starts it again. Seconds until it had its parameters."""
    wait_for_step(job, 0, step)
    times = job.output(LAUNCHER).count(BACK)
    find(job, victim, 0).kill()
    begin = time.monotonic()
    wait_until(job, f"{victim} to be back", lambda: job.output(LAUNCHER).count(BACK) > times)
    return time.monotonic() - begin


def rejoin_at_random_step(job: Job, victim: str, chance: random.Random) -> float:
    """A worker is killed at any step of a job in which all wait for it, which must end with the right bits."""
    until = 60
    launch(job, until=until, pause=0.05 * PATIENCE, on_loss=("wait",))
    seconds = kill_and_rejoin(job, victim, chance.randrange(1, until - 5))
    check_numbers(job, until)
    return seconds


@pytest.mark.timeout(100)
def test_a_job_waits_for_its_workers_and_ends_with_the_bits_of_an_undisturbed_one(
    make_job: Callable[..., Job],
) -> None:
    job, until = make_job(1, 2), 24
    launch(job, until=until, pause=0.05, on_loss=("wait",))
    for number, victim in enumerate(VICTIMS):
        kill_and_rejoin(job, victim, 6 * (number + 1))
    check_numbers(job, until)
    output = job.output(LAUNCHER)
    for victim in VICTIMS:
        assert re.search(rf"{victim} \(.*\) died: .*; its place is kept", output), output
        again = f"jaxrdma: {victim} killed by SIGKILL; starting it again, 1 of 3"
        assert again in output, output
    # Whoever stays makes every step, once.
    first = [int(step) for step in re.findall(r"^worker 0 +\| step (\d+)$", output, re.MULTILINE)]
    assert first == sorted(set(first)) and first[-1] == until, output


@pytest.mark.timeout(100)
def test_who_comes_back_to_a_job_that_went_on_is_in_every_later_mean(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 2, partition_bytes=256)
    stop = tmp_path / "stop"
    work = ("policies.py", "sync:2:shrink", f"v@{stop}", 0.05, 0.05)
    job.start(*work)
    job.wait_for_output("worker 0", '"batch": 10,')
    job.kill("worker 1")
    job.wait_for_output("coordinator", "the job goes on without it")
    # One that would train another model is told so, and nobody else is.
    job.start_worker(1, "policies.py", "async", "v1", name="unlike")
    job.wait(60, ["unlike"])
    assert re.search(
        "model 0 is not that of the job: the policy differs: worker 1 has 'async.*, the job has 'sync_replicas",
        error_of(job, "unlike") or job.output("unlike"),
    ), job.outputs()
    job.start_worker(1, *work, name="again")
    job.wait_for_output("again", BACK)
    end = lines(job, 0)[-1]["after"] + 60
    stop_at(stop, end)
    codes = job.wait(60, [name for name in job.processes if name not in ("worker 1", "unlike")])
    assert set(codes.values()) == {0}, job.outputs()
    told = lines(job, 1, "again")
    assert (told[-1]["after"], told[-1]["dropped"]) == (end, 0)
    assert [line["after"] for line in told] == [*range(told[0]["before"] + 1, end + 1)]
    found = sets(job, means(2, 2) | means(1, 2))
    assert list(found) == [*range(1, end + 1)], "no version was skipped"
    # Never a mean over two memberships.
    away = [version for version, each in found.items() if each == (0,)]
    assert away == [*range(away[0], told[0]["before"] + 1)]
    assert {each for version, each in found.items() if version not in away} == {(0, 1)}


@pytest.mark.timeout(100)
def test_who_wakes_after_its_place_was_taken_does_no_harm_and_is_told(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 2, partition_bytes=256, heartbeat_timeout=3 * PATIENCE)
    work = ("policies.py", "sync:2:wait", "v60", 0.02, 0.02)
    job.start(*work)
    job.wait_for_output("worker 0", '"batch": 10,')
    job.kill("worker 1", signal.SIGSTOP)
    text = job.wait_for_output("coordinator", "its place is kept")
    assert re.search(r"worker 1 \(.*\) has been silent for", text)
    seen = len(lines(job, 0))
    job.start_worker(1, *work, name="again")
    job.wait_for_output("again", BACK)
    job.kill("worker 1", signal.SIGCONT)
    codes = job.wait(60)
    assert codes.pop("worker 1") == 1, job.outputs()
    assert set(codes.values()) == {0}, job.outputs()
    assert "Its place is kept for a process that is started in its stead" in job.output("worker 1")
    assert len(lines(job, 0)) == 60 and seen < 60
    assert lines(job, 0)[-1]["values"] == [-60 * (1 + 4) / 2]
    assert lines(job, 1, "again")[-1] | {"batch": 0} == lines(job, 0)[-1] | {
        "batch": 0,
        "accepted": 60 - lines(job, 1, "again")[0]["before"],
    }
    assert set(sets(job, means(2, 2)).values()) == {(0, 1)}
