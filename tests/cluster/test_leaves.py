"""Every kind of leaf trains to the numbers of float64 NumPy, or is refused by name. The comparison is in the script."""

from collections.abc import Callable

import pytest

from tests.cluster.job import Job

BIG_BYTES = (
    24 << 20
)  # many partitions and more than the landing slots; the full form trains 512 MiB


def train_every_leaf(job: Job, big_bytes: int, x64: bool, limit_s: float) -> None:
    """Train on 2 servers + 2 workers, the largest leaf having `big_bytes` bytes, within `limit_s` seconds."""
    job.start_coordinator()
    for index in range(2):
        job.start_server(index)
        job.start_worker(index, "leaves.py", big_bytes, JAX_ENABLE_X64=str(int(x64)))
    job.succeed(limit_s)
    for worker in range(2):
        output = job.output(f"worker {worker}")
        assert output.rstrip().endswith("done"), output
        assert ("ok: float64" in output) == x64


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_every_leaf_trains_or_is_refused(make_job: Callable[..., Job], x64: bool) -> None:
    train_every_leaf(make_job(2, 2), BIG_BYTES, x64, 110)
