"""Faults to order over verbs, as tests/cluster/test_faults.py has them: who waits for what is said, and then the job
ends; or nothing comes of them."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.job import Job

DRILL = Path(__file__).parent / "drill.py"
# The 23rd write of a worker is the third of the five partitions that step 4 has.
FAULTS = {
    "worker 1: lost 23": (
        r"worker 1 \(\S+, pid \d+\) has waited \d+ s in step 4 of model 0, "
        r"longest for partition \d at server 0 \(completed\).*server 0 \(\S+, pid \d+\), .* "
        r"\(for \d+ s without partition \d of worker 1's gradient for step 4 of model 0\)"
    ),
    "server 0: uncredited 40": (
        r"worker \d \(\S+, pid \d+\) has waited \d+ s in step \d+ of model 0, "
        r"longest for partition \d at server 0 \(queued\)"
    ),
    "server 0: lost 40": (
        r"worker \d \(\S+, pid \d+\) has waited \d+ s in step (?P<step>\d+) of model 0, "
        r"longest for partition \d at server 0 \(completed\).*"
        r"server 0 has answered step (?P=step) of model 0 to worker \d: the answer to worker \d is lost, or on its way"
    ),
}


@pytest.fixture
def make_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Over verbs, whatever TEST_TRANSPORT is: over tcp, a completion that is swallowed keeps a step from its end."""
    return functools.partial(make_job, transport="verbs")


def start(job: Job, *arguments: int | str) -> None:
    """One server, and all workers in one process: what drill.py is given are its `arguments`."""
    job.start_coordinator()
    job.start_server(0)
    job.start_worker(0, DRILL, *arguments, name="workers")


def run_to_failure(job: Job) -> list[str]:
    """The processes, all of which have ended."""
    start(job)
    codes = job.wait(120)
    assert (codes["coordinator"], codes["server 0"]) == (1, 1), job.outputs()
    return list(codes)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_deadline_ends_the_job(
    make_job: Callable[..., Job], fault: str
) -> None:
    job = make_job(1, 2, fault=fault, partition_bytes=4096, stall_warning=3, step_timeout=9)
    for name in run_to_failure(job):
        (text, *_) = re.findall(".*No step may take longer than .* 9 s", job.output(name))
        assert re.search(FAULTS[fault], text), text


@pytest.mark.timeout(150)
def test_what_comes_twice_ends_the_job_and_names_whose_it_is(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 2, fault="server 0: duplicated 9", partition_bytes=4096)
    for name in run_to_failure(job):
        told = r"worker \d \(\S+\) broke the protocol towards server 0: .*slot"
        assert re.search(told, job.output(name)), job.output(name)


@pytest.mark.timeout(150)
def test_what_is_late_or_overtaken_or_not_told_changes_no_number_and_keeps_nobody(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 4, fault="server 0: delayed 110 1500", partition_bytes=4096, stall_warning=60)
    start(job, 12, "1:delayed 23 1500", "2:reordered 23", "3:swallowed 23")
    job.succeed(120)
    for index in range(4):
        pattern = rf"worker {index}: left after 12 steps, the longest of (\S+) s, .*closed in (\S+) s; (.*)"
        found = re.search(pattern, job.output("workers"))
        assert found is not None, job.outputs()
        assert found[3].startswith("verbs, ")
        assert found[3].endswith("with a fault to order, which has come") == (index > 0)
        assert float(found[1]) >= 1.5  # the means wait for what is late
        # The fabric's limit is 2 s, and this is an emulated processor.
        assert float(found[2]) < 6
