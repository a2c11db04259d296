"""Whatever is said to the coordinator, it answers, and goes on; what strangers and followers say changes nothing.

Messages are drawn from the types of `jaxrdma.control` themselves, so that one which is added there is tried here.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from jaxrdma import control
from jaxrdma.control import (
    IN_STEP,
    Admitting,
    ClientMessage,
    CoordinatorMessage,
    FlowReady,
    FollowerAdmitted,
    GradientName,
    Heartbeat,
    Hello,
    JobStatus,
    Landed,
    Left,
    LostWorker,
    Refused,
    SaveRule,
    WorkerAdmitted,
)
from jaxrdma.coordinator import Membership
from jaxrdma.dump import Dump
from jaxrdma.policy import Async, BoundedStaleness, SyncReplicas, to_wire
from tests.fuzz.examples import patience, search
from tests.unit.test_coordinator import Job, hello, proposal

pytestmark = patience

# What numbers, texts and bytes are made of: what a job has, and what it never has.
NUMBERS = st.sampled_from([0, 0, 1, 2, 7, 100, -1, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])
NEGATIVE = st.sampled_from([-1, -2, -(1 << 31), -(1 << 63)])
WORDS = (
    "job d u update average ema worker server launcher follower connection raised float32 tcp auto"
)
TEXTS = st.sampled_from(["", IN_STEP, "params['w']", "\0\n\x1b[1m", *WORDS.split()]) | st.text(
    max_size=5
)
POLICIES = [
    SyncReplicas(),
    SyncReplicas(1, 2),
    SyncReplicas(3, 2),
    SyncReplicas(on_loss="wait"),
    Async(),
    BoundedStaleness(1),
]


def anything(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type as msgspec sees it, small ones and absurd ones."""
    match kind:
        case inspect.IntType(ge=ge, le=le, lt=lt):
            numbers = NUMBERS if ge is not None else NUMBERS | NEGATIVE
            least = -(1 << 63) if ge is None else ge
            most = min((1 << 64) - 1 if le is None else le, (1 << 64) - 1 if lt is None else lt - 1)
            return numbers.filter(lambda n: least <= n <= most)
        case inspect.FloatType():
            return st.sampled_from([0.0, 0.5, 1e300, float("inf"), float("nan")])
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return TEXTS
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.NoneType():
            return st.none()
        case inspect.ListType(item_type=item):
            return st.lists(anything(item), max_size=3)
        case inspect.VarTupleType(item_type=item):
            return st.lists(anything(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(anything, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(anything(key), anything(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(anything, types))
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: anything(f.type) for f in fields})
    raise AssertionError(f"no values of {kind}")


MESSAGES = anything(inspect.type_info(ClientMessage))
ANSWERS = anything(inspect.type_info(CoordinatorMessage))


# --- bytes ---


@st.composite
def spoilt(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> bytes:
    """A message with some bytes changed, cut off, or put in; or no message at all."""
    data = bytearray(draw(messages.map(control.encode) | st.binary(max_size=60)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "cut", "insert", "nest"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=6))
            case "nest":
                data[at:at] = b"\x91" * draw(st.sampled_from([3, 2000]))
            case _:
                pass
    return bytes(data)


@search(5)
@given(data=spoilt(MESSAGES), answer=spoilt(ANSWERS))
def test_bytes_are_a_message_or_a_msgspec_error(data: bytes, answer: bytes) -> None:
    for decode, kinds, got in (
        (control.decode_client, ClientMessage, data),
        (control.decode_coordinator, CoordinatorMessage, answer),
    ):
        try:
            message = decode(got)
        except msgspec.MsgspecError:
            continue
        assert isinstance(message, kinds)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa4type\xa2\xff\xfe",
        b"\x81\x90\x01",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["nothing", "unused", "nested", "no UTF-8", "a key that is a list", "a huge map"],
)
def test_bytes_that_are_no_message_are_a_msgspec_error(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        control.decode_client(data)


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(1 << 63, ""),
        Left(-2),
        proposal(leaves=[control.LeafSpec("w", (-1,), "float32")]),
        FlowReady(0, rule=SaveRule(-1, 0.0)),
        proposal(1 << 16),
        Landed(0, GradientName(0, -1, 0), 0),
        Landed(0, GradientName(0, 7, 1 << 32), 0),
        LostWorker(-1, 7, ""),
        WorkerAdmitted(0, 1 << 63),
        FollowerAdmitted(1 << 32),
        hello("worker", 0, settings={"partition_bytes": -64}),
    ],
    ids=[
        "a late step",
        "a step before all",
        "a negative size",
        "a negative interval",
        "a model too many",
        "a negative incarnation",
        "a late gradient",
        "a worker before all",
        "a large incarnation",
        "a late follower",
        "a negative setting",
    ],
)
def test_numbers_that_cannot_be_are_no_message(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        control.decode_client(control.encode(message))


# What goes on into the native module is of its integers: any other would be a TypeError there, far from who sent it.
UNSIGNED = {
    "incarnation": 1 << 63,
    "sequence": 1 << 32,
    "flow": 1 << 16,
    "worker": 1 << 16,
    "server": 1 << 16,
    "parts": 1 << 16,
}
SIGNED = {"step", "restored", "joined", "steps"}


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """What a value may be, or an item of it."""
    match kind:
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from alternatives(item)
        case inspect.UnionType(types=types):
            for one in types:
                yield from alternatives(one)
        case _:
            yield kind


def integers(kind: inspect.Type) -> list[inspect.IntType]:
    """All in a field, but not in the structs that it has."""
    return [each for each in alternatives(kind) if isinstance(each, inspect.IntType)]


def structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    for each in alternatives(kind):
        if isinstance(each, inspect.StructType):
            yield each
            # A dump is only read, by people.
            for field in () if each.cls is Dump else each.fields:
                yield from structs(field.type)


@pytest.mark.parametrize("messages", [ClientMessage, CoordinatorMessage], ids=["said", "answered"])
def test_every_number_that_the_native_module_is_given_is_bounded(messages: Any) -> None:
    seen: set[str] = set()
    for struct in structs(inspect.type_info(messages)):
        if struct.cls is Dump:
            continue
        for field in struct.fields:
            for number in integers(field.type):
                where = f"{struct.cls.__name__}.{field.name}"
                if field.name in UNSIGNED:
                    end = number.lt if number.lt is not None else (number.le or 1 << 64) + 1
                    assert number.ge == 0 and end <= UNSIGNED[field.name], where
                elif field.name in SIGNED:
                    assert number.ge in (-1, 0) and number.le == 1 << 62, where
                else:
                    continue
                seen.add(field.name)
    assert {"incarnation", "sequence", "flow", "worker", "server", "step"} <= seen


@pytest.mark.parametrize("incarnation", [-1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("role", ["worker", "server", "follower"])
def test_a_hello_whose_incarnation_cannot_be_is_of_nobody(role: str, incarnation: int) -> None:
    job = joined("training")
    before = status_of_members(job)
    data = control.encode(hello(role, 0, settings={}, incarnation=incarnation))
    with pytest.raises(msgspec.ValidationError, match=r"int.* - at `\$.incarnation`"):
        control.decode_client(data)
    job.hear(10, data)
    assert job.membership.failure is None
    assert status_of_members(job) == before


# --- a job ---


class Attended:
    """A membership behind its streams, as `Coordinator` has it: bytes in, and all that comes out can be sent."""

    def __init__(self, workers: int = 2, servers: int = 2) -> None:
        self.membership = Membership(workers, servers, job="job", now=1000.0)
        self.now = 1000.0
        self.ended: set[int] = set()

    def hear(self, stream: int, data: bytes) -> None:
        if stream in self.ended:
            return
        try:
            message = control.decode_client(data)
        except msgspec.MsgspecError as error:
            self.end(stream, str(error))
            return
        out = self.membership.handle(stream, message, self.now)
        self.sent(out)
        if isinstance(message, control.Bye) or any(
            to == stream and isinstance(m, Refused) for to, m in out
        ):
            self.end(stream)

    def end(self, stream: int, why: str = "") -> None:
        if stream not in self.ended:
            self.ended.add(stream)
            self.sent(self.membership.lost(stream, why, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.sent(self.membership.tick(self.now))

    def sent(self, out: Any) -> None:
        for _, message in out:
            assert control.decode_coordinator(control.encode(message)) is not None
        assert all(isinstance(note, str) for note in self.membership.notes)
        self.membership.notes.clear()
        # And whatever may be asked next has an answer.
        assert isinstance(self.membership.status(self.now), JobStatus)
        control.encode(self.membership.status(self.now))
        self.membership.waits_for()
        self.membership.progress_text(self.now)
        assert self.membership.next_tick > 0
        assert self.membership.saving in (True, False)
        self.membership.is_over(self.now)


NAMES = {"worker 0": 0, "worker 1": 1, "server 0": 2, "server 1": 3, "launcher": 4, "follower": 5}


def joined(stage: str) -> Attended:
    """A job in which everybody is, by the streams of `NAMES`, and as far as `stage` says."""
    job = Attended()

    def say(name: str, message: Any) -> None:
        job.hear(NAMES[name], control.encode(message))

    for name in NAMES:
        role, _, index = name.partition(" ")
        settings = {} if role == "follower" else {"num_workers": 2, "num_servers": 2}
        say(name, hello(role, int(index or 0), settings=settings))
    if stage == "joined":
        return job
    for message in (Admitting("127.0.0.1:1"), FollowerAdmitted(0)):
        for server in ("server 0", "server 1"):
            say(server, message)
    if stage == "started":
        return job
    policy = SyncReplicas(1, 2) if stage == "held" else SyncReplicas()
    for worker in ("worker 1", "worker 0"):
        say(worker, proposal(policy=to_wire(policy.complete(2)), programs=[b"p", b"q"]))
    for server in ("server 0", "server 1"):
        say(server, FlowReady(0, rule=SaveRule(5, 1.0)))
    if stage == "held":
        for server in ("server 0", "server 1"):
            say(server, Landed(0, GradientName(0, 7, 0), 0))
    for worker in ("worker 0", "worker 1"):
        say(worker, Heartbeat(3, IN_STEP))
    if stage == "ending":
        for worker in ("worker 0", "worker 1"):
            say(worker, Left(3))
    assert job.membership.failure is None
    return job


STAGES = st.sampled_from(["joined", "started", "training", "held", "ending"])
# Proposals that fit together are rare among any.
SAID = (
    MESSAGES
    | st.sampled_from(POLICIES).map(lambda p: proposal(policy=to_wire(p.complete(2))))
    | st.sampled_from([0, 1]).map(lambda n: Landed(0, GradientName(n, 7, 1), 0))
)
BYTES = SAID.map(control.encode) | spoilt(SAID)


@search(2)
@given(
    stage=STAGES,
    events=st.lists(
        st.tuples(
            st.integers(0, 8),
            BYTES | st.sampled_from([None, 0.1, 5.0, 400.0]),
        ),
        max_size=12,
    ),
)
def test_the_coordinator_bears_whatever_members_say(stage: str, events: Any) -> None:
    job = joined(stage)
    for stream, what in events:
        match what:
            case bytes():
                job.hear(stream, what)
            case None:
                job.end(stream)
            case seconds:
                job.tick(seconds)


@search(2)
@given(
    stage=STAGES,
    strangers=st.lists(st.tuples(st.integers(10, 14), BYTES), max_size=8),
    follower=st.lists(BYTES, max_size=4),
)
def test_strangers_observers_and_followers_change_nothing_for_the_others(
    stage: str, strangers: Any, follower: Any
) -> None:
    job = joined(stage)
    before = status_of_members(job)
    for data in follower:
        job.hear(NAMES["follower"], data)
    for stream, data in strangers:
        try:
            said = control.decode_client(data)
        except msgspec.MsgspecError:
            said = None
        # Who says that it is one more launcher, or server, and has the secret, is believed.
        if not isinstance(said, Hello) or said.role in ("observer", "follower"):
            job.hear(stream, data)
    assert job.membership.failure is None
    assert status_of_members(job) == before


def status_of_members(job: Attended) -> list[tuple[Any, ...]]:
    shown = job.membership.status(job.now)
    return [(p.name, p.incarnation, p.state, p.step) for p in shown.processes]


@search(0.3)
@given(secrets=st.lists(st.binary(max_size=20).filter(lambda s: s != b"right"), max_size=5))
def test_who_has_not_the_secret_is_counted_and_told_nothing_else(secrets: list[bytes]) -> None:
    membership = Membership(1, 1, job="job", secret="right", now=0.0)
    assert membership.knock(b"right", 0.0) is None
    for secret in secrets:
        refused = membership.knock(secret, 0.0)
        assert refused is not None
        assert refused.kind == "secret"
        assert "job" not in refused.text.replace("the job's secret", "")
    assert membership.status(0.0).refused == len(secrets)
    # A flood of them is one line.
    assert len(membership.notes) == min(1, len(secrets))


def test_data_connections_that_a_server_turned_away_are_shown() -> None:
    job = Job(1, 1)
    for name in ("s0", "w0"):
        job.join(name)
    for refused in (0, 2, 2, 900):
        job.say("s0", Heartbeat(-1, "", refused=refused))
    (server,) = [p for p in job.membership.status(job.now).processes if p.name == "server 0"]
    assert server.refused == 900
    (note,) = job.membership.notes
    assert "server 0 (host-a, pid 100) has turned away 2 data connections so far" in note
    job.now += 61
    job.say("s0", Heartbeat(-1, "", refused=901))
    assert "901 data connections so far (and 1 more like this" in job.membership.notes[-1]
