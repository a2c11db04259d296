"""What a decision of `Aggregation` costs, by policy and number of replicas, in processor time. No network, one process.

    python benchmarks/aggregation.py [--steps 10] [--servers 2] [--json FILE]

Every replica pushes, in an order drawn anew for each step, until `--steps` times as many gradients have landed. An
event is one server's report that its share has landed. Most lead to nothing or to one answer; the one that completes a
step also names the mean and answers everybody. Times are of the event, with all its decisions, in processor time: what
else the machine does is not counted.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrdma.aggregation import Aggregate, Aggregation, Answer
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

SIZES = (50, 1_000, 10_000)


def policies(replicas: int) -> dict[str, Policy]:
    """Each policy in a form that does something at this size."""
    return {
        "sync": SyncReplicas(),
        "sync, backups": SyncReplicas(replicas - replicas // 10),
        "sync, several": SyncReplicas(replicas + replicas // 2),
        "async": Async(),
        "staleness 3": BoundedStaleness(3),
    }


def measure(policy: Policy, replicas: int, servers: int, steps: int) -> dict[str, Any]:
    """Microseconds per event: of all, of those that complete no step, and of those that do, also by their decisions."""
    chance = random.Random(0)
    aggregation = Aggregation(
        policy.complete(replicas), servers=servers, replicas=dict.fromkeys(range(replicas), 1)
    )
    ready = [d for d in aggregation.start() if isinstance(d, Answer)]
    plain: list[float] = []
    completing: list[float] = []
    each: list[float] = []
    wanted = replicas * servers * steps
    while len(plain) + len(completing) < wanted:
        chance.shuffle(ready)
        turn, ready = ready, []
        for last in turn:
            for server in range(servers):
                began = time.thread_time_ns()
                decisions = aggregation.landed(
                    server, last.replica, last.incarnation, last.sequence + 1, last.step
                )
                took = (time.thread_time_ns() - began) / 1000
                completes = any(isinstance(d, Aggregate) for d in decisions)
                (completing if completes else plain).append(took)
                each += [took / len(decisions)] if completes else []
                ready += [d for d in decisions if isinstance(d, Answer)]
    everything = plain + completing
    return {
        "replicas": replicas,
        "events": len(everything),
        "steps": aggregation.step,
        "mean_us": statistics.fmean(everything),
        "plain_median_us": statistics.median(plain),
        "completing_median_us": statistics.median(completing),
        "completing_worst_us": max(completing),
        "completing_per_decision_us": statistics.median(each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a decision of the aggregation costs.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    table = Table(
        "policy",
        "replicas",
        "steps",
        "mean event",
        "no step",
        "a step",
        "worst",
        "per decision",
        title=f"{args.servers} servers; processor time in microseconds per event",
    )
    rows: list[dict[str, Any]] = []
    for name in policies(SIZES[0]):
        for replicas in SIZES:
            row = measure(policies(replicas)[name], replicas, args.servers, args.steps)
            rows.append({"policy": name, **row})
            figures = (
                "mean_us",
                "plain_median_us",
                "completing_median_us",
                "completing_worst_us",
                "completing_per_decision_us",
            )
            table.add_row(
                name, str(replicas), str(row["steps"]), *(f"{row[key]:.1f}" for key in figures)
            )
    Console(width=110).print(table)
    if args.json:
        args.json.write_text(json.dumps({"servers": args.servers, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
