"""What a worker tells `jax.monitoring`: how long its last exchange took. docs/metrics.md has the names.

A heartbeat tells of the newest step that is over, so of a sample of them, and what is told costs no step anything.
"""

from typing import Any, NamedTuple

import jax.monitoring
import numpy as np
from numpy.typing import NDArray

from jaxrdma import trace
from jaxrdma.dump import Engine

# A step of this package's own, without the time between two steps.
EVENTS = ("/jaxrdma/push_duration", "/jaxrdma/pull_duration", "/jaxrdma/exchange_duration")

_QUEUED, _POSTED, _COMPLETED, _CONSUMED = range(4)


class Exchange(NamedTuple):
    """One worker's part in one step, in seconds: until all is sent, from then until all is there, and both."""

    flow: int
    step: int
    push: float
    pull: float
    whole: float


class Monitor:
    """Tells of each exchange at most once."""

    def __init__(self) -> None:
        self._told: tuple[int, int] | None = None
        self._added = 0

    def look(self, engine: Engine) -> None:
        """`tell` what an engine recorded, if that is more than the last time: who rests reads nothing."""
        added, _ = engine.record_counts()
        if added != self._added:
            self._added = added
            self.tell(engine.records())

    def tell(self, records: bytes) -> None:
        """Of the newest exchange among `records` that is over, if it is another than the last time."""
        found = newest_exchange(trace.decode(records))
        if found is None or found[:2] == self._told:
            return
        self._told = found[:2]
        for event, seconds in zip(EVENTS, found[2:], strict=True):
            jax.monitoring.record_event_duration_secs(event, seconds, model=found.flow)


def newest_exchange(records: NDArray[Any]) -> Exchange | None:
    """The last one of which every partition that was given has an answer; `None` if there is none."""
    given = records[records["stage"] == _QUEUED]
    if not len(given):
        return None
    flow = int(given["flow"][-1])
    mine = records[records["flow"] == flow]
    newest = int(given["step"][-1])
    for step in (newest, newest - 1):
        parts = mine[mine["step"] == step]
        times = {stage: parts["time_ns"][parts["stage"] == stage] for stage in range(4)}
        if not len(times[_QUEUED]) or len(times[_QUEUED]) != len(times[_CONSUMED]):
            continue
        sent = np.concatenate([times[_POSTED], times[_COMPLETED]])
        if not len(sent):
            continue
        begin, end = int(times[_QUEUED].min()), int(times[_CONSUMED].max())
        middle = min(int(sent.max()), end)
        return Exchange(
            flow, step, (middle - begin) / 1e9, (end - middle) / 1e9, (end - begin) / 1e9
        )
    return None
