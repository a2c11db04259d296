"""What several processes recorded, on one clock: who did what, from when to when. Facts in, values out."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrdma import trace
from jaxrdma.dump import Dump

# What a step is made of, in its order.
PARTS = ("compute", "push", "reduce", "update", "pull")


@dataclass
class WorkerSteps:
    """Times of one worker, in nanoseconds of the coordinator's clock, by `(flow, step, partition)`."""

    queued: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    sent: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    consumed: dict[tuple[int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int], int]
    )
    server: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])


@dataclass
class ServerSteps:
    """Times of one server. `landed`: of each worker's gradient. `published`: of the parameters *of* that step."""

    landed: dict[tuple[int, int, int], dict[int, int]] = field(
        default_factory=lambda: defaultdict[tuple[int, int, int], dict[int, int]](dict)
    )
    reduced: dict[tuple[int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int], int]
    )
    updating: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    published: dict[tuple[int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int], int]
    )
    answered: dict[tuple[int, int, int], dict[int, int]] = field(
        default_factory=lambda: defaultdict[tuple[int, int, int], dict[int, int]](dict)
    )


@dataclass
class Timeline:
    """A job's last steps: what is known of each worker and each server, by index."""

    workers: dict[int, WorkerSteps] = field(default_factory=dict[int, WorkerSteps])
    servers: dict[int, ServerSteps] = field(default_factory=dict[int, ServerSteps])

    def steps(self, last: int = 0) -> list[tuple[int, int]]:
        """`(flow, step)` of every exchange that some worker ended; of each flow the `last` ones, if not 0."""
        found = sorted({key[:2] for w in self.workers.values() for key in w.consumed})
        if last <= 0:
            return found
        newest = dict(found)  # the last of a flow stays
        return [(flow, step) for flow, step in found if step > newest[flow] - last]


@dataclass(frozen=True)
class Slice:
    """One process was at `part` of a step from `begin` to `end`. `partition`, `flow`, `step` -1: of none.

    `peer`: for whom or from whom, of the other role; -1: nobody in particular.
    """

    role: str
    index: int
    part: str
    flow: int
    step: int
    partition: int
    peer: int
    begin: int
    end: int


def merge(dumps: Iterable[Dump]) -> Timeline:
    """What they recorded, on the coordinator's clock. Of something that was done again the last time counts."""
    timeline = Timeline()
    for dump in dumps:
        records = trace.decode(dump.records)
        if dump.role == "worker":
            _add_worker(timeline.workers.setdefault(dump.index, WorkerSteps()), records, dump)
        elif dump.role == "server":
            _add_server(timeline.servers.setdefault(dump.index, ServerSteps()), records, dump)
    return timeline


def _add_worker(worker: WorkerSteps, records: Any, dump: Dump) -> None:
    for flow, step, partition, peer, stage, now in _rows(records, dump):
        key = flow, step, partition
        match stage:
            case "queued":
                worker.queued[key] = now
                worker.server[key] = peer
                worker.sent.pop(key, None)
                worker.consumed.pop(key, None)
            case "posted" | "completed":
                worker.sent[key] = now
            case "consumed":
                worker.consumed[key] = now
                worker.server[key] = peer
            case _:
                pass


def _add_server(server: ServerSteps, records: Any, dump: Dump) -> None:
    for flow, step, partition, peer, stage, now in _rows(records, dump):
        key = flow, step, partition
        match stage:
            case "landed":
                server.landed[key][peer] = now
            case "reduced":
                server.reduced[key] = now
            case "updating":
                server.updating[flow, step] = now
            case "published":
                server.published[key] = now
            case "answered":
                server.answered[key][peer] = now
            case _:
                pass


def _rows(records: Any, dump: Dump) -> Iterable[tuple[int, int, int, int, str, int]]:
    names = ("flow", "step", "partition", "peer", "stage", "time_ns")
    columns = [records[name].tolist() for name in names]
    for flow, step, partition, peer, stage, now in zip(*columns, strict=True):
        # A later release may know more of them.
        name = trace.STAGES[stage] if stage < len(trace.STAGES) else ""
        yield flow, step, partition, peer, name, now + dump.offset_ns


def slices(timeline: Timeline, steps: Sequence[tuple[int, int]]) -> list[Slice]:
    """What everybody did in `steps`, by partition; a worker's own time between two steps, and updates, as a whole."""
    wanted = set(steps)
    found: list[Slice] = []
    for index, worker in timeline.workers.items():
        found += _computing(index, worker, wanted)
        for key, begin in worker.queued.items():
            if key[:2] not in wanted:
                continue
            server = worker.server[key]
            sent = worker.sent.get(key)
            if sent is not None:
                found.append(Slice("worker", index, "push", *key, server, begin, max(begin, sent)))
            end = worker.consumed.get(key)
            if end is None:
                continue
            holder = timeline.servers.get(server)
            flow, step, partition = key
            there = None if holder is None else holder.published.get((flow, step + 1, partition))
            since = min(end, max(there if there is not None else 0, sent or begin))
            found.append(Slice("worker", index, "pull", *key, server, since, end))
    for index, server in timeline.servers.items():
        for key, landed in server.landed.items():
            if key[:2] in wanted and key in server.reduced:
                begin, end = min(landed.values()), server.reduced[key]
                last = max(landed, key=lambda w: landed[w])
                found.append(Slice("server", index, "reduce", *key, last, min(begin, end), end))
        ends: dict[tuple[int, int], int] = {}
        for (flow, step, _), now in server.published.items():
            ends[flow, step] = max(now, ends.get((flow, step), now))
        for (flow, step), begin in server.updating.items():
            end = ends.get((flow, step + 1))
            if (flow, step) in wanted and end is not None:
                found.append(
                    Slice("server", index, "update", flow, step, -1, -1, begin, max(begin, end))
                )
    return sorted(found, key=lambda s: (s.begin, s.end))


def spans(times: dict[tuple[int, int, int], int]) -> dict[tuple[int, int], tuple[int, int]]:
    """First and last time of each `(flow, step)`."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (flow, step, _), now in times.items():
        first, last = found.get((flow, step), (now, now))
        found[flow, step] = min(first, now), max(last, now)
    return found


def _computing(index: int, worker: WorkerSteps, wanted: set[tuple[int, int]]) -> list[Slice]:
    """Between the end of any exchange and the beginning of the next."""
    begins, ends = spans(worker.queued), spans(worker.consumed)
    found: list[Slice] = []
    free: int | None = None
    for key in sorted(begins, key=lambda k: begins[k][0]):
        begin = begins[key][0]
        if key in wanted and free is not None and free <= begin:
            found.append(Slice("worker", index, "compute", *key, -1, -1, free, begin))
        if key in ends:
            free = max(free or 0, ends[key][1])
    return found
