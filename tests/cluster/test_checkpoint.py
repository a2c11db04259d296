"""A job that is started again goes on from its last checkpoint, with the bits of a run that was never interrupted."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.cluster.job import SCRIPTS, Job
from tests.cluster.scripts import model
from tests.cluster.test_numbers import results


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints of the first model."""
    manifests = (folder / "model-0").glob("*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)


@pytest.mark.timeout(110)
def test_a_job_goes_on_after_a_kill_in_a_save_and_with_other_numbers_of_servers(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    out, folder = tmp_path / "parameters", tmp_path / "checkpoints"
    prefix = Path(f"{out}-adam-")
    settings: dict[str, Any] = {"ordered": 1, "partition_bytes": 256, "checkpoint": folder}

    # Server 1 is killed while it writes its share of a second checkpoint, of which server 0's may be there.
    job = make_job(2, 1, checkpoint_steps=3, **settings)
    job.start_coordinator()
    job.start_server(0)
    dying = {"PYTHONPATH": str(SCRIPTS / "dying"), "DIE_IN_FSYNC_OF": "/.server-001"}
    job.start_server(1, **dying)
    job.start_worker(0, "resume.py", out, "adam", 1000, 0.1)
    assert job.wait(60)["server 1"] == -signal.SIGKILL, job.outputs()
    assert re.search("server 1 .* died", job.output("worker 0")), job.outputs()
    assert steps_in(folder) == [3]
    assert list((folder / "model-0").glob("*/.server-001*")), "it was not in the middle of a save"

    # Started again, with three servers and two workers, it goes on from step 3, and ends in good order.
    job = make_job(3, 2, checkpoint_steps=5, checkpoint_keep=2, **settings)
    job.start("resume.py", out, "adam", 8, 0.1).succeed(60)
    for name in ("coordinator", "worker 0"):
        assert "model 0 goes on from the checkpoint of step 3" in job.output(name)
    assert "adam begins at step 3\n" in job.output("worker 1")
    for a, b in zip(results(prefix, 0), results(prefix, 1), strict=True):
        np.testing.assert_array_equal(a, b)
    assert steps_in(folder) == [5, 8]
    assert len(list((folder / "model-0").iterdir())) == 2, "something is left of the killed save"

    # And on one server, from what three have saved at their end.
    job = make_job(1, 1, **settings)
    job.start("resume.py", out, "adam", 12).succeed(60)
    assert "adam begins at step 8\n" in job.output("worker 0")
    # The bits of an uninterrupted run, in one process, with optax alone.
    expected = [np.asarray(x) for x in jax.tree.leaves(model.reference("adam", 1, 12))]
    for a, b in zip(results(prefix, 0), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert steps_in(folder) == [5, 8, 12]
