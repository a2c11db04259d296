"""What the streams of one coordinator cost it: who says what it may not, or takes nothing, is disconnected."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxrdma import control, coordinator
from jaxrdma.control import (
    Admitting,
    CoordinatorMessage,
    JobStatus,
    Refused,
    SendTrace,
    Tracing,
    Waiting,
    Welcome,
)
from jaxrdma.coordinator import Coordinator, Membership
from tests.unit.test_coordinator import Job, hello

pytestmark = pytest.mark.timeout(60)

TRACER = control.encode(hello("tracer", 5, settings={}))
FOLLOWER = control.encode(hello("follower", 0, settings={}))


class Watched(Coordinator):
    """With a job of one worker and one server, whose streams are made up. Remembers what was sent."""

    def __init__(self) -> None:
        job = Job(1, 1)
        for name in ("w0", "s0"):
            job.join(name)
        job.say("s0", Admitting("127.0.0.1:1"))
        self.job: Membership = job.membership
        self.sent: list[CoordinatorMessage] = []
        self.said: list[str] = []
        super().__init__(job.membership, "127.0.0.1:0", self.said.append)
        self._next_id = len(job.ids)

    def _send(self, out: list[tuple[int, CoordinatorMessage]]) -> None:
        self.sent += [message for _, message in out]
        super()._send(out)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.sent)

    def status(self) -> JobStatus:
        return self.job.status(1000.0)


class Silent:
    """The context of a stream whose other end takes nothing."""

    def invocation_metadata(self) -> Any:
        return ((control.SECRET_KEY, b"s"),)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().create_future()


async def say(*messages: bytes, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
        await asyncio.sleep(0)  # as a stream: others have their turn
    if then is not None:
        await then.wait()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("role", ["observer", "tracer"])
def test_an_observer_or_tracer_is_served_once_by_stream(role: str) -> None:
    async def test() -> None:
        watched = Watched()
        address = await watched.start()
        asked = control.encode(hello(role, 5, settings={}))
        async with grpc.aio.insecure_channel(address) as channel:
            stream: Any = channel.stream_stream(control.METHOD)
            end = asyncio.Event()
            words = say(asked, asked, then=end)
            call = stream(words, metadata=Silent().invocation_metadata())
            got = [control.decode_coordinator(data) async for data in call]
            end.set()
        assert [type(each) for each in got] == [
            JobStatus if role == "observer" else Tracing,
            Refused,
        ]
        assert "says hello and no more" in got[1].text
        assert watched.count(SendTrace) == (2 if role == "tracer" else 0)
        assert watched.status().refused == 1
        await watched.stop()

    run(test())


def test_a_refusal_that_is_not_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_LEAVING_SECONDS", 0.1)

    async def test() -> None:
        watched = Watched()
        await watched._attend(say(*[TRACER] * 100), Silent())
        assert watched.count(Refused) == 1
        assert watched._streams == {}
        assert watched.job._tracers == {} and watched.job._asked == set()

    run(test())


def test_a_tracer_that_takes_nothing_is_ended_beyond_what_it_may_be_sent() -> None:
    async def test() -> None:
        watched = Watched()
        attending = asyncio.ensure_future(
            watched._attend(say(TRACER, then=asyncio.Event()), Silent())
        )
        while watched.count(Tracing) == 0:
            await asyncio.sleep(0)
        (stream,) = watched._streams.values()
        for _ in range(10):
            watched._send([(2, Tracing([]))])  # as no process of ours leads to
        await attending
        # One is being written, and of its processes and itself there are three.
        assert 3 <= stream.waiting.qsize() <= 4
        assert stream.why.startswith("it does not take what it is sent: 3 messages wait")
        assert watched._streams == {} and watched.job._tracers == {}

    run(test())


def test_a_member_that_takes_nothing_is_lost_before_what_waits_for_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "_MOST_WAITING", 50)

    async def test() -> None:
        watched = Watched()
        address = await watched.start()
        end = asyncio.Event()
        async with grpc.aio.insecure_channel(address) as channel:
            stream: Any = channel.stream_stream(control.METHOD)
            call = stream(say(FOLLOWER, then=end), metadata=Silent().invocation_metadata())
            while watched.count(Welcome) == 0:
                await asyncio.sleep(0.01)
            follower, most = max(watched._streams), 1000
            while watched._streams and watched.count(Waiting) < most:
                watched._send([(follower, Waiting("x" * 100_000))])
                await asyncio.sleep(0.001)  # gRPC takes some MiB on their way
            assert watched.count(Waiting) < most
            while watched.status().followers:
                await asyncio.sleep(0.01)
            assert watched.status().phase == "training"
            # And the other end is told, once it takes what it was sent before.
            taken = [data async for data in call]
            assert len(taken) <= watched.count(Waiting) - 50
            end.set()
        await watched.stop()

    run(test())
