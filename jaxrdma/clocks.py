"""How far another machine's clock is ahead of ours, from questions that it answers with its time."""

# Two clocks of ordinary machines drift apart by at most so much of the time that passes.
_DRIFT = 1e-4


class Offset:
    """Of the coordinator's clock, as one process knows it: what to add to the own time. Times in nanoseconds.

    The clock was read somewhere between the question and the answer, so an estimate is wrong by at most half of that
    time. The one that is wrong by least is kept; it gets worse as time passes.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._error = 0
        self._at: int | None = None  # of the estimate; None: there is none

    def heard(self, asked: int, told: int, now: int) -> None:
        """Asked at `asked`, answered by `now`, both of the own clock; `told` is of the other."""
        error = (now - asked) // 2
        if error < 0:
            return  # the own clock was set meanwhile
        if self._at is None or error <= self._error + abs(now - self._at) * _DRIFT:
            self._offset, self._error, self._at = told - (asked + now) // 2, error, now

    @property
    def known(self) -> bool:
        """Whether there was an answer yet."""
        return self._at is not None

    @property
    def offset(self) -> int:
        """To be added to the own time. 0 if that is as likely: two processes of a machine have one clock."""
        return 0 if abs(self._offset) <= self._error else self._offset

    @property
    def error(self) -> int:
        """By how much `offset` was wrong at most, when it was estimated."""
        return self._error
