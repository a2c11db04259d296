"""A signal is seen at once, also while the main thread sleeps in native code."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from jaxrdma.signals import SignalWatch, signal_together

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
