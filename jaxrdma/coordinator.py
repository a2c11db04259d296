"""The coordinator: who belongs to the job, what was agreed, and the first cause of its failure.

`Membership` decides everything and does nothing else: messages and times in, messages out, no clock and no I/O.
`Coordinator` drives it with an asyncio gRPC server. Nothing here imports JAX.
"""

import asyncio
import contextlib
import hmac
import math
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from jaxrdma import control
from jaxrdma.aggregation import (
    JOINING,
    Aggregate,
    Aggregation,
    Contribution,
    Decisions,
    Drop,
    Fail,
)
from jaxrdma.aggregation import Answer as Answering
from jaxrdma.cluster import (
    HEARTBEAT_TIMEOUT,
    ROLES,
    STALL_WARNING,
    STEP_TIMEOUT,
    TlsFiles,
    check_listen,
    format_address,
    parse_address,
    why_not_to_listen,
)
from jaxrdma.control import (
    IN_STEP,
    JOINS,
    MOST_FOLLOWERS,
    AdmitFollower,
    Admitting,
    AdmitWorker,
    Alive,
    Answered,
    Bye,
    ClientMessage,
    CoordinatorMessage,
    Decided,
    DismissFollower,
    Dropped,
    Ended,
    Failed,
    FlowAgreed,
    FlowProposal,
    FlowReady,
    FlowRejected,
    FlowStart,
    FollowerAdmitted,
    Follows,
    GradientName,
    Heartbeat,
    Held,
    Hello,
    JobFailed,
    JobStatus,
    Keeps,
    Landed,
    Left,
    LostWorker,
    Mean,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MirrorAt,
    ModelStatus,
    Offer,
    ProcessStatus,
    Refused,
    RescueCommitted,
    RescueSaved,
    Rescuing,
    Restored,
    Roster,
    SaveCommitted,
    SaveMissed,
    SendTrace,
    ServerEntry,
    ShardSaved,
    Shutdown,
    Traced,
    Tracing,
    Wait,
    Waiting,
    Welcome,
    WorkerAdmitted,
    WorkerEntry,
)
from jaxrdma.errors import ConfigError
from jaxrdma.pace import Pace
from jaxrdma.plan import compare_leaves, place_mirrors
from jaxrdma.policy import OnLoss, from_wire
from jaxrdma.rescue import RESCUE_SECONDS, Model, Rescuer
from jaxrdma.restarts import is_lasting
from jaxrdma.savepoints import LAST_SAVE_SECONDS, Answer, Orders, Savepoints, Seldom
from jaxrdma.signals import ending_signals
from jaxrdma.stalls import explain
from jaxrdma.tls import Identity

import grpc  # isort: skip  # after control, which tells it to be quiet
import grpc.aio  # isort: skip

ROOT_CAUSE_SECONDS = (
    1.0  # how long the report of a lost connection waits for the death that explains it
)
LINGER_SECONDS = 5.0  # after a failure, for the members to hear of it and go
SHUTDOWN_SECONDS = 8.0  # for the servers to say goodbye when all workers have left
ASKED = "asked for"  # why a transport is used that all processes ask for
TOKEN_BYTES = 16  # as native/fabric/fabric.h wants them
_TICK_SECONDS = 0.25
_QUIET_SECONDS = 1.0  # between two ticks while only somebody's silence can come of them
_PAUSE_SECONDS = 3.0  # a tick this late means that the coordinator itself was stopped
_WAKING_SECONDS = 5.0  # so long after that its consequences may still arrive
_HELLO_SECONDS = 10.0
_GOODBYE_SECONDS = 2.0  # for a stranger to take the answer that it is none of us
_MOST_PARAMETERS = 10**18  # of a model; more cannot be addressed in bytes, nor told to an observer
# Connections of strangers, beside those of a job's processes, their successors and its followers.
_MOST_STRANGERS = 128
_LEAVING_SECONDS = 10.0  # for a stream that may say no more to take what it is still to be told
# Messages that may wait for a member that does not take them: a server is told a few for each gradient, and a worker
# gives no other before all servers have dealt with it.
_MOST_WAITING = 1 << 18
_METRICS_SECONDS = 5.0  # for a scrape to be answered: else it is given up
_MOST_TRACERS = 4  # at a time: each costs every process of the job up to half a megabyte
_REMIND_SECONDS = 10.0  # between two texts on a worker whose place is kept
_LEFT_OUT = "The job goes on without this worker, as its policy has on_loss='shrink'."
_KEPT = "Its place is kept for a process that is started in its stead, as its policy has on_loss='wait'."

Outgoing = list[tuple[int, CoordinatorMessage]]


@dataclass
class _Member:
    id: int
    hello: Hello
    heard: float
    step: int = -1
    state: str = ""
    since: float = 0.0  # it told something else
    next_text: float = 0.0  # not before is it told again for whom it waits
    wait: Wait | None = None
    doing: str = ""
    pace: Pace = field(default_factory=Pace)
    refused: int = 0  # connections to its data port
    strangers: Seldom = field(default_factory=Seldom)  # lines on those
    address: str = ""  # of a server that lets the workers in: where
    mirror: str = ""  # and where the server of whose part it keeps a copy
    left: bool = False  # said that it is done, or was lost and no place is kept for it
    lost: JobFailed | None = None  # the job bears that: this is what became of it
    lost_at: float = 0.0
    gone: bool = False  # its stream has ended, or is about to
    confessed: bool = False  # sent Failed: its end is no news
    number: int = -1  # of a follower
    tokens: dict[int, bytes] = field(default_factory=dict[int, bytes])  # of a follower, by server
    # Of a follower, or who came after the start: servers that do not expect it yet.
    awaits: set[int] = field(default_factory=set[int])
    ready: bool = False  # of a follower: every server expects it
    returned: bool = False  # to the place of one that was lost, or left
    spare: bool = False  # a worker beyond those that the job needs to begin
    # Of who came after the start: models that it has called init for, and those that have not begun yet.
    resumed: set[int] = field(default_factory=set[int])
    proposed: int = 0  # how many models: they are numbered in that order
    early: dict[int, FlowProposal] = field(default_factory=dict[int, FlowProposal])

    @property
    def launches(self) -> bool:
        """Whether this is a launcher: it speaks for its machine, and has no place among workers and servers."""
        return self.hello.role == "launcher"

    @property
    def follows(self) -> bool:
        """Whether this is a follower: it takes parameters, and its end is nobody's affair."""
        return self.hello.role == "follower"

    @property
    def name(self) -> str:
        if self.follows:
            return f"follower {self.number}"
        return "launcher" if self.launches else f"{self.hello.role} {self.hello.index}"

    @property
    def place(self) -> str:
        return f"{self.hello.host}, pid {self.hello.pid}"

    @property
    def joins(self) -> str:
        """What keeps it from having a part yet."""
        return f": {self.doing}" if self.state == JOINS and self.doing else ""

    @property
    def last(self) -> str:
        if self.launches:
            return "and nobody can tell how the processes of its machine are"
        return f"last at step {self.step}" if self.step >= 0 else "with no step reported yet"


@dataclass
class _Flow:
    since: float
    next_text: float
    savepoints: Savepoints
    proposals: dict[int, FlowProposal] = field(default_factory=dict[int, FlowProposal])
    agreed: bool = False
    holders: set[int] = field(default_factory=set[int])  # servers that have a part of it
    start: FlowStart | None = None  # once it has started
    on_loss: OnLoss | None = None  # of its policy
    aggregation: Aggregation | None = None  # where something is left to decide about gradients


def decide_transport(offers: Mapping[str, Offer]) -> tuple[str, str]:
    """The transport of a job, and why, from what its processes offer, by name; empty, and why, if there is none.

    One for all. Who asks for verbs gets it or an error; who leaves it open gets verbs if everybody can.
    """
    wanted = {offer.wanted for offer in offers.values()}
    unable = next((f"{name} {o.why}" for name, o in offers.items() if not o.verbs), "")
    if wanted == {"auto"}:
        return ("tcp", unable) if unable else ("verbs", "every process can use it")
    (asked,) = wanted - {"auto"}
    asker = next(name for name, offer in offers.items() if offer.wanted == asked)
    if asked == "verbs" and unable:
        return (
            "",
            f"{asker} asks for transport verbs, but {unable}. `jaxrdma doctor` tells more there",
        )
    return asked, ASKED if len(wanted) == 1 else f"{asker} asks for it"


class Membership:
    """Everything the coordinator knows and decides, as a state machine.

    A member is known by an id that its driver chooses, one per stream, never used twice. After a `Refused`, or a
    `Bye`, the driver ends the stream of that id. The state is always one of: the job is over; or somebody connected is
    waited for; or somebody absent is, until a deadline.

    The place of a worker that was lost, and the job goes on, may be taken by another life of it, with an incarnation of
    its own. It begins as any process does, by a hello; is let in by every server; and has a part in each model, at a
    step's end, from when it has proposed the same one.

    The places of workers beyond the first `num_workers` are spare: nobody waits for who might take one, and whoever
    does comes in the same way. So does, in a job with spare places, who takes the place of one that left.

    **Arguments:**

    - `num_workers`, `num_servers`, `most_workers`, `job`, `attempt`, `secret`: as in `ClusterSpec`.
    - `now`: the time of the start, in seconds, as all other times.
    - `connect_timeout`: from the first arrival (or the start) until everybody must be there; and from the loss of a
      worker that the others wait for until somebody must have taken its place.
    - `heartbeat_timeout`: silence after which a member counts as lost.
    - `stall_warning`: time in one step after which it is said who waits for whom; then again after twice as long.
    - `step_timeout`: time in one step after which the job fails.
    - `token`: makes the secrets between a worker and a server.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        *,
        most_workers: int | None = None,
        job: str = "jaxrdma",
        attempt: int = 0,
        secret: str = "",
        now: float = 0.0,
        connect_timeout: float = 300.0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        stall_warning: float = STALL_WARNING,
        step_timeout: float = STEP_TIMEOUT,
        token: Callable[[], bytes] = lambda: secrets.token_bytes(TOKEN_BYTES),
    ) -> None:
        self._expected = {"worker": num_workers, "server": num_servers}
        most = num_workers if most_workers is None else max(num_workers, most_workers)
        self._most = {"worker": most, "server": num_servers}
        # Workers in spare places that have had a part in a model: what its policy says of a loss is said of them.
        self._bound: set[int] = set()
        self._job = job
        self._attempt = attempt
        self._secret = secret
        self._connect_timeout = connect_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_warning = stall_warning
        self._step_timeout = step_timeout
        self._stall = (0.0, stall_warning)  # not to be told of before, and how long after that
        self._token = token
        self._members: dict[int, _Member] = {}
        self._places: dict[tuple[str, int], _Member] = {}
        self._flows: dict[int, _Flow] = {}
        self._began = self._since = now
        self._next_text = now + control.PROGRESS_SECONDS
        self._beat_seconds = control.heartbeat_pause(heartbeat_timeout, busy=False)
        self._last_tick = now
        # When the coordinator woke last, and how long it had stood still.
        self._stood = -float("inf"), 0.0
        self._refusal: tuple[float, str] | None = None
        self._started = False  # everybody is here, and every server lets the workers in
        self._transport = ("", "")  # what the job uses, and why; once all are here
        self._tokens: dict[tuple[int, int], bytes] = {}  # by worker and server; once all are here
        self._admit: set[int] = set()
        self._saving_since: float | None = None  # when all workers had left
        self._shutdown_since: float | None = None
        self._suspect: tuple[float, JobFailed, _Member] | None = None
        self._failure: JobFailed | None = None
        self._failed_at = now
        self._mirrors: list[int] = []  # with replicate: by server, who keeps a copy of its part
        self._mirror_tokens: list[bytes] = []  # by server, what it shows its mirror
        self._rescuer: Rescuer | None = None  # from the failure on until what is left is saved
        self._next_follower = 0
        # By the id of their stream, the members that have not answered.
        self._tracers: dict[int, set[int]] = {}
        self._asked: set[int] = set()  # streams of observers and tracers: these may say no more
        self._next_reminder = now
        self._refused = 0  # streams of strangers
        self._strangers = Seldom()
        self.address = ""  # where workers find the coordinator; for texts
        self.notes: list[str] = []  # lines for people; whoever prints them takes them out

    @property
    def most(self) -> int:
        """How many workers and servers there may be at a time."""
        return sum(self._most.values())

    @property
    def _grows(self) -> bool:
        return self._most["worker"] > self._expected["worker"]

    @property
    def saving(self) -> bool:
        """Whether all workers have left, and the last step of a model is being saved."""
        return self._saving_since is not None and any(
            flow.savepoints.busy for flow in self._flows.values()
        )

    @property
    def rescuing(self) -> bool:
        """Whether the job has failed, and the servers that are left save what they hold."""
        return self._rescuer is not None

    @property
    def failure(self) -> JobFailed | None:
        """The first cause of the job's failure, or None."""
        return self._failure

    @property
    def started(self) -> bool:
        """Whether everybody has been here, and every server was ready to let the workers in."""
        return self._started

    def is_over(self, now: float) -> bool:
        """Whether nothing is left to do: all said goodbye, or the job failed and everybody went or had time to."""
        if self.rescuing:
            return False
        if self._failure is not None:
            return not self._essential() or now - self._failed_at >= LINGER_SECONDS
        return self._shutdown_since is not None and all(m.gone for m in self._of("server"))

    @property
    def next_tick(self) -> float:
        """Seconds until time may matter."""
        trains = self._started and self._failure is None and self._suspect is None
        ends = self._saving_since is not None or self._shutdown_since is not None
        return _QUIET_SECONDS if trains and not ends else _TICK_SECONDS

    def waits_for(self) -> list[str]:
        """Whom the present state waits for, members and absent ones, by name. Empty if the job is over."""
        if self._rescuer is not None:
            return [f"server {server}" for server in self._rescuer.waits_for()]
        if self._failure is not None:
            return [m.name for m in self._essential()]
        if not self._started:
            return self._missing()
        if self._shutdown_since is not None:
            return [m.name for m in self._of("server") if not m.gone]
        if self.saving:
            late = {s for flow in self._flows.values() for s in flow.savepoints.waits_for()}
            return [m.name for m in self._of("server") if m.hello.index in late]
        return [m.name for m in self._of("worker") if not m.left]

    def most_waiting(self, member_id: int) -> int:
        """So many messages may wait for a stream that does not take them. Beyond, it is to be ended."""
        return _MOST_WAITING if member_id in self._members else self.most + 1  # as a tracer is sent

    def knock(self, secret: bytes, now: float) -> Refused | None:
        """Whether a stream may speak, by the secret that goes ahead of it; if not, the answer, and it is counted."""
        if hmac.compare_digest(secret, self._secret.encode()):
            return None
        came = "a wrong one" if secret else "none"
        text = f"the job's secret was expected, {came} came. Set JAXRDMA_SECRET alike on every process."
        self.turn_away(text, now)
        return Refused("secret", text)

    def turn_away(self, why: str, now: float) -> None:
        """Count a stream that never said who it is, or had not the secret. People are told, seldom."""
        self._refused += 1
        self.notes += filter(None, [self._strangers.filter(f"turned a stranger away: {why}", now)])

    def handle(self, member_id: int, message: ClientMessage, now: float) -> Outgoing:
        """What a message of the stream `member_id` leads to. Streams that may not `knock` do not come here."""
        if member_id in self._asked:
            self._tracers.pop(member_id, None)
            return self._out_of_turn(member_id, "an observer or tracer says hello and no more", now)
        if isinstance(message, Hello) and member_id not in self._members:
            if message.role == "observer":
                return self._observe(member_id, message, now)
            if message.role == "tracer":
                return self._trace(member_id, message)
            return self._hello(member_id, message, now)
        member = self._members.get(member_id)
        if member is None:
            text = "the first message of a process must be its hello"
            return self._out_of_turn(member_id, text, now)
        if member.gone:
            return []
        member.heard = now
        if self._rescuer is not None:
            return self._during_rescue(self._rescuer, member, message, now)
        if self._failure is not None:
            member.gone = isinstance(message, Bye)
            return []
        if member.follows:
            return self._of_follower(member, message)
        match message:
            case Heartbeat():
                if (message.step, message.state) != (member.step, member.state):
                    member.since = now
                member.pace.beat(message, now)
                if message.refused > member.refused:
                    text = f"{member.name} ({member.place}) has turned away {message.refused} data connections so far"
                    self.notes += filter(None, [member.strangers.filter(text, now)])
                member.refused = message.refused
                member.step, member.state = max(member.step, message.step), message.state
                member.wait, member.doing = message.wait, message.doing
                return [(member_id, Alive())]  # both at once disturb a process that rests once
            case Failed():
                return self._member_failed(member, message, now)
            case LostWorker():
                return self._connection_lost(member, message, now)
            case Left():
                return self._left(member, message.step, now)
            case Bye():
                member.gone = True
                return self._bye(member, now) + self._dismiss()
            case Ended():
                return self._ended(member, message, now)
            case FlowProposal():
                return self._proposal(member, message, now)
            case Admitting():
                if member.hello.role != "server" or not self._tokens or member.id in self._admit:
                    return self._broken(
                        member,
                        "admits workers, which only a server of a complete job does once",
                        now,
                    )
                if not message.address:
                    return self._broken(member, "gave no address for data", now)
                if self._mirrors and not message.mirror:
                    return self._broken(member, "keeps no copy of another server's part", now)
                member.mirror = message.mirror
                return self._admitting(member, message.address)
            case WorkerAdmitted():
                return self._worker_admitted(member, message, now)
            case FollowerAdmitted():
                return self._follower_admitted(member, message, now)
            case Landed():
                return self._landed(member, message, now)
            case Traced():
                asked = self._tracers.get(message.number, set())
                if member_id not in asked:
                    return []  # who asked has gone, or has been answered
                asked.remove(member_id)
                return [(message.number, message)]
            case FlowReady() | Restored() | ShardSaved() | SaveMissed() | SaveCommitted():
                return self._answer(member, message, now)
            case Held() | RescueSaved() | RescueCommitted():
                return self._broken(member, "saves what is left of a job that has not failed", now)
            case Hello():
                return self._broken(member, "said hello twice", now)

    def _out_of_turn(self, member_id: int, text: str, now: float) -> Outgoing:
        """The answer to a stream of no member that says what it may not."""
        self.turn_away(text, now)
        return [(member_id, Refused("protocol", text))]

    def lost(self, member_id: int, why: str, now: float) -> Outgoing:
        """The stream `member_id` has ended, `why` if that is known. Nothing new if its end was announced."""
        self._tracers.pop(member_id, None)
        self._asked.discard(member_id)
        member = self._members.get(member_id)
        out = [] if member is None or member.gone else self._lost(member, why, now)
        if member is not None and (member.follows or member.launches):
            # Nothing refers to who had no place; and any number of followers may come and go.
            del self._members[member_id]
        return out

    def _lost(self, member: _Member, why: str, now: float) -> Outgoing:
        if member.follows:
            return self._forget_follower(member, why or "its connection ended")
        member.gone = True
        if self._rescuer is not None and member.hello.role == "server":
            self._rescuer.lose(member.hello.index, f"{member.name} ({member.place}) died")
            return self._end_rescue_if_over(now)
        if member.left and member.hello.role == "worker":
            return []
        if member.confessed:
            return self._confirm_suspect(member, now)
        text = f"{member.name} ({member.place}) died: {why or 'its connection ended without a goodbye'}, {member.last}"
        self._notice_pause(now)
        woke, stood = self._stood
        if now - woke < _WAKING_SECONDS and stood > self._heartbeat_timeout - self._beat_seconds:
            text += (
                f"; but the coordinator itself stood still for {stood:.0f} s until then, and who does not hear from it "
                f"for {self._heartbeat_timeout:g} s takes it for lost"
            )
        return self._lose(member, "died", text, now)

    def interrupt(self, why: str, now: float) -> Outgoing:
        """The coordinator itself is told to stop."""
        if self._rescuer is not None:
            self._rescuer.stop(f"the coordinator was stopped: {why}")
            return self._end_rescue_if_over(now)
        return self._fail("interrupted", f"the coordinator was stopped: {why}", None, now)

    def _notice_pause(self, now: float) -> None:
        """If it was the coordinator that stood still, or its machine, nobody could have been heard meanwhile."""
        stood = now - self._last_tick
        if stood > min(_PAUSE_SECONDS, max(2 * _QUIET_SECONDS, self._heartbeat_timeout / 2)):
            self._last_tick = now
            self._stood = now, stood
            for member in self._live():
                member.heard = member.since = now

    def tick(self, now: float) -> Outgoing:
        """What the passing of time leads to. To be called after `next_tick` seconds, or earlier."""
        self._notice_pause(now)
        self._last_tick = now
        out: Outgoing = []
        if self._rescuer is not None:
            return self._rescue_overdue(self._rescuer, now)
        if self._failure is None:
            out = self._overdue_followers(now) + self._overdue(now)
        if self._failure is None:
            out += self._stalled(now)
        if self._failure is None:
            out += self._texts(now)
            for flow in self._flows.values():
                out += self._carry_out(flow, flow.savepoints.tick(now), now)
        return out

    # --- joining ---

    def _hello(self, member_id: int, hello: Hello, now: float) -> Outgoing:
        refused = self._refuse(hello)
        if refused is not None:
            # Of a stranger, no word is repeated to others; and who is early will ask again.
            if refused.kind not in ("job", "early"):
                self._refusal = (now, refused.text)
            return [(member_id, refused)]
        spare = hello.role == "worker" and hello.index >= self._expected["worker"]
        member = _Member(member_id, hello, now, since=now, spare=spare)
        if not member.follows and all(m.follows for m in self._members.values()):
            self._since = now
            self._next_text = now + control.PROGRESS_SECONDS
        self._members[member_id] = member
        welcome = Welcome(self._expected["worker"], self._expected["server"], self._attempt)
        out: Outgoing = [(member_id, welcome)]
        if member.follows:
            member.number, self._next_follower = self._next_follower, self._next_follower + 1
            return out + (self._announce_follower(member) if self._started else [])
        if member.launches:
            return out + self._dismiss()
        before = self._places.get((hello.role, hello.index))
        self._places[hello.role, hello.index] = member
        if spare and not self._started:
            return out  # it is let in when the job has begun
        if before is not None or spare:
            return out + self._take_place(member, before)
        if not self._tokens and not self._missing():
            names = {m.name: m.hello.offer for role in ROLES for m in self._of(role)}
            transport, why = decide_transport(names)
            if not transport:
                return [*out, *self._fail("transport", why, None, now)]
            self._transport = transport, why
            self._tokens = {
                (w.hello.index, s.hello.index): self._token()
                for w in self._of("worker")
                for s in self._of("server")
                if not w.spare
            }
            servers = self._of("server")
            if servers[0].hello.settings.get("replicate"):
                self._mirrors = place_mirrors([s.hello.host for s in servers])
                self._mirror_tokens = [self._token() for _ in servers]
            out += [(m.id, self._roster(m)) for m in self._live() if m.hello.role == "server"]
        return out

    def _admitting(self, member: _Member, address: str) -> Outgoing:
        """Workers may knock once every server knows them."""
        member.address = address
        self._admit.add(member.id)
        if any(m.id not in self._admit for m in self._of("server")):
            return []
        self._started = True
        out: Outgoing = self._introduce_mirrors()
        workers = [m for m in self._of("worker") if not m.gone]
        out += [(m.id, self._roster(m)) for m in workers if not m.spare]
        for m in workers:
            out += self._take_place(m, None) if m.spare else []
        for follower in self._followers():
            out += self._announce_follower(follower)
        return out

    def _refuse_stranger(self, hello: Hello, who: str) -> Refused | None:
        """Whoever has no part in this job."""
        if hello.job != self._job:
            return Refused(
                "job",
                f"{who} belongs to job {hello.job!r}, this is the coordinator of job {self._job!r}. "
                "Set JAXRDMA_JOB or JAXRDMA_COORDINATOR.",
            )
        if hello.version != control.VERSION:
            return Refused(
                "version",
                f"{who} runs jaxrdma {hello.version}, the coordinator {control.VERSION}. "
                "Install the same release everywhere.",
            )
        return None

    def _refuse(self, hello: Hello) -> Refused | None:
        launches, follows = hello.role == "launcher", hello.role == "follower"
        who = hello.role if launches or follows else f"{hello.role} {hello.index}"
        who += f" ({hello.host}, pid {hello.pid})"
        if (refused := self._refuse_stranger(hello, who)) is not None:
            return refused
        if not follows and (refused := self._refuse_attempt(hello, who)) is not None:
            return refused
        if self._failure is not None:
            return Refused(
                "failed",
                f"{who} comes too late, the job has failed: {self._failure.text}",
                self._attempt,
            )
        if follows and self._shutdown_since is not None:
            return Refused("ended", f"{who} comes too late, the job is over.")
        if follows and len(self._followers()) >= MOST_FOLLOWERS:
            return Refused(
                "full",
                f"{who}: {MOST_FOLLOWERS} followers are here, which is the most. Close one, or take its snapshots.",
            )
        if hello.role not in ROLES and not launches and not follows:
            return Refused("role", f"{who}: expected a role of {' or '.join(ROLES)}")
        for name, sizes, role in (
            ("num_workers", self._expected, "worker"),
            ("num_servers", self._expected, "server"),
            ("most_workers", self._most, "worker"),
        ):
            theirs, ours = hello.settings.get(name), sizes[role]
            if theirs is not None and theirs != ours:
                most = " at most" if name == "most_workers" else ""
                return Refused(
                    "settings",
                    f"{who} expects {theirs} {role}s{most}, the coordinator {ours}. "
                    f"Set JAXRDMA_{name.upper()} alike on every process.",
                )
        count = self._most.get(hello.role, hello.index + 1)
        if not 0 <= hello.index < count:
            most = " at most" if hello.role == "worker" and self._grows else ""
            return Refused(
                "index",
                f"{who}: there are {count} {hello.role}s{most}, so the index must be 0 to {count - 1}.",
            )
        first = self._places.get((hello.role, hello.index))
        if first is not None and (refused := self._refuse_place(first, hello, who)) is not None:
            return refused
        if hello.role == "worker" and self._transport[0]:  # it comes to a job that is complete
            refused = self._refuse_newcomer(hello, who)
            if refused is not None:
                return refused
        for member in self._members.values():
            if follows or member.follows:
                continue  # it is told them
            for name in sorted(hello.settings.keys() | member.hello.settings.keys()):
                theirs, ours = hello.settings.get(name), member.hello.settings.get(name)
                if theirs != ours:
                    return Refused(
                        "settings",
                        f"{who} has {name}={theirs}, {member.name} ({member.place}) has {name}={ours}. "
                        f"Set JAXRDMA_{name.upper()} alike on every process.",
                    )
            break  # those who are here are alike
        for member in self._members.values():
            if launches or follows or member.launches or member.follows:
                continue
            theirs, ours = hello.offer.wanted, member.hello.offer.wanted
            if {theirs, ours} == {"tcp", "verbs"}:
                return Refused(
                    "settings",
                    f"{who} asks for transport {theirs}, {member.name} ({member.place}) for {ours}. "
                    "Set JAXRDMA_TRANSPORT alike on every process, or auto.",
                )
        return None

    def _refuse_attempt(self, hello: Hello, who: str) -> Refused | None:
        """Workers and servers must be of this attempt; launchers are told which it is, and start theirs to match.

        A launcher that expects a later attempt has seen this one fail: or else this coordinator was started anew by
        hand, from attempt 0, and that can only be one whose job is not complete yet.
        """
        launches = hello.role == "launcher"
        gathers = self._failure is None and not self._tokens
        if hello.attempt > self._attempt and not (launches and gathers):
            return Refused(
                "early",
                f"it is still at attempt {self._attempt + 1} of the job, "
                f"{who} belongs to attempt {hello.attempt + 1}",
            )
        if hello.attempt < self._attempt and not launches:
            return Refused(
                "attempt",
                f"{who} belongs to attempt {hello.attempt + 1} of the job, which is over; this is attempt "
                f"{self._attempt + 1}. Set JAXRDMA_ATTEMPT alike on every process.",
            )
        return None

    def _refuse_place(self, first: _Member, hello: Hello, who: str) -> Refused | None:
        """The place of `first` may be taken if that was lost, and the job has borne it; or left a job that grows."""
        free = first.lost is not None or (self._grows and first.left and first.gone)
        if not free:
            return Refused("duplicate", self._duplicate(first, who))
        if any(m.hello.incarnation == hello.incarnation for m in self._lives(first)):
            return Refused(
                "duplicate",
                f"{who} gives the incarnation of a process that was here before and was lost. "
                "Every process needs one of its own; is this a copy of one?",
            )
        return None

    def _refuse_newcomer(self, hello: Hello, who: str) -> Refused | None:
        """A worker that comes to a job that has begun has to do with what was agreed."""
        if self._saving_since is not None:
            return Refused("ended", f"{who} comes too late: all other workers have left.")
        transport, _ = self._transport
        if hello.offer.wanted not in ("auto", transport):
            return Refused(
                "settings",
                f"{who} asks for transport {hello.offer.wanted}, and the job has {transport}. "
                "Set JAXRDMA_TRANSPORT alike on every process, or auto.",
            )
        if transport == "verbs" and not hello.offer.verbs:
            text = f"{who} {hello.offer.why}, and the job has transport verbs"
            return Refused("transport", f"{text}. `jaxrdma doctor` tells more there.")
        return None

    def _duplicate(self, first: _Member, who: str) -> str:
        if first.gone:
            return f"{who} comes too late: {first.name} ({first.place}) was here and has ended."
        return (
            f"two processes claim to be {first.name}: {first.place}, which came first, and now "
            f"{who.partition('(')[2].rstrip(')')}. Give each its own JAXRDMA_INDEX."
        )

    def _roster(self, member: _Member) -> Roster:
        """What `member` may know of the others."""

        def visible(worker: int, server: int) -> bool:
            return member.hello.index == (worker if member.hello.role == "worker" else server)

        return Roster(
            [
                ServerEntry(
                    s.hello.index,
                    s.address,
                    s.hello.incarnation,
                    {
                        w: token
                        for (w, i), token in self._tokens.items()
                        if i == s.hello.index and visible(w, i)
                    },
                )
                for s in self._of("server")
            ],
            [
                WorkerEntry(w.hello.index, w.hello.host, w.hello.pid, w.hello.incarnation)
                for w in self._of("worker")
                if (w.hello.index, 0) in self._tokens and not (w.left or w.gone or w.awaits)
            ],
            *self._transport,
            keeps=self._keeps(member),
        )

    def _keeps(self, member: _Member) -> Keeps | None:
        """Whose part a server keeps a copy of."""
        if member.hello.role != "server" or not self._mirrors:
            return None
        server = self._of("server")[self._mirrors.index(member.hello.index)]
        token = self._mirror_tokens[server.hello.index]
        return Keeps(server.hello.index, server.hello.incarnation, token)

    def _introduce_mirrors(self) -> Outgoing:
        """Each server is told who keeps a copy of its part."""
        servers = self._of("server")
        return [
            (server.id, MirrorAt(mirror, servers[mirror].mirror, token))
            for server, mirror, token in zip(
                servers, self._mirrors, self._mirror_tokens, strict=False
            )
        ]

    # --- returning ---

    def _take_place(self, member: _Member, before: _Member | None) -> Outgoing:
        """Every server is told whom to expect, before the worker is told where to knock."""
        member.returned = before is not None
        index, incarnation = member.hello.index, member.hello.incarnation
        place = "a spare place" if before is None else f"the place of {before.place}"
        self.notes.append(f"{member.name} ({member.place}) comes in {place}")
        servers = self._of("server")
        member.awaits = {s.hello.index for s in servers}
        out: Outgoing = []
        for server in servers:
            token = self._tokens[index, server.hello.index] = self._token()
            out.append((server.id, AdmitWorker(index, incarnation, token)))
        return out

    def _worker_admitted(self, server: _Member, message: WorkerAdmitted, now: float) -> Outgoing:
        member = self._places.get(("worker", message.index))
        if server.hello.role != "server" or member is None:
            return self._broken(
                server, f"admitted worker {message.index}, which nobody asked it to", now
            )
        awaited = server.hello.index in member.awaits
        if not awaited or member.gone or member.hello.incarnation != message.incarnation:
            return []  # another life of it, lost meanwhile
        if message.problem:
            text = f"{server.name} ({server.place}) cannot let it in: {message.problem}"
            told = JobFailed("transport", f"{member.name}: {text}", "worker", message.index)
            return [(member.id, told), *self._turn_away(member, "transport", text, now)]
        member.awaits.discard(server.hello.index)
        if member.awaits:
            return []
        others = (m for m in self._of("worker") if not m.gone)
        told = self._to(others, MemberJoined("worker", message.index), but=member)
        return [*told, (member.id, self._roster(member))]

    def _resume(self, member: _Member, flow: _Flow, proposal: FlowProposal, now: float) -> Outgoing:
        """Who came after the start has called init for a model that started without it."""
        number, index = proposal.flow, member.hello.index
        difference = _difference(proposal, flow.proposals[0], member.name, "the job")
        if difference is not None:
            rejected = FlowRejected(number, f"model {number} is not that of the job: {difference}")
            out = self._turn_away(member, "mismatch", f"model {number}: {difference}", now)
            return [(member.id, rejected), *out]
        member.resumed.add(number)
        if flow.aggregation is None:  # nothing lies on the servers
            assert flow.start is not None, "what bears a loss has started"
            return self._begins(number, member, flow.start.restored or 0)
        decisions = flow.aggregation.joins(index, member.hello.incarnation)
        return self._decided(number, flow, decisions, now)

    def _begins(self, number: int, member: _Member, step: int) -> Outgoing:
        if member.spare:
            self._bound.add(member.hello.index)
        comes = "is back" if member.returned else "takes part"
        self.notes.append(f"{member.name} {comes} in model {number} from step {step} on")
        return [(member.id, FlowStart(number, joined=step))]

    def _turn_away(self, member: _Member, kind: str, why: str, now: float) -> Outgoing:
        """Who came cannot be let in, and is told so. For the others the place is empty as before."""
        member.confessed = True
        came = "came back" if member.returned else "came"
        text = f"{member.name} ({member.place}) {came} and was turned away: {why}"
        return self._lose(member, kind, text, now)

    def _lives(self, member: _Member) -> list[_Member]:
        """All that had, or have, the place of `member`, the oldest first."""
        place = (member.hello.role, member.hello.index)
        return [m for m in self._members.values() if (m.hello.role, m.hello.index) == place]

    def _absent(self) -> list[_Member]:
        """Lost workers whose place is kept and not taken."""
        return [m for m in self._of("worker") if m.lost is not None and not m.left]

    def _stands_still(self) -> bool:
        """Whether there is nothing to do but to wait for those who are absent, or came back and are not in yet."""
        if all(m.left or m.lost is not None for m in self._of("worker")):
            return True
        flows = (flow.aggregation for flow in self._flows.values())
        return any(each is not None and each.stands_still for each in flows)

    def _absence_text(self, now: float) -> str:
        """Who waits for whom, since when, and how to bring it back; empty if nobody does."""
        if not self._stands_still():
            return ""
        texts = [self._absent_text(m, now) for m in self._absent()]
        for number, flow in self._flows.items():
            if flow.aggregation is None or not flow.aggregation.stands_still:
                continue
            texts += [
                f"{m.name} ({m.place}, {m.state or 'no news'}), which came back, to call init for model {number}"
                for m in self._of("worker")
                if m.returned and not m.gone and not self._knocks(m) and number not in m.resumed
            ]
        texts += [self._admission_text(m) for m in self._of("worker") if self._knocks(m)]
        return f"training stands still, and waits for {'; and for '.join(texts)}" if texts else ""

    def _knocks(self, member: _Member) -> bool:
        """Whether it came to a job that has begun, and not every server lets it in."""
        return not member.gone and bool(member.awaits)

    def _admission_text(self, member: _Member) -> str:
        servers = [s for s in self._of("server") if s.hello.index in member.awaits]
        names = _list([f"{s.name} ({s.place})" for s in servers])
        how = "came back" if member.returned else "is new"
        return f"{names} to let {member.name} ({member.place}) in, which {how}"

    def _absent_text(self, member: _Member, now: float) -> str:
        assert member.lost is not None
        seconds = now - member.lost_at
        workers, servers = self._expected["worker"], self._expected["server"]
        most = f"JAXRDMA_MOST_WORKERS={self._most['worker']} " if self._grows else ""
        command = (
            f"JAXRDMA_COORDINATOR={self.address or 'HOST:PORT'} JAXRDMA_INDEX={member.hello.index} "
            f"JAXRDMA_NUM_WORKERS={workers} {most}JAXRDMA_NUM_SERVERS={servers} python SCRIPT"
        )
        if self._secret:
            command += ", with the job's JAXRDMA_SECRET and JAXRDMA_JOB"
        return (
            f"{member.name}, which was lost {seconds:.0f} s ago: {member.lost.text}. If nothing starts it again, give "
            f"within {max(0.0, self._connect_timeout - seconds):.0f} s: {command}"
        )

    # --- followers ---

    def _announce_follower(self, follower: _Member) -> Outgoing:
        """Every server is told whom to expect, before the follower is told where to knock."""
        servers = self._of("server")
        follower.tokens = {s.hello.index: self._token() for s in servers}
        follower.awaits = set(follower.tokens)
        incarnation = follower.hello.incarnation
        return [
            (s.id, AdmitFollower(follower.number, incarnation, follower.tokens[s.hello.index]))
            for s in servers
        ]

    def _follower_admitted(
        self, server: _Member, message: FollowerAdmitted, now: float
    ) -> Outgoing:
        if server.hello.role != "server" or not self._started:
            return self._broken(
                server, "admitted a follower, which only a server of a complete job does", now
            )
        follower = next((m for m in self._followers() if m.number == message.number), None)
        if follower is None:
            return []  # gone meanwhile
        if message.problem:
            why = f"{server.name} ({server.place}) cannot serve it: {message.problem}"
            return self._dismiss_follower(follower, "transport", why)
        follower.awaits.discard(server.hello.index)
        if follower.awaits or follower.ready:
            return []
        follower.ready = True
        servers = [
            ServerEntry(
                s.hello.index,
                s.address,
                s.hello.incarnation,
                {follower.number: follower.tokens[s.hello.index]},
            )
            for s in self._of("server")
        ]
        settings = server.hello.settings
        out: Outgoing = [
            (follower.id, Follows(follower.number, servers, *self._transport, settings))
        ]
        for flow in self._flows.values():
            if flow.agreed:
                out.append((follower.id, _agreement(flow.proposals[0], None)))
            if flow.start is not None:
                out.append((follower.id, flow.start))
        return out

    def _of_follower(self, follower: _Member, message: ClientMessage) -> Outgoing:
        """Whatever it says, it concerns nobody else."""
        match message:
            case Heartbeat():
                follower.step, follower.state = max(follower.step, message.step), message.state
                return [(follower.id, Alive())]
            case Left() | Bye() | Failed():
                return self._forget_follower(follower, "it left")
            case _:
                why = "it sent a message that is not for followers to send"
                return self._dismiss_follower(follower, "protocol", why)

    def _dismiss_follower(self, follower: _Member, kind: str, why: str) -> Outgoing:
        text = f"{follower.name} ({follower.place}) was dismissed: {why}"
        self.notes.append(text)
        out = self._forget_follower(follower, why)
        return [*out, (follower.id, JobFailed(kind, text, "follower", follower.number))]

    def _forget_follower(self, follower: _Member, why: str) -> Outgoing:
        follower.gone = True
        if not follower.tokens:
            return []
        servers = [m for m in self._of("server") if not m.gone]
        return self._to(servers, DismissFollower(follower.number, why))

    def _overdue_followers(self, now: float) -> Outgoing:
        out: Outgoing = []
        for follower in self._followers():
            silent = now - follower.heard
            if silent > self._heartbeat_timeout:
                why = f"it has been silent for {silent:.0f} s. Call jaxrdma.follow again"
                out += self._dismiss_follower(follower, "silent", why)
        return out

    # --- flows ---

    def _proposal(self, member: _Member, proposal: FlowProposal, now: float) -> Outgoing:
        index = member.hello.index
        if member.hello.role != "worker" or member.left or not self._started:
            return self._broken(
                member, "proposed a model, which only a worker of a complete job does", now
            )
        number = proposal.flow
        flaw = _flaw(proposal, self._most["worker"], grows=self._grows)
        if flaw is not None:
            return self._broken(member, f"proposed a model {number} that cannot be: {flaw}", now)
        expected = self._expected_before(member, number)
        if expected is not None:
            return self._broken(member, f"proposed model {number}, and {expected}", now)
        member.proposed = max(member.proposed, number + 1)
        # Programs can be large, and those of others are not asked for.
        if index > 0:
            proposal = msgspec.structs.replace(proposal, programs=[])
        flow = self._flows.get(number)
        if member.spare:
            return self._spare_proposal(member, flow, proposal, now)
        if flow is None:
            savepoints = Savepoints(number, self._expected["server"])
            flow = _Flow(now, now + control.PROGRESS_SECONDS, savepoints)
            self._flows[number] = flow
        if index in flow.proposals:
            if member.returned and flow.start is not None and number not in member.resumed:
                return self._resume(member, flow, proposal, now)
            return self._broken(member, f"proposed model {number} twice", now)
        for other, theirs in sorted(flow.proposals.items()):
            difference = _difference(proposal, theirs, member.name, f"worker {other}")
            if difference is not None:
                return self._reject(number, difference, member, now)
        flow.proposals[index] = proposal
        deserter = next(
            (m for m in self._needed() if m.left and m.hello.index not in flow.proposals), None
        )
        if deserter is not None:
            return self._fail("left", _deserted(deserter, number, member.name), deserter, now)
        if len(flow.proposals) < self._expected["worker"]:
            return []
        programs = flow.proposals[0].programs
        servers = self._expected["server"]
        if programs and len(programs) != servers:
            return self._broken(
                member, f"gave {len(programs)} update programs for {servers} servers", now
            )
        flow.agreed = True
        flow.on_loss = from_wire(proposal.policy).on_loss
        flow.since, flow.next_text = now, now + control.PROGRESS_SECONDS
        out: Outgoing = []
        for m in self._crew():
            if m.spare:
                continue  # it is told when it has a part
            program = mirrored = None
            if programs and m.hello.role == "server":
                program = programs[m.hello.index]
                if self._mirrors:
                    mirrored = programs[self._mirrors.index(m.hello.index)]
            out.append((m.id, _agreement(proposal, program, mirrored)))
        for m in self._followers():
            if m.ready:
                out.append((m.id, _agreement(proposal, None)))
        # Programs can be large, and nobody asks for them again.
        flow.proposals = {
            w: msgspec.structs.replace(p, programs=[]) for w, p in flow.proposals.items()
        }
        return out

    def _expected_before(self, member: _Member, number: int) -> str | None:
        """What was expected of a worker rather than to propose model `number` now, or None.

        It numbers its models in the order of its calls of init, each of which waits until the model has started. So no
        worker is ahead of another by more than one model, and the programs of one model at most are kept here.
        """
        if number > member.proposed:
            return (
                f"model {member.proposed} was expected, the next after those that it has proposed"
            )
        before = self._flows.get(number - 1)
        if 0 < number == member.proposed and (before is None or before.start is None):
            return f"was expected to wait until model {number - 1} has started"
        return None

    def _spare_proposal(
        self, member: _Member, flow: _Flow | None, proposal: FlowProposal, now: float
    ) -> Outgoing:
        """Who came to a spare place has called init: for a model that has begun, or is to begin without it."""
        number = proposal.flow
        if number in member.resumed or number in member.early:
            return self._broken(member, f"proposed model {number} twice", now)
        if flow is None or flow.start is None:
            member.early[number] = proposal
            return []
        return self._resume(member, flow, proposal, now)

    def _answer(self, member: _Member, answer: Answer, now: float) -> Outgoing:
        """A server is ready for a model, or tells of its checkpoints."""
        flow = self._flows.get(answer.flow)
        if member.hello.role != "server" or flow is None or not flow.agreed:
            return self._broken(
                member, f"is ready for model {answer.flow}, which was not agreed", now
            )
        if isinstance(answer, FlowReady) and answer.holds:
            flow.holders.add(member.hello.index)
        orders = flow.savepoints.handle(member.hello.index, answer, now)
        return self._carry_out(flow, orders, now) + self._shut_down_if_saved(now)

    def _carry_out(self, flow: _Flow, orders: Orders, now: float) -> Outgoing:
        self.notes += orders.notes
        if orders.problem is not None:
            kind, text, server = orders.problem
            member = self._places["server", server]
            if kind == "protocol":
                return self._broken(member, text, now)
            return self._fail(kind, text, member, now)
        out: Outgoing = [
            (self._places["server", server].id, message) for server, message in orders.messages
        ]
        if orders.start is not None:
            flow.start = orders.start
            number, step = orders.start.flow, orders.start.restored or 0
            told = (m for m in self._live() if (m.ready or not m.follows) and not m.spare)
            out += self._to(told, orders.start)
            out += self._begin_to_aggregate(number, flow, step, now)
            for m in self._of("worker"):
                if number in m.early and not m.gone and self._failure is None:
                    out += self._resume(m, flow, m.early.pop(number), now)
        return out

    def _begin_to_aggregate(self, number: int, flow: _Flow, step: int, now: float) -> Outgoing:
        proposal = flow.proposals[0]
        policy = from_wire(proposal.policy)
        if policy.held == 0 or not flow.holders or proposal.mode in ("ema", "table"):
            return []
        workers = self._needed()
        replicas = {worker.hello.index: worker.hello.incarnation for worker in workers}
        flow.aggregation = Aggregation(
            policy, servers=len(flow.holders), replicas=replicas, step=step
        )
        decisions = flow.aggregation.start()
        for worker in workers:
            if worker.left:
                decisions += flow.aggregation.leaves(worker.hello.index, worker.hello.incarnation)
        return self._decided(number, flow, decisions, now)

    def _landed(self, member: _Member, message: Landed, now: float) -> Outgoing:
        flow = self._flows.get(message.flow)
        if flow is None or flow.aggregation is None or member.hello.index not in flow.holders:
            return self._broken(
                member, f"holds a gradient of model {message.flow}, which holds none there", now
            )
        # It counts servers that hold something from 0.
        server = sorted(flow.holders).index(member.hello.index)
        gradient = message.gradient
        decisions = flow.aggregation.landed(
            server, gradient.worker, gradient.incarnation, gradient.sequence, message.step
        )
        return self._decided(message.flow, flow, decisions, now)

    def _decided(
        self, number: int, flow: _Flow, decisions: Decisions, now: float, kind: str = "left"
    ) -> Outgoing:
        """What servers are told of decisions; a job that cannot go on fails, by a failure of that `kind`."""
        out: Outgoing = []
        told: list[Mean | Dropped | Answered] = []
        dropped: set[GradientName] = set()
        for decision in decisions:
            match decision:
                case Aggregate(step, contributions):
                    told.append(Mean(step, [_name(each) for each in contributions]))
                case Drop(contribution):
                    dropped.add(_name(contribution))
                    told.append(Dropped(_name(contribution)))
                case Answering(replica, incarnation, sequence, step) if sequence != JOINING:
                    name = GradientName(replica, incarnation, sequence)
                    told.append(Answered(name, step, name not in dropped))
                case Answering(replica, _, _, step):
                    # With the model itself a worker begins by itself.
                    member = self._places["worker", replica]
                    out += self._begins(number, member, step) if number in member.resumed else []
                case Fail(text):
                    return self._fail(kind, f"model {number}: {text}", None, now)
                case _:
                    pass  # an epoch
        if told:
            servers = self._of("server")
            holders = [m for m in servers if m.hello.index in flow.holders and not m.gone]
            out += self._to(holders, Decided(number, told))
        return out

    def _reject(self, number: int, difference: str, member: _Member, now: float) -> Outgoing:
        text = f"model {number} is not the same on all workers: {difference}"
        self._set_failure("mismatch", text, member, now)
        return self._to(self._live(), FlowRejected(number, text))

    # --- ending ---

    def _left(self, member: _Member, step: int, now: float) -> Outgoing:
        if member.launches:
            return []
        if member.hello.role == "server":
            if self._shutdown_since is not None:
                return []
            return self._fail(
                "left",
                f"{member.name} ({member.place}) ended although "
                f"{_list(self.waits_for())} {'has' if len(self.waits_for()) == 1 else 'have'} not left",
                member,
                now,
            )
        if member.left:
            return []
        member.left = True
        member.step = max(member.step, step)
        if not self._started and member.spare:
            return self._forget_place(member, f"{member.name} ({member.place}) left", "left")
        if not self._started:
            text = f"{member.name} ({member.place}) gave up before everybody was there"
            return self._fail("left", text, member, now)
        out = self._to(
            self._essential(), MemberLeft("worker", member.hello.index, step), but=member
        )
        for number, flow in self._flows.items():
            needed = not member.spare and not flow.agreed
            if needed and member.hello.index not in flow.proposals:
                waiting = f"worker {min(flow.proposals)}"
                return out + self._fail("left", _deserted(member, number, waiting), member, now)
            if flow.aggregation is not None:
                # If it came back and never took up this model, the place is kept for a life before it.
                for life in self._lives(member):
                    decisions = flow.aggregation.leaves(life.hello.index, life.hello.incarnation)
                    out += self._decided(number, flow, decisions, now)
        return out + self._end_if_all_left(now)

    def _end_if_all_left(self, now: float) -> Outgoing:
        out: Outgoing = []
        if self._failure is None and all(m.left for m in self._of("worker")):
            self._saving_since = now
            for flow in self._flows.values():
                out += self._carry_out(flow, flow.savepoints.finish(), now)
            out += self._shut_down_if_saved(now)
        return out

    def _lose(self, member: _Member, kind: str, text: str, now: float) -> Outgoing:
        """Nothing is to be expected of `member` any more: the job bears that, if it can."""
        if self._failure is not None:
            return []  # it heard of that
        if member.launches and member.hello.spare:  # the job can do without its workers
            member.gone = True
            self.notes.append(f"{text}; the job goes on without what it started")
            return []
        if member.spare and not self._started:
            return self._forget_place(member, text, kind)
        flows = self._flows.values()
        bears = (
            member.hello.role == "worker"
            and self._started
            and bool(flows)
            and all(flow.start is not None and flow.on_loss != "fail" for flow in flows)
        )
        if not bears and not member.spare:
            return self._fail(kind, text, member, now)
        waits = any(flow.on_loss == "wait" for flow in flows)
        if member.spare and member.hello.index not in self._bound:
            waits = False  # nobody had it in a mean
        out: Outgoing = []
        index = member.hello.index
        if not member.gone and not member.confessed:  # it may be stopped, and wake
            why = f"{text}. {_KEPT if waits else _LEFT_OUT}"
            out = self._to([member], JobFailed("lost", why, "worker", index))
        member.lost, member.lost_at = JobFailed(kind, text, "worker", index), now
        member.left, member.gone = not waits, True
        self._next_reminder = now + _REMIND_SECONDS
        self.notes.append(
            f"{text}; {'its place is kept' if waits else 'the job goes on without it'}"
        )
        out += self._to(self._essential(), MemberLost("worker", index, kind, text, waits))
        for number, flow in self._flows.items():
            if flow.aggregation is not None and self._failure is None:
                decisions = flow.aggregation.lost(index, member.hello.incarnation, text)
                out += self._decided(number, flow, decisions, now, kind)
        return out + self._end_if_all_left(now)

    def _forget_place(self, member: _Member, text: str, kind: str) -> Outgoing:
        """Who came early to a spare place has gone before the job began: another one may take it."""
        member.left = member.gone = True
        index = member.hello.index
        del self._places["worker", index]
        self.notes.append(f"{text}; its place is spare again")
        launchers = [m for m in self._live() if m.launches]
        return self._to(launchers, MemberLost("worker", index, kind, text, waits=False))

    def _shut_down_if_saved(self, now: float) -> Outgoing:
        """The servers may end when all workers have left, and the last step of each model is saved."""
        if self._saving_since is None or self._shutdown_since is not None or self.saving:
            return []
        self._shutdown_since = now
        told = [m for m in self._live() if m.hello.role == "server" or m.follows]
        return self._to(told, Shutdown())

    def _bye(self, member: _Member, now: float) -> Outgoing:
        if member.confessed:
            return self._confirm_suspect(member, now)
        if member.left or member.launches:
            return []
        return self._left(member, member.step, now)

    def _dismiss(self) -> Outgoing:
        """Launchers may go when the last server has."""
        if self._failure is not None or self._shutdown_since is None or not self.is_over(0.0):
            return []
        return self._to([m for m in self._live() if m.launches], Shutdown())

    def _ended(self, launcher: _Member, ended: Ended, now: float) -> Outgoing:
        """News only of who never joined, or left in good order and failed later: the others' streams tell more."""
        if not launcher.launches:
            return self._broken(
                launcher, "told how another process ended, which only a launcher does", now
            )
        host = launcher.hello.host
        member = self._places.get((ended.role, ended.index))
        if member is not None and (ended.well or member.lost is not None):
            return []
        if any(
            m.lost is not None and (m.hello.host, m.hello.pid) == (host, ended.pid)
            for m in self._members.values()
        ):
            return []  # an earlier life of it
        if member is not None and (member.hello.host, member.hello.pid) == (host, ended.pid):
            if not member.left:
                return []
            text = f"{member.name} ({member.place}) {ended.how}, after it had left the job"
        else:
            text = f"{ended.role} {ended.index} ({host}, pid {ended.pid}) {ended.how} and had never joined"
            if ended.well:
                text += "; does its script call jaxrdma.connect()?"
            elif self._refusal is not None:
                at, why = self._refusal
                text += f" (refused {now - at:.0f} s ago: {why})"
        if ended.role == "worker" and ended.index >= self._expected["worker"]:
            self.notes.append(f"{text}; the job does not need it")
            told = MemberLost("worker", ended.index, "died", text, waits=False)
            # One that has others to look after goes on; one that has nothing else ends.
            return [] if launcher.hello.spare else [(launcher.id, told)]
        self._failure = JobFailed("left" if ended.well else "died", text, ended.role, ended.index)
        self._failed_at = now
        return self._to(self._live(), self._failure)

    def _member_failed(self, member: _Member, message: Failed, now: float) -> Outgoing:
        member.confessed = True
        verb = {
            "raised": "raised",
            "config": "raised",
            "connection": "reports",
            "left": "reports",
            "interrupted": "was",
            "terminated": "was",
        }.get(message.kind, "failed")
        if member.launches and message.kind != "interrupted":
            verb = "reports"
        text = f"{member.name} ({member.place}) {verb}: {message.text}"
        failure = JobFailed(message.kind, text, member.hello.role, member.hello.index)
        # What came to a spare place may stand on the wrong side of a firewall: that is nobody else's affair.
        if message.kind != "connection" or member.spare:
            return self._lose(member, message.kind, text, now)
        if self._suspect is None:
            self._suspect = (now + ROOT_CAUSE_SECONDS, failure, member)
        return []

    def _connection_lost(self, server: _Member, message: LostWorker, now: float) -> Outgoing:
        worker = self._places.get(("worker", message.index))
        if server.hello.role != "server" or worker is None:
            return self._broken(server, f"lost worker {message.index}, which it never had", now)
        if worker.left or worker.gone or worker.hello.incarnation != message.incarnation:
            return []
        failed = Failed("connection", message.text)
        if not worker.spare and all(flow.on_loss == "fail" for flow in self._flows.values()):
            return self._member_failed(server, failed, now)
        return self._lose(
            worker, "connection", f"{server.name} ({server.place}) reports: {message.text}", now
        )

    def _confirm_suspect(self, member: _Member, now: float) -> Outgoing:
        """Whoever reported a lost connection is gone itself. A better cause is still awaited, unless nobody is left."""
        if self._suspect is None or self._crew():
            return []
        _, failure, accused = self._suspect
        return self._fail(failure.kind, failure.text, accused, now)

    def _broken(self, member: _Member, what: str, now: float) -> Outgoing:
        return self._fail("protocol", f"{member.name} ({member.place}) {what}", member, now)

    def _fail(self, kind: str, text: str, culprit: _Member | None, now: float) -> Outgoing:
        if self._failure is not None:
            return []
        failure = self._set_failure(kind, text, culprit, now)
        # Who failed by itself knows; who reported a lost connection waits to hear what was behind it.
        knows = culprit if culprit and culprit.confessed and kind != "connection" else None
        self._rescuer = self._make_rescuer(failure)
        if self._rescuer is None:
            return self._to(self._live(), failure, but=knows)
        told = [m for m in self._live() if m.hello.role != "server" and not m.launches]
        out = self._to(told, failure, but=knows)
        out += self._to([m for m in self._live() if m.launches], Rescuing(RESCUE_SECONDS))
        out += self._to_servers(self._rescuer.begin())
        self.notes.append(f"{text}; the servers that are left save what they hold")
        return out + self._end_rescue_if_over(now)

    def _set_failure(self, kind: str, text: str, culprit: _Member | None, now: float) -> JobFailed:
        role, index = (
            ("coordinator", -1) if culprit is None else (culprit.hello.role, culprit.hello.index)
        )
        self._failure = JobFailed(kind, text, role, index)
        self._failed_at = now
        return self._failure

    # --- rescue ---

    def _make_rescuer(self, failure: JobFailed) -> Rescuer | None:
        """Who decides what is saved of a job that has just failed, if there is anything to save."""
        ended = not self._started or self._shutdown_since is not None
        if not self._mirrors or ended or is_lasting(failure.kind):
            return None
        models = {
            number: Model(frozenset(flow.holders), flow.savepoints.saved)
            for number, flow in self._flows.items()
            if flow.start is not None and flow.proposals[0].mode == "update"
        }
        if not models:
            return None
        lost = {m.hello.index for m in self._of("server") if m.gone}
        if failure.role == "server" and failure.kind != "connection":
            lost.add(failure.index)  # it may be stopped, and wake
        return Rescuer(models, self._mirrors, lost)

    def _during_rescue(
        self, rescuer: Rescuer, member: _Member, message: ClientMessage, now: float
    ) -> Outgoing:
        """Of a job that has failed only what its servers save is of interest."""
        match message:
            case Heartbeat():
                return [(member.id, Alive())]
            case Held() | RescueSaved() | RescueCommitted() if member.hello.role == "server":
                out = self._to_servers(rescuer.handle(member.hello.index, message))
                return out + self._end_rescue_if_over(now)
            case Failed(kind="interrupted") if member.launches and self._failure is not None:
                # A person waits for the prompt, and wants no other attempt.
                text = f"{member.name} ({member.place}) was: {message.text}"
                failure = self._failure
                self._failure = JobFailed(message.kind, f"{failure.text}; {text}", "launcher", 0)
                rescuer.stop("it was interrupted")
                return self._end_rescue_if_over(now)
            case Failed() | Left() | Bye():
                member.gone = isinstance(message, Bye)
                # Who reports a lost connection waits to hear what was behind it.
                echo = isinstance(message, Failed) and message.kind == "connection"
                if member.hello.role == "server" and not echo:
                    rescuer.lose(member.hello.index, f"{member.name} ({member.place}) failed")
                return self._end_rescue_if_over(now)
            case _:
                return []

    def _to_servers(self, messages: list[tuple[int, CoordinatorMessage]]) -> Outgoing:
        return [(self._places["server", server].id, message) for server, message in messages]

    def _rescue_overdue(self, rescuer: Rescuer, now: float) -> Outgoing:
        for index in rescuer.waits_for():
            member = self._places["server", index]
            silent = now - member.heard
            if silent > self._heartbeat_timeout:
                text = f"{member.name} ({member.place}) has been silent for {silent:.0f} s"
                rescuer.lose(index, text)
        if not rescuer.over and now - self._failed_at >= RESCUE_SECONDS:
            rescuer.late(now - self._failed_at)
        return self._end_rescue_if_over(now)

    def _end_rescue_if_over(self, now: float) -> Outgoing:
        """The others may hear of the failure once nothing more is to be saved."""
        rescuer, failure = self._rescuer, self._failure
        if rescuer is None or failure is None or not rescuer.over:
            return []
        self._rescuer = None
        self._failed_at = now
        self._failure = msgspec.structs.replace(failure, text=f"{failure.text}; {rescuer.text}")
        told = [m for m in self._live() if m.hello.role == "server" or m.launches]
        return self._to(told, self._failure)

    # --- time ---

    def _overdue(self, now: float) -> Outgoing:
        out: Outgoing = []
        for member in self._essential():
            # Of a machine that falls silent, its workers and servers are named rather than its launcher, which may have
            # been heard a little earlier.
            silent = now - member.heard - (self._beat_seconds if member.launches else 0.0)
            if silent > self._heartbeat_timeout and not (
                member.left and member.hello.role == "worker"
            ):
                text = (
                    f"{member.name} ({member.place}) has been silent for {silent:.0f} s, {member.last}: "
                    "it was stopped, or its machine or the network to it is gone"
                )
                out += self._lose(member, "silent", text, now)
                if self._failure is not None:
                    return out
        if self._suspect is not None and now >= self._suspect[0]:
            _, failure, accused = self._suspect
            return out + self._fail(failure.kind, failure.text, accused, now)
        if not self._started and now - self._since >= self._connect_timeout:
            return out + self._fail(
                "timeout", f"the job did not start: {self._barrier_text(now)}", None, now
            )
        for member in self._absent() if self._stands_still() else ():
            if member.lost is not None and now - member.lost_at >= self._connect_timeout:
                text = f"{member.lost.text}; nobody took its place in {now - member.lost_at:.0f} s"
                return out + self._fail(member.lost.kind, text, member, now)
        if self._saving_since is not None and self.saving:
            seconds = now - self._saving_since
            if seconds >= LAST_SAVE_SECONDS:
                text = (
                    f"{_list(self.waits_for())} did not save the last step within {seconds:.0f} s"
                )
                return out + self._fail("timeout", text, None, now)
        if self._shutdown_since is not None and now - self._shutdown_since >= SHUTDOWN_SECONDS:
            late = next((m for m in self._of("server") if not m.gone), None)
            if late is not None:
                text = f"{late.name} ({late.place}) did not end within {SHUTDOWN_SECONDS:.0f} s of the last worker"
                return out + self._fail("timeout", text, late, now)
        return out

    def _stalled(self, now: float) -> Outgoing:
        """What comes of a step that takes long."""
        stuck = self._stuck(now)
        if not stuck:
            self._stall = (0.0, self._stall_warning)
            return []
        due, pause = self._stall
        longest = max(now - m.since for m in stuck)
        if now < due and longest < self._step_timeout:
            return []
        text = self._stall_text(now)
        if longest >= self._step_timeout:
            late = self._late_for(stuck)
            text += f". No step may take longer than JAXRDMA_STEP_TIMEOUT, {self._step_timeout:g} s"
            return self._fail("stalled", text, late[0] if late else None, now)
        self._stall = (now + pause, 2 * pause)
        self.notes.append(text)
        return self._to(stuck, Waiting(text))

    def _stuck(self, now: float) -> list[_Member]:
        """Workers that are long in a step, and it is not said anyway that they wait for a lost one."""
        if not self._started or self._stands_still():
            return []
        return [
            m
            for m in self._of("worker")
            if m.state == IN_STEP and self._takes_part(m) and now - m.since >= self._stall_warning
        ]

    def _takes_part(self, member: _Member) -> bool:
        return not (member.left or member.gone)

    def _stall_text(self, now: float) -> str:
        """Who waits for whom, in a step that takes long; else empty."""
        stuck = self._stuck(now)
        if not stuck:
            return ""
        concerned = stuck, self._late_for(stuck), self._of("server")
        waiting, late, servers = (
            [self._process_status(m, now) for m in members] for members in concerned
        )
        return explain(waiting, late, servers, self._undone(stuck))

    def _undone(self, stuck: list[_Member]) -> list[str]:
        """Who did not do what was decided, or has not told what it has, as far as those who wait may wait for that."""
        texts: list[str] = []
        for number, flow in self._flows.items():
            here = [m for m in stuck if m.wait is None or m.wait.flow == number]
            if flow.start is None or not here:
                continue
            if flow.aggregation is None:
                # Servers know whom to wait for, and were told who left.
                texts += [
                    f"{m.name} ({m.place}) has left, {m.last}: no server may wait for it"
                    for m in self._of("worker")
                    if m.left and m.lost is None
                ]
                if flow.proposals[0].mode == "average":
                    texts += _answered(number, stuck)
                continue
            decided, holders = flow.aggregation.step, sorted(flow.holders)
            # A server tells the newest step of all its models: who is behind is behind in this one.
            texts += [
                f"{server.name} ({server.place}) has not made step {decided} of model {number}, "
                "of which it was told whose gradients form the mean"
                for server in self._of("server")
                if server.hello.index in holders and server.step < decided
            ]
            for m in here:
                step = -1 if m.wait is None else m.wait.step
                silent = flow.aggregation.unreported(m.hello.index, step)
                names = _list([f"server {holders[server]}" for server in silent])
                if silent:
                    texts.append(
                        f"{names} {'has' if len(silent) == 1 else 'have'} not told that the gradient of {m.name} "
                        f"for step {step} of model {number} has landed"
                    )
        return texts

    def _late_for(self, stuck: list[_Member]) -> list[_Member]:
        """Whose gradients the steps lack that these are in: those of workers that are in none."""
        late: set[int] = set()
        for number, flow in self._flows.items():
            here = [m.hello.index for m in stuck if m.wait is None or m.wait.flow == number]
            if flow.aggregation is None:
                late |= {m.hello.index for m in self._of("worker") if here}
            elif any(map(flow.aggregation.awaits_others, here)):
                late |= {awaited.replica for awaited in flow.aggregation.waits_for()}
        return [
            m
            for m in self._of("worker")
            if m.hello.index in late and m.state != IN_STEP and self._takes_part(m)
        ]

    def _observe(self, observer: int, hello: Hello, now: float) -> Outgoing:
        refused = self._refuse_stranger(hello, "an observer")
        if refused is not None:
            return [(observer, refused)]
        self._asked.add(observer)
        return [(observer, self.status(now))]

    def _trace(self, tracer: int, hello: Hello) -> Outgoing:
        """Everybody is asked to answer whenever it can; nobody waits for that but who asked."""
        refused = self._refuse_stranger(hello, "a tracer")
        if refused is None and self._failure is not None:
            text = f"the job has failed: {self._failure.text}. With JAXRDMA_TRACE_DIR its processes have left files."
            refused = Refused("failed", text)
        if refused is None and len(self._tracers) >= _MOST_TRACERS:
            refused = Refused(
                "full", f"{_MOST_TRACERS} others ask for the same just now. Try again."
            )
        if refused is not None:
            return [(tracer, refused)]
        asked = [m for m in self._crew() if not m.left]
        self._asked.add(tracer)
        self._tracers[tracer] = {m.id for m in asked}
        begin: Outgoing = [(tracer, Tracing([m.name for m in asked]))]
        return begin + self._to(asked, SendTrace(tracer, max(0, hello.index)))

    def status(self, now: float) -> JobStatus:
        """The job as it is, for people."""
        if self._failure is not None:
            phase, text = "failed", self._failure.text
        elif not self._started:
            phase, text = "starting", self._barrier_text(now)
        elif self._saving_since is not None or self._shutdown_since is not None:
            phase, text = "ending", self.progress_text(now)
        else:
            waiting = [
                self._flow_text(n, f, now) for n, f in self._flows.items() if f.start is None
            ]
            text = "; ".join(waiting) or self._absence_text(now) or self._stall_text(now)
            phase = "training"
        processes = [
            self._process_status(m, now)
            for m in sorted(self._members.values(), key=lambda m: (m.hello.role, m.hello.index))
            if not m.follows and not m.gone
        ]
        models = [_model_status(number, flow) for number, flow in sorted(self._flows.items())]
        return JobStatus(
            job=self._job,
            attempt=self._attempt,
            phase=phase,
            text=text,
            seconds=now - self._began,
            transport=self._transport[0],
            why=self._transport[1],
            processes=processes,
            models=models,
            followers=len(self._followers()),
            refused=self._refused,
            spare=self._spare_places(),
        )

    def _spare_places(self) -> list[int]:
        """Places beyond those that the job needs, that nobody has now and nobody is waited for."""
        taken = {m.hello.index for m in self._of("worker") if not (m.gone and m.left)}
        return [i for i in range(self._expected["worker"], self._most["worker"]) if i not in taken]

    def _process_status(self, member: _Member, now: float) -> ProcessStatus:
        accepted = dropped = -1
        for flow in self._flows.values():
            if member.hello.role == "worker" and flow.aggregation is not None:
                counts = flow.aggregation.counts(member.hello.index)
                accepted = max(0, accepted) + counts.accepted
                dropped = max(0, dropped) + sum(counts.dropped.values())
        return ProcessStatus(
            name=member.name,
            host=member.hello.host,
            pid=member.hello.pid,
            incarnation=member.hello.incarnation,
            state="left" if member.left else member.state,
            doing=member.doing,
            wait=member.wait,
            seconds=now - member.since,
            step=member.step,
            step_seconds=member.pace.step_seconds,
            sent=member.pace.sent,
            received=member.pace.received,
            accepted=accepted,
            dropped=dropped,
            silent=now - member.heard,
            refused=member.refused,
        )

    def _texts(self, now: float) -> Outgoing:
        out: Outgoing = []
        if not self._started and now >= self._next_text:
            self._next_text = now + control.progress_pause(now - self._since)
            out += self._to(self._live(), Waiting(self._barrier_text(now)))
        for number, flow in self._flows.items():
            if flow.start is None and now >= flow.next_text:
                flow.next_text = now + control.progress_pause(now - flow.since)
                out += self._to(self._live(), Waiting(self._flow_text(number, flow, now)))
        for m in self._of("worker"):
            if m.early and not m.gone and now >= m.next_text:
                m.next_text = now + control.progress_pause(now - m.since)
                out.append((m.id, Waiting(self._early_text(m))))
        if now < self._next_reminder:
            return out
        if text := self._absence_text(now):
            self._next_reminder = now + _REMIND_SECONDS
            self.notes.append(text)
            return out + self._to(self._live(), Waiting(text))
        for member in self._of("worker"):
            # The others go on meanwhile.
            if self._knocks(member) and now - member.since >= control.PROGRESS_SECONDS:
                self._next_reminder = now + _REMIND_SECONDS
                text = f"waiting for {self._admission_text(member)}"
                self.notes.append(text)
                out.append((member.id, Waiting(text)))
        return out

    def progress_text(self, now: float) -> str:
        """Whom the start-up, or the end, waits for; empty in between."""
        if self._rescuer is not None:
            late = _list(self.waits_for())
            return f"waiting for {late} to save what is left, {now - self._failed_at:.0f} s"
        if self._saving_since is not None and self.saving and self._failure is None:
            seconds = now - self._saving_since
            return f"waiting for {_list(self.waits_for())} to save the last step, {seconds:.0f} s"
        return "" if self._started else self._barrier_text(now)

    def _barrier_text(self, now: float) -> str:
        def have(role: str) -> str:
            count = self._expected[role]
            there = sum(not m.spare for m in self._of(role))
            return f"{there} of {count} {role}{'s' if count > 1 else ''}"

        text = (
            f"have {have('worker')} and {have('server')}, waiting for {_list(self._missing())}"
            f"{' to let the workers in' if self._tokens else ''}, {now - self._since:.0f} s"
        )
        if self._refusal is not None:
            at, why = self._refusal
            text += f" (refused {now - at:.0f} s ago: {why})"
        return text

    def _flow_text(self, number: int, flow: _Flow, now: float) -> str:
        seconds = f"{now - flow.since:.0f} s"
        if flow.agreed:
            waits = flow.savepoints.waits_for()
            late = [m.name for m in self._of("server") if m.hello.index in waits]
            return (
                f"model {number}: waiting for {_list(late)} to {flow.savepoints.doing()}, {seconds}"
            )
        late = [
            f"{m.name} ({m.state or 'no news'}{m.joins}, {m.last})"
            for m in self._needed()
            if m.hello.index not in flow.proposals
        ]
        have = f"{len(flow.proposals)} of {self._expected['worker']}"
        return (
            f"model {number}: {have} workers have called init, waiting for {_list(late)}, {seconds}"
        )

    def _early_text(self, member: _Member) -> str:
        """For whom a worker in a spare place waits, which has called init for a model that has not begun."""
        number = min(member.early)
        flow = self._flows.get(number)
        if flow is not None and flow.agreed:
            waits = flow.savepoints.waits_for()
            late = [m.name for m in self._of("server") if m.hello.index in waits]
            return f"model {number}: waiting for {_list(late)} to {flow.savepoints.doing()}"
        have = flow.proposals if flow is not None else {}
        late = [m.name for m in self._needed() if m.hello.index not in have]
        return f"model {number} has not begun: waiting for {_list(late)} to call init for it"

    # --- members ---

    def _of(self, role: str) -> list[_Member]:
        """Those in the places of that role, by index: who is gone too, until another takes its place."""
        members = (m for (kind, _), m in self._places.items() if kind == role)
        return sorted(members, key=lambda m: m.hello.index)

    def _needed(self) -> list[_Member]:
        """Workers in the places that the job needed to begin."""
        return [m for m in self._of("worker") if not m.spare]

    def _live(self) -> list[_Member]:
        return [m for m in self._members.values() if not m.gone]

    def _essential(self) -> list[_Member]:
        """Those that live, but for followers."""
        return [m for m in self._live() if not m.follows]

    def _followers(self) -> list[_Member]:
        """Those that live, and take."""
        return [m for m in self._live() if m.follows]

    def _crew(self) -> list[_Member]:
        """Servers and workers that live."""
        return [m for m in self._essential() if not m.launches]

    def _missing(self) -> list[str]:
        if self._tokens:
            return [m.name for m in self._of("server") if m.id not in self._admit]
        return [
            f"{role} {i}"
            for role in ROLES
            for i in range(self._expected[role])
            if (role, i) not in self._places
        ]

    def _to(
        self, members: Iterable[_Member], message: CoordinatorMessage, but: _Member | None = None
    ) -> Outgoing:
        return [(m.id, message) for m in members if m is not but]


def _flaw(proposal: FlowProposal, workers: int, *, grows: bool) -> str | None:
    """Why no worker of ours proposes this, or None: all that follows relies on a policy and sizes that can be."""
    try:
        policy = from_wire(proposal.policy)
        if policy.complete(workers) != policy:
            return f"its policy is not complete: {proposal.policy}"
        if grows and (policy.on_loss == "fail" or proposal.mode in ("average", "table")):
            return f"to a job with mode {proposal.mode!r} and {policy.describe()} no worker can be added"
    except ConfigError as error:
        return str(error)
    if proposal.mode not in ("update", "average", "ema", "table"):
        return f"there is no mode {proposal.mode!r}"
    if sum(math.prod(leaf.shape) for leaf in proposal.leaves) > _MOST_PARAMETERS:
        return f"it has more than {_MOST_PARAMETERS:.0e} parameters"
    return None


def _difference(a: FlowProposal, b: FlowProposal, a_name: str, b_name: str) -> str | None:
    leaves = compare_leaves(a.leaves, b.leaves, a_name, b_name)
    if leaves is not None:
        return leaves
    for name, what in (
        ("mode", "the mode"),
        ("policy", "the policy"),
        ("update_fingerprint", "the update"),
        ("digest", "the plan"),
    ):
        mine, theirs = getattr(a, name), getattr(b, name)
        if name == "policy":
            mine, theirs = from_wire(mine).describe(), from_wire(theirs).describe()
        if mine != theirs:
            return f"{what} differs: {a_name} has {mine!r}, {b_name} has {theirs!r}"
    return None


def _name(contribution: Contribution) -> GradientName:
    return GradientName(contribution.replica, contribution.incarnation, contribution.sequence)


def _agreement(
    proposal: FlowProposal, program: bytes | None, mirrored: bytes | None = None
) -> FlowAgreed:
    return FlowAgreed(
        flow=proposal.flow,
        leaves=proposal.leaves,
        digest=proposal.digest,
        mode=proposal.mode,
        policy=proposal.policy,
        update_fingerprint=proposal.update_fingerprint,
        program=program,
        averaged=proposal.averaged,
        mirrored=mirrored,
    )


def _model_status(number: int, flow: _Flow) -> ModelStatus:
    proposal = next(iter(flow.proposals.values()))
    return ModelStatus(
        flow=number,
        state="proposed" if not flow.agreed else "agreed" if flow.start is None else "started",
        mode=proposal.mode,
        policy=from_wire(proposal.policy).describe(),
        leaves=len(proposal.leaves),
        parameters=sum(math.prod(leaf.shape) for leaf in proposal.leaves),
    )


def _deserted(member: _Member, flow: int, waiting: str) -> str:
    went = "left" if member.lost is None else "was lost"
    return (
        f"{member.name} ({member.place}) {went}, {member.last}, and never called init "
        f"for model {flow}, for which {waiting} waits"
    )


def _answered(flow: int, stuck: Sequence[_Member]) -> list[str]:
    """Of what is averaged servers count no steps: but who is in one has had every answer to those before."""
    waits = [(m, m.wait) for m in stuck if m.wait is not None and m.wait.flow == flow]
    if not waits:
        return []
    ahead, latest = max(waits, key=lambda each: each[1].step)
    return [
        f"server {wait.server} has answered step {wait.step} of model {flow} to {ahead.name}: the answer to "
        f"{member.name} is lost, or on its way"
        for member, wait in waits
        if wait.step < latest.step
    ]


def _list(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class _Stream:
    """What waits for the other end of a stream."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()  # None: the end
        self.writing: asyncio.Future[None] | None = None
        self.why = ""  # it was ended, if it was

    async def write(self, context: Any) -> None:
        while (message := await self.waiting.get()) is not None:
            if isinstance(message, Alive | Welcome):
                message = msgspec.structs.replace(message, time_ns=time.time_ns())
            await context.write(control.encode(message))
            if isinstance(message, Refused):
                break

    def end(self, why: str) -> None:
        """At once, whatever still waits."""
        self.why = why
        if self.writing is not None:
            self.writing.cancel()


class Coordinator:
    """A `Membership` behind a gRPC port. Lives in one event loop; a member is a stream.

    **Arguments:**

    - `membership`: the state machine; nobody else may use it.
    - `listen`: "host:port"; port 0 takes a free one.
    - `say`: prints one line of what happens.
    - `on_failure`: called once, as soon as the job has failed.
    - `on_saving`: called once, with the most seconds that may take, when all workers have left and the last step is
      being saved.
    - `on_lost`: called for each process whose loss the job bears.
    - `on_rescue`: called once, with the most seconds that may take, when the job has failed and the servers that are
      left save what they hold. `on_failure` follows.
    - `identity`: what it speaks TLS with, and asks everybody for. `None`: it does not.
    """

    def __init__(
        self,
        membership: Membership,
        listen: str,
        say: Callable[[str], None] = control.say_on_stderr,
        on_failure: Callable[[JobFailed], None] = lambda failure: None,
        on_saving: Callable[[float], None] = lambda seconds: None,
        on_lost: Callable[[MemberLost], None] = lambda lost: None,
        on_rescue: Callable[[float], None] = lambda seconds: None,
        identity: Identity | None = None,
    ) -> None:
        self._membership = membership
        self._listen = listen
        self._say = say
        self._on_failure = on_failure
        self._on_saving = on_saving
        self._on_lost = on_lost
        self._on_rescue = on_rescue
        self._identity = identity
        self._told_saving = self._told_rescue = False
        self._streams: dict[int, _Stream] = {}
        self._next_id = 0
        self._told_transport = False
        self._changed = asyncio.Event()
        self._server: Any = None

    async def start(self) -> str:
        """Listen. Returns the address, with the port that was taken.

        **Raises:** `ConfigError` with the errno's text if the address cannot be had.
        """
        host, port = parse_address(self._listen, "listen address")
        # gRPC's Python package has no type information.
        options = _server_options(self._membership.most)
        self._server = cast(Any, grpc.aio).server(options=options)
        handler: Any = cast(Any, grpc).stream_stream_rpc_method_handler(self._attend)
        service, method = control.METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (cast(Any, grpc).method_handlers_generic_handler(service, {method: handler}),)
        )
        try:
            taken: int = self._open_port()
        except RuntimeError:
            taken = 0
        if taken == 0:
            raise ConfigError(
                f"the coordinator cannot listen at {self._listen}: {_why_not(host, port)}"
            )
        await self._server.start()
        self._membership.address = format_address(host, taken)
        return self._membership.address

    def _open_port(self) -> int:
        """The port's number; 0, or `RuntimeError`, if it cannot be had."""
        identity = self._identity
        if identity is None:
            return self._server.add_insecure_port(self._listen)
        credentials = cast(Any, grpc).dynamic_ssl_server_credentials(
            _certificates(identity), self._renew, require_client_authentication=True
        )
        return self._server.add_secure_port(self._listen, credentials)

    def _renew(self) -> Any:
        """On gRPC's threads, before each handshake: the certificate in the files, if that is another one by now.

        A job may outlive the certificate with which it began, and its coordinator must not be lost for that.
        """
        assert self._identity is not None
        try:
            renewed = self._identity.renewed()
        except ConfigError as error:
            self._say(f"goes on with the certificate that it has: {error}")
            return None
        if renewed is None:
            return None
        self._identity = renewed
        return _certificates(renewed)

    async def run(self) -> JobFailed | None:
        """Until the job is over. Returns why it failed, or None."""
        told = False
        # Since when for somebody, and when that was last said.
        waits = said = time.monotonic()
        while not self._membership.is_over(time.monotonic()):
            ended = self._membership.failure is not None and not self._membership.rescuing
            if ended and not told:
                told = True
                assert self._membership.failure is not None
                self._on_failure(self._membership.failure)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._membership.next_tick)
            now = time.monotonic()
            self._send(self._membership.tick(now))
            self._changed.clear()  # after its own messages, which are no news: this loop would never sleep
            text = self._membership.progress_text(now)
            if not text:
                waits = said = now
            elif now - said >= control.progress_pause(now - waits):
                said = now
                self._say(text)
        failure = self._membership.failure
        if failure is not None and not told:
            self._on_failure(failure)
        return failure

    async def stop(self) -> None:
        """End every stream, after what is queued for it, and close the port."""
        for stream in self._streams.values():
            stream.waiting.put_nowait(None)
        if self._server is not None:
            await self._server.stop(0.5)

    def interrupt(self, why: str) -> None:
        """Fail the job because this process is told to stop."""
        self._send(self._membership.interrupt(why, time.monotonic()))

    async def _attend(self, requests: AsyncIterator[bytes], context: Any) -> None:
        secret = dict(context.invocation_metadata() or ()).get(control.SECRET_KEY, b"")
        refused = self._membership.knock(secret, time.monotonic())
        if refused is not None:
            self._send([])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await context.write(control.encode(refused))
            return
        member, self._next_id = self._next_id, self._next_id + 1
        stream = self._streams[member] = _Stream()
        stream.writing = writing = asyncio.ensure_future(stream.write(context))
        # If both ends go at once, nobody else asks how that ended.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        reading = asyncio.ensure_future(self._read(member, requests, stream))
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            # Who takes nothing would otherwise keep what waits for it.
            await asyncio.wait([writing], timeout=_LEAVING_SECONDS)
            if writing.done() and not writing.cancelled():
                writing.result()
        finally:
            # No await in here: a cancelled stream must be accounted for at once.
            reading.cancel()
            writing.cancel()
            self._streams.pop(member, None)
            self._send(self._membership.lost(member, stream.why, time.monotonic()))

    async def _read(
        self,
        member: int,
        requests: AsyncIterator[bytes],
        stream: _Stream,
    ) -> None:
        """Feed the messages of one stream to the membership; at the end, or at a bad one, let the stream end."""
        why = ""
        known = False
        try:
            async with asyncio.timeout(_HELLO_SECONDS) as patience:
                async for data in requests:
                    patience.reschedule(None)
                    message = control.decode_client(data)
                    known = True
                    out = self._membership.handle(member, message, time.monotonic())
                    self._send(out)
                    refused = any(to == member and isinstance(m, Refused) for to, m in out)
                    if refused or isinstance(message, Bye):
                        break
        except TimeoutError:
            why = "it never said hello"
        except msgspec.MsgspecError as error:
            why = f"it sent a message that cannot be read ({error})"
        except Exception as error:  # a mistake of ours, or gRPC's word on what is too large
            why = f"what it sent cannot be dealt with ({error!r})"
        if not known:
            self._membership.turn_away(why or "it ended without a word", time.monotonic())
        self._send(self._membership.lost(member, why, time.monotonic()))
        stream.waiting.put_nowait(None)

    def _send(self, out: Outgoing) -> None:
        notes, self._membership.notes = self._membership.notes, []
        for note in notes:
            self._say(note)
        if self._membership.saving and not self._told_saving:
            self._told_saving = True
            self._on_saving(LAST_SAVE_SECONDS)
        if self._membership.rescuing and not self._told_rescue:
            self._told_rescue = True
            self._on_rescue(RESCUE_SECONDS)
        # Everybody is told the same.
        for lost in {m.index: m for _, m in out if isinstance(m, MemberLost)}.values():
            self._on_lost(lost)
        for member, message in out:
            if isinstance(message, Refused) and message.kind != "early":  # which comes again soon
                self._say(f"refused: {message.text}")
            if isinstance(message, Roster) and not self._told_transport:
                self._told_transport = True
                if message.why != ASKED:  # or everybody knows
                    self._say(f"transport {message.transport}: {message.why}")
            stream = self._streams.get(member)
            if stream is None:
                continue
            if stream.waiting.qsize() < self._membership.most_waiting(member):
                stream.waiting.put_nowait(message)
            else:
                del self._streams[member]
                stream.end(
                    f"it does not take what it is sent: {stream.waiting.qsize()} messages wait"
                )
        self._changed.set()


def _certificates(identity: Identity) -> Any:
    return cast(Any, grpc).ssl_server_certificate_configuration(
        [(identity.key, identity.cert)], identity.ca
    )


def _server_options(members: int) -> tuple[tuple[str, int], ...]:
    """gRPC's options for the port of a job of so many processes: bounds for those that are none of them.

    Who does not speak HTTP/2 within 10 s, or speaks it and calls nothing for 10 s, is disconnected; beyond the number
    of connections nobody is let in. A stream that is open keeps its connection.
    """
    most = 2 * members + MOST_FOLLOWERS + _MOST_STRANGERS
    return (
        *control.GRPC_OPTIONS,
        ("grpc.max_concurrent_streams", 4),  # by connection; a process of ours needs one
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 10_000),
        ("grpc.max_allowed_incoming_connections", most),
    )


def _why_not(host: str, port: int) -> str:
    """Why an address cannot be had: gRPC does not tell, a plain socket does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError as error:
        return why_not_to_listen(error, host, port)
    return "no reason given"


def run_coordinator(
    listen: str,
    num_workers: int,
    num_servers: int,
    *,
    most_workers: int | None = None,
    secret: str = "",
    job: str = "jaxrdma",
    attempt: int = 0,
    connect_timeout: float = 300.0,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    stall_warning: float = STALL_WARNING,
    step_timeout: float = STEP_TIMEOUT,
    report: Callable[[str], None] = lambda address: None,
    on_failure: Callable[[JobFailed], None] = lambda failure: None,
    on_saving: Callable[[float], None] = lambda seconds: None,
    on_lost: Callable[[MemberLost], None] = lambda lost: None,
    on_rescue: Callable[[float], None] = lambda seconds: None,
    say: Callable[[str], None] = control.say_on_stderr,
    metrics: tuple[str, int] | None = None,
    tls: TlsFiles | None = None,
) -> int:
    """Coordinate one job, to its end.

    **Arguments:**

    - `listen`: "host:port"; port 0 takes a free one. Beyond loopback only with a secret.
    - `most_workers`: as in `ClusterSpec`.
    - `report`: called with the address once the port is open.
    - `on_failure`, `on_saving`, `on_lost`, `on_rescue`: as of `Coordinator`.
    - `metrics`: host and port at which Prometheus is told the job's numbers. `None`: nowhere.
    - `tls`: the files to speak TLS with; who has no certificate of their CA is not let in. `None`: without.

    **Returns:** the exit code: 0 if all workers left and all servers ended, 1 if the job failed, 128+n on signal n.

    **Raises:** `ConfigError`.
    """
    check_listen(listen, secret)
    identity = None if tls is None else Identity(tls, f"the coordinator at {listen}", serves=True)

    async def main() -> int:
        membership = Membership(
            num_workers,
            num_servers,
            most_workers=most_workers,
            job=job,
            attempt=attempt,
            secret=secret,
            now=time.monotonic(),
            connect_timeout=connect_timeout,
            heartbeat_timeout=heartbeat_timeout,
            stall_warning=stall_warning,
            step_timeout=step_timeout,
        )

        def failed(failure: JobFailed) -> None:
            say(f"the job failed: {failure.text}")
            on_failure(failure)

        coordinator = Coordinator(
            membership, listen, say, failed, on_saving, on_lost, on_rescue, identity
        )
        code = 1

        def stop(number: signal.Signals) -> None:
            nonlocal code
            code = 128 + number
            coordinator.interrupt(number.name)

        # Of a signal to all processes of a job: here are no records to be written.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, stop, number)
        with contextlib.ExitStack() as stack:
            if metrics is not None:
                from jaxrdma.metrics import Endpoint, coordinator_registry

                async def status() -> JobStatus:
                    return membership.status(time.monotonic())

                def ask() -> JobStatus:  # on the endpoint's threads
                    asked = asyncio.run_coroutine_threadsafe(status(), loop)
                    return asked.result(_METRICS_SECONDS)

                endpoint = stack.enter_context(Endpoint(metrics, coordinator_registry(ask)))
                say(f"coordinator: metrics at {endpoint.url}")
            report(await coordinator.start())
            failure = await coordinator.run()
            await coordinator.stop()
        return 0 if failure is None else code

    return asyncio.run(main())
