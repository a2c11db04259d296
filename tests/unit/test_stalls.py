"""Who waits for whom is said, in time, to who waits; whoever works is never named for one who waits."""

import threading
import types

import jax
import pytest

from jaxrdma.control import (
    IN_STEP,
    FlowReady,
    GradientName,
    Heartbeat,
    JobFailed,
    Landed,
    Left,
    ProcessStatus,
    Wait,
    Waiting,
)
from jaxrdma.policy import Async, Policy, SyncReplicas, to_wire
from jaxrdma.stalls import explain
from jaxrdma.whereabouts import describe, whereabouts
from tests.unit.test_coordinator import Job, proposal, shrinking


def standing(name: str, **facts) -> ProcessStatus:
    values = {
        "host": "host-a",
        "pid": 1,
        "incarnation": 7,
        "state": IN_STEP,
        "doing": "",
        "wait": None,
        "seconds": 31.4,
        "step": 6,
        "step_seconds": 0.0,
        "sent": 0.0,
        "received": 0.0,
        "accepted": -1,
        "dropped": -1,
        "silent": 1.0,
    }
    return ProcessStatus(name, **{**values, **facts})


WAIT = Wait(flow=1, step=7, server=1, partition=12, stage="posted")


def test_a_late_worker_is_named_with_what_it_does_and_who_waits_with_what_for():
    waiting = [standing("worker 0", wait=WAIT), standing("worker 1", seconds=29.0)]
    late = [
        standing(
            "worker 2", state="computing", doing="train.py:41 in load", seconds=35.0, silent=2
        ),
        standing("worker 3", state="computing", step=-1, silent=16.0),
    ]
    text = explain(waiting, late, [])
    assert text == (
        "worker 0 (host-a, pid 1) has waited 31 s in step 7 of model 1, longest for partition 12 at server 1 (posted); "
        "worker 1 (host-a, pid 1) has waited 29 s in step 6. "
        "The step lacks the gradients of worker 2 (host-a, pid 1), computing for 35 s (train.py:41 in load), "
        "last at step 6; "
        "worker 3 (host-a, pid 1), computing for 31 s, not heard for 16 s, with no step reported yet"
    )


def test_if_all_are_in_the_step_the_server_that_is_waited_for_is_named():
    servers = [
        standing("server 0", state="serving"),
        standing("server 1", state="updating model 1", seconds=30.0),
    ]
    text = explain([standing("worker 0", wait=WAIT)], [], servers)
    assert text.endswith(
        "No worker is waited for: server 1 (host-a, pid 1), updating model 1 for 30 s, last at step 6"
    )
    assert "server 0" in explain([standing("worker 0")], [], servers)


def started(workers: int = 2, policy: Policy | None = None) -> Job:
    options = {"stall_warning": 10, "step_timeout": 65, "heartbeat_timeout": 30}
    job = shrinking(policy or SyncReplicas(), workers, **options)
    job.membership.notes.clear()
    return job


def beat(job: Job, seconds: float, served: tuple[int, int] = (3, 3), **beats: Heartbeat) -> None:
    """Time passes; everybody tells this, servers that they serve and have made the steps `served`."""
    end = job.now + seconds
    while job.now < end:
        job.now += 1
        for server, step in zip(("s0", "s1"), served, strict=True):
            job.say(server, Heartbeat(step, "serving"))
        for name, message in beats.items():
            job.say(name, message)
        job.take(job.membership.tick(job.now))


def texts(job: Job, name: str) -> list[str]:
    return [m.text for m in job.got[name] if isinstance(m, Waiting)]


STUCK = Heartbeat(3, IN_STEP, Wait(0, 3, 1, 0, "posted"))
LATE = Heartbeat(2, "computing", None, "train.py:41 in load")


def test_who_waits_is_told_after_the_warning_time_then_half_as_often_each_time_then_the_job_fails():
    job = started()
    beat(job, 10, w0=STUCK, w1=LATE)
    assert job.membership.notes == []
    beat(job, 2, w0=STUCK, w1=LATE)
    (text,) = job.membership.notes
    assert texts(job, "w0") == [text]
    assert texts(job, "w1") == []  # it does not wait
    assert "worker 0 (host-a, pid 100) has waited 10 s in step 3 of model 0" in text
    assert "lacks the gradients of worker 1 (host-a, pid 101), computing for 1" in text
    assert "(train.py:41 in load), last at step 2" in text
    beat(job, 50, w0=STUCK, w1=LATE)
    assert len(texts(job, "w0")) == 3  # after 10, 20 and 40 s
    beat(job, 5, w0=STUCK, w1=LATE)
    assert job.failure.kind == "stalled"
    assert (job.failure.role, job.failure.index) == ("worker", 1)
    assert "JAXRDMA_STEP_TIMEOUT, 65 s" in job.failure.text
    assert "train.py:41 in load" in job.failure.text
    for name in ("w0", "w1", "s0", "s1"):
        assert job.last(name, JobFailed) == job.failure


def test_steps_that_come_back_are_no_stall_however_long_the_job():
    job = started()
    for step in range(20):
        beat(job, 9, w0=Heartbeat(step, IN_STEP), w1=Heartbeat(step, "computing"))
    # Nor is it to compute for long while nobody waits.
    beat(job, 100, w0=Heartbeat(20, "computing"), w1=Heartbeat(20, "computing"))
    assert job.membership.notes == []
    assert job.membership.failure is None
    beat(job, 12, w0=Heartbeat(20, IN_STEP), w1=LATE)
    beat(job, 1, w0=Heartbeat(21, "computing"), w1=LATE)
    beat(job, 12, w0=Heartbeat(21, IN_STEP), w1=LATE)
    assert len(texts(job, "w0")) == 2  # each at its first


def test_a_coordinator_that_stood_still_accuses_nobody():
    job = started()
    beat(job, 5, w0=STUCK, w1=LATE)
    job.now += 200
    job.take(job.membership.tick(job.now))
    assert job.membership.notes == []
    assert job.membership.failure is None


def test_servers_are_named_if_no_worker_is_late():
    job = started()
    beat(job, 12, w0=STUCK, w1=STUCK)
    (text,) = job.membership.notes
    assert texts(job, "w0") == texts(job, "w1") == [text]
    assert "No worker is waited for: server 1 (host-a, pid 101), serving for" in text


def test_a_worker_that_nothing_waits_for_is_not_named():
    # With a backup replica: the step lacks one gradient, of worker 1 or 3.
    job = started(4, SyncReplicas(3, on_loss="fail"))
    for server in ("s0", "s1"):
        job.say(server, Landed(0, GradientName(2, 7, 0), 0))
    beats = {"w0": STUCK, "w1": LATE, "w2": LATE, "w3": LATE}
    beat(job, 12, **beats)
    assert "No worker is waited for" in job.membership.notes.pop()  # that of 0 has not landed
    for server in ("s0", "s1"):
        job.say(server, Landed(0, GradientName(0, 7, 0), 0))
    beat(job, 10, **beats)
    (text,) = job.membership.notes
    named = [worker for worker in range(4) if f"worker {worker} " in text]
    assert named == [0, 1, 3]
    # With Async a step is made of each gradient.
    job = started(3, Async(on_loss="fail"))
    for server in ("s0", "s1"):
        job.say(server, Landed(0, GradientName(0, 7, 0), 0))
    beat(job, 12, w0=STUCK, w1=LATE, w2=LATE)
    (text,) = job.membership.notes
    assert "worker 1 " not in text


def landed(job: Job, worker: int, *servers: str) -> None:
    for server in servers:
        job.say(server, Landed(0, GradientName(worker, 7, 0), 0))


def test_who_did_not_do_what_was_decided_or_told_nothing_of_a_gradient_is_named():
    job = started(2, SyncReplicas(2, on_loss="shrink"))
    pushes = {
        f"w{worker}": Heartbeat(-1, IN_STEP, Wait(0, 0, 1, 0, "completed")) for worker in range(2)
    }
    landed(job, 0, "s0", "s1")
    landed(job, 1, "s0")
    beat(job, 12, (0, 0), **pushes)
    (text,) = job.membership.notes
    assert text.endswith(
        ". server 1 has not told that the gradient of worker 1 for step 0 of model 0 has landed"
    )
    # Now the mean of step 0 is decided, of which one server does not hear.
    landed(job, 1, "s1")
    beat(job, 20, (1, 0), **pushes)
    text = job.membership.notes[-1]
    assert text.endswith(
        ". server 1 (host-a, pid 101) has not made step 1 of model 0, of which it was told whose gradients form "
        "the mean"
    )
    beat(job, 40, (1, 1), **pushes)
    assert "has not made" not in job.failure.text
    assert "has not told" not in job.failure.text


def test_an_answer_that_was_lost_is_known_by_who_had_it():
    """Of what is averaged servers tell no step."""
    job = started()
    wire = to_wire(SyncReplicas().complete(2))
    for worker in ("w0", "w1"):
        job.say(worker, proposal(1, mode="average", policy=wire))
    for server in ("s0", "s1"):
        job.say(server, FlowReady(1))
    alike, ahead = (
        {
            f"w{worker}": Heartbeat(step, IN_STEP, Wait(1, step, 1, 0, "completed"))
            for worker, step in enumerate(steps)
        }
        for steps in ((4, 4), (5, 4))
    )
    beat(job, 12, (-1, -1), **alike)
    assert "has answered" not in job.membership.notes[-1]
    beat(job, 40, (-1, -1), **ahead)
    assert job.membership.notes[-1].endswith(
        ". server 1 has answered step 4 of model 1 to worker 0: the answer to worker 1 is lost, or on its way"
    )


def test_a_server_that_waits_for_one_who_left_is_seen_to():
    job = started(2)
    job.say("w1", Left(2))
    beat(job, 12, w0=STUCK)
    (text,) = job.membership.notes
    assert text.endswith(
        ". worker 1 (host-a, pid 101) has left, last at step 2: no server may wait for it"
    )


def test_the_line_of_the_users_program_is_found_under_what_jax_does():
    seen: list[str] = []

    def outer() -> None:
        jax.jit(lambda x: seen.append(whereabouts()) or x)(1.0)

    outer()
    (text,) = seen
    assert text.startswith("test_stalls.py:")
    assert text.endswith("in <lambda>")
    assert threading.current_thread() is threading.main_thread()


def test_compiling_is_told_from_computing():
    def frame(
        name: str, function: str, back: types.SimpleNamespace | None
    ) -> types.SimpleNamespace:
        code = types.SimpleNamespace(co_filename=name, co_name=function)
        return types.SimpleNamespace(f_code=code, f_lineno=7, f_back=back)

    library = jax.__file__.removesuffix("__init__.py") + "_src/"
    user = frame("/home/me/train.py", "main", None)
    pjit = frame(library + "pjit.py", "call", user)
    compiler = frame(library + "compiler.py", "backend_compile", pjit)
    assert describe(compiler) == "compiling for train.py:7 in main"
    assert describe(pjit) == "train.py:7 in main"
    assert describe(frame(library + "x.py", "f", None)) == "x.py:7 in f"


@pytest.mark.parametrize("name", ["stall_warning", "step_timeout"])
def test_a_time_that_is_none_is_refused(name, monkeypatch):
    from jaxrdma import ClusterSpec, ConfigError

    with pytest.raises(ConfigError, match=f"{name} is -1"):
        ClusterSpec("127.0.0.1:1", "worker", 0, 1, 1, **{name: -1})
