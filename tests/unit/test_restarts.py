"""Which failed jobs are started again, how often, and what is said of it."""

import re
from pathlib import Path

import pytest

from jaxrdma import control
from jaxrdma.cli import launch
from jaxrdma.control import raised
from jaxrdma.errors import (
    ConfigError,
    ConnectError,
    MismatchError,
    PeerFailedError,
    PlanError,
    StepError,
    TransportError,
    UpdateError,
)
from jaxrdma.restarts import Ending, Loss, judge, judge_worker

ROOT = Path(__file__).parents[2]

# Of those that `JobFailed` names, and what a member gives itself.
HEALED = (
    *("died", "silent", "connection", "coordinator_lost", "raised", "protocol"),
    "terminated",
)
LASTING = (
    *("interrupted", "config", "mismatch", "transport", "checkpoint", "left", "timeout"),
    *("refused", "stuck"),
)


def lost(kind: str = "died") -> Ending:
    return Ending(137, "worker 1 failed first: killed by SIGKILL", kind)


@pytest.mark.parametrize("kind", HEALED)
def test_a_lost_process_starts_the_job_again(kind):
    assert judge(lost(kind), 0, 2) == (
        True,
        "worker 1 failed first: killed by SIGKILL; starting again: attempt 2 of 3",
    )


@pytest.mark.parametrize("kind", LASTING)
def test_what_no_restart_heals_ends_the_job_and_says_why(kind):
    again, text = judge(lost(kind), 0, 2)
    assert not again
    assert re.fullmatch(
        "worker 1 failed first: killed by SIGKILL; not started again, for .{15,}", text
    )


def test_every_kind_of_failure_was_decided_on():
    assert control.JobFailed.__doc__ is not None
    kinds = re.search(r"Kinds: (.*?), and whatever kind", control.JobFailed.__doc__, re.DOTALL)
    assert kinds is not None
    assert set(re.split(r",\s+", kinds[1])) <= {*HEALED, *LASTING}


def test_a_sentence_goes_on_after_its_end():
    assert judge(Ending(1, "Look there.", "died"), 0, 1)[1] == (
        "Look there; starting again: attempt 2 of 2"
    )


def test_attempts_are_counted_to_the_last():
    assert [judge(lost(), attempt, 2)[0] for attempt in range(4)] == [True, True, False, False]
    assert judge(lost(), 2, 2)[1].endswith("; attempt 3 of 3 was the last")


def test_without_restarts_nothing_is_said_of_them():
    assert judge(lost(), 0, 0) == (False, lost().text)


@pytest.mark.parametrize(
    ("waits", "restarts", "most"), [(True, None, 3), (False, None, 0), (False, 2, 2), (True, 0, 0)]
)
def test_a_worker_is_started_again_as_often_as_is_asked_for_or_needed(waits, restarts, most):
    judged = [judge_worker(Loss("died", waits), done, restarts) for done in range(5)]
    assert [again for again, _ in judged] == [done < most for done in range(5)]
    if most:
        assert judged[0][1] == f"starting it again, 1 of {most}"
    assert judged[most][1] == f"not started again, that was done {most} times of {most}"


@pytest.mark.parametrize("kind", LASTING)
def test_a_worker_that_would_fail_again_is_not_started_again(kind):
    again, text = judge_worker(Loss(kind, waits=True), 0, 5)
    assert not again
    assert re.fullmatch("not started again, for .{15,}", text)


def test_a_job_that_ended_well_is_over():
    assert judge(Ending(0), 0, 3) == (False, "")


def test_a_launcher_that_is_told_to_end_says_only_that():
    assert judge(Ending(130, "ended by SIGINT"), 0, 3) == (False, "ended by SIGINT")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "raised"),
        (SystemExit(3), "raised"),
        (StepError("x"), "raised"),
        (ConnectError("x"), "raised"),
        (TransportError("x"), "raised"),
        (PeerFailedError("x"), "raised"),
        (ConfigError("x"), "config"),
        (MismatchError("x"), "config"),
        (PlanError("x"), "config"),
        (UpdateError("x"), "config"),
    ],
)
def test_a_member_says_whether_its_error_would_come_again(error, kind):
    assert raised(error).kind == kind
    assert raised(error).text.startswith(type(error).__name__)


def test_the_help_names_the_promise():
    assert "--restarts 3 train.py" in launch.EPILOG
    assert "JAXRDMA_ATTEMPT" in launch.EPILOG
