"""What an observer is told of a job, and how it looks."""

import io
import json

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from jaxrdma.cli.status import as_json, render
from jaxrdma.control import (
    IN_STEP,
    Bye,
    Failed,
    GradientName,
    Heartbeat,
    JobStatus,
    Landed,
    Left,
    Refused,
    Wait,
)
from jaxrdma.pace import Pace
from jaxrdma.policy import SyncReplicas, to_wire
from tests.unit.test_coordinator import Job, hello, proposal
from tests.unit.test_stalls import started


def status(observed: Job, **changes) -> JobStatus | Refused:
    """What a new stream that only looks is answered; nothing may come of it."""
    members = dict(observed.membership._members)
    asked = hello("observer", 0, settings={}, **changes)
    ((to, answer),) = observed.membership.handle(999, asked, observed.now)
    assert to == 999
    assert observed.membership.lost(999, "", observed.now) == []
    assert observed.membership._members == members
    return answer


def of(found: JobStatus, name: str):
    (process,) = [p for p in found.processes if p.name == name]
    return process


def test_a_job_that_starts_names_who_is_missing():
    job = Job(2, 1)
    job.join("w1")
    job.now += 5
    found = status(job)
    assert (found.job, found.attempt, found.phase, found.seconds) == ("job", 0, "starting", 5)
    assert "have 1 of 2 workers and 0 of 1 server, waiting for worker 0 and server 0" in found.text
    assert (found.transport, found.why, found.models, found.followers) == ("", "", [], 0)
    (worker,) = found.processes
    assert (worker.name, worker.host, worker.pid, worker.incarnation) == (
        "worker 1",
        "host-a",
        101,
        7,
    )
    assert (worker.step, worker.accepted, worker.seconds, worker.silent) == (-1, -1, 5, 5)


def test_a_job_that_trains_tells_what_everybody_does_and_how_fast():
    job = started(3, SyncReplicas(2, on_loss="fail"))
    for server in ("s0", "s1"):
        for worker in (0, 2):
            job.say(server, Landed(0, GradientName(worker, 7, 0), 0))
        job.say(server, Landed(0, GradientName(1, 7, 0), 0))
    job.say("w0", Heartbeat(4, "computing", sent=1000, received=500))
    job.now += 2
    job.say("w0", Heartbeat(8, IN_STEP, sent=5000, received=1500))
    job.now += 3
    wait = Wait(0, 8, 1, 5, "posted")
    job.say("w0", Heartbeat(8, IN_STEP, wait, sent=5000, received=1500))
    job.now += 1
    found = status(job)
    assert (found.phase, found.text) == ("training", "")
    worker = of(found, "worker 0")
    assert (worker.step, worker.state, worker.wait) == (8, IN_STEP, wait)
    assert (worker.seconds, worker.silent, worker.step_seconds) == (4, 1, 0.5)
    assert (worker.sent, worker.received) == (0, 0)  # between the last two
    assert (worker.accepted, worker.dropped) == (1, 0)
    assert (of(found, "worker 1").accepted, of(found, "worker 1").dropped) == (0, 1)
    assert of(found, "server 0").accepted == -1
    (model,) = found.models
    assert (model.flow, model.state, model.leaves, model.parameters) == (0, "started", 1, 6)
    assert model.policy == SyncReplicas(2, 3, on_loss="fail").describe()
    assert msgspec.json.decode(json.dumps(as_json(found)), type=JobStatus) == found


def test_a_model_that_somebody_has_not_called_init_for_is_said():
    job = started()
    job.say("w0", proposal(1, policy=to_wire(SyncReplicas().complete(2))))
    found = status(job)
    assert found.models[1].state == "proposed"
    assert "model 1: 1 of 2 workers have called init, waiting for worker 1" in found.text


def test_a_stall_is_told_and_so_is_the_end():
    job = started()
    for _ in range(12):
        job.now += 1
        job.say("w0", Heartbeat(3, IN_STEP))
        job.say("w1", Heartbeat(2, "computing", None, "train.py:41 in load"))
    assert "lacks the gradients of worker 1" in status(job).text
    job.say("w0", Left(3), Bye())
    found = status(job)
    assert [p.name for p in found.processes] == ["server 0", "server 1", "worker 1"]
    job.say("w1", Failed("raised", "ValueError: no"))
    job.lose("w1")
    found = status(job)
    assert found.phase == "failed"
    assert "worker 1" in found.text
    assert "ValueError: no" in found.text


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"job": "x"}, "job"), ({"version": "0"}, "version")],
)
def test_a_stranger_is_told_nothing(changes, kind):
    answer = status(started(), **changes)
    assert isinstance(answer, Refused)
    assert answer.kind == kind


def test_a_pace_is_that_between_the_last_two():
    pace = Pace()
    pace.beat(Heartbeat(-1, ""), 0.0)
    pace.beat(Heartbeat(0, "", sent=10, received=100), 1.0)
    assert (pace.step_seconds, pace.sent, pace.received) == (0.0, 10, 100)
    pace.beat(Heartbeat(0, "", sent=10, received=100), 2.0)
    pace.beat(Heartbeat(4, "", sent=30, received=500), 3.0)
    assert (pace.step_seconds, pace.sent, pace.received) == (0.5, 20, 400)
    pace.beat(Heartbeat(4, "", sent=30, received=500), 8.0)
    assert (pace.step_seconds, pace.sent, pace.received) == (0.5, 0, 0)


def test_the_table_shows_it_all():
    job = started()
    job.say("w0", Heartbeat(4, "computing", None, "train.py:41 in load", 3_000_000, 1_500_000))
    job.now += 100
    job.say("w0", Heartbeat(4, "computing", None, "train.py:41 in load", 153_000_000, 1_500_000))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*render(status(job)), sep="\n")
    text = console.export_text()
    assert "job job: training for 1 min 40 s, transport tcp: asked for" in text
    (line,) = [line for line in text.splitlines() if "worker 0" in line]
    for word in (
        "host-a",
        "100",
        "computing",
        "train.py:41 in load",
        "1 min 40 s",
        " 4 ",
        "1.5",
        "0 s ago",
    ):
        assert word in line, line
    assert "model 0: started, sync_replicas(2 of 2, on_loss=fail), 6 parameters in 1 leaves" in text


def test_places_that_nobody_has_taken_are_not_there_yet():
    job = Job(2, 2, most_workers=4)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*render(status(job)), sep="\n")
    assert "not there yet: worker 2, worker 3" in console.export_text()


@pytest.mark.parametrize("counted", [False, True])
def test_a_narrow_terminal_gets_whole_words(counted):
    job = started()
    job.say("w0", Heartbeat(12345, "computing", None, "train.py:41 in load"))
    shown = status(job)
    if counted:
        processes = [structs.replace(p, accepted=123456, dropped=1234) for p in shown.processes]
        shown = structs.replace(shown, processes=processes)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*render(shown, 80), sep="\n")
    lines = console.export_text().splitlines()
    (line,) = [line for line in lines if "worker 0" in line]
    (heads,) = [line for line in lines if "process" in line]
    for word in ("12345", *(("123456", "1234") if counted else ())):
        assert f" {word} " in line, line
    for word in ("state", "at", "s/step", *(("accepted", "dropped") if counted else ("in MB/s",))):
        assert f" {word} " in heads, heads
    assert "host" not in heads
