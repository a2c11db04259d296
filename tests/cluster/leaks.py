"""What the processes of a job hold, sampled while it runs: nothing of it may grow with time or with events."""

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.cluster.job import Job


@dataclass(frozen=True)
class Sample:
    """Of one process at one time. `pinned`, `resident`: KiB."""

    seconds: float
    files: int
    threads: int
    pinned: int
    resident: int


def sample(pid: int, since: float) -> Sample | None:
    """What process `pid` holds now; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = psutil.Process(pid).num_fds()
    except (OSError, psutil.Error):
        return None
    number = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    if "VmRSS" not in number:
        return None  # it has ended, and nobody has waited for it
    pinned = int(number["VmPin"]) + int(number["VmLck"])
    return Sample(
        time.monotonic() - since, files, int(number["Threads"]), pinned, int(number["VmRSS"])
    )


class Leaks:
    """Samples all processes of a job every `pause` seconds on a thread of its own. A context manager."""

    def __init__(self, job: Job, pause: float = 0.5) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._job = job
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Leaks":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        since = time.monotonic()
        while not self._stop.wait(self._pause):
            for name, process in list(self._job.processes.items()):
                found = sample(process.pid, since) if process.poll() is None else None
                if found is not None:
                    self.samples.setdefault(name, []).append(found)

    def grown(self, name: str) -> str:
        """How much more the process holds at the least in the last third than at the most in the second; "" if no more.

        The first third is for what is made once: pools, caches, arenas. A connection that is being made or ended may
        show in one sample, so least is compared with most; and an allocator takes and gives back a little.
        """
        samples = self.samples[name]
        third = len(samples) // 3
        assert third >= 3, f"{name} was seen {len(samples)} times only"
        before, after = samples[third : 2 * third], samples[2 * third :]
        texts: list[str] = []
        for what, spare in (("files", 0), ("threads", 0), ("pinned", 0), ("resident", 4096)):
            most = max(getattr(each, what) for each in before)
            least = min(getattr(each, what) for each in after)
            if least > most + spare:
                texts.append(f"{what} {most} -> {least}")
        return f"{name}: {', '.join(texts)}" if texts else ""

    def table(self) -> str:
        """Of each process, what it held at first, in the middle, and at the end."""
        lines = ["process          seconds  files  threads  pinned KiB  resident KiB"]
        for name, samples in sorted(self.samples.items()):
            for each in (samples[0], samples[len(samples) // 2], samples[-1]):
                lines.append(
                    f"{name:<15}  {each.seconds:7.0f}  {each.files:5}  {each.threads:7}  {each.pinned:10}  "
                    f"{each.resident:12}"
                )
        return "\n".join(lines)
