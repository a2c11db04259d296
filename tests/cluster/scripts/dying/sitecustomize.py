"""On a process's module path: kills it when it flushes a second file with DIE_IN_FSYNC_OF in its path."""

import os
import signal
from typing import Any

_fsync: Any = os.fsync


_flushed: list[str] = []


def _die(descriptor: int) -> None:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if os.environ["DIE_IN_FSYNC_OF"] in path:
        _flushed.append(path)
    if len(_flushed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _fsync(descriptor)


os.fsync = _die
