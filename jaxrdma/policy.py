"""Whose gradients form a mean: aggregation policies, as values.

A policy is frozen data with a few pure answers; `Aggregation` (`aggregation.py`) keeps the state and asks them. A new
rule is one more class here.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import msgspec

from jaxrdma.errors import ConfigError

OnLoss = Literal["fail", "shrink", "wait"]
Wire = dict[str, int | str | None]
LOSSES: tuple[OnLoss, ...] = ("fail", "shrink", "wait")


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """What every policy answers.

    Gradients are sorted by the version of the parameters that they improve: a gradient *of step s* counts in the mean
    that turns version s into version s + 1.

    **Arguments:**

    - `on_loss`: what follows when a replica dies or falls silent. `None`: the policy's own default.
        - "fail": the job ends, with an error that names the replica.
        - "shrink": the others go on without it.
        - "wait": its place is kept for its next incarnation. A step that cannot do without it waits.

    With "shrink" and "wait", a process that is started in the place of a lost one may join the job; and workers may be
    added to one that has spare places (`JAXRDMA_MOST_WORKERS`). All places count as workers in what follows.

    A replica whose data ran out, and which says so, is no loss: whatever `on_loss` is, the others go on without it.
    Nor can a replica be spared before training has begun: until every worker has called `init`, a loss ends the job.
    """

    on_loss: OnLoss | None = None

    @abstractmethod
    def complete(self, num_workers: int) -> Self:
        """The policy with nothing left open, for a job of `num_workers`.

        **Raises:** `ConfigError`, naming the argument that cannot be, what was expected and what came.
        """

    @abstractmethod
    def describe(self) -> str:
        """One short text, equal on two processes exactly if their policies are."""

    @abstractmethod
    def quorum(self, members: int) -> int:
        """How many gradients form a mean while there are `members` replicas, at least 1. Of a complete policy."""

    def least(self, staying: int) -> int:
        """With fewer replicas than this, a loss ends the job although `on_loss` is "shrink". Of a complete policy.

        `staying` counts those that have not left in good order: the living and the lost.
        """
        del staying
        return 1

    @abstractmethod
    def step_of(self, own: int, computed_on: int, newest: int) -> int | None:
        """The step that a gradient is of, or None if it comes too late to count.

        `own`: the replica's clock, one more than the step of its last gradient; `computed_on`: the version of the
        parameters that it saw; `newest`: the newest version.
        """

    @abstractmethod
    def answered_at(self, step: int) -> int:
        """The oldest version that may answer the exchange which brought a gradient of `step`."""

    @property
    @abstractmethod
    def held(self) -> int:
        """How many gradients of one replica the servers keep at a time; 0: nothing is ever left to decide.

        Of a complete policy. Replicas that others have left may have more, as long as all together have no more.
        """

    def _with_on_loss(self, default: OnLoss) -> Self:
        on_loss = default if self.on_loss is None else self.on_loss
        if on_loss not in LOSSES:
            raise ConfigError(
                f"{type(self).__name__}(on_loss={on_loss!r}): expected one of {', '.join(map(repr, LOSSES))}."
            )
        return replace(self, on_loss=on_loss)


@dataclass(frozen=True)
class SyncReplicas(Policy):
    """Every step averages N gradients that were all computed on its version; nobody is more than one version ahead.

    With N gradients to aggregate and M workers:

    - N = M: one gradient of each replica. The quorum follows the membership.
    - N < M: M - N *backup replicas*. The first N gradients that have landed whole on all servers form the mean. Those
      that come later are dropped and counted, and their replicas go on with the newest version.
    - N > M: a replica contributes several gradients to a step, all computed on the same version. Each has one of its
      own to give, and the N - M others are for whoever is first, but nobody gives more than its fair share, N / M
      rounded up.

    When a replica leaves in good order: N = M, the mean is over those that remain. N < M, over the first N of them, or
    over all when fewer remain. N > M, those that remain give more; what has landed of a step that nobody is left to
    complete is dropped.

    **Arguments:**

    - `replicas_to_aggregate`: N. `None`: one of every worker.
    - `total_replicas`: M. `None`: all workers. Any other number must be that of the workers.
    - `on_loss`: as in `Policy`. Default: "fail", but "shrink" if there are backup replicas: N stays while at least N
      replicas remain, and the job ends when there are fewer.
    """

    replicas_to_aggregate: int | None = None
    total_replicas: int | None = None

    def complete(self, num_workers: int) -> Self:
        total = num_workers if self.total_replicas is None else self.total_replicas
        if total != num_workers:
            raise ConfigError(
                f"SyncReplicas(total_replicas={total}) in a job of {num_workers} workers: every worker is a replica. "
                f"Leave total_replicas out, or start {total} workers."
            )
        wanted = total if self.replicas_to_aggregate is None else self.replicas_to_aggregate
        if wanted < 1:
            raise ConfigError(
                f"SyncReplicas(replicas_to_aggregate={wanted}): expected at least 1. "
                "Leave it out for one gradient of every worker."
            )
        return replace(
            self._with_on_loss("shrink" if wanted < total else "fail"),
            replicas_to_aggregate=wanted,
            total_replicas=total,
        )

    def describe(self) -> str:
        total, wanted = self.total_replicas, self.replicas_to_aggregate
        numbers = "all" if wanted is None and total is None else f"{wanted} of {total}"
        return f"sync_replicas({numbers}{_suffix(self.on_loss)})"

    def quorum(self, members: int) -> int:
        wanted, total = self._numbers()
        if wanted == total:
            return max(1, members)
        return max(1, min(wanted, members)) if wanted < total else wanted

    def least(self, staying: int) -> int:
        wanted, total = self._numbers()
        return max(1, min(wanted, staying)) if wanted < total else 1

    def step_of(self, own: int, computed_on: int, newest: int) -> int | None:
        return newest if computed_on == newest else None

    def answered_at(self, step: int) -> int:
        return step + 1

    @property
    def held(self) -> int:
        wanted, total = self._numbers()
        if wanted == total and self.on_loss == "fail":
            return 0  # always one of each
        return -(-wanted // total)

    def _numbers(self) -> tuple[int, int]:
        if self.replicas_to_aggregate is None or self.total_replicas is None:
            raise ValueError(f"{self} is not complete: call complete(num_workers) first")
        return self.replicas_to_aggregate, self.total_replicas


@dataclass(frozen=True)
class Async(Policy):
    """Every gradient is applied at once, in the order of landing, and makes a version of its own.

    Nobody waits for anybody. With one worker this is local SGD. A replica that leaves in good order, or is lost, is
    missed by none.

    **Arguments:**

    - `on_loss`: as in `Policy`. Default: "shrink", until nobody remains; that ends the job. With "wait" it does not.
    """

    def complete(self, num_workers: int) -> Self:
        del num_workers
        return self._with_on_loss("shrink")

    def describe(self) -> str:
        return f"async({_suffix(self.on_loss).removeprefix(', ')})"

    def quorum(self, members: int) -> int:
        del members
        return 1

    def step_of(self, own: int, computed_on: int, newest: int) -> int | None:
        return newest

    def answered_at(self, step: int) -> int:
        return step + 1

    @property
    def held(self) -> int:
        return 1


@dataclass(frozen=True)
class BoundedStaleness(Policy):
    """Every step averages one gradient of each replica, which may see parameters up to `k` versions old.

    A replica's first gradient is of the step at which it joined, the next one of the step after that, and so on. It
    goes on from a gradient of step s as soon as version s + 1 - k is there, so nobody is ever more than `k` steps ahead
    of the slowest. Each server keeps up to k + 1 gradients of a replica. `BoundedStaleness(0)` is `SyncReplicas()`.

    When a replica leaves in good order, the gradients that it gave in advance still count, each in its step; later
    means are over those that remain. Those of a replica that is lost do not.

    **Arguments:**

    - `k`: how many steps ahead, at least 0.
    - `on_loss`: as in `Policy`. Default: "fail", as every mean takes a gradient of each replica.
    """

    k: int

    def complete(self, num_workers: int) -> Self:
        del num_workers
        if self.k < 0:
            raise ConfigError(
                f"BoundedStaleness(k={self.k}): expected at least 0, which lets nobody be ahead."
            )
        return self._with_on_loss("fail")

    def describe(self) -> str:
        return f"bounded_staleness(k={self.k}{_suffix(self.on_loss)})"

    def quorum(self, members: int) -> int:
        return max(1, members)

    def step_of(self, own: int, computed_on: int, newest: int) -> int | None:
        return own

    def answered_at(self, step: int) -> int:
        return step + 1 - self.k

    @property
    def held(self) -> int:
        return self.k + 1


def check_growth(policy: Policy, what: str) -> None:
    """Refuse a complete policy by which no worker can be added while the job runs. `what`: the model, for people.

    **Raises:** `ConfigError`.
    """
    if policy.on_loss == "fail":
        raise ConfigError(
            f"{what} with {policy.describe()} in a job to which workers may be added (JAXRDMA_MOST_WORKERS): where "
            "the loss of one ends the job, all must be there from the start. Give a policy with on_loss='shrink' or "
            "'wait', or leave JAXRDMA_MOST_WORKERS out"
        )


def to_wire(policy: Policy) -> Wire:
    """A policy as it travels, for `from_wire`."""
    return {"policy": type(policy).__name__, **asdict(policy)}


def from_wire(wire: Wire) -> Policy:
    """The policy that `to_wire` was given.

    **Raises:** `ConfigError` if there is none such.
    """
    arguments: dict[str, Any] = dict(wire)
    kind = {each.__name__: each for each in (SyncReplicas, Async, BoundedStaleness)}.get(
        str(arguments.pop("policy", ""))
    )
    if kind is None:
        raise ConfigError(f"there is no policy {wire}: install the same jaxrdma everywhere")
    try:
        return msgspec.convert(asdict(kind(**arguments)), kind)  # which looks at the types
    except (TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"there is no policy {wire}: {error}") from None


def _suffix(on_loss: OnLoss | None) -> str:
    return "" if on_loss is None else f", on_loss={on_loss}"
