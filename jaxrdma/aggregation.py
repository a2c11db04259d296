"""Decides which gradients form the next mean, and what each worker goes on from. Pure: events in, decisions out.

One `Aggregation` per model. The coordinator tells it what has landed where and who has left; what it decides goes to
every server, in the order in which it was decided. It knows no clock and no network, so it is tested by simulation.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxrdma.control import Answered, Dropped, GradientName, Mean
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

Decision = Mean | Dropped | Answered


@dataclass
class _Replica:
    incarnation: int
    left: bool = False
    pushed: int = 0  # gradients that have landed whole
    accepted: int = 0
    dropped: int = 0
    contributed: int = 0  # to the step that is being made


@dataclass(frozen=True)
class Count:
    """What became of one replica's gradients: part of a mean, dropped."""

    accepted: int
    dropped: int


class Aggregation:
    """What is known of the gradients of one model, and decided about them.

    **Arguments:**

    - `policy`: resolved.
    - `servers`: those that hold a part of the model, by index. A gradient has landed when it has on all of them.
    - `replicas`: by worker, its incarnation.
    - `step`: the version of the parameters at the beginning.
    """

    def __init__(
        self, policy: Policy, servers: Iterable[int], replicas: Mapping[int, int], step: int = 0
    ) -> None:
        self._policy = policy
        self._servers = frozenset(servers)
        self._replicas = {index: _Replica(incarnation) for index, incarnation in replicas.items()}
        self._gone: set[int] = set()
        self._first = step
        self._step = step
        self._landing: dict[GradientName, set[int]] = {}
        # For the mean of `step`, or, with bounded staleness, of later ones: by step.
        self._candidates: dict[int, list[GradientName]] = {}
        # Bounded staleness: gradients that are not answered, by the step that they wait for.
        self._unanswered: dict[int, list[GradientName]] = {}

    @property
    def step(self) -> int:
        """The version of the parameters that everything decided so far leads to."""
        return self._step

    def counts(self) -> dict[int, Count]:
        """By worker, what became of its gradients so far."""
        return {i: Count(r.accepted, r.dropped) for i, r in self._replicas.items()}

    def landed(self, server: int, gradient: GradientName, step: int) -> list[Decision]:
        """All that `server` gets of `gradient` is there; it was computed on the parameters of `step`.

        May be told twice, and in any order among servers.
        """
        replica = self._replicas.get(gradient.worker)
        if (
            replica is None
            or gradient.incarnation != replica.incarnation
            or gradient.sequence != replica.pushed
            or server not in self._servers
        ):
            return []  # of an incarnation that is over, or known already
        places = self._landing.setdefault(gradient, set())
        places.add(server)
        if len(places) < len(self._servers):
            return []
        del self._landing[gradient]
        replica.pushed += 1
        match self._policy:
            case SyncReplicas():
                return self._of_sync(replica, gradient, step)
            case Async():
                return [*self._mean([gradient]), Answered(gradient, self._step, True)]
            case BoundedStaleness(k):
                return self._of_bounded(replica, gradient, k)

    def left(self, worker: int) -> None:
        """`worker` will push nothing any more. What it has pushed counts."""
        if worker in self._replicas:
            self._replicas[worker].left = True
            self._gone.add(worker)

    def stranded(self) -> str:
        """Why somebody waits for a step that can never be; empty if nobody does.

        A worker that has left ends no step that can do without it.
        """
        if not self._gone:
            return ""
        who = f"{' and '.join(f'worker {i}' for i in sorted(self._gone))} left the job"
        match self._policy:
            case SyncReplicas(quorum, total):
                assert quorum is not None and total is not None
                have = len(self._candidates.get(self._step, []))
                share = self._share(quorum, total)
                possible = have + sum(
                    share - r.contributed for r in self._replicas.values() if not r.left
                )
                if have == 0 or possible >= quorum:
                    return ""
                return (
                    f"{who}; the mean of step {self._step} is over {quorum} gradients, and the workers that are left "
                    f"can make it {possible}"
                )
            case Async():
                return ""
            case BoundedStaleness():
                for i in sorted(self._gone):
                    replica = self._replicas[i]
                    missing = self._first + replica.pushed
                    if any(wanted > missing for wanted in self._unanswered):
                        return (
                            f"worker {i} left the job after {replica.pushed} gradients, and others wait for step "
                            f"{missing}, to which each worker gives one; all workers must run the same number of steps"
                        )
                return ""

    # --- rules ---

    def _of_sync(self, replica: _Replica, gradient: GradientName, step: int) -> list[Decision]:
        assert isinstance(self._policy, SyncReplicas)
        quorum, total = self._policy.replicas_to_aggregate, self._policy.total_replicas
        assert quorum is not None and total is not None
        if step < self._step:
            replica.dropped += 1
            return [Dropped(gradient), Answered(gradient, self._step, False)]
        candidates = self._candidates.setdefault(self._step, [])
        candidates.append(gradient)
        replica.contributed += 1
        if len(candidates) == quorum:
            # Of each replica the last is unanswered, if it had given its share or the set is complete with it.
            unanswered = [
                name
                for name in candidates
                if name == gradient
                or (
                    name.sequence == self._replicas[name.worker].pushed - 1
                    and self._replicas[name.worker].contributed == self._share(quorum, total)
                )
            ]
            made = self._mean(candidates)
            return [*made, *(Answered(name, self._step, True) for name in unanswered)]
        if replica.contributed < self._share(quorum, total):
            return [Answered(gradient, self._step, True)]
        return []

    def _of_bounded(self, replica: _Replica, gradient: GradientName, k: int) -> list[Decision]:
        number = self._first + gradient.sequence  # of the step that it is for
        self._candidates.setdefault(number, []).append(gradient)
        wanted = number + 1 - k
        waits = wanted > self._step
        if waits:
            self._unanswered.setdefault(wanted, []).append(gradient)
        decisions: list[Decision] = []
        while len(self._candidates.get(self._step, [])) == len(self._replicas):
            decisions += self._mean(self._candidates[self._step])
            due = self._unanswered.pop(self._step, [])
            decisions += [Answered(name, self._step, True) for name in due]
        # After the means: the slowest, whose gradients complete them, is to have the newest.
        return decisions if waits else [*decisions, Answered(gradient, self._step, True)]

    def _mean(self, candidates: Iterable[GradientName]) -> list[Decision]:
        names = sorted(candidates, key=lambda name: (name.worker, name.sequence))
        for name in names:
            replica = self._replicas[name.worker]
            replica.accepted += 1
            replica.contributed = 0
        self._candidates.pop(self._step, None)
        decision = Mean(self._step, names)
        self._step += 1
        return [decision]

    @staticmethod
    def _share(quorum: int, total: int) -> int:
        return math.ceil(quorum / total)
