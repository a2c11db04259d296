"""What all tests share: JAX on the CPU, and the promise that nothing is left behind."""

import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.job import PATIENCE, Job

# Before anything imports JAX. Tests on an accelerator say so themselves.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell starts what runs in its background with SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` has SIGHUP ignored likewise. It is still of no effect here, and a handler is not inherited.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

GRACE_S = 5.0  # for what is ending already: a process to be reaped, a thread to return

# Inherited by every process that a test starts, however many generations down and whoever is its parent by now.
MARK = "TESTS_OF_JAXRDMA"  # not JAXRDMA_...: those are settings, and unknown ones are refused


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes, but this one, that carry `mark` in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().get(MARK, ""):
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours to look at
    return found


def own_threads() -> set[str]:
    """Threads of this process that belong to the package, as `name (id)`; Python's and native ones."""
    found = {
        f"{thread.name} ({thread.native_id})"
        for thread in threading.enumerate()
        if thread.name.startswith("jaxrdma")
    }
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # ended meanwhile
        if name.startswith("jaxrdma") and not any(one.endswith(f"({task.name})") for one in found):
            found.add(f"{name} ({task.name})")
    return found


def listening_sockets() -> set[tuple[str, int]]:
    """Where this process listens."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {process.pid}"


def end(processes: list[psutil.Process]) -> None:
    """Kills what is left, so that the next test starts on a clean machine."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=GRACE_S)


@pytest.fixture(scope="session", autouse=True)
def session_mark() -> Iterator[str]:
    """Marks all processes of this run; at its end none may be left."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield mark
    left = marked_processes(mark)
    _, left = psutil.wait_procs(left, timeout=GRACE_S)
    names = [describe(process) for process in left]
    end(left)
    assert not names, "left behind by the tests:\n" + "\n".join(names)


@pytest.fixture
def no_leftovers(session_mark: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test: no process that it started, no thread of the package, no listening socket is left."""
    mark = f"{session_mark}/{uuid.uuid4().hex}"
    threads, sockets = own_threads(), listening_sockets()
    with monkeypatch.context() as patch:
        patch.setenv(MARK, mark)
        yield
    deadline = time.monotonic() + GRACE_S
    while True:
        processes = marked_processes(mark)
        left = [describe(process) for process in processes]
        left += [f"thread {name}" for name in sorted(own_threads() - threads)]
        left += [
            f"listening socket {ip}:{port}" for ip, port in sorted(listening_sockets() - sockets)
        ]
        if not left or time.monotonic() > deadline:
            break
        psutil.wait_procs(processes, timeout=0.1)  # returns at once when the last of them ends
        if not processes:
            threading.Event().wait(0.05)
    end(processes)
    assert not left, "left behind by the test:\n" + "\n".join(left)


@pytest.fixture
def make_job(tmp_path: Path, no_leftovers: None) -> Iterator[Callable[..., Job]]:
    """`make_job(servers, workers, **settings)`: a job that is gone at the end of the test, whatever happens."""
    jobs: list[Job] = []

    def make(servers: int = 1, workers: int = 2, **settings: Any) -> Job:
        jobs.append(Job(tmp_path / f"job{len(jobs)}", servers, workers, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.__exit__()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PATIENCE == 1:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests that this machine cannot run are not passed over: skips that say "not run: ..." are repeated at the end."""
    reasons = Counter(
        reason.removeprefix("Skipped: ")
        for _, _, reason in (
            report.longrepr for report in terminalreporter.stats.get("skipped", [])
        )
        if reason.startswith("Skipped: not run: ")
    )
    if reasons:
        terminalreporter.section("NOT RUN", yellow=True)
        for reason, count in reasons.items():
            terminalreporter.write_line(f"{count} tests {reason}")
