"""A signal is seen at once, also while the main thread sleeps in native code."""

import os
import signal
import socket
import threading

from jaxrdma.signals import SignalWatch


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
