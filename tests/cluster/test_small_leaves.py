"""Small leaves travel as packs: they train, and are saved, as if each travelled alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrdma.plan import assign_partitions, describe_leaves
from tests.cluster.job import Job
from tests.cluster.scripts import small

WORKERS, STEPS = 2, 5
PARTITION_BYTES = 4096  # of which leaves of up to 64 elements are packed


def by_numpy(steps: int) -> dict[str, np.ndarray]:
    """Parameters after steps of plain descent, in float64, rounded to a leaf's type as often as a step rounds it."""
    params = small.parameters()
    values = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    for step in range(steps):
        for place, (name, leaf) in enumerate(sorted(params.items())):
            places = np.arange(leaf.size) * 7 + place * 5 + step * 11
            each = [(places + worker * 3) % 31 / 8.0 for worker in range(WORKERS)]
            mean = (sum(each) / WORKERS).astype(leaf.dtype).astype(np.float64).reshape(leaf.shape)
            new = values[name] - small.RATE * mean
            values[name] = new.astype(leaf.dtype).astype(np.float64)
    return values


def by_optax(way: str, steps: int) -> dict[str, np.ndarray]:
    """Parameters after steps of one process."""
    update = small.UPDATES[way]()
    apply = small.optax_step(update)
    params: Any = small.parameters()
    state = update.init(params)
    for step in range(steps):
        params, state = apply(params, state, small.mean(params, WORKERS, step))
    return {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}


def check(out: Path, way: str, expected: dict[str, np.ndarray]) -> None:
    """All workers must have these."""
    for worker in range(WORKERS):
        with np.load(f"{out}-{way}-{worker}.npz") as found:
            assert set(found) == set(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{way}, {name}")


def test_most_leaves_of_the_model_are_packed() -> None:
    leaves, _, _ = describe_leaves(small.parameters())
    for servers in (1, 3):
        plan = assign_partitions(leaves, servers, PARTITION_BYTES)
        packed = [leaf for pack in plan.packs for leaf in pack]
        assert len(packed) > small.LEAVES / 2
        assert {leaves[leaf].dtype for leaf in packed} == {"float32", "bfloat16", "float16"}
        assert any(part.begin for part in plan.partitions), "no leaf is cut"
        assert len(plan.packs) > 2 * servers


@pytest.mark.parametrize("servers", [1, 3])
def test_packed_leaves_train_to_the_numbers_of_numpy_and_the_bits_of_optax(
    make_job: Callable[..., Job], tmp_path: Path, servers: int
) -> None:
    out = tmp_path / "parameters"
    ways = ",".join(small.WAYS)
    job = make_job(servers, WORKERS, ordered=1, partition_bytes=PARTITION_BYTES)
    job.start("small.py", out, ways, STEPS).succeed(110)
    expected = by_numpy(STEPS)
    for way in ("sgd", "halves", "average"):
        check(out, way, expected)
    for way in ("masked", "norms"):
        check(out, way, by_optax(way, STEPS))


@pytest.mark.timeout(110)
def test_a_checkpoint_of_packed_leaves_is_read_by_any_number_of_servers(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    out = tmp_path / "parameters"
    settings: dict[str, Any] = {"ordered": 1, "checkpoint": tmp_path / "checkpoints"}
    # With other partitions too, so that other leaves are packed, and at last nearly none.
    for servers, partition_bytes, until in ((2, 4096, 3), (3, 1 << 20, 5), (1, 512, 8)):
        job = make_job(servers, WORKERS, partition_bytes=partition_bytes, **settings)
        job.start("small.py", out, "masked", until).succeed(60)
        check(out, "masked", by_optax("masked", until))
        begins = {3: 0, 5: 3, 8: 5}[until]
        assert f"masked begins at step {begins}\n" in job.output("worker 1")
