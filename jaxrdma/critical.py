"""What made a step late: the chain of waits that led to its end, and the longest of them. Facts in, values out."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrdma.timeline import PARTS, Timeline, spans


@dataclass(frozen=True)
class Step:
    """One step's critical path: whoever ended it last, and backwards whatever that waited for. Times in seconds.

    - `seconds`: from the end of the step before; of the first one, from the beginning of its path.
    - `end_ns`: when the last worker had the last partition, of the coordinator's clock.
    - `parts`: by name (`timeline.PARTS`), how long the path was in each; "compute" if the step before is known.
    - `late`: the part that made it late, for `late_seconds`: `worker`, `server`, `partition`; -1: none is concerned.

    Of compute, only what the worker came later than the first one counts as late: all need that long anyway. Where
    there is one worker alone, all of it.
    """

    flow: int
    step: int
    seconds: float
    end_ns: int
    parts: dict[str, float]
    late: str
    late_seconds: float
    worker: int
    server: int
    partition: int

    @property
    def text(self) -> str:
        """What made it late, in words: "worker 1: compute"."""
        who = [f"worker {self.worker}"] if self.worker >= 0 else []
        if self.server >= 0:
            who.append(f"server {self.server}")
        if self.partition >= 0:
            who.append(f"partition {self.partition}")
        return f"{', '.join(who)}: {self.late}"


def critical_paths(timeline: Timeline, steps: Sequence[tuple[int, int]]) -> list[Step]:
    """Of each of `steps`, `(flow, step)`, in this order; those are left out of which not enough is recorded."""
    facts = _Facts(timeline)
    found = (_path(timeline, facts, flow, step) for flow, step in steps)
    return [each for each in found if each is not None]


class _Facts:
    """What is looked up for every step, by `(flow, step)`."""

    def __init__(self, timeline: Timeline) -> None:
        # First and last partition that came, by worker.
        self.ends = {index: spans(worker.consumed) for index, worker in timeline.workers.items()}
        # When what came last did, whose it was, of which partition and from which server.
        self.last: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        for index, worker in timeline.workers.items():
            for key, now in worker.consumed.items():
                mine = now, index, key[2], worker.server[key]
                self.last[key[:2]] = max(mine, self.last.get(key[:2], mine))
        # When the last sum was there, and of which partition, by server.
        self.sums: dict[tuple[int, int, int], tuple[int, int]] = {}
        for index, server in timeline.servers.items():
            for (flow, step, partition), now in server.reduced.items():
                key = index, flow, step
                self.sums[key] = max((now, partition), self.sums.get(key, (now, partition)))


def _path(timeline: Timeline, facts: _Facts, flow: int, step: int) -> Step | None:
    last = facts.last.get((flow, step))
    if last is None or last[3] not in timeline.servers:
        return None
    end, taker, pulled, server = last
    there = timeline.servers[server]
    published = there.published.get((flow, step + 1, pulled))
    # An update waits for all sums of the server, a mean is there with its own.
    if (flow, step) in there.updating:
        reduced, summed = facts.sums.get((server, flow, step), (None, -1))
    else:
        reduced, summed = there.reduced.get((flow, step, pulled)), pulled
    if published is None or reduced is None:
        return None
    landings = there.landed.get((flow, step, summed))
    if not landings:
        return None
    giver = max(landings, key=lambda worker: landings[worker])
    landed = landings[giver]
    queues = {
        index: worker.queued[flow, step, summed]
        for index, worker in timeline.workers.items()
        if (flow, step, summed) in worker.queued
    }
    if giver not in queues:
        return None
    queued = queues[giver]
    parts = {
        "push": landed - queued,
        "reduce": reduced - landed,
        "update": published - reduced,
        "pull": end - published,
    }
    free = facts.ends[giver].get((flow, step - 1))
    if free is not None:
        parts["compute"] = queued - free[1]
    # Clocks of two machines are not quite the same.
    parts = {name: max(0, parts[name]) for name in PARTS if name in parts}
    lateness = parts | {"compute": queued - min(queues.values())}
    if len(timeline.workers) == 1:
        lateness["compute"] = parts.get("compute", 0)
    late = max(lateness, key=lambda part: lateness[part])
    before = [mine[flow, step - 1][1] for mine in facts.ends.values() if (flow, step - 1) in mine]
    begin = max(before) if before else queued
    concerned = {
        "compute": (giver, -1, -1),
        "push": (giver, server, summed),
        "reduce": (-1, server, summed),
        "update": (-1, server, -1),
        "pull": (taker, server, pulled),
    }[late]
    return Step(
        flow,
        step,
        (end - begin) / 1e9,
        end,
        {name: length / 1e9 for name, length in parts.items()},
        late,
        lateness[late] / 1e9,
        *concerned,
    )
