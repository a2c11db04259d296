"""How long the coordinator takes to decide about a gradient, for each policy, by the number of replicas.

    python benchmarks/aggregation.py [--json FILE]

Every replica pushes at once, in random order, on two servers; that is repeated for some steps. The limit is 1 ms for a
decision at 1,000 replicas: a step must not wait for its bookkeeping.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxrdma.aggregation import Aggregation
from jaxrdma.control import GradientName
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

SERVERS = 2
POLICIES: dict[str, Callable[[int], Policy]] = {
    "4 of 5 replicas": lambda n: SyncReplicas(n - n // 5),
    "4 gradients of 3 replicas": lambda n: SyncReplicas(n + n // 3),
    "bounded staleness of 2": lambda n: BoundedStaleness(2),
    "asynchronous": lambda n: Async(),
}


def measure(policy: Policy, replicas: int, steps: int) -> tuple[float, float]:
    """Mean and longest time, in seconds, of one piece of news."""
    job = Aggregation(policy.resolve(replicas), range(SERVERS), {i: i for i in range(replicas)})
    chance = random.Random(0)
    total, longest, count = 0.0, 0.0, 0
    for sequence in range(steps):
        news = [(s, GradientName(i, i, sequence)) for s in range(SERVERS) for i in range(replicas)]
        chance.shuffle(news)
        step = job.step
        for server, name in news:
            began = time.perf_counter()
            job.landed(server, name, step)
            job.stranded()
            took = time.perf_counter() - began
            total, longest, count = total + took, max(longest, took), count + 1
    assert job.step > 0
    return total / count, longest


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    table = Table(title="microseconds to decide about a gradient")
    for column in ("policy", "replicas", "mean", "longest"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    rows: list[dict[str, str | int | float]] = []
    for name, policy in POLICIES.items():
        for replicas in (50, 1000, 10_000):
            mean, longest = measure(policy(replicas), replicas, max(3, 2000 // replicas))
            rows.append(
                {"policy": name, "replicas": replicas, "mean_s": mean, "longest_s": longest}
            )
            table.add_row(name, f"{replicas:,}", f"{mean * 1e6:.1f}", f"{longest * 1e6:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
