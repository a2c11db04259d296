"""Processes of tests on verbs, and the cable between their devices."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ENGINES = Path(__file__).parent / "engines.py"
ROOT = Path(__file__).parents[2]
# A dead link is noticed within 0.5 s.
QUICK = ("timeout=14", "retry_count=6")


class Process:
    """One process, whose lines are read as they come."""

    def __init__(self, *command: str) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
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

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 40) -> int:
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.output}")
        self._reader.join(10)
        return status

    def finish(self, last: str, seconds: float = 40) -> None:
        """Waits for a good end, of which `last` is the last line."""
        assert self.wait(seconds) == 0, self.output
        assert self.lines[-1] == last, self.output

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Job:
    """The processes of one test: a server on rxe1, two workers on rxe0, so that all bytes cross the cable."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def run(self, *command: str) -> Process:
        process = Process(*command)
        self.processes.append(process)
        return process

    def start(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        """An engine's process: `engines.py` with these arguments."""
        return self.run(*prefix, sys.executable, str(ENGINES), *arguments)

    def train(self, *options: str, verbs: tuple[str, ...] = QUICK) -> tuple[Process, list[Process]]:
        server = self.start("server", "0", *options, "--verbs", "device=rxe1", *verbs)
        address = server.wait_for("^listening (.*)$")[1]
        workers = [
            self.start("worker", str(i), address, *options, "--verbs", "device=rxe0", *verbs)
            for i in range(2)
        ]
        return server, workers

    def end(self) -> None:
        for process in self.processes:
            process.end()


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


def pull_the_cable() -> None:
    run("ip", "link", "set", "v1", "down")


def plug_the_cable() -> None:
    run("ip", "link", "set", "v1", "up")
    # Went with the link.
    run("ip", "route", "replace", "10.88.0.1", "dev", "v1", "src", "10.88.0.2", "table", "101")
