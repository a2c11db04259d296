"""Flight recorders of a job that never was: two servers with two partitions each, times chosen by the test."""

import numpy as np

from jaxrdma import trace
from jaxrdma.dump import FORMAT, Dump

MS = 1_000_000
BEGIN = 1_700_000_000_000 * MS


class Life:
    """One process, and what it recorded."""

    def __init__(self, role: str, index: int) -> None:
        self.role, self.index = role, index
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.offset = 0

    def add(self, stage: str | int, at: int, step: int, partition: int, peer: int) -> None:
        number = trace.STAGES.index(stage) if isinstance(stage, str) else stage
        self.rows.append((BEGIN + at, step, partition, 0, peer, number))

    def forget(self, stage: str, step: int) -> None:
        number = trace.STAGES.index(stage)
        self.rows = [row for row in self.rows if (row[5], row[1]) != (number, step)]

    def ahead(self, ns: int) -> None:
        """Its clock is."""
        self.rows = [(row[0] + ns, *row[1:]) for row in self.rows]
        self.offset = -ns

    def dump(self, **changes) -> Dump:
        records = np.zeros(len(self.rows), trace.RECORD_DTYPE)
        for i, row in enumerate(sorted(self.rows)):
            records[i] = (*row, (0,) * 7)
        facts = {
            "format": FORMAT,
            "role": self.role,
            "index": self.index,
            "host": "host",
            "pid": (10 if self.role == "worker" else 20) + self.index,
            "incarnation": 7,
            "reason": "made up",
            "time_ns": BEGIN,
            "offset_ns": self.offset,
            "error_ns": 0,
            "added": len(records),
            "lost": 0,
            "records": records.tobytes(),
        }
        return Dump(**{**facts, **changes})


def job(steps: int, workers: int = 2, average: bool = False, **late: int) -> list[Life]:
    """Workers, then servers; partition k lies on server k mod 2.

    A step: 10 ms of compute, 2 of push, 1 until all is summed, 3 of update, 2 of pull. `late` adds milliseconds:
    `compute_WORKER`, `push_WORKER_PARTITION`, `reduce_PARTITION`, `update_SERVER`, `pull_WORKER_PARTITION`.
    """
    crew = [Life("worker", index) for index in range(workers)]
    servers = [Life("server", index) for index in range(2)]
    parts = range(4)

    def extra(*what: object) -> int:
        return late.get("_".join(map(str, what)), 0) * MS

    free = [0] * workers
    for step in range(steps):
        landed: dict[int, list[int]] = {k: [] for k in parts}
        for worker in crew:
            queued = free[worker.index] + 10 * MS + extra("compute", worker.index)
            for k in parts:
                sent = queued + 2 * MS + extra("push", worker.index, k)
                worker.add("queued", queued, step, k, k % 2)
                worker.add("posted", queued + MS, step, k, k % 2)
                worker.add("completed", sent, step, k, k % 2)
                servers[k % 2].add("landed", sent, step, k, worker.index)
                landed[k].append(sent)
        reduced = {k: max(landed[k]) + MS + extra("reduce", k) for k in parts}
        published: dict[int, int] = {}
        for server in servers:
            mine = [k for k in parts if k % 2 == server.index]
            ready = max(reduced[k] for k in mine)
            for k in mine:
                server.add("reduced", reduced[k], step, k, 0xFFFF)
                length = 3 * MS + extra("update", server.index)
                published[k] = reduced[k] if average else ready + length
                server.add("published", published[k], step + 1, k, 0xFFFF)
            if not average:
                server.add("updating", ready, step, mine[0], 0xFFFF)
        for worker in crew:
            ends = [published[k] + 2 * MS + extra("pull", worker.index, k) for k in parts]
            for k, end in zip(parts, ends, strict=True):
                worker.add("consumed", end, step, k, k % 2)
            free[worker.index] = max(ends)
    return crew + servers
