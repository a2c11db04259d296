"""A signal is seen at once, also while the main thread sleeps in native code."""

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from jaxrdma.signals import SignalWatch, signal_together
from tests.conftest import own_threads

# Tells of every signal that comes, and of SIGINT the process that it is given.
_TELLER = """
import os, signal, sys
awaited = {signal.SIGINT, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print("ready", flush=True)
while True:
    number = signal.sigwait(awaited)
    if number == signal.SIGINT and len(sys.argv) > 1:
        os.kill(int(sys.argv[1]), signal.SIGUSR1)
    print(signal.Signals(number).name, flush=True)
"""


def test_a_signal_reaches_the_watch_and_those_who_watched_before() -> None:
    seen: list[int] = []
    arrived = threading.Event()

    def notify(number: int) -> None:
        seen.append(number)
        arrived.set()

    before_reader, before_writer = socket.socketpair()
    before_writer.setblocking(False)
    handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    old = signal.set_wakeup_fd(before_writer.fileno())
    try:
        with SignalWatch(notify):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert arrived.wait(10)
            before_reader.settimeout(10)
            assert before_reader.recv(8) == bytes([signal.SIGUSR2])
        assert seen == [signal.SIGUSR2]
        assert signal.set_wakeup_fd(before_writer.fileno()) == before_writer.fileno()
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGUSR2, handler)
        before_reader.close()
        before_writer.close()


class Watcher:
    """A watch, and what it saw."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.watch = SignalWatch(self.seen.put)


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGUSR2 has a handler, and nobody is woken but who is started in the test."""
    handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    old = signal.set_wakeup_fd(-1)
    yield
    left = signal.set_wakeup_fd(old)
    signal.signal(signal.SIGUSR2, handler)
    assert left == -1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_watches_may_be_stopped_in_any_order(handled: None, order: tuple[int, ...]) -> None:
    strangers = [socket.socketpair() for _ in range(3)]
    watchers = [Watcher() for _ in range(3)]
    for each in watchers:
        each.watch.start()
    left = set(range(3))
    with contextlib.ExitStack() as stack:
        for stopped in order:
            number = watchers[stopped].watch._writer.fileno()
            watchers[stopped].watch.stop()
            left.remove(stopped)
            # Somebody else's file has the number by now, and must get none of our bytes.
            os.dup2(strangers[stopped][0].fileno(), number)
            stack.callback(os.close, number)
            os.kill(os.getpid(), signal.SIGUSR2)
            for index in left:
                assert watchers[index].seen.get(timeout=10) == signal.SIGUSR2
        assert not own_threads()
        assert all(each.seen.empty() for each in watchers)
        assert not select.select([theirs for _, theirs in strangers], [], [], 0)[0]
    for pair in strangers:
        for each in pair:
            each.close()


def test_a_watch_can_be_stopped_when_who_was_woken_before_has_gone(handled: None) -> None:
    before = socket.socketpair()
    for each in before:
        each.setblocking(False)
    signal.set_wakeup_fd(before[0].fileno())
    watcher = Watcher()
    watcher.watch.start()
    for each in before:
        each.close()
    watcher.watch.stop()
    assert not own_threads()


def test_a_stop_that_was_interrupted_can_be_done_again(
    handled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Watcher(), Watcher()
    first.watch.start()
    second.watch.start()
    thread = second.watch._thread
    assert thread is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            second.watch.stop()
    second.watch.stop()
    assert not thread.is_alive()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert first.seen.get(timeout=10) == signal.SIGUSR2
    first.watch.stop()
    assert not own_threads()


def test_a_watch_that_another_thread_stops_writes_into_nobodys_file(
    handled: None, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped, later = Watcher(), Watcher()
    stopped.watch.start()
    number = stopped.watch._writer.fileno()
    thread = threading.Thread(target=stopped.watch.stop)
    thread.start()
    thread.join()
    assert not own_threads()
    os.kill(os.getpid(), signal.SIGUSR2)
    with later.watch:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert later.seen.get(timeout=10) == signal.SIGUSR2
    os.kill(os.getpid(), signal.SIGUSR2)
    assert capfd.readouterr().err == ""
    assert stopped.seen.empty()
    os.close(number)


@pytest.mark.timeout(30)
def test_a_forked_child_has_none_of_its_parents_watches(handled: None) -> None:
    first, second, third = Watcher(), Watcher(), Watcher()
    for each in (first, second, third):
        each.watch.start()
    first.watch.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child does without
        child = os.fork()
    if child == 0:
        second.watch.stop()
        alone = signal.set_wakeup_fd(-1) == -1 and not SignalWatch._live
        os._exit(0 if alone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.kill(os.getpid(), signal.SIGUSR2)
    for each in (second, third):
        assert each.seen.get(timeout=10) == signal.SIGUSR2
        each.watch.stop()


@pytest.mark.timeout(30)
def test_who_is_signalled_together_sees_nothing_of_it_before() -> None:
    tellers: list[subprocess.Popen[str]] = []

    def start(*told: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _TELLER, *map(str, told)]
        tellers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert tellers[-1].stdout is not None
        assert tellers[-1].stdout.readline() == "ready\n"
        return tellers[-1]

    def send_to_first(number: int) -> None:
        first.send_signal(number)
        if number == signal.SIGINT:
            # The sender is slow: time enough for the first to tell the second.
            select.select([first.stdout], [], [], 0.3)

    try:
        second = start()
        first = start(second.pid)
        signal_together([send_to_first, second.send_signal], signal.SIGINT)
        assert second.stdout is not None
        assert [second.stdout.readline() for _ in range(2)] == ["SIGINT\n", "SIGUSR1\n"]
    finally:
        for teller in tellers:
            teller.kill()
            teller.communicate()
