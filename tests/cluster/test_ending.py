"""Ends of a worker's program: what was pushed counts, and nothing hangs, however the program ends."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.blame import PROGRESS, check_all_name
from tests.cluster.job import SCRIPTS, TRANSPORT, Job

STEPS = 20
END_S = 5


@pytest.mark.timeout(100)
@pytest.mark.parametrize("way", ["jit", "scan", "eager"])
def test_a_last_step_that_nobody_awaits_counts(make_job: Callable[..., Job], way: str) -> None:
    job = make_job(2, 2).start("ending.py", STEPS, way)
    job.succeed(60)
    check_counts(job)
    check_says_nothing(job)


@pytest.mark.timeout(100)
def test_a_step_is_made_though_its_program_uses_no_result(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2).start("unused.py")
    job.succeed(90)
    for worker in ("worker 0", "worker 1"):
        made = re.search(r"^made (\d+), came back (\d+)$", job.output(worker), re.MULTILINE)
        assert made and made[1] == made[2], job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("way", ["late", "late-inside"])
def test_who_closes_has_made_its_last_step_though_the_others_are_late(
    make_job: Callable[..., Job], tmp_path: Path, way: str
) -> None:
    job = make_job(2, 2).start("ending.py", STEPS, way, tmp_path / "closes")
    job.succeed(60)
    check_counts(job)
    check_says_nothing(job)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("launched", [False, True], ids=["by-hand", "launched"])
def test_after_the_last_step_all_end_with_0_within_5_seconds(
    make_job: Callable[..., Job], launched: bool
) -> None:
    job, deeds = make_job(2, 2), [f"{worker}:{STEPS}:leave" for worker in range(2)]
    if launched:
        totals = ["--servers", "2", "--workers", "2", "--transport", TRANSPORT]
        command = ["-m", "jaxrdma", "launch", *totals, str(SCRIPTS / "steps.py"), "8", *deeds]
        job.spawn("launcher", command, dict(os.environ))
        last = [("launcher", f"worker {worker}    | step {STEPS - 1}\n") for worker in range(2)]
    else:
        job.start("steps.py", 8, *deeds)
        last = [(f"worker {worker}", f"step {STEPS - 1}\n") for worker in range(2)]
    for name, text in last:
        job.wait_for_output(name, text)
    # What `succeed` allows is multiplied by the patience; no process may be left, says the fixture.
    job.succeed(END_S)


@pytest.mark.timeout(100)
def test_a_session_can_be_closed_twice_and_refuses_steps_afterwards(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 2).start("ending.py", STEPS, "twice")
    job.succeed(60)
    check_counts(job)
    for worker in ("worker 0", "worker 1"):
        assert re.search("^refused: .*closed", job.output(worker), re.MULTILINE), job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("way", "code"), [("dead", 1), ("after", 1), ("dead-with", 1), ("dead-exit", 0)]
)
def test_a_program_ends_although_its_last_step_can_never_be_answered(
    make_job: Callable[..., Job], way: str, code: int
) -> None:
    job = make_job(2, 2).start("ending.py", STEPS, way)
    check_worker_1_died(job)
    assert job.wait(15, ["worker 0"])["worker 0"] == code, job.outputs()
    said = job.output("worker 0").partition("at the end")[2]
    if way == "dead-with":
        assert re.search("^jaxrdma.*PeerFailedError: .*worker 1 .*died", said, re.MULTILINE), said
    else:
        # The program itself was over, or ends as it likes: the loss is a line, not an exception.
        assert re.search("^jaxrdma: .*worker 1 .*died", said, re.MULTILINE), job.outputs()
        assert "Traceback" not in job.output("worker 0"), job.outputs()


@pytest.mark.timeout(100)
def test_a_program_that_looks_at_no_step_hears_that_its_job_has_failed(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 2).start("ending.py", STEPS, "blind")
    check_worker_1_died(job)
    assert job.wait(40, ["worker 0"])["worker 0"] == 1, job.outputs()
    said = job.output("worker 0").partition("about to end")[2].partition("at the end")[0]
    assert re.search(
        "^jaxrdma: .*no step can be made any more, for 10 s already: worker 1 .*died",
        said,
        re.MULTILINE,
    ), said


def check_worker_1_died(job: Job) -> None:
    job.wait_for_output("worker 0", "about to end")
    assert job.wait(15, ["worker 1"])["worker 1"] == -signal.SIGKILL
    check_all_name(job, "worker 1 .*died", 15, ["server 0", "server 1", "coordinator"])


def check_counts(job: Job) -> None:
    """Every server's last line counts every push of both workers."""
    for server in ("server 0", "server 1"):
        last = job.output(server).splitlines()[-1]
        assert (
            f"{STEPS} steps; gradients accepted from worker 0: {STEPS}, worker 1: {STEPS}; 0 dropped"
            in last
        ), last


def check_says_nothing(job: Job) -> None:
    """Workers print nothing but what they wait for at the start."""
    for worker in ("worker 0", "worker 1"):
        strange = [line for line in job.output(worker).splitlines() if not re.match(PROGRESS, line)]
        assert not strange, strange
