"""Two launchers share one job, as on two machines."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from tests.cluster.job import SCRIPTS, Job, free_address
from tests.cluster.scripts import model
from tests.cluster.test_numbers import results

STEPS = 30
SHARES = ("coordinator,server:0,worker:0", "server:1,worker:1-2")


def start_launcher(job: Job, share: str, address: str, *command: object) -> str:
    """Its name among the processes of `job`."""
    job.spawn(
        share,
        [
            *("-m", "jaxrdma", "launch", "--servers", "2", "--workers", "3"),
            *("--ordered", "--partition-bytes", "256", "--coordinator", address, "--here", share),
            *map(str, command),
        ],
        {**os.environ, "JAXRDMA_CONNECT_TIMEOUT": "60"},
    )
    return share


@pytest.mark.timeout(110)
@pytest.mark.parametrize("order", [SHARES, SHARES[::-1]], ids=["first", "last"])
def test_launchers_come_in_any_order_and_train_one_model(
    make_job: Callable[..., Job], tmp_path: Path, order: tuple[str, str]
) -> None:
    address, out, job = free_address(), tmp_path / "parameters", make_job(2, 3)
    command = (SCRIPTS / "train.py", out, "momentum", STEPS, "donate")
    early = start_launcher(job, order[0], address, *command)
    job.wait_for_output(early, "waiting for ")
    start_launcher(job, order[1], address, *command)
    job.succeed(90)
    expected = [np.asarray(x) for x in jax.tree.leaves(model.reference("momentum", 3, STEPS))]
    for worker in range(3):
        for a, b in zip(results(Path(f"{out}-momentum-"), worker), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.timeout(110)
def test_a_death_on_one_machine_is_named_on_all(make_job: Callable[..., Job]) -> None:
    address, job = free_address(), make_job(2, 3)
    first, second = (
        start_launcher(job, share, address, SCRIPTS / "steps.py", 8) for share in SHARES
    )
    job.wait_for_output(second, "worker 2    | step 3")
    victim = next(
        process
        for process in psutil.Process(job.pid(second)).children()
        if process.environ().get("JAXRDMA_ROLE") == "worker"
        and process.environ()["JAXRDMA_INDEX"] == "2"
        and "steps.py" in " ".join(process.cmdline())
    )
    victim.kill()
    codes = job.wait(15)
    assert codes == {first: 1, second: 128 + signal.SIGKILL}, job.outputs()
    for name in (first, second):
        assert re.search(r"worker 2 \(.*died", job.output(name).splitlines()[-1]), job.outputs()
    for survivor in ("server 0", "server 1", "worker 0", "worker 1"):
        said = rf"^{survivor}    \| .*worker 2 \(.*died"
        assert re.search(said, job.outputs(), re.MULTILINE), job.outputs()
