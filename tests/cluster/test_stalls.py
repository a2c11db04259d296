"""A step that takes long is explained to who waits in it, with the line at which the late one is; then the job ends."""

import re
from collections.abc import Callable

import pytest

from tests.cluster.job import PATIENCE, Job


@pytest.mark.timeout(100)
def test_a_sleeper_is_named_with_its_line_and_the_deadline_ends_the_job(
    make_job: Callable[..., Job],
) -> None:
    warning, deadline = 2 * PATIENCE, 8 * PATIENCE
    job = make_job(2, 2, stall_warning=warning, step_timeout=deadline)
    job.start("steps.py", 8, "1:5:sleep")
    # As the line is told when nothing has changed for two heartbeats, the first warning may lack it.
    where = (
        r"worker 1 \(.*, pid \d+\), computing for \d+ s \(steps\.py:\d+ in main\), last at step 5"
    )
    waits = r"worker 0 \(.*, pid \d+\) has waited \d+ s in step 5 of model 0, longest for partition \d at server \d"
    for name in ("worker 0", "coordinator"):
        job.wait_for_output(name, "has waited", 60)
    # The sleeper sleeps on: who waits is ended, and it is left to the launcher.
    codes = job.wait(40, ["coordinator", "server 0", "server 1", "worker 0"])
    assert set(codes.values()) == {1}, job.outputs()
    for name in codes:
        output = job.output(name)
        assert re.search(f"{waits}.*{where}", output), output
        assert f"No step may take longer than JAXRDMA_STEP_TIMEOUT, {deadline:g} s" in output
    assert "PeerFailed" in job.output("worker 0") or "JaxRuntimeError" in job.output("worker 0")
    assert "has waited" not in job.output("worker 1").partition("sleeping")[0]
    job.kill("worker 1")
    job.wait(10, ["worker 1"])


@pytest.mark.timeout(100)
def test_a_worker_that_compiles_for_long_is_said_to(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 2, stall_warning=2 * PATIENCE)
    job.start("compiling.py")
    job.wait_for_output("worker 0", "compiling for compiling.py", 60)
    for name in job.processes:  # however long it would take
        job.kill(name)
    job.wait(10)
