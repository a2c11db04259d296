"""The coordinator: who belongs to the job, what was agreed, and the first cause of its failure.

`Membership` decides everything and does nothing else: messages and times in, messages out, no clock and no I/O.
`Coordinator` drives it with an asyncio gRPC server. Nothing here imports JAX.
"""

import asyncio
import contextlib
import hmac
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
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
from jaxrdma.cluster import ROLES, check_listen, format_address, parse_address
from jaxrdma.control import (
    Admitting,
    Alive,
    Answered,
    Bye,
    ClientMessage,
    CoordinatorMessage,
    Decided,
    Dropped,
    Ended,
    Failed,
    FlowAgreed,
    FlowProposal,
    FlowReady,
    FlowRejected,
    GradientName,
    Heartbeat,
    Hello,
    JobFailed,
    Landed,
    Left,
    Mean,
    MemberLeft,
    Offer,
    Refused,
    Restored,
    Roster,
    SaveCommitted,
    SaveMissed,
    ServerEntry,
    ShardSaved,
    Shutdown,
    Waiting,
    Welcome,
    WorkerEntry,
)
from jaxrdma.errors import ConfigError
from jaxrdma.plan import compare_leaves
from jaxrdma.policy import from_wire
from jaxrdma.savepoints import LAST_SAVE_SECONDS, Answer, Orders, Savepoints

import grpc  # isort: skip  # after control, which tells it to be quiet
import grpc.aio  # isort: skip

ROOT_CAUSE_SECONDS = (
    1.0  # how long the report of a lost connection waits for the death that explains it
)
LINGER_SECONDS = 5.0  # after a failure, for the members to hear of it and go
SHUTDOWN_SECONDS = 8.0  # for the servers to say goodbye when all workers have left
ASKED = "asked for"  # why a transport is used that all processes ask for
TOKEN_BYTES = 16  # as native/fabric/fabric.h wants them
_ALIVE_SECONDS = 1.0
_TICK_SECONDS = 0.25
_PAUSE_SECONDS = 2.0  # a tick this late means that the coordinator itself was stopped
_HELLO_SECONDS = 10.0
_LAUNCHER_SECONDS = 1.0  # of a machine that falls silent, its workers and servers are named rather than its launcher

Outgoing = list[tuple[int, CoordinatorMessage]]


@dataclass
class _Member:
    id: int
    hello: Hello
    heard: float
    step: int = -1
    state: str = ""
    address: str = ""  # of a server that lets the workers in: where
    left: bool = False  # said that it is done
    gone: bool = False  # its stream has ended, or is about to
    confessed: bool = False  # sent Failed: its end is no news

    @property
    def launches(self) -> bool:
        """Whether this is a launcher: it speaks for its machine, and has no place among workers and servers."""
        return self.hello.role == "launcher"

    @property
    def name(self) -> str:
        return "launcher" if self.launches else f"{self.hello.role} {self.hello.index}"

    @property
    def place(self) -> str:
        return f"{self.hello.host}, pid {self.hello.pid}"

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
    started: bool = False
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

    **Arguments:**

    - `num_workers`, `num_servers`, `job`, `secret`: as in `ClusterSpec`.
    - `now`: the time of the start, in seconds, as all other times.
    - `connect_timeout`: from the first arrival (or the start) until everybody must be there.
    - `heartbeat_timeout`: silence after which a member counts as lost.
    - `token`: makes the secrets between a worker and a server.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        *,
        job: str = "jaxrdma",
        secret: str = "",
        now: float = 0.0,
        connect_timeout: float = 300.0,
        heartbeat_timeout: float = 12.0,
        token: Callable[[], bytes] = lambda: secrets.token_bytes(TOKEN_BYTES),
    ) -> None:
        self._expected = {"worker": num_workers, "server": num_servers}
        self._job = job
        self._secret = secret
        self._connect_timeout = connect_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._token = token
        self._members: dict[int, _Member] = {}
        self._places: dict[tuple[str, int], _Member] = {}
        self._flows: dict[int, _Flow] = {}
        self._since = now
        self._next_text = now + control.PROGRESS_SECONDS
        self._next_alive = now + _ALIVE_SECONDS
        self._last_tick = now
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
        self.notes: list[str] = []  # lines for people; whoever prints them takes them out

    @property
    def saving(self) -> bool:
        """Whether all workers have left, and the last step of a model is being saved."""
        return self._saving_since is not None and any(
            flow.savepoints.busy for flow in self._flows.values()
        )

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
        if self._failure is not None:
            return not self._live() or now - self._failed_at >= LINGER_SECONDS
        return self._shutdown_since is not None and all(m.gone for m in self._of("server"))

    def waits_for(self) -> list[str]:
        """Whom the present state waits for, members and absent ones, by name. Empty if the job is over."""
        if self._failure is not None:
            return [m.name for m in self._live()]
        if not self._started:
            return self._missing()
        if self._shutdown_since is not None:
            return [m.name for m in self._of("server") if not m.gone]
        if self.saving:
            late = {s for flow in self._flows.values() for s in flow.savepoints.waits_for()}
            return [m.name for m in self._of("server") if m.hello.index in late]
        return [m.name for m in self._of("worker") if not m.left]

    def handle(self, member_id: int, message: ClientMessage, now: float) -> Outgoing:
        """What a message of the stream `member_id` leads to."""
        if isinstance(message, Hello) and member_id not in self._members:
            return self._hello(member_id, message, now)
        member = self._members.get(member_id)
        if member is None:
            return [
                (member_id, Refused("protocol", "the first message of a process must be its hello"))
            ]
        if member.gone:
            return []
        member.heard = now
        if self._failure is not None:
            member.gone = isinstance(message, Bye)
            return []
        match message:
            case Heartbeat():
                member.step, member.state = max(member.step, message.step), message.state
                return []
            case Failed():
                return self._member_failed(member, message, now)
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
                return self._admitting(member, message.address)
            case Landed():
                return self._landed(member, message, now)
            case FlowReady() | Restored() | ShardSaved() | SaveMissed() | SaveCommitted():
                return self._answer(member, message, now)
            case Hello():
                return self._broken(member, "said hello twice", now)

    def lost(self, member_id: int, why: str, now: float) -> Outgoing:
        """The stream `member_id` has ended, `why` if that is known. Nothing new if its end was announced."""
        member = self._members.get(member_id)
        if member is None or member.gone:
            return []
        member.gone = True
        if member.left and member.hello.role == "worker":
            return []
        if member.confessed:
            return self._confirm_suspect(member, now)
        text = f"{member.name} ({member.place}) died: {why or 'its connection ended without a goodbye'}, {member.last}"
        return self._fail("died", text, member, now)

    def interrupt(self, why: str, now: float) -> Outgoing:
        """The coordinator itself is told to stop."""
        return self._fail("interrupted", f"the coordinator was stopped: {why}", None, now)

    def tick(self, now: float) -> Outgoing:
        """What the passing of time leads to. To be called several times a second."""
        if now - self._last_tick > _PAUSE_SECONDS:
            # It was the coordinator that stood still, or its machine: nobody could have been heard meanwhile.
            for member in self._live():
                member.heard = now
        self._last_tick = now
        out: Outgoing = []
        if self._failure is None:
            out = self._overdue(now)
        if self._failure is None:
            out += self._texts(now)
            for flow in self._flows.values():
                out += self._carry_out(flow, flow.savepoints.tick(now), now)
        if now >= self._next_alive:
            self._next_alive = now + _ALIVE_SECONDS
            out += self._to(self._live(), Alive())
        return out

    # --- joining ---

    def _hello(self, member_id: int, hello: Hello, now: float) -> Outgoing:
        refused = self._refuse(hello)
        if refused is not None:
            if refused.kind not in (
                "secret",
                "job",
            ):  # of a stranger, no word is repeated to others
                self._refusal = (now, refused.text)
            return [(member_id, refused)]
        if not self._members:
            self._since = now
            self._next_text = now + control.PROGRESS_SECONDS
        member = _Member(member_id, hello, now)
        self._members[member_id] = member
        welcome = Welcome(self._expected["worker"], self._expected["server"])
        out: Outgoing = [(member_id, welcome)]
        if member.launches:
            return out + self._dismiss()
        self._places[hello.role, hello.index] = member
        if not self._missing():
            names = {m.name: m.hello.offer for role in ROLES for m in self._of(role)}
            transport, why = decide_transport(names)
            if not transport:
                return [*out, *self._fail("transport", why, None, now)]
            self._transport = transport, why
            self._tokens = {
                (w.hello.index, s.hello.index): self._token()
                for w in self._of("worker")
                for s in self._of("server")
            }
            out += [(m.id, self._roster(m)) for m in self._live() if m.hello.role == "server"]
        return out

    def _admitting(self, member: _Member, address: str) -> Outgoing:
        """Workers may knock once every server knows them."""
        member.address = address
        self._admit.add(member.id)
        if any(m.id not in self._admit for m in self._of("server")):
            return []
        self._started = True
        return [(m.id, self._roster(m)) for m in self._live() if m.hello.role == "worker"]

    def _refuse(self, hello: Hello) -> Refused | None:
        launches = hello.role == "launcher"
        who = "launcher" if launches else f"{hello.role} {hello.index}"
        who += f" ({hello.host}, pid {hello.pid})"
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            came = "a wrong one" if hello.secret else "none"
            return Refused(
                "secret",
                f"the job's secret was expected, {came} came. Set JAXRDMA_SECRET alike on every process.",
            )
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
        if self._failure is not None:
            return Refused(
                "failed", f"{who} comes too late, the job has failed: {self._failure.text}"
            )
        if hello.role not in ROLES and not launches:
            return Refused("role", f"{who}: expected a role of {' or '.join(ROLES)}")
        for name, role in (("num_workers", "worker"), ("num_servers", "server")):
            theirs, ours = hello.settings.get(name), self._expected[role]
            if theirs is not None and theirs != ours:
                return Refused(
                    "settings",
                    f"{who} expects {theirs} {role}s, the coordinator {ours}. "
                    f"Set JAXRDMA_{name.upper()} alike on every process.",
                )
        count = self._expected.get(hello.role, hello.index + 1)
        if not 0 <= hello.index < count:
            return Refused(
                "index",
                f"{who}: there are {count} {hello.role}s, so the index must be 0 to {count - 1}.",
            )
        first = self._places.get((hello.role, hello.index))
        if first is not None:
            return Refused("duplicate", self._duplicate(first, who))
        for member in self._members.values():
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
            if launches or member.launches:
                continue
            theirs, ours = hello.offer.wanted, member.hello.offer.wanted
            if {theirs, ours} == {"tcp", "verbs"}:
                return Refused(
                    "settings",
                    f"{who} asks for transport {theirs}, {member.name} ({member.place}) for {ours}. "
                    "Set JAXRDMA_TRANSPORT alike on every process, or auto.",
                )
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
            ],
            *self._transport,
        )

    # --- flows ---

    def _proposal(self, member: _Member, proposal: FlowProposal, now: float) -> Outgoing:
        index = member.hello.index
        if member.hello.role != "worker" or member.left or not self._started:
            return self._broken(
                member, "proposed a model, which only a worker of a complete job does", now
            )
        number = proposal.flow
        flow = self._flows.get(number)
        if flow is None:
            savepoints = Savepoints(number, self._expected["server"])
            flow = _Flow(now, now + control.PROGRESS_SECONDS, savepoints)
            self._flows[number] = flow
        if index in flow.proposals:
            return self._broken(member, f"proposed model {number} twice", now)
        for other, theirs in sorted(flow.proposals.items()):
            difference = _difference(proposal, theirs, member.name, f"worker {other}")
            if difference is not None:
                return self._reject(number, difference, member, now)
        flow.proposals[index] = proposal
        deserter = next(
            (m for m in self._of("worker") if m.left and m.hello.index not in flow.proposals), None
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
        flow.since, flow.next_text = now, now + control.PROGRESS_SECONDS
        out: Outgoing = []
        for m in self._crew():
            program = programs[m.hello.index] if programs and m.hello.role == "server" else None
            out.append((m.id, _agreement(proposal, program)))
        # Programs can be large, and nobody asks for them again.
        flow.proposals = {
            w: msgspec.structs.replace(p, programs=[]) for w, p in flow.proposals.items()
        }
        return out

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
            flow.started = True
            out += self._to(self._live(), orders.start)
            step = orders.start.restored or 0
            out += self._begin_to_aggregate(orders.start.flow, flow, step, now)
        return out

    def _begin_to_aggregate(self, number: int, flow: _Flow, step: int, now: float) -> Outgoing:
        policy = from_wire(flow.proposals[0].policy)
        if policy.held == 0 or not flow.holders:
            return []
        workers = self._of("worker")
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

    def _decided(self, number: int, flow: _Flow, decisions: Decisions, now: float) -> Outgoing:
        """What servers are told of decisions; a job that cannot go on fails."""
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
                case Fail(text):
                    return self._fail("left", f"model {number}: {text}", None, now)
                case _:
                    pass  # an epoch; or a worker that begins, which it does by itself
        if not told:
            return []
        holders = [m for m in self._of("server") if m.hello.index in flow.holders and not m.gone]
        return self._to(holders, Decided(number, told))

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
        if not self._started:
            text = f"{member.name} ({member.place}) gave up before everybody was there"
            return self._fail("left", text, member, now)
        out = self._to(self._live(), MemberLeft("worker", member.hello.index, step), but=member)
        for number, flow in self._flows.items():
            if not flow.agreed and member.hello.index not in flow.proposals:
                waiting = f"worker {min(flow.proposals)}"
                return out + self._fail("left", _deserted(member, number, waiting), member, now)
            if flow.aggregation is not None:
                decisions = flow.aggregation.leaves(member.hello.index, member.hello.incarnation)
                out += self._decided(number, flow, decisions, now)
        if all(m.left for m in self._of("worker")):
            self._saving_since = now
            for flow in self._flows.values():
                out += self._carry_out(flow, flow.savepoints.finish(), now)
            out += self._shut_down_if_saved(now)
        return out

    def _shut_down_if_saved(self, now: float) -> Outgoing:
        """The servers may end when all workers have left, and the last step of each model is saved."""
        if self._saving_since is None or self._shutdown_since is not None or self.saving:
            return []
        self._shutdown_since = now
        return self._to([m for m in self._live() if m.hello.role == "server"], Shutdown())

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
        if ended.well and member is not None:
            return []
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
        self._failure = JobFailed("died", text, ended.role, ended.index)
        self._failed_at = now
        return self._to(self._live(), self._failure)

    def _member_failed(self, member: _Member, message: Failed, now: float) -> Outgoing:
        member.confessed = True
        verb = {
            "raised": "raised",
            "connection": "reports",
            "left": "reports",
            "interrupted": "was",
        }.get(message.kind, "failed")
        text = f"{member.name} ({member.place}) {verb}: {message.text}"
        failure = JobFailed(message.kind, text, member.hello.role, member.hello.index)
        if message.kind != "connection":
            return self._fail(message.kind, text, member, now)
        if self._suspect is None:
            self._suspect = (now + ROOT_CAUSE_SECONDS, failure, member)
        return []

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
        return self._to(self._live(), failure, but=knows)

    def _set_failure(self, kind: str, text: str, culprit: _Member | None, now: float) -> JobFailed:
        role, index = (
            ("coordinator", -1) if culprit is None else (culprit.hello.role, culprit.hello.index)
        )
        self._failure = JobFailed(kind, text, role, index)
        self._failed_at = now
        return self._failure

    # --- time ---

    def _overdue(self, now: float) -> Outgoing:
        for member in self._live():
            silent = now - member.heard - (_LAUNCHER_SECONDS if member.launches else 0.0)
            if silent > self._heartbeat_timeout and not (
                member.left and member.hello.role == "worker"
            ):
                text = (
                    f"{member.name} ({member.place}) has been silent for {silent:.0f} s, {member.last}: "
                    "it was stopped, or its machine or the network to it is gone"
                )
                return self._fail("silent", text, member, now)
        if self._suspect is not None and now >= self._suspect[0]:
            _, failure, accused = self._suspect
            return self._fail(failure.kind, failure.text, accused, now)
        if not self._started and now - self._since >= self._connect_timeout:
            return self._fail(
                "timeout", f"the job did not start: {self._barrier_text(now)}", None, now
            )
        if self._saving_since is not None and self.saving:
            seconds = now - self._saving_since
            if seconds >= LAST_SAVE_SECONDS:
                text = (
                    f"{_list(self.waits_for())} did not save the last step within {seconds:.0f} s"
                )
                return self._fail("timeout", text, None, now)
        if self._shutdown_since is not None and now - self._shutdown_since >= SHUTDOWN_SECONDS:
            late = next((m for m in self._of("server") if not m.gone), None)
            if late is not None:
                text = f"{late.name} ({late.place}) did not end within {SHUTDOWN_SECONDS:.0f} s of the last worker"
                return self._fail("timeout", text, late, now)
        return []

    def _texts(self, now: float) -> Outgoing:
        out: Outgoing = []
        if not self._started and now >= self._next_text:
            self._next_text = now + control.PROGRESS_SECONDS
            out += self._to(self._live(), Waiting(self._barrier_text(now)))
        for number, flow in self._flows.items():
            if not flow.started and now >= flow.next_text:
                flow.next_text = now + control.PROGRESS_SECONDS
                out += self._to(self._live(), Waiting(self._flow_text(number, flow, now)))
        return out

    def progress_text(self, now: float) -> str:
        """Whom the start-up, or the end, waits for; empty in between."""
        if self._saving_since is not None and self.saving and self._failure is None:
            seconds = now - self._saving_since
            return f"waiting for {_list(self.waits_for())} to save the last step, {seconds:.0f} s"
        return "" if self._started else self._barrier_text(now)

    def _barrier_text(self, now: float) -> str:
        def have(role: str) -> str:
            count = self._expected[role]
            return f"{len(self._of(role))} of {count} {role}{'s' if count > 1 else ''}"

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
            f"{m.name} ({m.state or 'no news'}, {m.last})"
            for m in self._of("worker")
            if m.hello.index not in flow.proposals
        ]
        have = f"{len(flow.proposals)} of {self._expected['worker']}"
        return (
            f"model {number}: {have} workers have called init, waiting for {_list(late)}, {seconds}"
        )

    # --- members ---

    def _of(self, role: str) -> list[_Member]:
        return sorted(
            (m for m in self._members.values() if m.hello.role == role), key=lambda m: m.hello.index
        )

    def _live(self) -> list[_Member]:
        return [m for m in self._members.values() if not m.gone]

    def _crew(self) -> list[_Member]:
        """Servers and workers that live."""
        return [m for m in self._live() if not m.launches]

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


def _agreement(proposal: FlowProposal, program: bytes | None) -> FlowAgreed:
    return FlowAgreed(
        flow=proposal.flow,
        leaves=proposal.leaves,
        digest=proposal.digest,
        mode=proposal.mode,
        policy=proposal.policy,
        update_fingerprint=proposal.update_fingerprint,
        program=program,
    )


def _deserted(member: _Member, flow: int, waiting: str) -> str:
    return (
        f"{member.name} ({member.place}) left, {member.last}, and never called init for model {flow}, "
        f"for which {waiting} waits"
    )


def _list(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class Coordinator:
    """A `Membership` behind a gRPC port. Lives in one event loop; a member is a stream.

    **Arguments:**

    - `membership`: the state machine; nobody else may use it.
    - `listen`: "host:port"; port 0 takes a free one.
    - `say`: prints one line of what happens.
    - `on_failure`: called once, as soon as the job has failed.
    - `on_saving`: called once, with the most seconds that may take, when all workers have left and the last step is
      being saved.
    """

    def __init__(
        self,
        membership: Membership,
        listen: str,
        say: Callable[[str], None] = control.say_on_stderr,
        on_failure: Callable[[JobFailed], None] = lambda failure: None,
        on_saving: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._membership = membership
        self._listen = listen
        self._say = say
        self._on_failure = on_failure
        self._on_saving = on_saving
        self._told_saving = False
        self._queues: dict[int, asyncio.Queue[CoordinatorMessage | None]] = {}
        self._next_id = 0
        self._said = time.monotonic()
        self._told_transport = False
        self._changed = asyncio.Event()
        self._server: Any = None

    async def start(self) -> str:
        """Listen. Returns the address, with the port that was taken.

        **Raises:** `ConfigError` with the errno's text if the address cannot be had.
        """
        host, port = parse_address(self._listen, "listen address")
        # gRPC's Python package has no type information.
        self._server = cast(Any, grpc.aio).server(options=control.GRPC_OPTIONS)
        handler: Any = cast(Any, grpc).stream_stream_rpc_method_handler(self._attend)
        service, method = control.METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (cast(Any, grpc).method_handlers_generic_handler(service, {method: handler}),)
        )
        try:
            taken: int = self._server.add_insecure_port(self._listen)
        except RuntimeError:
            taken = 0
        if taken == 0:
            raise ConfigError(
                f"the coordinator cannot listen at {self._listen}: {_why_not(host, port)}"
            )
        await self._server.start()
        return format_address(host, taken)

    async def run(self) -> JobFailed | None:
        """Until the job is over. Returns why it failed, or None."""
        told = False
        while not self._membership.is_over(time.monotonic()):
            if self._membership.failure is not None and not told:
                told = True
                self._on_failure(self._membership.failure)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK_SECONDS)
            now = time.monotonic()
            self._send(self._membership.tick(now))
            self._changed.clear()  # after its own messages, which are no news: this loop would never sleep
            if now - self._said >= control.PROGRESS_SECONDS:
                self._said = now
                if text := self._membership.progress_text(now):
                    self._say(text)
        failure = self._membership.failure
        if failure is not None and not told:
            self._on_failure(failure)
        return failure

    async def stop(self) -> None:
        """End every stream, after what is queued for it, and close the port."""
        for outgoing in self._queues.values():
            outgoing.put_nowait(None)
        if self._server is not None:
            await self._server.stop(0.5)

    def interrupt(self, why: str) -> None:
        """Fail the job because this process is told to stop."""
        self._send(self._membership.interrupt(why, time.monotonic()))

    async def _attend(self, requests: AsyncIterator[bytes], context: Any) -> None:
        member, self._next_id = self._next_id, self._next_id + 1
        outgoing: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()
        self._queues[member] = outgoing
        reading = asyncio.ensure_future(self._read(member, requests, outgoing))
        try:
            while (message := await outgoing.get()) is not None:
                await context.write(control.encode(message))
                if isinstance(message, Refused):
                    break
        finally:
            # No await in here: a cancelled stream must be accounted for at once.
            reading.cancel()
            del self._queues[member]
            self._send(self._membership.lost(member, "", time.monotonic()))

    async def _read(
        self,
        member: int,
        requests: AsyncIterator[bytes],
        outgoing: "asyncio.Queue[CoordinatorMessage | None]",
    ) -> None:
        """Feed the messages of one stream to the membership; at the end, or at a bad one, let the stream end."""
        why = ""
        try:
            async with asyncio.timeout(_HELLO_SECONDS) as patience:
                async for data in requests:
                    patience.reschedule(None)
                    message = control.decode_client(data)
                    self._send(self._membership.handle(member, message, time.monotonic()))
                    if isinstance(message, Bye):
                        break
        except TimeoutError:
            why = "it never said hello"
        except msgspec.MsgspecError as error:
            why = f"it sent a message that cannot be read ({error})"
        self._send(self._membership.lost(member, why, time.monotonic()))
        outgoing.put_nowait(None)

    def _send(self, out: Outgoing) -> None:
        notes, self._membership.notes = self._membership.notes, []
        for note in notes:
            self._say(note)
        if self._membership.saving and not self._told_saving:
            self._told_saving = True
            self._on_saving(LAST_SAVE_SECONDS)
        for member, message in out:
            if isinstance(message, Refused):
                self._say(f"refused: {message.text}")
            if isinstance(message, Roster) and not self._told_transport:
                self._told_transport = True
                if message.why != ASKED:  # or everybody knows
                    self._say(f"transport {message.transport}: {message.why}")
            outgoing = self._queues.get(member)
            if outgoing is not None:
                outgoing.put_nowait(message)
        self._changed.set()


def _why_not(host: str, port: int) -> str:
    """Why an address cannot be had: gRPC does not tell, a plain socket does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError as error:
        return f"{error.strerror or error} (errno {error.errno})"
    return "no reason given"


def run_coordinator(
    listen: str,
    num_workers: int,
    num_servers: int,
    *,
    secret: str = "",
    job: str = "jaxrdma",
    connect_timeout: float = 300.0,
    heartbeat_timeout: float = 12.0,
    report: Callable[[str], None] = lambda address: None,
    on_failure: Callable[[JobFailed], None] = lambda failure: None,
    on_saving: Callable[[float], None] = lambda seconds: None,
    say: Callable[[str], None] = control.say_on_stderr,
) -> int:
    """Coordinate one job, to its end.

    **Arguments:**

    - `listen`: "host:port"; port 0 takes a free one. Beyond loopback only with a secret.
    - `report`: called with the address once the port is open.
    - `on_failure`, `on_saving`: as of `Coordinator`.

    **Returns:** the exit code: 0 if all workers left and all servers ended, 1 if the job failed, 128+n on signal n.

    **Raises:** `ConfigError`.
    """
    check_listen(listen, secret)

    async def main() -> int:
        membership = Membership(
            num_workers,
            num_servers,
            job=job,
            secret=secret,
            now=time.monotonic(),
            connect_timeout=connect_timeout,
            heartbeat_timeout=heartbeat_timeout,
        )

        def failed(failure: JobFailed) -> None:
            say(f"the job failed: {failure.text}")
            on_failure(failure)

        coordinator = Coordinator(membership, listen, say, failed, on_saving)
        code = 1

        def stop(number: signal.Signals) -> None:
            nonlocal code
            code = 128 + number
            coordinator.interrupt(number.name)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        report(await coordinator.start())
        failure = await coordinator.run()
        await coordinator.stop()
        return 0 if failure is None else code

    return asyncio.run(main())
