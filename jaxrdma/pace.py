"""How fast a process goes, from its heartbeats."""

from dataclasses import dataclass

from jaxrdma.control import Heartbeat


@dataclass
class Pace:
    """What the last heartbeats of one process tell of its speed.

    - `step_seconds`: seconds of a step, between the last two heartbeats that told of another step; 0: not known.
    - `sent`, `received`: bytes a second, between the last two.
    """

    step_seconds: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    _last: tuple[float, Heartbeat] | None = None
    _stepped: tuple[float, int] | None = None  # when the newest step was told of

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Another heartbeat, at the time `now` in seconds."""
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            self.sent = (heartbeat.sent - self._last[1].sent) / seconds
            self.received = (heartbeat.received - self._last[1].received) / seconds
        self._last = now, heartbeat
        if self._stepped is None or heartbeat.step > self._stepped[1]:
            if self._stepped is not None and self._stepped[1] >= 0:
                since, step = self._stepped
                self.step_seconds = (now - since) / (heartbeat.step - step)
            self._stepped = now, heartbeat.step
