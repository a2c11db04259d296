"""`ps_step` under the transformations of JAX: the same numbers, or a clear error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.job import Job
from tests.cluster.scripts import transforms

STEPS = 100
WAYS = ("eager", "jit", "scan", "while", "donate", "custom_vjp", "checkpoint", "halves")


def reference(workers: int) -> dict[str, Any]:
    """SGD with momentum on the mean gradient, in float64 NumPy."""
    params = {name: np.asarray(value, np.float64) for name, value in transforms.start().items()}
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(STEPS):
        wanted = [(worker + 1) * 0.25 + 0.125 * (step % 8) for worker in range(workers)]
        for name in params:
            mean = sum(params[name] - w for w in wanted) / workers
            momentum[name] = 0.5 * momentum[name] + mean
            params[name] = params[name] - 0.125 * momentum[name]
    return params


def check(out: Path, workers: int) -> None:
    expected = reference(workers)
    for worker in range(workers):
        with np.load(f"{out}-{worker}.npz") as got:
            assert set(got.files) == {f"{way}.{leaf}" for way in WAYS for leaf in expected}
            for way in WAYS:
                for leaf, value in expected.items():
                    np.testing.assert_array_equal(
                        got[f"{way}.{leaf}"], got[f"jit.{leaf}"], err_msg=way
                    )
                    np.testing.assert_allclose(got[f"{way}.{leaf}"], value, rtol=2e-6, err_msg=way)


def test_every_transformation_gives_the_same_numbers(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 2, partition_bytes=128).start("transforms.py", tmp_path / "out", STEPS)
    job.succeed(100)
    check(tmp_path / "out", 2)


def test_programs_run_from_the_persistent_cache_of_another_process(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "JAX_EXPLAIN_CACHE_MISSES": "0",
        "JAX_LOG_COMPILES": "0",
    }
    for attempt in range(2):
        job = make_job(1, 1)
        job.start_coordinator()
        job.start_server(0)
        job.start_worker(0, "transforms.py", tmp_path / f"out{attempt}", STEPS, **cache)
        job.succeed(100)
        check(tmp_path / f"out{attempt}", 1)
        entries = {
            path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith("-cache")
        }
        if attempt == 0:
            first = entries
        else:
            # No program had to be compiled again.
            assert entries == first
            assert any("step" in name for name in entries), entries
