"""Whose gradients form a mean: aggregation policies, as values."""

from dataclasses import dataclass

from jaxrdma.errors import ConfigError


@dataclass(frozen=True)
class SyncReplicas:
    """Every step averages one gradient of each replica; nobody is more than one version ahead.

    **Arguments:**

    - `replicas_to_aggregate`: how many gradients form the mean. `None`: one of every worker.
    - `total_replicas`: how many workers contribute. `None`: all.

    Only all of all is implemented; `resolve` refuses anything else, so that a script that asks for backup replicas
    does not silently train without them.
    """

    replicas_to_aggregate: int | None = None
    total_replicas: int | None = None

    def resolve(self, num_workers: int) -> "SyncReplicas":
        """The policy with its numbers filled in for a job of `num_workers`.

        **Raises:** `ConfigError`, naming the number that differs from the number of workers.
        """
        for name in ("replicas_to_aggregate", "total_replicas"):
            value: int | None = getattr(self, name)
            if value is not None and value != num_workers:
                raise ConfigError(
                    f"SyncReplicas({name}={value}) in a job of {num_workers} workers: only means over all workers "
                    f"are implemented. Leave {name} out, or start {value} workers."
                )
        return SyncReplicas(num_workers, num_workers)

    def describe(self) -> str:
        """One short text, equal on two processes exactly if their policies are."""
        if self.replicas_to_aggregate is None and self.total_replicas is None:
            return "sync_replicas(all)"
        return f"sync_replicas({self.replicas_to_aggregate} of {self.total_replicas})"
