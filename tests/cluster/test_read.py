"""`Session.read`: the servers' parameters as they are, over verbs; over tcp an error that stops nothing.

The comparisons are in the script.
"""

import re
from collections.abc import Callable

import pytest

from tests.cluster.job import TRANSPORT, Job

STEPS = 10
NOT_RUN = "not run: needs an RDMA device; with TEST_TRANSPORT=verbs in a guest"


def train(job: Job, limit_s: float) -> None:
    """Two workers, of which one reads; both must train to the same."""
    job.start_coordinator()
    for index in range(job.servers):
        job.start_server(index)
    for index in range(job.workers):
        job.start_worker(index, "read.py", STEPS, JAX_ENABLE_X64="1")
    job.succeed(limit_s)
    trained = re.findall(r"trained to (\w+)", job.outputs())
    assert len(trained) == job.workers and len(set(trained)) == 1, job.outputs()


def test_reading_is_refused_over_tcp_and_training_goes_on(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2, ordered=1, partition_bytes=256, transport="tcp")
    train(job, 100)
    assert "reading needs transport verbs, and this job has tcp" in job.output("worker 0")


@pytest.mark.skipif(TRANSPORT != "verbs", reason=NOT_RUN)
def test_what_is_read_is_the_version_that_its_step_names(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2, ordered=1, partition_bytes=256)
    train(job, 100)
    assert re.search(r"read \d+ times beside \d+ steps", job.output("worker 0")), job.outputs()
    assert re.search(r"worker 0 locks .* for what is read of model 0", job.output("worker 0"))
