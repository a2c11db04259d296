"""Who asks what a job recorded gets it from everybody who can answer; it is no part of the job, and nobody waits."""

import pytest

from jaxrdma.control import Admitting, Failed, Left, Refused, SendTrace, Traced, Tracing
from tests.unit.records import job as made_up
from tests.unit.test_coordinator import Job, hello

DUMP = made_up(steps=1)[0].dump()


def asks(job: Job, tracer: int = 900, steps: int = 5, **changes):
    return job.membership.handle(tracer, hello("tracer", steps, settings={}, **changes), job.now)


def answer(job: Job, name: str, tracer: int = 900):
    return job.membership.handle(job.ids[name], Traced(tracer, DUMP), job.now)


@pytest.fixture
def job() -> Job:
    made = Job(2, 1)
    for name in ("w0", "w1", "s0"):
        made.join(name)
    made.say("s0", Admitting("127.0.0.1:1"))
    return made


def test_everybody_who_is_there_is_asked_and_its_answer_goes_to_who_asked(job):
    out = asks(job)
    assert out[0] == (900, Tracing(["worker 0", "worker 1", "server 0"]))
    assert sorted(out[1:], key=lambda each: each[0]) == [
        (job.ids[name], SendTrace(900, 5)) for name in ("w0", "w1", "s0")
    ]
    assert answer(job, "w1") == [(900, Traced(900, DUMP))]


def test_an_answer_for_somebody_who_has_gone_goes_to_nobody(job):
    asks(job)
    assert job.membership.lost(900, "", job.now) == []
    assert answer(job, "w1") == []
    assert answer(job, "w1", tracer=job.ids["w0"]) == []


def test_who_has_left_is_not_asked(job):
    job.say("w1", Left(3))
    assert asks(job)[0] == (900, Tracing(["worker 0", "server 0"]))


def test_strangers_and_too_many_at_a_time_are_refused(job):
    ((_, refused),) = asks(job, version="0.0.0")
    assert isinstance(refused, Refused) and "0.0.0" in refused.text
    for tracer in range(901, 905):
        assert len(asks(job, tracer)) == 4
    ((_, refused),) = asks(job)
    assert isinstance(refused, Refused) and refused.kind == "full"
    job.membership.lost(901, "", job.now)
    assert len(asks(job)) == 4


def test_of_a_job_that_has_failed_the_files_are_named(job):
    job.say("w0", Failed("raised", "ValueError: no"))
    ((_, refused),) = asks(job)
    assert isinstance(refused, Refused) and refused.kind == "failed"
    assert "ValueError: no" in refused.text and "JAXRDMA_TRACE_DIR" in refused.text


def test_each_process_is_heard_once(job):
    asks(job)
    for name in ("w0", "w1", "s0"):
        assert answer(job, name) == [(900, Traced(900, DUMP))]
        assert answer(job, name) == []


def test_a_stream_that_has_asked_may_ask_nothing_else(job):
    asks(job)
    for _ in range(3):
        ((to, refused),) = asks(job)
        assert (to, refused.kind) == (900, "protocol")
    assert answer(job, "w1") == []
    assert job.membership.status(job.now).refused == 3
    for tracer in range(901, 905):  # nor does it take a place
        assert len(asks(job, tracer)) == 4
