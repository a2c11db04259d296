"""Whose gradients form a mean: aggregation policies, as values. What they decide is in `jaxrdma.aggregation`."""

import math

import msgspec

from jaxrdma.errors import ConfigError


class SyncReplicas(msgspec.Struct, frozen=True, tag="sync_replicas"):
    """Every step applies one mean of `replicas_to_aggregate` gradients, computed on its own parameters.

    - As many as there are workers, the default: one gradient of each. Nobody is more than one version ahead.
    - Fewer: the others are backups. The first gradients to arrive whole on every server form the mean, the same set for
      every parameter. Those that come later are dropped and counted, and their workers go on from the newest version.
    - More: workers contribute several gradients per step, none more than its share, `replicas_to_aggregate` divided by
      the workers and rounded up. Until the step is complete they get the same version again, for their next batch.

    **Arguments:**

    - `replicas_to_aggregate`: how many gradients form the mean. `None`: one of every worker.
    - `total_replicas`: how many workers contribute: all of the job. `None`: as many as there are.
    """

    replicas_to_aggregate: int | None = None
    total_replicas: int | None = None

    def resolve(self, num_workers: int) -> "SyncReplicas":
        """The policy with its numbers filled in for a job of `num_workers`.

        **Raises:** `ConfigError` for a number that cannot be.
        """
        total = num_workers if self.total_replicas is None else self.total_replicas
        if total != num_workers:
            raise ConfigError(
                f"SyncReplicas(total_replicas={total}) in a job of {num_workers} workers: all workers contribute. "
                f"Leave total_replicas out, or start {total} workers."
            )
        quorum = total if self.replicas_to_aggregate is None else self.replicas_to_aggregate
        if quorum < 1:
            raise ConfigError(
                f"SyncReplicas(replicas_to_aggregate={quorum}): a mean is over at least 1 gradient."
            )
        return SyncReplicas(quorum, total)

    @property
    def held(self) -> int:
        """How many gradients of one worker servers keep at a time; 0: the mean is over one of each. Once resolved."""
        quorum, total = self._numbers
        return 0 if quorum == total else math.ceil(quorum / total)

    def describe(self) -> str:
        """One short text, equal on two processes exactly if their policies are."""
        if self.replicas_to_aggregate is None and self.total_replicas is None:
            return "sync_replicas(all)"
        return f"sync_replicas({self.replicas_to_aggregate} of {self.total_replicas})"

    @property
    def _numbers(self) -> tuple[int, int]:
        assert self.replicas_to_aggregate is not None and self.total_replicas is not None
        return self.replicas_to_aggregate, self.total_replicas


class Async(msgspec.Struct, frozen=True, tag="async"):
    """Each gradient is applied by itself, as soon as it is there whole: a step per gradient, nobody waits for anybody.

    With one worker this is what that worker would do alone. With several, a gradient may have been computed on
    parameters that are some steps old.
    """

    def resolve(self, num_workers: int) -> "Async":
        """Itself."""
        del num_workers
        return self

    @property
    def held(self) -> int:
        """How many gradients of one worker servers keep at a time."""
        return 1

    def describe(self) -> str:
        """One short text, equal on two processes exactly if their policies are."""
        return "async"


class BoundedStaleness(msgspec.Struct, frozen=True, tag="bounded_staleness"):
    """Every step applies the mean of one gradient of each worker, and a worker may be `k` steps ahead of the slowest.

    Step n is made of every worker's gradient number n. A worker that has pushed its gradient number n goes on with the
    newest parameters as soon as there are those of step n + 1 - k. So `k = 0` is `SyncReplicas`, and a worker that is
    slow now and then holds nobody up before it is `k` steps behind.

    **Arguments:**

    - `k`: how many steps, at least 0.
    """

    k: int

    def resolve(self, num_workers: int) -> "BoundedStaleness":
        """Itself.

        **Raises:** `ConfigError` if `k` is negative.
        """
        del num_workers
        if self.k < 0:
            raise ConfigError(f"BoundedStaleness(k={self.k}): k is a number of steps, at least 0.")
        return self

    @property
    def held(self) -> int:
        """How many gradients of one worker servers keep at a time."""
        return self.k + 1

    def describe(self) -> str:
        """One short text, equal on two processes exactly if their policies are."""
        return f"bounded_staleness({self.k})"


Policy = SyncReplicas | Async | BoundedStaleness
