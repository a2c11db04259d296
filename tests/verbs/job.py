"""Processes of tests on verbs, and the cable between their devices."""

import abc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.verbs import engines

ENGINES = Path(__file__).parent / "engines.py"
ROOT = Path(__file__).parents[2]
# A dead link is noticed within 0.5 s.
QUICK = ("timeout=14", "retry_count=6")


# Processes of engines are forked from one that has read NumPy and the native module already: it takes an emulated
# processor longer than most tests. (And pytest, which is their main module as multiprocessing sees it.)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.verbs.engines", "pytest"])


def stop_forking() -> None:
    """Ends the process that forks, which would otherwise live as long as this one."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[reportPrivateUsage, attr-defined]
    multiprocessing.resource_tracker._resource_tracker._stop()  # type: ignore[reportPrivateUsage, attr-defined]


class Process(abc.ABC):
    """One process, whose lines are read as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._pipe, output = multiprocessing.Pipe(duplex=False)
        with output:
            self._start(output)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @abc.abstractmethod
    def _start(self, output: Connection) -> None: ...

    @abc.abstractmethod
    def _wait(self, seconds: float | None) -> int | None:
        """Its exit status, negative for a signal; `None` while it runs."""

    @abc.abstractmethod
    def signal(self, number: signal.Signals) -> None: ...

    def _read(self) -> None:
        for line in open(self._pipe.fileno(), closefd=False):  # noqa: SIM115
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 40) -> re.Match[str]:
        """The first line that matches, now or later."""
        deadline = time.monotonic() + seconds
        seen = 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    pytest.fail(f"no line like {pattern!r} but:\n{self.output}")
                self._changed.wait(left)

    def wait(self, seconds: float = 40) -> int:
        status = self._wait(seconds)
        if status is None:
            pytest.fail(f"still running after {seconds} s:\n{self.output}")
        self._reader.join(10)
        return status

    def finish(self, last: str, seconds: float = 40) -> None:
        """Waits for a good end, of which `last` is the last line."""
        assert self.wait(seconds) == 0, self.output
        assert self.lines[-1] == last, self.output

    def end(self) -> None:
        if self._wait(0) is None:
            self.signal(signal.SIGKILL)
        self._wait(None)
        self._reader.join(10)
        self._pipe.close()


class Command(Process):
    """A program of its own."""

    def __init__(self, *command: str) -> None:
        self._command = command
        super().__init__()

    def _start(self, output: Connection) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdout=output.fileno(), stderr=output.fileno()
        )

    def _wait(self, seconds: float | None) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class Engine(Process):
    """`engines.py` with these arguments."""

    def __init__(self, *arguments: str, environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._environment = {**os.environ, **environment}
        super().__init__()

    def _start(self, output: Connection) -> None:
        self._process = _FORKS.Process(
            target=engines.forked, args=(self._arguments, self._environment, output)
        )
        self._process.start()

    def _wait(self, seconds: float | None) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)


class Job:
    """The processes of one test: a server on rxe1, two workers on rxe0, or on others: all bytes cross a cable."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def run(self, *command: str) -> Process:
        return self._keep(Command(*command))

    def start(
        self,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        environment: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Process:
        """An engine's process: `engines.py` with these arguments; after `prefix` as a program of its own."""
        if prefix:
            return self.run(*prefix, sys.executable, str(ENGINES), *arguments)
        return self._keep(Engine(*arguments, environment=environment))

    def _keep(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def train(
        self,
        *options: str,
        verbs: tuple[str, ...] = QUICK,
        server_devices: str = "rxe1",
        worker_devices: str = "rxe0",
    ) -> tuple[Process, list[Process]]:
        theirs, ours = f"device={server_devices}", f"device={worker_devices}"
        server = self.start("server", "0", *options, "--verbs", theirs, *verbs)
        address = server.wait_for("^listening (.*)$")[1]
        workers = [
            self.start("worker", str(i), address, *options, "--verbs", ours, *verbs)
            for i in range(2)
        ]
        return server, workers

    def end(self) -> None:
        for process in self.processes:
            process.end()


def finished_well(workers: list[Process]) -> None:
    for worker in workers:
        worker.finish("done")


def named_the_link(server: Process, workers: list[Process], *also: str) -> None:
    """All know of the link between rxe0 and rxe1, broken for 3 s; the workers ended and said `also` too."""
    for worker in workers:
        assert worker.wait() == 3, worker.output
        said = worker.wait_for("^failed UNAVAILABLE: ").string
        assert "server 0" in said and "the link between rxe0 port 1 here and" in said, said
        assert "rxe1 port 1" in said and "did not come back within 3 s" in said, said
        assert all(text in said for text in also), said
    for index in range(2):
        server.wait_for(rf"^WORKER_LOST worker {index}: .*link")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


def pull_the_cable() -> None:
    run("ip", "link", "set", "v1", "down")


def plug_the_cable() -> None:
    run("ip", "link", "set", "v1", "up")
    # Went with the link.
    run("ip", "route", "replace", "10.88.0.1", "dev", "v1", "src", "10.88.0.2", "table", "101")
