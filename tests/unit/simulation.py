"""A world for `Aggregation`: replicas that die, servers that lag, messages late, twice and out of order.

Usage, from any folder, for the long form of what `test_aggregation.py` runs:
  python tests/unit/simulation.py                                  1000 seeds at 50 replicas, 10 at 10,000
  python tests/unit/simulation.py --seeds 7 --replicas 50 --first 3   seeds 3 to 9, in one size

Everything happens in the order of a clock of its own, and is drawn from the seed. What the world checks, it knows from
what it did itself and from the decisions alone; it never looks into the `Aggregation`.
"""

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxrdma.aggregation import (
    JOINING,
    Aggregate,
    Aggregation,
    Answer,
    Contribution,
    Decision,
    Drop,
    Epoch,
    Fail,
)
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

Life = tuple[int, int]


@dataclass
class Replica:
    """One life of a replica, as the replica knows it."""

    index: int
    incarnation: int
    batches: int  # that it has left
    speed: float
    alive: bool = True  # as a process
    killed: bool = False  # it may live on for a while, unheard
    waiting: bool = True  # for the answer to the exchange `sequence`
    sequence: int = JOINING
    holds: int = -1
    answers: dict[int, int] = field(default_factory=dict)  # server -> version, to that exchange
    # As the aggregation was told, in what has been delivered:
    member: bool = False
    declared: str = ""  # "lost" or "left"
    joined_at: int = -1
    answered: int = JOINING - 1

    @property
    def life(self) -> Life:
        return self.index, self.incarnation


@dataclass
class Server:
    """One server: it holds gradients, and carries out decisions in the order of the log, at its own pace."""

    version: int = 0
    done: int = 0
    held: set[Contribution] = field(default_factory=set)
    freed: set[Contribution] = field(default_factory=set)
    reading: bool = False


class World:
    """One job, from its start until all have left or it failed.

    **Arguments:**

    - `policy`: not yet complete.
    - `replicas`, `servers`: how many at the start.
    - `batches`: about how many each replica has.
    - `kills`, `newcomers`: how many lives end without a word, and how many replicas come later.
    - `places`: for how many replicas the policy is; those that nobody takes must be missed by nobody.
    """

    def __init__(
        self,
        seed: int,
        policy: Policy,
        *,
        replicas: int,
        servers: int,
        batches: int,
        kills: int,
        newcomers: int,
        places: int,
    ) -> None:
        self.chance = random.Random(seed)
        self.policy = policy.complete(places)
        self.batches = batches
        self.began_with = replicas
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.now, self.order = 0.0, 0
        self.servers = [Server() for _ in range(servers)]
        self.lives: dict[Life, Replica] = {}
        self.current: dict[int, Replica] = {}
        self.log: list[Decision] = []
        self.version, self.epoch = 0, Epoch(0, 0, (), (), 0, 0)
        self.epoch_members: set[Life] = set()
        self.computed_on: dict[Contribution, int] = {}
        self.reported: dict[Contribution, set[int]] = {}
        self.fate: dict[Contribution, str] = {}
        self.accepted: Counter[int] = Counter()
        self.dropped: Counter[tuple[int, str]] = Counter()
        self.begun: Counter[Life] = Counter()  # gradients of this step
        self.active: set[Life] = set()
        self.lost_places: set[int] = set()
        self.losses = 0
        self.failure: Fail | None = None
        self.slowest_us = 0.0
        first = [self.be_born(index, seed_life=index + 1) for index in range(replicas)]
        for replica in first:
            replica.member = True
            self.active.add(replica.life)
        self.aggregation = Aggregation(
            self.policy,
            servers=servers,
            replicas={replica.index: replica.incarnation for replica in first},
        )
        self.decide(self.aggregation.start)
        span = batches * 2.0
        for _ in range(kills):
            self.after(self.chance.random() * span, self.kill)
        for index in range(replicas, replicas + newcomers):
            self.after(self.chance.random() * span, self.come, index)

    # --- what happens ---

    def after(self, delay: float, what: Callable[..., None], *arguments: Any) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + delay, self.order, what, arguments))

    def tell(self, what: Callable[..., None], *arguments: Any, mean: float = 0.3) -> None:
        """Send a message that is late, and sometimes comes twice."""
        self.after(self.chance.expovariate(1 / mean), what, *arguments)
        if self.chance.random() < 0.05:
            self.after(self.chance.expovariate(0.1), what, *arguments)

    def be_born(self, index: int, seed_life: int = 0) -> Replica:
        incarnation = seed_life or self.chance.getrandbits(40)
        slow = 8.0 if self.chance.random() < 0.1 else 1.0
        replica = Replica(
            index, incarnation, max(1, self.batches + self.chance.choice((-1, 0, 0, 1))), slow
        )
        self.lives[replica.life] = replica
        self.current[index] = replica
        return replica

    def come(self, index: int) -> None:
        replica = self.be_born(index)
        self.tell(self.hear_join, replica)

    def kill(self) -> None:
        # Only who has been heard of: the lives of one place are told in their order.
        candidates = [r for r in self.current.values() if r.member and r.alive and not r.killed]
        if not candidates or self.failure:
            return
        victim = self.chance.choice(candidates)
        victim.killed = True
        # A process that was merely silent, and lives on for a while, is as lost as a dead one.
        if self.chance.random() < 0.7:
            victim.alive = False
        else:
            self.after(5.0, setattr, victim, "alive", False)
        if self.chance.random() < 0.8:
            self.tell(self.hear_loss, victim)
            returns = self.policy.on_loss == "wait" or self.chance.random() < 0.5
        else:
            returns = True  # and is heard of first
        if returns:
            self.after(self.chance.expovariate(0.5), self.come_back, victim)

    def come_back(self, before: Replica) -> None:
        before.alive = False
        self.come(before.index)

    def compute(self, r: Replica) -> None:
        self.after(self.chance.expovariate(1 / r.speed), self.push, r)

    def push(self, r: Replica) -> None:
        if not r.alive:
            return
        r.sequence += 1
        r.waiting = True
        r.answers = {}
        r.batches -= 1
        gradient = Contribution(r.index, r.incarnation, r.sequence)
        self.computed_on[gradient] = r.holds
        for server in range(len(self.servers)):
            self.tell(self.land, server, gradient, r)
        if r.batches == 0 and self.chance.random() < 0.3:
            self.leave(r)  # without waiting for what comes of its last gradient

    def land(self, server: int, gradient: Contribution, r: Replica) -> None:
        if not r.alive and not r.declared and self.chance.random() < 0.5:
            return  # died while it was sent
        s = self.servers[server]
        if gradient not in s.freed:
            s.held.add(gradient)
        self.tell(self.hear_landing, server, gradient)

    def leave(self, r: Replica) -> None:
        r.alive = False
        self.tell(self.hear_leave, r)

    def read_log(self, server: int) -> None:
        s = self.servers[server]
        decision = self.log[s.done]
        s.done += 1
        match decision:
            case Aggregate(step, contributions):
                assert step == s.version
                assert s.held.issuperset(contributions), "a server was told to add what it lacks"
                s.held.difference_update(contributions)
                s.freed.update(contributions)
                s.version += 1
            case Drop(contribution):
                s.held.discard(contribution)
                s.freed.add(contribution)
            case Answer(replica, incarnation, sequence, step):
                assert step == s.version, "the version of an answer is another one on this server"
                r = self.lives[replica, incarnation]
                self.after(self.chance.expovariate(5), self.be_answered, r, server, sequence, step)
            case _:
                pass
        s.reading = s.done < len(self.log)
        if s.reading:
            self.after(self.chance.expovariate(1000), self.read_log, server)

    def be_answered(self, r: Replica, server: int, sequence: int, version: int) -> None:
        if not r.alive:
            return
        assert r.waiting, "nothing was asked"
        assert r.sequence == sequence
        r.answers[server] = version
        if len(r.answers) < len(self.servers):
            return
        assert len(set(r.answers.values())) == 1, "servers answer with different versions"
        r.waiting, r.holds = False, version
        if r.batches:
            self.compute(r)
        else:
            self.leave(r)

    # --- what the aggregation hears ---

    def hear_landing(self, server: int, gradient: Contribution) -> None:
        self.reported.setdefault(gradient, set()).add(server)
        step = self.computed_on[gradient]
        self.decide(
            self.aggregation.landed,
            server,
            gradient.replica,
            gradient.incarnation,
            gradient.sequence,
            step,
        )

    def hear_join(self, r: Replica) -> None:
        if not r.declared and not r.member:
            for before in list(self.active):
                if before[0] == r.index:
                    self.declare(self.lives[before], "lost")
            r.member = True
            self.active.add(r.life)
            self.lost_places.discard(r.index)
        self.decide(self.aggregation.joins, r.index, r.incarnation)

    def hear_loss(self, r: Replica) -> None:
        losses = self.losses
        self.declare(r, "lost")
        self.decide(self.aggregation.lost, r.index, r.incarnation, "killed")
        if self.losses > losses and self.policy.on_loss == "shrink" and self.too_few():
            assert self.failure, "goes on with too few"

    def hear_leave(self, r: Replica) -> None:
        self.declare(r, "left")
        self.decide(self.aggregation.leaves, r.index, r.incarnation)

    def declare(self, r: Replica, what: str) -> None:
        if not r.declared:
            r.declared = what
            self.active.discard(r.life)
            if what == "lost" and r.joined_at >= 0:
                self.losses += 1
                self.lost_places.add(r.index)

    # --- what must hold ---

    def decide(self, event: Callable[..., list[Decision]], *arguments: Any) -> None:
        began = time.perf_counter()
        decisions = event(*arguments)
        self.slowest_us = max(self.slowest_us, (time.perf_counter() - began) * 1e6)
        if self.failure:
            assert not decisions, "a decision after the end"
        for decision in decisions:
            assert self.failure is None
            match decision:
                case Aggregate():
                    self.check_aggregate(decision)
                case Drop():
                    self.check_drop(decision)
                case Answer():
                    self.check_answer(decision)
                case Epoch():
                    self.check_epoch(decision)
                case Fail():
                    self.check_fail(decision)
        if decisions and not self.failure and self.look_closely():
            assert self.aggregation.members() == sorted(self.epoch_members)
        self.log += decisions
        if decisions:
            for index, server in enumerate(self.servers):
                if not server.reading:
                    server.reading = True
                    self.after(self.chance.expovariate(5), self.read_log, index)

    def check_aggregate(self, decision: Aggregate) -> None:
        policy, step = self.policy, decision.step
        assert step == self.version, "steps have a gap"
        contributions = decision.contributions
        keys = [(c.replica, c.sequence) for c in contributions]
        assert keys == sorted(set(keys)), "not in replica order, or one twice"
        assert len(keys) == self.epoch.quorum, "a mean of too many or too few"
        for c in contributions:
            life = (c.replica, c.incarnation)
            assert c not in self.fate, f"counted in two places: {c}"
            assert life in self.epoch_members, f"not of this epoch: {c}"
            assert self.lives[life].declared != "lost", f"of a lost replica: {c}"
            assert len(self.reported[c]) == len(self.servers), f"not landed whole: {c}"
            self.fate[c] = "accepted"
            self.accepted[c.replica] += 1
            if isinstance(policy, SyncReplicas):
                assert self.computed_on[c] == step, f"a stale gradient: {c}"
            if isinstance(policy, BoundedStaleness):
                assert self.lives[life].joined_at + c.sequence == step, f"of another step: {c}"
                assert self.computed_on[c] >= step - policy.k, f"too stale: {c}"
        self.version += 1
        self.begun.clear()

    def check_drop(self, decision: Drop) -> None:
        c, life = decision.contribution, self.lives[self.life_of(decision.contribution)]
        assert c not in self.fate, f"dropped, and in another place too: {c}"
        assert self.reported.get(c), f"nobody had this: {c}"
        self.fate[c] = decision.why
        self.dropped[c.replica, decision.why] += 1
        if decision.why == "stale":
            assert isinstance(self.policy, SyncReplicas)
            assert self.computed_on[c] < self.version
        else:
            assert decision.why == life.declared, (decision.why, life)

    def check_answer(self, decision: Answer) -> None:
        r = self.lives[decision.replica, decision.incarnation]
        assert r.life in self.epoch_members, "an answer to somebody outside"
        assert not r.declared, "an answer to the dead"
        assert decision.step == self.version, "not the newest version"
        assert decision.sequence == r.answered + 1 if r.answered >= JOINING else True
        if decision.sequence == JOINING:
            assert r.joined_at < 0, "let in twice"
            r.joined_at = self.version
        else:
            c = Contribution(*r.life, decision.sequence)
            assert len(self.reported[c]) == len(self.servers), "answered before it landed whole"
        r.answered = decision.sequence
        policy = self.policy
        if isinstance(policy, BoundedStaleness):
            ahead = r.joined_at + r.answered + 1 - self.slowest_clock()
            assert ahead <= policy.k, f"{ahead} steps ahead of the slowest"
        if isinstance(policy, SyncReplicas):
            self.begun[r.life] += 1
            if self.begun[r.life] > 1:
                assert self.epoch.quorum > self.epoch.members, "several, though one is wanted"
                members = self.active & self.epoch_members if self.look_closely() else {r.life}
                share = -(-self.epoch.quorum // len(members))
                assert self.begun[r.life] <= share, "more than its fair share"

    def slowest_clock(self) -> int:
        """The step of the gradient that the slowest replica computes, or that has not landed of it yet."""
        if not self.look_closely():
            return self.version  # known from the means: nobody's gradient is missing below
        working = [self.lives[life] for life in self.active & self.epoch_members]
        return min(
            r.joined_at + r.answered + 1 + self.has_landed(*r.life, r.answered + 1)
            for r in working
            if r.joined_at >= 0
        )

    def look_closely(self) -> bool:
        """What takes a look at everybody is checked now and then where there are many."""
        return len(self.active) < 100 or self.chance.random() < 0.003

    def has_landed(self, replica: int, incarnation: int, sequence: int) -> bool:
        gradient = Contribution(replica, incarnation, sequence)
        return len(self.reported.get(gradient, ())) == len(self.servers)

    def check_epoch(self, decision: Epoch) -> None:
        assert decision.number == self.epoch.number + 1
        assert decision.step == self.version, "not at the boundary of a step"
        assert self.epoch_members.issuperset(decision.gone), "somebody went who was not there"
        self.epoch_members.difference_update(decision.gone)
        assert self.epoch_members.isdisjoint(decision.joined), "somebody came twice"
        self.epoch_members.update(decision.joined)
        assert decision.members == len(self.epoch_members)
        if self.look_closely():
            assert len({index for index, _ in self.epoch_members}) == decision.members
            changed = self.epoch_members
        else:
            changed = decision.joined
        for life in changed:
            r = self.lives[life]
            assert r.declared != "lost" or self.policy.on_loss == "wait", "a dead member"
            assert r.member
        assert decision.quorum == self.quorum(decision.members)
        self.epoch = decision

    def quorum(self, members: int) -> int:
        """As the documentation has it, reckoned here once more."""
        match self.policy:
            case SyncReplicas(replicas_to_aggregate=wanted, total_replicas=total) if (
                wanted != total
            ):
                return wanted if wanted > total else max(1, min(wanted, members))
            case Async():
                return 1
            case _:
                return max(1, members)

    def check_fail(self, decision: Fail) -> None:
        self.failure = decision
        assert self.policy.on_loss != "wait", decision
        assert self.losses, decision
        if self.policy.on_loss == "shrink":
            assert self.too_few(), decision

    def too_few(self) -> bool:
        """Whether a loss has left fewer replicas than the policy can do with."""
        least, staying = 1, len(self.active) + len(self.lost_places)
        if isinstance(self.policy, SyncReplicas):
            wanted, total = self.policy.replicas_to_aggregate, self.policy.total_replicas
            least = min(wanted, staying, self.began_with) if wanted < total else 1
        return len(self.active) < least

    def life_of(self, c: Contribution) -> Life:
        return c.replica, c.incarnation

    def check_end(self) -> None:
        """All messages have come: everybody got to the end of the data, or the job says why not."""
        for index, server in enumerate(self.servers):
            assert server.done == len(self.log)
            assert server.version == self.version, f"server {index} lags"
        for replica in {c.replica for c in self.fate}:
            counts = self.aggregation.counts(replica)
            assert counts.accepted == self.accepted[replica], "accepted gradients do not add up"
            for why, number in counts.dropped.items():
                assert number == self.dropped[replica, why], "dropped gradients do not add up"
        if self.failure:
            return
        if self.policy.on_loss == "fail":
            assert not self.losses, "a loss went without a word"
        hanging = [r for r in self.lives.values() if r.alive or (r.member and not r.declared)]
        assert not hanging, (hanging[:3], self.aggregation.waits_for()[:3])
        assert not self.aggregation.waits_for(), "waits for somebody, though all have left"
        assert set(self.fate) == set(self.reported), "a gradient was neither counted nor dropped"
        for index, server in enumerate(self.servers):
            assert not server.held, f"server {index} still holds gradients"

    def run(self) -> "World":
        while self.queue:
            self.now, _, what, arguments = heapq.heappop(self.queue)
            what(*arguments)
        self.check_end()
        return self


def draw_world(seed: int, replicas: int, batches: int = 8) -> World:
    """A world whose policy, and whatever else can differ, are drawn from the seed."""
    chance = random.Random(f"world {seed}")
    on_loss = chance.choice(("fail", "shrink", "wait", None))
    fewer = max(1, replicas - chance.randint(1, max(1, replicas // 5)))
    more = replicas + chance.randint(1, 2 * replicas)
    policy = chance.choice(
        (
            SyncReplicas(on_loss=on_loss),
            SyncReplicas(fewer, on_loss=on_loss),
            SyncReplicas(more, on_loss=on_loss),
            Async(on_loss=on_loss),
            BoundedStaleness(chance.choice((0, 1, 3)), on_loss=on_loss),
        )
    )
    newcomers = chance.choice((0, 1, 2, max(1, replicas // 10)))
    places = replicas + chance.choice((0, newcomers, newcomers + 2))
    losses = policy.complete(places).on_loss
    kills = chance.choice((0, 1) if losses == "fail" else (0, 1, 3, max(3, replicas // 3)))
    return World(
        seed,
        policy,
        replicas=replicas,
        servers=chance.choice((1, 2, 3)),
        batches=batches,
        kills=kills,
        newcomers=newcomers,
        places=places,
    )


def run_seeds(first: int, seeds: int, replicas: int, batches: int) -> None:
    began = time.monotonic()
    totals: Counter[str] = Counter()
    slowest = 0.0
    for seed in range(first, first + seeds):
        world = draw_world(seed, replicas, batches)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed} with {replicas} replicas, {world.policy}") from error
        totals["jobs failed"] += world.failure is not None
        totals["steps"] += world.version
        totals["epochs"] += world.epoch.number
        totals["gradients accepted"] += world.accepted.total()
        totals["dropped"] += world.dropped.total()
        slowest = max(slowest, world.slowest_us)
    figures = ", ".join(f"{number} {name}" for name, number in totals.items())
    print(
        f"{seeds} seeds at {replicas} replicas: all hold. {figures}; slowest event {slowest / 1000:.2f} ms; "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The long form of the simulation.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--batches", type=int, default=8)
    args = parser.parse_args()
    if args.seeds or args.replicas:
        run_seeds(args.first, args.seeds or 100, args.replicas or 50, args.batches)
    else:
        run_seeds(args.first, 1000, 50, 8)
        run_seeds(args.first, 10, 10_000, 4)


if __name__ == "__main__":
    main()
