"""A process dies, falls silent, raises or leaves: everybody else says who it was, soon, and nothing is left."""

import random
import signal
from collections.abc import Callable

import pytest

from tests.cluster.blame import check_all_name, error_of
from tests.cluster.job import PATIENCE, Job

SECONDS = 15  # from the death of one process to the end of all
VICTIMS = {"worker": "worker 1", "server": "server 0", "coordinator": "coordinator"}


def kill_at_random_step(job: Job, victim: str, chance: random.Random) -> float:
    """Kills one process of a training job with SIGKILL; the seconds until all others had ended as they should."""
    job.start("steps.py", chance.choice((8, 256)))
    # The coordinator and servers print no steps; the workers go along with them.
    worker = victim if victim.startswith("worker") else "worker 0"
    job.wait_for_output(worker, f"step {chance.randrange(1, 200)}\n")
    job.kill(victim)
    others = [name for name in job.processes if name != victim]
    cause = f"the {victim} at .* is lost" if victim == "coordinator" else f"{victim} .*died"
    seconds = check_all_name(job, cause, SECONDS, others)
    assert job.wait(1, [victim])[victim] == -signal.SIGKILL
    return seconds


@pytest.mark.timeout(110)
@pytest.mark.parametrize("role", VICTIMS)
def test_the_death_of_a_process_is_named_by_all_others(
    make_job: Callable[..., Job], role: str
) -> None:
    kill_at_random_step(make_job(2, 2), VICTIMS[role], random.Random())


@pytest.mark.timeout(110)
def test_a_worker_that_stands_still_is_called_silent(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 2, heartbeat_timeout=3 * PATIENCE).start("steps.py", 8)
    job.wait_for_output("worker 1", "step 3\n")
    job.kill("worker 1", signal.SIGSTOP)
    check_all_name(job, "worker 1 .*silent for", SECONDS, ["worker 0", "server 0", "coordinator"])
    # And once it may go on, it does not go on for ever.
    job.kill("worker 1", signal.SIGCONT)
    assert job.wait(SECONDS, ["worker 1"])["worker 1"] == 1
    assert error_of(job, "worker 1"), job.output("worker 1")


@pytest.mark.timeout(110)
def test_an_exception_of_one_worker_reaches_all(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 2).start("steps.py", 8, "1:5:raise")
    job.wait_for_output("worker 1", "step 4\n")
    cause = "worker 1 .*raised: ValueError: the loss is not a number"
    check_all_name(job, cause, SECONDS, ["worker 0", "server 0", "coordinator"])
    assert job.wait(1, ["worker 1"])["worker 1"] == 1
    last = job.output("worker 1").strip().splitlines()[-1]
    assert last == "ValueError: the loss is not a number", job.output("worker 1")


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("exit", "worker 1 left the job, but 1 of 2 workers wait"),
        ("exit-inside", "worker 1 .*raised: SystemExit: 3"),
    ],
)
def test_an_early_exit_of_one_worker_is_an_error_of_the_others(
    make_job: Callable[..., Job], way: str, cause: str
) -> None:
    job = make_job(1, 2).start("steps.py", 8, f"1:5:{way}")
    job.wait_for_output("worker 1", "step 4\n")
    check_all_name(job, cause, SECONDS, ["worker 0", "server 0", "coordinator"])
    assert job.wait(SECONDS, ["worker 1"])["worker 1"] == 3
    assert "Traceback" not in job.output("worker 1")


@pytest.mark.timeout(110)
def test_a_worker_that_leaves_early_strands_nobody_for_ever(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 2).start("steps.py", 8, "1:5:leave")
    job.wait_for_output("worker 1", "left")
    check_all_name(job, "worker 1 .*left", SECONDS, ["worker 0", "server 0", "coordinator"])
    assert job.wait(1, ["worker 1"])["worker 1"] == 0
