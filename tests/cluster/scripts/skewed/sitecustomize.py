"""On PYTHONPATH: the clock of this process is ahead of the others' by CLOCK_AHEAD seconds."""

import os
import sys
import time

_SECONDS = int(os.environ["CLOCK_AHEAD"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _SECONDS
time.time_ns = lambda: _time_ns() + _SECONDS * 1_000_000_000

print(f"the clock is ahead by {_SECONDS} s", file=sys.stderr)
