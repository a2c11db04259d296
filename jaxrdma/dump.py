"""A process's flight recorder as a value that travels, and as a file: docs/trace.md describes its format.

NumPy is imported where records are looked into: the coordinator, which only passes them on, does without.
"""

import contextlib
import errno
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from jaxrdma.clocks import Offset
from jaxrdma.errors import ConfigError

FORMAT = 1
SUFFIX = ".trace"


class Dump(msgspec.Struct, frozen=True):
    """What one process recorded last.

    - `format`: of this struct, and so of the file.
    - `role`, `index`, `host`, `pid`, `incarnation`: whose it is.
    - `reason`: why it was made, `time_ns`: when, of that host's clock in nanoseconds since 1970, as in the records.
    - `offset_ns`: what to add to those times for the coordinator's, wrong by at most `error_ns`; -1: not known.
    - `added`: records that there ever were; `lost`: those of them that two threads wanted to write at one place.
    - `records`: `trace.RECORD_DTYPE`, oldest first.
    """

    format: int
    role: str
    index: int
    host: str
    pid: int
    incarnation: int
    reason: str
    time_ns: int
    offset_ns: int
    error_ns: int
    added: int
    lost: int
    records: bytes

    @property
    def name(self) -> str:
        """For people: "worker 1"."""
        return f"{self.role} {self.index}"


class Engine(Protocol):
    """Of a worker or a server: what has a recorder."""

    def records(self) -> bytes: ...
    def record_counts(self) -> tuple[int, int]: ...


class Dumper:
    """Makes the dumps of this process. Methods may be called from any thread; no step waits for them.

    **Arguments:**

    - `role`, `index`, `incarnation`: whose they are.
    - `folder`: where `save` puts files; `None`: it makes none.
    - `clock`: how far the coordinator's is ahead.
    - `say`: prints one line.
    """

    def __init__(
        self,
        role: str,
        index: int,
        incarnation: int,
        folder: str | None,
        clock: Offset,
        say: Callable[[str], None],
    ) -> None:
        self._who = (role, index, platform.node(), os.getpid(), incarnation)
        self._folder = folder
        self._clock = clock
        self._say = say
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # of the next one
        self._files = 0

    def record(self, engine: Engine) -> None:
        """From now on there is something to tell."""
        self._engine = engine

    def take(self, reason: str, steps: int = 0) -> Dump:
        """What is recorded now; only of the newest `steps` steps of each model, if not 0."""
        records, added, lost = b"", 0, 0
        if self._engine is not None:
            added, lost = self._engine.record_counts()
            records = newest(self._engine.records(), steps)
        error = self._clock.error if self._clock.known else -1
        times = (time.time_ns(), self._clock.offset, error)
        return Dump(FORMAT, *self._who, reason, *times, added, lost, records)

    def save(self, reason: str) -> None:
        """Write a file, if files are wanted. A disk that is full is said, and no error."""
        if self._folder is None:
            return
        role, index, host, pid, _ = self._who
        with self._lock:
            name = f"{role}-{index}-{host}-{pid}-{self._files}{SUFFIX}"
            self._files += 1
        path = Path(self._folder) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whoever reads the folder sees a whole file or none.
            part = path.with_suffix(".part")
            _write_new(part, msgspec.msgpack.encode(self.take(reason)))
            part.replace(path)
        except OSError as error:
            self._say(f"{role} {index}: its last records cannot be written to {path}: {error}")
            return
        self._say(f"{role} {index}: its last records are in {path} ({reason})")


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that was not there: what somebody has put there to be written through is removed, not opened."""
    path.unlink(missing_ok=True)
    try:
        with open(path, "xb") as file:  # follows no link either
            file.write(content)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _read_file(path: Path) -> bytes:
    """What is in a file, or in one that a link leads to, for dumps are collected. A FIFO would be waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        return file.read()


def newest(records: bytes, steps: int) -> bytes:
    """Of each model the records of its last `steps` steps; 0: all."""
    if steps <= 0:
        return records
    import numpy as np

    from jaxrdma import trace

    found = trace.decode(records)
    keep = np.zeros(len(found), bool)
    for flow in np.unique(found["flow"]):
        mine = found["flow"] == flow
        keep |= mine & (found["step"] > found["step"][mine].max() - steps)
    return found[keep].tobytes()


def read(path: Path) -> Dump:
    """A file that `Dumper.save` wrote.

    **Raises:** `ConfigError` if it is none, or of another format.
    """
    from jaxrdma import trace

    try:
        dump = msgspec.msgpack.decode(_read_file(path), type=Dump)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no dump of a flight recorder: {error}") from None
    if dump.format != FORMAT:
        raise ConfigError(
            f"{path} has format {dump.format}, expected {FORMAT}: read it with the release that wrote it"
        )
    if len(dump.records) % trace.RECORD_DTYPE.itemsize:
        raise ConfigError(f"{path} ends in the middle of a record")
    return dump


def read_folder(folder: Path) -> list[Dump]:
    """The newest dump of each process of which there is a file in `folder`.

    **Raises:** `ConfigError` if there is none, or one cannot be read.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(
            f"{folder} has no *{SUFFIX} files: processes write them on SIGUSR1 and on errors if JAXRDMA_TRACE_DIR "
            "names the folder"
        )
    return latest([read(path) for path in paths])


def latest(dumps: Sequence[Dump]) -> list[Dump]:
    """One of each life of each process, by role and index."""
    found: dict[tuple[str, int, int], Dump] = {}
    for dump in sorted(dumps, key=lambda each: each.time_ns):
        found[dump.role, dump.index, dump.incarnation] = dump
    return sorted(found.values(), key=lambda each: (each.role, each.index, each.time_ns))
