"""Workers are added to a running job: the values of the parameters tell of whom each mean was."""

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.job import Job, ask
from tests.cluster.test_follow import stop_at
from tests.cluster.test_loss import sets
from tests.cluster.test_policies import lines, means

BACK = "takes part in model 0 from step "
ANY = means(1, 4) | means(2, 4) | means(3, 4) | means(4, 4)
PAUSES = (0.03,) * 4


def grow(job: Job, worker: int, *work: object, name: str = "") -> int:
    """Starts a worker in a spare place of a job that trains; the step from which on it has a part."""
    job.wait_for_output("worker 0", '"after": ')
    job.start_worker(worker, *work, name=name)
    name = name or f"worker {worker}"
    text = job.wait_for_output(name, BACK)
    return int(re.findall(rf"{BACK}(\d+)", text)[0])


def wait_for_version(job: Job, version: int, worker: int = 0) -> None:
    job.wait_for_output(f"worker {worker}", f'"after": {version},')


def end_soon(job: Job, stop: Path, steps: int = 30) -> int:
    """All train `steps` steps more; the last."""
    end = lines(job, 0)[-1]["after"] + steps
    stop_at(stop, end)
    return end


def check_values(job: Job, found: dict[int, tuple[int, ...]], whole: bool = True) -> None:
    """The parameters are what the means over these sets make, reckoned apart, in float64.

    `whole`: somebody has seen every version; else it is as far as somebody has.
    """
    known = [*itertools.takewhile(found.__contains__, itertools.count(1))]
    assert not whole or known == list(found), "a version was skipped"
    gradients = [np.mean([4.0**worker for worker in found[version]]) for version in known]
    expected = -np.cumsum([0.0, *gradients])  # by version
    for worker in range(job.workers):
        for line in lines(job, worker):
            if line["after"] >= len(expected):
                continue  # of what came after the end nobody may have seen every version
            np.testing.assert_allclose(line["values"], expected[line["after"]], rtol=1e-6)


@pytest.mark.timeout(110)
@pytest.mark.parametrize("policy", ["sync:4:shrink", "bounded:2:shrink"])
def test_two_workers_become_four_and_no_mean_is_over_two_memberships(
    make_job: Callable[..., Job], tmp_path: Path, policy: str
) -> None:
    job, stop = make_job(2, 2, partition_bytes=256, most_workers=4), tmp_path / "stop"
    chance = random.Random()
    work = ("policies.py", policy, f"v@{stop}", *PAUSES)
    job.start(*work)
    wait_for_version(job, chance.randrange(1, 20))
    status = ask("status", job.address, "--json")
    assert json.loads(status.stdout)["spare"] == [2, 3], status
    third = grow(job, 2, *work)
    wait_for_version(job, third + chance.randrange(1, 20))
    assert "not there yet: worker 3" in ask("status", job.address).stdout
    fourth = grow(job, 3, *work)
    end = end_soon(job, stop)
    job.succeed()
    found = sets(job, ANY)
    phases = {(0, 1): range(1, third + 1), (0, 1, 2): range(third + 1, fourth + 1)}
    phases[0, 1, 2, 3] = range(fourth + 1, end + 1)
    # With staleness a worker may get two versions at a time, of which nobody has seen the first.
    whole = policy.startswith("sync")
    assert len(found) > 0.9 * end
    for members, versions in phases.items():
        seen = {found[version] for version in versions if whole or version in found}
        assert seen == {members}, (members, versions)
    check_values(job, found, whole)
    for worker in range(4):
        told = lines(job, worker)[-1]
        assert told["dropped"] == 0
        # With staleness, what others gave ahead makes versions after the first has left.
        assert end <= told["after"] <= end + 2 * policy.startswith("bounded")
        if policy.startswith("sync"):
            assert told["accepted"] == sum(worker in each for each in found.values())
    for server in range(2):
        last = job.output(f"server {server}").rpartition("gradients accepted from ")[2]
        assert re.fullmatch(r"worker 0: \d+, .*worker 3: \d+; 0 dropped, 0 came twice\s*", last)


@pytest.mark.timeout(110)
@pytest.mark.parametrize("on_loss", ["shrink", "wait"])
def test_one_that_came_is_killed_and_replaced(
    make_job: Callable[..., Job], tmp_path: Path, on_loss: str
) -> None:
    job, stop = make_job(1, 2, partition_bytes=256, most_workers=4), tmp_path / "stop"
    work = ("policies.py", f"sync:4:{on_loss}", f"v@{stop}", *PAUSES)
    job.start(*work)
    first = grow(job, 2, *work)
    wait_for_version(job, first + 5)
    job.kill("worker 2")
    says = "its place is kept" if on_loss == "wait" else "the job goes on without it"
    job.wait_for_output("coordinator", says)
    again = grow(job, 2, *work, name="again")
    end = end_soon(job, stop)
    codes = job.wait(60, [name for name in job.processes if name != "worker 2"])
    assert set(codes.values()) == {0}, job.outputs()
    found = sets(job, ANY)
    assert {found[version] for version in range(1, first + 1)} == {(0, 1)}
    assert {found[version] for version in range(again + 1, end + 1)} == {(0, 1, 2)}
    away = [v for v in range(first + 1, again + 1) if found[v] == (0, 1)]
    assert away == [*range(away[0], again + 1)] if on_loss == "shrink" else not away
    check_values(job, found)


@pytest.mark.timeout(100)
def test_places_that_are_not_there_or_taken_are_refused_and_the_end_waits_for_none(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job, stop = make_job(1, 1, partition_bytes=256, most_workers=3), tmp_path / "stop"
    work = ("policies.py", "sync:3:shrink", f"v@{stop}", *PAUSES)
    job.start(*work)
    first = grow(job, 2, *work)
    job.start_worker(2, *work, name="twin")
    job.start_worker(3, *work, name="beyond")
    job.start_worker(1, *work, name="unlike", JAXRDMA_MOST_WORKERS="2")
    assert set(job.wait(60, ["twin", "beyond", "unlike"]).values()) == {1}, job.outputs()
    assert "two processes claim to be worker 2" in job.output("twin")
    assert "index 3 of a worker in a job of at most 3 workers: expected 0 to 2" in (
        job.output("beyond")
    )
    assert "expects 2 workers at most, the coordinator 3" in job.output("unlike")
    end = end_soon(job, stop)
    codes = job.wait(60, ["coordinator", "server 0", "worker 0", "worker 2"])
    assert set(codes.values()) == {0}, job.outputs()
    found = sets(job, ANY)
    assert {found[v] for v in range(first + 1, end + 1)} == {(0, 2)}
    check_values(job, found)


@pytest.mark.timeout(100)
def test_who_has_left_is_followed_by_another(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job, stop = make_job(2, 2, partition_bytes=256, most_workers=3), tmp_path / "stop"
    policy = "sync:3:shrink"
    job.start("policies.py", policy, f"v@{stop},10", *PAUSES)
    assert job.wait(60, ["worker 1"]) == {"worker 1": 0}, job.outputs()
    again = grow(job, 1, "policies.py", policy, f"v@{stop}", *PAUSES, name="again")
    end = end_soon(job, stop)
    job.succeed()
    found = sets(job, ANY)
    assert {found[v] for v in range(1, 11)} == {(0, 1)} == {found[v] for v in range(again + 1, end)}
    assert {found[v] for v in range(11, again + 1)} <= {(0,)}
    check_values(job, found)


@pytest.mark.timeout(100)
def test_what_nobody_can_be_added_to_is_refused_with_the_reason(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 1, most_workers=2)
    job.start("grows_not.py").succeed()
    told = job.output("worker 0")
    for what in (
        "init with sync_replicas(2 of 2, on_loss=fail)",
        "embedding 'rows'",
        "average_gradients",
    ):
        assert f"refused: {what} in a job to which workers may be added" in told, told
    assert "places 2, active (0,)" in told


@pytest.mark.timeout(110)
def test_a_job_that_grew_goes_on_from_its_checkpoint_and_grows_again(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {"partition_bytes": 256, "most_workers": 3, "checkpoint": tmp_path / "saved"}
    ends = []
    for number in range(2):
        job, stop = make_job(2, 1, **settings), tmp_path / f"stop-{number}"
        work = ("policies.py", "sync:3:shrink", f"v@{stop}", *PAUSES)
        job.start(*work)
        if ends:
            job.wait_for_output("worker 0", f"goes on from the checkpoint of step {ends[0]}")
        first = grow(job, 1, *work)
        ends.append(end_soon(job, stop, 10))
        job.succeed()
        told = lines(job, 0)
        assert told[0]["before"] == (ends[0] if number else 0)
        assert told[-1]["after"] == ends[-1] > first
