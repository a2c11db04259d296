"""The parameters of a cluster are those of one process: the promise that everything else rests on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.cluster.job import Job
from tests.cluster.scripts import model

STEPS = 100


def results(prefix: Path, worker: int) -> list[Any]:
    with np.load(f"{prefix}{worker}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def distance(a: list[Any], b: list[Any]) -> float:
    """Largest relative distance of two leaves, as vectors."""
    pairs = zip(a, b, strict=True)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


@pytest.mark.parametrize(("servers", "workers"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "arrival"])
def test_parameters_equal_a_single_process_run(
    make_job: Callable[..., Job], tmp_path: Path, servers: int, workers: int, ordered: bool
) -> None:
    out = tmp_path / "parameters"
    job = make_job(servers, workers, ordered=int(ordered), partition_bytes=256)
    job.start("train.py", out, "momentum,adam", STEPS, "donate").succeed(100)
    for optimiser in ("momentum", "adam"):
        expected = [
            np.asarray(x) for x in jax.tree.leaves(model.reference(optimiser, workers, STEPS))
        ]
        joined = [
            np.asarray(x)
            for x in jax.tree.leaves(model.joined_reference(optimiser, workers, STEPS))
        ]
        for worker in range(workers):
            got = results(Path(f"{out}-{optimiser}-"), worker)
            if ordered:
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(a, b)
            assert distance(got, expected) <= 1e-6
            assert distance(got, joined) <= 1e-6


@pytest.mark.parametrize("mode", ["average", "halves"])
def test_other_ways_to_step_give_the_same_bits(
    make_job: Callable[..., Job], tmp_path: Path, mode: str
) -> None:
    out = tmp_path / "parameters"
    job = make_job(2, 3, ordered=1, partition_bytes=256)
    job.start("train.py", out, "momentum", STEPS, mode).succeed(100)
    expected = [np.asarray(x) for x in jax.tree.leaves(model.reference("momentum", 3, STEPS))]
    for worker in range(3):
        for a, b in zip(results(Path(f"{out}-momentum-"), worker), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("policy", "workers"), [("async", 1), ("bounded", 1), ("held", 3)], ids=str
)
def test_gradients_that_are_held_give_the_same_bits(
    make_job: Callable[..., Job], tmp_path: Path, policy: str, workers: int
) -> None:
    out = tmp_path / "parameters"
    job = make_job(2, workers, ordered=1, partition_bytes=256)
    job.start("train.py", out, "momentum,adam", STEPS, "jit", policy).succeed(100)
    for optimiser in ("momentum", "adam"):
        reference = model.reference(optimiser, workers, STEPS)
        expected = [np.asarray(x) for x in jax.tree.leaves(reference)]
        for worker in range(workers):
            got = results(Path(f"{out}-{optimiser}-"), worker)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)
