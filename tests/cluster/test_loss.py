"""A worker is lost, and the others go on without it: the values of the parameters tell of whom each mean was."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cluster.job import PATIENCE, SCRIPTS, Job
from tests.cluster.test_policies import lines, means, versions
from tests.conftest import MARK, marked_processes

SECONDS = 60


def sets(job: Job, quorum: dict[float, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """By version, whose gradients the mean that made it was over; where somebody saw it and the one before."""
    seen = versions(job)
    found: dict[int, tuple[int, ...]] = {}
    for version in sorted(seen):
        if version - 1 in seen:
            mean = seen[version - 1] - seen[version]
            nearest = min(quorum, key=lambda value: abs(value - mean))
            assert nearest == pytest.approx(mean, abs=0.02)
            found[version] = quorum[nearest]
    return found


def check_ended_well(job: Job, lost: str) -> None:
    others = [name for name in job.processes if name != lost]
    codes = job.wait(SECONDS, others)
    assert set(codes.values()) == {0}, job.outputs()
    assert "the job goes on without it" in job.output("coordinator"), job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("victim", ["worker 2", "worker 0"])
def test_backup_replicas_bear_the_death_of_one(make_job: Callable[..., Job], victim: str) -> None:
    job = make_job(2, 3, partition_bytes=256)
    job.start("policies.py", "sync:2", "v60", 0.02, 0.02, 0.02)
    job.wait_for_output("worker 1", '"batch": 15,')
    job.kill(victim)
    check_ended_well(job, victim)
    index = int(victim[-1])
    alive = tuple(sorted({0, 1, 2} - {index}))
    found = sets(job, means(2, 3))
    assert list(found) == list(range(1, 61)), "no version was skipped"
    last = max((version for version, each in found.items() if index in each), default=0)
    assert last < 60
    assert {each for version, each in found.items() if version > last} == {alive}
    for worker in alive:
        assert lines(job, worker)[-1]["after"] == 60
    assert re.search(rf"{victim} \(.*\) died", job.output("coordinator"))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("policy", ["sync:3:shrink", "bounded:2:shrink"])
def test_a_mean_of_all_is_over_those_that_are_left(
    make_job: Callable[..., Job], policy: str
) -> None:
    job = make_job(1, 3, partition_bytes=256)
    job.start("policies.py", policy, 60, 0.02, 0.02, 0.02)
    job.wait_for_output("worker 0", '"batch": 15,')
    job.kill("worker 1")
    check_ended_well(job, "worker 1")
    found = sets(job, means(3, 3) | means(2, 3))
    assert max(found) == 60
    shrunk = min(version for version, each in found.items() if each == (0, 2))
    assert shrunk >= 14
    # Never a mean over two memberships, and never back.
    assert {each for version, each in found.items() if version < shrunk} == {(0, 1, 2)}
    assert {each for version, each in found.items() if version >= shrunk} == {(0, 2)}


@pytest.mark.timeout(100)
def test_servers_and_others_outlive_a_worker_that_raises(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 3, partition_bytes=256)
    job.start("policies.py", "sync:2", "v60,v60,!5", 0.02, 0.02, 0.02)
    job.wait_for_output("worker 2", "ValueError: the loss is not a number")
    assert job.wait(SECONDS, ["worker 2"])["worker 2"] == 1, job.outputs()
    check_ended_well(job, "worker 2")
    cause = (
        r"worker 2 \(.*\) raised: ValueError: the loss is not a number.*; the job goes on without"
    )
    assert re.search(cause, job.output("coordinator")), job.outputs()
    for worker in (0, 1):
        assert lines(job, worker)[-1]["after"] == 60


@pytest.mark.timeout(100)
def test_when_fewer_remain_than_a_mean_takes_the_job_ends_and_says_so(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 3, partition_bytes=256)
    job.start("policies.py", "sync:2", "v100000", 0.02, 0.02, 0.02)
    job.wait_for_output("worker 0", '"batch": 5,')
    job.kill("worker 2")
    job.wait_for_output("coordinator", "the job goes on without it")
    seen = lines(job, 0)[-1]["batch"]
    job.wait_for_output("worker 0", f'"batch": {seen + 10},')
    job.kill("worker 1")
    codes = job.wait(SECONDS)
    assert codes["worker 0"] == codes["server 0"] == codes["coordinator"] == 1, job.outputs()
    for name in ("worker 0", "server 0", "coordinator"):
        assert re.search("worker 1 .*1 remain, and .*needs at least 2", job.output(name)), (
            job.outputs()
        )


@pytest.mark.timeout(100)
def test_who_stands_still_too_long_is_left_out_and_told_so_when_it_wakes(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 3, partition_bytes=256, heartbeat_timeout=3 * PATIENCE)
    job.start("policies.py", "async", "v900", 0.02, 0.02, 0.02)
    job.wait_for_output("worker 0", '"batch": 15,')
    job.kill("worker 2", signal.SIGSTOP)
    check_ended_well(job, "worker 2")
    assert re.search(r"worker 2 \(.*\) has been silent for", job.output("coordinator"))
    job.kill("worker 2", signal.SIGCONT)
    assert job.wait(SECONDS, ["worker 2"])["worker 2"] == 1
    text = job.output("worker 2")
    assert "The job goes on without this worker" in text, text
    assert lines(job, 0)[-1]["after"] >= 900


@pytest.mark.timeout(100)
def test_the_launcher_ends_with_0_if_the_job_bears_a_loss(no_leftovers: None) -> None:
    totals = ["--servers", "1", "--workers", "3", "--plan"]
    command = [sys.executable, "-m", "jaxrdma", "launch", *totals]
    script = [str(SCRIPTS / "policies.py"), "sync:2", "v300", "0.02", "0.02", "0.02"]
    with subprocess.Popen(
        [*command, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("worker 1") and '"batch": 15,' in line:
                break
        (victim,) = [
            each
            for each in marked_processes(os.environ[MARK])
            if each.environ().get("JAXRDMA_ROLE") == "worker"
            and each.environ()["JAXRDMA_INDEX"] == "2"
        ]
        os.kill(victim.pid, signal.SIGKILL)
        output += process.stdout.read()
        assert process.wait(SECONDS) == 0, output
    assert re.search(r"worker 2 \(.*\) died: .*; the job goes on without it", output), output
    assert '"after": 300,' in output
    assert output.count("model 0: 3 leaves, 6,088 bytes on 1 servers") == 1, output
