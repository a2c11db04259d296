"""What becomes of each gradient: a policy as a state machine, events in and decisions out, no clock and no I/O.

One `Aggregation` per model. Its driver tells it who comes and goes and what has landed, and sends every decision to all
servers, in the order in which it got them. As all servers see one order, each mean is over one set of gradients, on
every partition, and each answer is of one version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Literal

import msgspec

from jaxrdma.policy import Policy

Why = Literal["stale", "ahead", "lost", "left", "stranger"]
Life = tuple[int, int]  # a replica's index, and its incarnation
_REPLICA = attrgetter("replica")
JOINING = -1  # the sequence in the answer that lets a replica begin


# Where there are thousands of replicas there are as many of these: gc=False, as they can be in no cycle, spares the
# garbage collector the look at each.
class Contribution(msgspec.Struct, frozen=True, gc=False):
    """One gradient, whole: number `sequence` (0, 1, 2, ...) in the life `incarnation` of a replica."""

    replica: int
    incarnation: int
    sequence: int


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """The membership with which steps from `step` on are made, until the next epoch: that of the last epoch, changed.

    Only the changes are named: when the data of thousands of replicas runs out, each makes an epoch. `gone` and
    `joined`: index and incarnation of each, by index. `members`: how many there are now. `quorum`: how many gradients
    form a mean.
    """

    number: int
    step: int
    gone: tuple[Life, ...]
    joined: tuple[Life, ...]
    members: int
    quorum: int


class Aggregate(msgspec.Struct, frozen=True, tag="aggregate"):
    """The mean of exactly these gradients, summed in this order, makes version `step` + 1."""

    step: int
    contributions: tuple[Contribution, ...]


class Drop(msgspec.Struct, frozen=True, tag="drop", gc=False):
    """Servers free this gradient, what they have of it and what still comes; it counts in no mean.

    `why`:

    - "stale": the step for which it was computed is over.
    - "ahead": it was computed on a version that is not there; after a restore of an older checkpoint, say.
    - "lost": its replica was lost before it counted, or had been when it came.
    - "left": its replica left before it had landed whole, or left a step that nobody completes.
    - "stranger": its replica never joined.
    """

    contribution: Contribution
    why: Why


class Answer(msgspec.Struct, frozen=True, tag="answer", gc=False):
    """The servers answer the exchange `sequence` of a replica with the parameters of exactly version `step`.

    That is the newest version, by the decisions before this one. A `sequence` of `JOINING` lets the replica begin.
    """

    replica: int
    incarnation: int
    sequence: int
    step: int


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The job ends; `text` says who, what was expected, what came and what to try. No decision follows."""

    text: str


Decision = Epoch | Aggregate | Drop | Answer | Fail
Decisions = list[Decision]


@dataclass(slots=True)
class Counts:
    """What became of the gradients of one replica, all its lives together. Those not decided yet are in neither."""

    accepted: int = 0
    dropped: dict[Why, int] = field(default_factory=dict[Why, int])


class Awaited(msgspec.Struct, frozen=True):
    """Whom step `step` waits for, and in words what is missing, as in "replica 3 computes ..."."""

    replica: int
    step: int
    text: str


@dataclass(eq=False, slots=True)
class _Replica:
    index: int
    incarnation: int
    clock: int  # one more than the step of its last gradient
    counts: Counts  # of all lives of this index
    state: Literal["active", "missing", "leaving"] = "active"
    next: int = 0  # the sequence of the gradient that lands next, or is landing
    servers: int = 0  # bit by server: where it has landed
    computed_on: int = 0  # what those servers say of it
    awaits: int | None = 0  # the version that answers its open exchange; None: it computes
    # Gradients that landed whole and are not in a mean yet, as (step, sequence), the oldest first.
    pending: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    granted_at: int = -1  # the step of which it has begun `granted` gradients
    granted: int = 0


class Aggregation:
    """Decides whose gradients form each mean, under one policy.

    Events may come late, twice, and from lives that are over; what servers report may be reordered between them. Only
    the lives of one place must be told of in their order, as incarnations have none. A replica has one exchange open at
    a time: it pushes a gradient when the one before has been answered.

    - **A change of the membership** makes a new epoch. Who leaves or is lost is out at once, and the step begins anew
      with what has landed for it from the others; but while gradients count of one who left in good order, it stays.
      Who joins is in after the step that is under way, or at once if nothing has landed for that, or if it waits for
      somebody lost. So every mean is over members of one epoch, in the incarnations that this names.
    - **An incarnation that was lost never comes back.** What still comes from it is dropped and counted. A process that
      returns has a new one, which replaces the old: to be replaced is to be lost.
    - **Nothing waits for the dead**, except with `on_loss="wait"`.
    - **Servers are fixed.** When one dies, make a new `Aggregation` at the step that was restored.

    A gradient costs the same however many replicas there are. The time of a mean, of `waits_for` and, where replicas
    give several gradients to a step, of a change of the membership grows with their number.

    **Arguments:**

    - `policy`: a complete one, see `Policy.complete`.
    - `servers`: how many, at least 1. A gradient has landed when all have reported it.
    - `replicas`: the incarnation of each replica that is there from the start, by index. If the policy is for more,
      others may come; and with as many as at the start a loss is always borne.
    - `step`: the version of the parameters at the start.
    """

    def __init__(
        self, policy: Policy, *, servers: int, replicas: Mapping[int, int], step: int = 0
    ) -> None:
        self._policy = policy
        self._servers = servers
        self._everywhere = (1 << servers) - 1
        self._version = step
        self._members: dict[int, _Replica] = {}
        self._joining = dict(replicas)
        self._began_with = len(replicas)
        self._missing = 0  # members whose place is kept
        self._active = 0
        self._lost: set[int] = set()  # places that a loss has emptied
        # What is known of lives that are over: the sequence that would come next, and how they ended.
        self._ended: dict[Life, tuple[int, Why]] = {}
        self._leaving: list[_Replica] = []
        self._gone: list[Life] = []  # since the last epoch
        self._epochs = count(1)
        # Step -> what has landed for it, in the order of landing.
        self._pending: dict[int, dict[tuple[int, int], Contribution]] = {}
        self._awaiting: dict[int, list[_Replica]] = {}  # version -> whom it answers
        self._spare = 0  # gradients wanted for this step beyond one of each replica, and not begun
        self._counts: dict[int, Counts] = {}
        self._failed = False

    @property
    def step(self) -> int:
        """The newest version of the parameters."""
        return self._version

    @property
    def failed(self) -> bool:
        """Whether the job has ended by a `Fail`."""
        return self._failed

    @property
    def stands_still(self) -> bool:
        """Whether no step can end before somebody has come back whose place is kept."""
        members = len(self._members)
        return self._missing > 0 and members - self._missing < self._policy.quorum(members)

    def members(self) -> list[Life]:
        """The members of the epoch, by index."""
        return sorted((r.index, r.incarnation) for r in self._members.values())

    def counts(self, replica: int) -> Counts:
        """What became of the gradients of a replica so far."""
        return self._counts.get(replica, Counts())

    # --- events ---

    def start(self) -> Decisions:
        """The first epoch, and the answers that let its replicas begin. To be called once, before any event."""
        return self._changed_members([])

    def landed(
        self, server: int, replica: int, incarnation: int, sequence: int, step: int
    ) -> Decisions:
        """The share of `server` in a gradient has landed there whole.

        `step` is the version of the parameters on which it was computed.
        """
        out: Decisions = []
        if self._failed:
            return out
        r = self._members.get(replica)
        if r is None or r.incarnation != incarnation or r.state != "active":
            self._from_elsewhere(Contribution(replica, incarnation, sequence), out)
            return out
        if sequence < r.next:
            return out
        if sequence > r.next or r.awaits is not None:
            expected = (
                f"number {r.next}"
                if r.awaits is None
                else f"none until number {r.next - 1} is answered"
            )
            self._fail(
                f"server {server} reports gradient number {sequence} of replica {replica}, expected {expected}: "
                "a worker has one exchange open at a time. This is a mistake in jaxrdma; please report it.",
                out,
            )
            return out
        if r.servers and step != r.computed_on:
            self._fail(
                f"server {server} reports gradient number {sequence} of replica {replica} as computed on version "
                f"{step}, another server on version {r.computed_on}. This is a mistake in jaxrdma; please report it.",
                out,
            )
            return out
        r.computed_on = step
        r.servers |= 1 << server
        if r.servers == self._everywhere:
            r.servers = 0
            r.next += 1
            self._take(r, step, out)
        return out

    def joins(self, replica: int, incarnation: int) -> Decisions:
        """A replica is there and can train. A life that was known before is not begun again."""
        out: Decisions = []
        r = self._members.get(replica)
        known = (
            (replica, incarnation) in self._ended
            or self._joining.get(replica) == incarnation
            or (r is not None and r.incarnation == incarnation)
        )
        if self._failed or known:
            return out
        if replica in self._joining:
            self._ended[replica, self._joining[replica]] = (0, "lost")
        self._joining[replica] = incarnation
        if r is not None and r.state == "active":
            self._lose(r, f"its place was taken by a new incarnation, {incarnation}", out)
        return self._changed_members(out)

    def leaves(self, replica: int, incarnation: int) -> Decisions:
        """A replica goes in good order: its data ran out. What has landed of it by now counts."""
        out: Decisions = []
        r = self._members.get(replica)
        if self._failed or self._is_over(r, replica, incarnation, "left"):
            return out
        assert r is not None
        if r.state == "active":
            self._active -= 1
            self._end(r, "left", out)
        elif r.state == "missing":  # it was no loss after all
            self._missing -= 1
        else:
            return out
        if r.pending:
            r.state = "leaving"
            self._leaving.append(r)
        else:
            self._remove(r)
        return self._changed_members(out)

    def lost(self, replica: int, incarnation: int, why: str) -> Decisions:
        """A replica died or fell silent; `why` in words, as in "replica 3 was lost: `why`"."""
        out: Decisions = []
        r = self._members.get(replica)
        if self._failed or self._is_over(r, replica, incarnation, "lost"):
            return out
        assert r is not None
        if r.state != "active":
            return out
        self._lose(r, why, out)
        return self._changed_members(out)

    def waits_for(self) -> list[Awaited]:
        """Whom the step that is under way waits for. Of backup replicas, any that make the quorum will do."""
        if self._failed:
            return []
        landed = {index for index, _ in self._pending.get(self._version, ())}
        several = self._policy.quorum(len(self._members)) > len(self._members)
        awaited: list[Awaited] = []
        for index, r in sorted(self._members.items()):
            gives_more = several and r.awaits is None
            if r.state == "leaving" or (index in landed and not gives_more):
                continue
            who = f"replica {index} (incarnation {r.incarnation})"
            if r.state == "missing":
                text = f"{who} was lost; its next incarnation is waited for, as on_loss is 'wait'"
            elif not r.servers:
                text = (
                    f"{who} computes gradient number {r.next}, or it is on its way to the servers"
                )
            else:
                servers = [s for s in range(self._servers) if not r.servers >> s & 1]
                where = f"server{'s' if len(servers) > 1 else ''} {', '.join(map(str, servers))}"
                text = f"gradient number {r.next} of {who} has not landed whole on {where}"
            awaited.append(Awaited(index, self._version, text))
        return awaited

    def awaits_others(self, replica: int) -> bool:
        """Whether the open exchange of a replica is answered only after a mean that still lacks gradients."""
        r = self._members.get(replica)
        return r is not None and r.awaits is not None and r.awaits > self._version

    def unreported(self, replica: int, step: int) -> list[int]:
        """The servers that have not reported the gradient that a replica computed on `step`, and pushes.

        Empty if it is in no such push: it has landed whole, or was answered.
        """
        r = self._members.get(replica)
        if r is None or r.state != "active" or r.awaits is not None or r.granted_at != step:
            return []
        return [server for server in range(self._servers) if not r.servers >> server & 1]

    def _is_over(self, r: _Replica | None, replica: int, incarnation: int, why: Why) -> bool:
        """Whether that life is not `r`. Then it ends before it has begun here, and cannot join any more."""
        if r is not None and r.incarnation == incarnation:
            return False
        if self._joining.get(replica) == incarnation:
            del self._joining[replica]
        self._ended.setdefault((replica, incarnation), (0, why))
        return True

    # --- gradients ---

    def _take(self, r: _Replica, computed_on: int, out: Decisions) -> None:
        """A gradient has landed whole: count it in or drop it, and answer its replica as soon as may be."""
        sequence = r.next - 1
        step = None
        if computed_on <= self._version:
            step = self._policy.step_of(r.clock, computed_on, self._version)
        if step is None:
            why: Why = "ahead" if computed_on > self._version else "stale"
            self._drop(r.index, r.incarnation, sequence, why, out)
            self._take_back(r)
            self._answer(r, out)
            return
        key = (r.index, sequence)
        self._pending.setdefault(step, {})[key] = Contribution(r.index, r.incarnation, sequence)
        r.pending.append((step, sequence))
        r.clock = step + 1
        r.awaits = self._policy.answered_at(step)
        if r.awaits > self._version:
            self._awaiting.setdefault(r.awaits, []).append(r)
        self._advance(out)
        if self._is_due(r) or self._may_give_more(r):
            self._answer(r, out)

    def _from_elsewhere(self, contribution: Contribution, out: Decisions) -> None:
        """Of no living member: drop it, once."""
        life = (contribution.replica, contribution.incarnation)
        expected, why = self._ended.get(life, (0, "stranger"))
        if contribution.sequence >= expected:
            self._ended[life] = (contribution.sequence + 1, why)
            self._drop(*life, contribution.sequence, why, out)

    def _drop(
        self, replica: int, incarnation: int, sequence: int, why: Why, out: Decisions
    ) -> None:
        dropped = self._count(replica).dropped
        dropped[why] = dropped.get(why, 0) + 1
        out.append(Drop(Contribution(replica, incarnation, sequence), why))

    def _count(self, replica: int) -> Counts:
        return self._counts.setdefault(replica, Counts())

    # --- steps ---

    def _advance(self, out: Decisions) -> None:
        """Make every version that can be made. After each the membership may change, and answers are due."""
        while not self._failed:
            landed = self._pending.get(self._version)
            if not landed or len(landed) < self._policy.quorum(len(self._members)):
                return
            del self._pending[self._version]
            # Several of one replica have landed in the order of their sequence, and stay so.
            contributions = tuple(sorted(landed.values(), key=_REPLICA))
            out.append(Aggregate(self._version, contributions))
            self._version += 1
            for index, _ in landed:
                r = self._members[index]
                r.counts.accepted += 1
                del r.pending[0]
            self._change_members(out, between_steps=True)
            self._spare = max(0, self._policy.quorum(len(self._members)) - len(self._members))
            for r in self._awaiting.pop(self._version, ()):
                if r.awaits == self._version:
                    self._answer(r, out)

    def _answer(self, r: _Replica, out: Decisions) -> None:
        """Let `r` go on: it begins a gradient on the newest version."""
        version = self._version
        if r.granted_at != version:
            r.granted_at = version
            r.granted = 1
        else:
            self._spare -= 1 if r.granted else 0
            r.granted += 1
        r.awaits = None
        out.append(Answer(r.index, r.incarnation, r.next - 1, version))

    def _is_due(self, r: _Replica) -> bool:
        return r.awaits is not None and r.awaits <= self._version

    def _take_back(self, r: _Replica) -> None:
        """A gradient that `r` began came to nothing."""
        if r.granted_at == self._version and r.granted:
            r.granted -= 1
            self._spare += 1 if r.granted else 0

    def _may_give_more(self, r: _Replica) -> bool:
        """Whether `r`, which waits for the next version, may give another gradient to this step."""
        if self._spare <= 0 or r.awaits != self._version + 1 or r.granted_at != self._version:
            return False
        quorum = self._policy.quorum(len(self._members))
        return r.granted < -(-quorum // max(1, self._active + self._missing))

    def _share_out(self, out: Decisions) -> None:
        """Somebody came or went: what those who went would have given to this step, others may."""
        quorum = self._policy.quorum(len(self._members))
        self._spare = 0
        if quorum <= len(self._members):
            return
        for r in self._members.values():
            if r.state == "leaving":
                quorum -= len(r.pending)
            else:
                quorum -= max(1, r.granted if r.granted_at == self._version else 0)
        self._spare = max(0, quorum)
        waiting = [r for r in self._members.values() if self._may_give_more(r)]
        for r in sorted(waiting, key=lambda r: (r.granted, r.index)):
            if self._may_give_more(r):
                self._answer(r, out)

    # --- members ---

    def _changed_members(self, out: Decisions) -> Decisions:
        if not self._failed:
            self._change_members(out)
            self._share_out(out)
            self._advance(out)
        return out

    def _change_members(self, out: Decisions, *, between_steps: bool = False) -> None:
        """Let out who has nothing to give any more and in who may come, and announce the epoch if it is a new one."""
        if between_steps:
            self._let_out()
        joined = self._let_in(between_steps)
        if not self._active and not self._missing and self._leaving:
            self._give_up(out)
            joined += self._let_in(between_steps)
        if not joined and not self._gone:
            return
        lives = [(r.index, r.incarnation) for r in joined]
        quorum = self._policy.quorum(len(self._members))
        changes = tuple(sorted(self._gone)), tuple(sorted(lives))
        self._gone.clear()
        out.append(Epoch(next(self._epochs), self._version, *changes, len(self._members), quorum))
        for r in joined:
            self._answer(r, out)

    def _let_out(self) -> None:
        staying: list[_Replica] = []
        for r in self._leaving:
            if r.pending:
                staying.append(r)
            else:
                self._remove(r)
        self._leaving = staying

    def _remove(self, r: _Replica) -> None:
        del self._members[r.index]
        self._gone.append((r.index, r.incarnation))

    def _let_in(self, between_steps: bool) -> list[_Replica]:
        """Those who wait to join, unless a step is under way that can do without them."""
        under_way = bool(self._pending.get(self._version)) and not between_steps
        if under_way and self._active and not self._missing:
            return []
        joined: list[_Replica] = []
        for index, incarnation in sorted(self._joining.items()):
            before = self._members.get(index)
            if before is not None and before.state == "leaving":
                continue  # its gradients still count
            if before is not None:
                self._remove(before)
                self._missing -= 1
            del self._joining[index]
            self._lost.discard(index)
            self._active += 1
            self._members[index] = _Replica(index, incarnation, self._version, self._count(index))
            joined.append(self._members[index])
        return joined

    def _give_up(self, out: Decisions) -> None:
        """All have left. If what they gave makes no mean, it never will."""
        landed = self._pending.get(self._version, {})
        if len(landed) >= self._policy.quorum(len(self._members)):
            return
        for r in self._leaving:
            self._drop_pending(r, "left", out)
        self._let_out()

    def _lose(self, r: _Replica, why: str, out: Decisions) -> None:
        """An active member is no more."""
        self._active -= 1
        self._drop_pending(r, "lost", out)
        self._end(r, "lost", out)
        who = f"replica {r.index} (incarnation {r.incarnation}) was lost at step {self._version}: {why}."
        if self._policy.on_loss == "wait":
            r.state = "missing"
            self._missing += 1
            return
        if self._policy.on_loss == "fail":
            self._fail(
                f"{who} By {self._policy.describe()} that ends the job. Start it again from its last checkpoint, or "
                "choose on_loss='shrink' or 'wait'.",
                out,
            )
            return
        self._remove(r)
        self._lost.add(r.index)
        remaining = self._active + len(self._joining)
        least = self._policy.least(self._active + len(self._lost | self._joining.keys()))
        least = min(least, self._began_with)
        if remaining < least:
            self._fail(
                f"{who} {remaining} remain, and {self._policy.describe()} needs at least {least}. Start the job again "
                "from its last checkpoint with fewer replicas to aggregate, or choose on_loss='wait'.",
                out,
            )

    def _end(self, r: _Replica, why: Why, out: Decisions) -> None:
        """The life of `r` is over: of a gradient that is just landing, nothing more is waited for."""
        if r.servers:
            self._drop(r.index, r.incarnation, r.next, why, out)
            r.servers = 0
            r.next += 1
        r.awaits = None
        r.granted = 0
        self._ended[r.index, r.incarnation] = (r.next, why)

    def _drop_pending(self, r: _Replica, why: Why, out: Decisions) -> None:
        for step, sequence in r.pending:
            landed = self._pending[step]
            del landed[r.index, sequence]
            if not landed:
                del self._pending[step]
            self._drop(r.index, r.incarnation, sequence, why, out)
        r.pending.clear()

    def _fail(self, text: str, out: Decisions) -> None:
        self._failed = True
        out.append(Fail(text))
