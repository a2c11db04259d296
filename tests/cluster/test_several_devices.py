"""Several devices in each worker's process, which are one worker: the same numbers, and no hang."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.job import Job
from tests.cluster.scripts import several_devices

DEVICES = 8
FLAGS = f"--xla_force_host_platform_device_count={DEVICES}"


def reference(workers: int, steps: int) -> dict[str, Any]:
    """SGD on the mean gradient of all batches, in float64 NumPy."""
    w, b = np.zeros((32, 4)), np.zeros(4)
    batches: list[Any] = [several_devices.batch(worker, DEVICES) for worker in range(workers)]
    for _ in range(steps):
        mean_w, mean_b = np.zeros_like(w), np.zeros_like(b)
        for inputs, targets in batches:
            error = 2 * (inputs.astype(np.float64) @ w + b - targets) / targets.size
            mean_w += inputs.T.astype(np.float64) @ error / workers
            mean_b += error.sum(0) / workers
        w, b = w - several_devices.RATE * mean_w, b - several_devices.RATE * mean_b
    return {"w": w, "b": b}


def train(job: Job, out: Path, steps: int, way: str, cores: Sequence[int] = ()) -> None:
    """A whole job; on `cores`, if any are given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)  # of this thread, and of what it starts
    try:
        job.start_coordinator()
        for server in range(job.servers):
            job.start_server(server)
        for worker in range(job.workers):
            job.start_worker(worker, "several_devices.py", out, steps, way, XLA_FLAGS=FLAGS)
    finally:
        os.sched_setaffinity(0, before)
    job.succeed(100)
    expected = reference(job.workers, steps)
    for worker in range(job.workers):
        with np.load(f"{out}-{worker}.npz") as got:
            for name, value in expected.items():
                np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("way", ["mesh", "shard_map", "donate", "halves", "average"])
def test_a_mesh_of_devices_is_one_worker(
    make_job: Callable[..., Job], tmp_path: Path, way: str
) -> None:
    train(make_job(1, 2), tmp_path / "out", 100, way)


@pytest.mark.timeout(115)
@pytest.mark.parametrize("cores", [1, 2])
def test_a_thousand_steps_of_a_mesh(
    make_job: Callable[..., Job], tmp_path: Path, cores: int
) -> None:
    some = sorted(os.sched_getaffinity(0))[:cores]
    train(make_job(1, 2), tmp_path / "out", 1000, "mesh", some)


def test_every_device_trains_a_model_of_its_own_at_the_same_time(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """More exchanges under way than threads that make progress."""
    train(make_job(1, 2), tmp_path / "out", 100, "models")
