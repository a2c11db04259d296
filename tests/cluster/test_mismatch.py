"""Workers whose models differ: everybody is told which leaf, and both versions of it."""

from collections.abc import Callable

import pytest

from tests.cluster.blame import check_all_name
from tests.cluster.job import Job


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("what", "versions"),
    [
        (
            "shape",
            (
                r"worker 0 has params\['w'\] float32\[4,3\]",
                r"worker 1 has params\['w'\] float32\[4,5\]",
            ),
        ),
        (
            "dtype",
            (
                r"worker 0 has params\['b'\] float32\[3\]",
                r"worker 1 has params\['b'\] bfloat16\[3\]",
            ),
        ),
        (
            "order",
            (
                r"params\['w'\] float32\[4,3\] for worker 0",
                r"params\['b'\] float32\[3\] for worker 1",
            ),
        ),
        (
            "more",
            (r"worker 0 has no params\['extra'\]", r"worker 1 has params\['extra'\] float32\[7\]"),
        ),
    ],
    ids=["shape", "dtype", "order", "one-more"],
)
def test_unlike_models_fail_every_process_and_name_the_leaf(
    make_job: Callable[..., Job], what: str, versions: tuple[str, ...]
) -> None:
    job = make_job(2, 2).start("unlike.py", what)
    job.wait_for_output("coordinator", "the job failed")
    check_all_name(job, versions, 10, list(job.processes))
    for worker in ("worker 0", "worker 1"):
        assert "init went well" not in job.output(worker)
        assert "MismatchError" in job.output(worker)
