"""Faults to order over verbs: who waits for what is said, and then the job ends. tests/cluster/ has them all."""

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
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_deadline_ends_the_job(
    make_job: Callable[..., Job], fault: str
) -> None:
    job = make_job(1, 2, fault=fault, partition_bytes=4096, stall_warning=3, step_timeout=9)
    job.start_coordinator()
    job.start_server(0)
    job.start_worker(0, DRILL, name="workers")
    codes = job.wait(120)
    assert (codes["coordinator"], codes["server 0"]) == (1, 1), job.outputs()
    for name in codes:
        (text, *_) = re.findall(".*No step may take longer than .* 9 s", job.output(name))
        assert re.search(FAULTS[fault], text), text
