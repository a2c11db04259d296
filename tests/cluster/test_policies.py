"""Whose gradients form a mean, in real jobs: the values of the parameters tell of whom each was."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.job import Job


def lines(job: Job, worker: int, name: str = "") -> list[dict[str, Any]]:
    """What a worker told of its steps; every element of every leaf had the same value. `name`: of its process."""
    text = job.output(name or f"worker {worker}")
    told = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for line in told:
        assert len(line["values"]) == 1, line
    return told


def versions(job: Job) -> dict[int, float]:
    """By version, the parameters' value; the same for everybody who saw it."""
    seen = {0: 0.0}
    for worker in range(job.workers):
        for line in lines(job, worker):
            assert seen.setdefault(line["after"], line["values"][0]) == line["values"][0]
    return seen


def means(quorum: int, workers: int, share: int = 1) -> dict[float, tuple[int, ...]]:
    """By value, the set of workers that a mean of `quorum` gradients was over."""
    sets = itertools.combinations_with_replacement(range(workers), quorum)
    return {
        sum(4.0**w for w in each) / quorum: each
        for each in sets
        if all(each.count(w) <= share for w in each)
    }


@pytest.mark.timeout(100)
def test_the_slowest_of_four_is_a_backup_and_its_gradients_are_dropped(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 4, partition_bytes=256)
    job.start("policies.py", "sync:3", "60,60,60,2", 0.02, 0.02, 0.02, 1.0).succeed(100)
    sets = means(3, 4)
    seen = versions(job)
    assert sorted(seen) == list(range(61)), "no version was skipped"
    for version in range(1, 61):
        # Fractions of three: the sum is rounded.
        mean = seen[version - 1] - seen[version]
        assert min(sets, key=lambda value: abs(value - mean)) == pytest.approx(mean, abs=0.01)
    for worker in range(3):
        told = lines(job, worker)
        assert [line["after"] for line in told] == list(range(1, 61))
        assert (told[-1]["accepted"], told[-1]["dropped"]) == (60, 0)
    late = lines(job, 3)
    assert [line["dropped"] for line in late] == [1, 2]
    assert late[0]["before"] == 0 and late[0]["after"] > 1  # goes on from the newest
    assert late[1]["before"] == late[0]["after"]
    for server in range(2):
        assert "dropped from worker 3: 2" in job.output(f"server {server}")


@pytest.mark.timeout(100)
def test_two_workers_make_means_of_four(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2, partition_bytes=256)
    job.start("policies.py", "sync:4", 20).succeed(100)
    seen = versions(job)
    assert sorted(seen) == list(range(11))
    for version in range(1, 11):
        assert seen[version - 1] - seen[version] == (1 + 1 + 4 + 4) / 4
    for worker in range(2):
        told = lines(job, worker)
        assert [line["after"] for line in told] == [n for v in range(10) for n in (v, v + 1)]
        assert told[-1]["accepted"] == 20


@pytest.mark.timeout(100)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_nobody_is_more_than_k_steps_ahead_of_the_slowest(
    make_job: Callable[..., Job], k: int
) -> None:
    job = make_job(2, 3, partition_bytes=256)
    job.start("policies.py", f"bounded:{k}", 12, 0.1, 0, 0).succeed(100)
    seen = versions(job)
    assert seen[12] == -12 * (1 + 4 + 16) / 3
    for version, value in seen.items():
        assert value == -version * (1 + 4 + 16) / 3
    ahead = 0
    for worker in range(3):
        for line in lines(job, worker):
            # A version is made of as many gradients of the slowest.
            assert line["batch"] + 1 - k <= line["after"] <= line["batch"] + 1
            ahead = max(ahead, line["batch"] + 1 - line["after"])
    assert ahead == k, "the fast ones wait no more than they have to"


@pytest.mark.timeout(100)
def test_asynchronous_gradients_are_all_applied_each_by_itself(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 3, partition_bytes=256)
    job.start("policies.py", "async", "30,20,10").succeed(100)
    seen = versions(job)
    assert min(seen.values()) == -(30 * 1 + 20 * 4 + 10 * 16)
    for worker, steps in enumerate((30, 20, 10)):
        told = lines(job, worker)
        assert told[-1]["accepted"] == steps
        for line in told:
            assert line["after"] > line["before"]
    # Where somebody saw two versions in a row, they differ by one gradient.
    for version in seen:
        if version + 1 in seen:
            assert seen[version] - seen[version + 1] in (1, 4, 16)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("policy", "batches", "steps"),
    [
        ("sync:2", "5,5,9", range(1, 20)),
        (
            "sync:2",
            "v20,v20,3",
            range(20, 24),
        ),  # who is slow makes its own when the others are done
        ("sync:6", "6,6,20", range(1, 33)),
        ("bounded:1", "5,8,8", [8]),
        ("async", "3,5,7", [15]),
        ("sync:3:wait", "6,6,7", [7]),
    ],
)
def test_nobody_waits_for_a_worker_whose_data_ran_out(
    make_job: Callable[..., Job], policy: str, batches: str, steps: Sequence[int]
) -> None:
    job = make_job(1, 3, partition_bytes=256)
    job.start("policies.py", policy, batches).succeed(60)
    last = max(versions(job))
    assert last in steps
    for worker in range(3):
        told = lines(job, worker)
        wanted = batches.split(",")[worker]
        if not wanted.startswith("v"):
            assert len(told) == int(wanted)
        assert told[-1]["accepted"] + told[-1]["dropped"] == len(told)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("policy", ["sync:2", "bounded:1"])
def test_a_job_that_is_started_again_goes_on_from_its_checkpoint(
    make_job: Callable[..., Job], tmp_path: Path, policy: str
) -> None:
    folder = tmp_path / "checkpoints"
    first = make_job(2, 3, partition_bytes=256, checkpoint=folder)
    first.start("policies.py", policy, "v6").succeed(60)
    seen = versions(first)
    last = max(seen)
    again = make_job(1, 3, partition_bytes=256, checkpoint=folder)
    again.start("policies.py", policy, f"v{last + 6}").succeed(60)
    begun = {lines(again, worker)[0]["before"] for worker in range(3)}
    # What was given in advance makes one more version when others have left.
    assert begun == {last} or (policy == "bounded:1" and begun == {last + 1})
    for worker in range(3):
        for line in lines(again, worker):
            assert seen.setdefault(line["after"], line["values"][0]) == line["values"][0]
    for version in sorted(seen):
        if version - 1 in seen:
            change = seen[version - 1] - seen[version]
            assert any(change == pytest.approx(mean) for mean in means_of(policy))


def means_of(policy: str) -> list[float]:
    """What one step can change. Over fewer workers, when others have left."""
    quorums = (2,) if policy == "sync:2" else (1, 2, 3)
    return [mean for quorum in quorums for mean in means(quorum, 3)]
