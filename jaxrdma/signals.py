"""Makes native waits end on a signal.

Python runs signal handlers between bytecodes of the main thread; a main thread that sleeps inside XLA runs none. The
interpreter does write a byte to the wake-up descriptor at once, though, and a thread of ours reads it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType


def do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler that leaves the signal to a wake-up descriptor, which sees only signals with a Python handler."""
    del number, frame


def see_signal(number: int) -> None:
    """Let a watch see a signal that nobody handles here, and that would end the process. In the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, do_nothing)


class SignalWatch:
    """Calls `notify(signal number)` from its own thread as soon as a signal arrives. A context manager.

    Only signals that have a Python handler are seen. Bytes go on to the descriptor that was set before (asyncio's, for
    instance). Outside the main thread, where Python allows no such watch, this does nothing.
    """

    def __init__(self, notify: Callable[[int], None]) -> None:
        self._notify = notify
        self._thread: threading.Thread | None = None
        self._previous = -1

    def start(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="jaxrdma-signals", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is None:
            return
        if threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(self._previous if self._previous >= 0 else -1)
            if current not in (-1, self._writer.fileno()):
                signal.set_wakeup_fd(current)  # somebody came after us: leave theirs
        self._writer.close()
        self._thread.join()
        self._reader.close()
        self._thread = None

    def _watch(self) -> None:
        while True:
            received = self._reader.recv(64)
            if not received:
                return
            for number in received:
                self._notify(number)
            if self._previous >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._previous, received)

    def __enter__(self) -> "SignalWatch":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def signal_main_thread(pid: int, number: int) -> None:
    """Signal a child that was not waited for yet, if it has not ended.

    Of a process that stands still any thread takes what is sent to the process as a whole. If that is not the main
    thread, no sleep of a Python program ends by it.
    """
    # Of glibc since 2.30; a process's number is that of its main thread.
    ctypes.CDLL(None).tgkill(pid, pid, number)


def signal_together(processes: Sequence[Callable[[int], None]], number: int) -> None:
    """Signal several processes as if at one moment: none sees what another does of it before it is signalled itself.

    Otherwise the first tells the others, by the job's own ways, that it was interrupted, and they fail by that before
    they are interrupted too. So they stand still until all have their signal. One that stood still before goes on.

    **Arguments:**

    - `processes`: for each, what sends it a signal, as `signal_main_thread` does.
    - `number`: the signal.
    """
    for each in (signal.SIGSTOP, number, signal.SIGCONT):
        for send in processes:
            send(each)


_OURS = "jaxrdma: "  # in the text of every error that comes out of a compiled program
_hook_lock = threading.Lock()
_hooked = False


def tell_interrupts_plainly() -> None:
    """Let a program that Ctrl-C ends in a step end by KeyboardInterrupt alone. Once per process.

    A native wait can only end with an error. Python raises KeyboardInterrupt right after it: in whatever line of JAX
    comes next, as "during handling of" that error; or, where no line comes, not before the error has ended the program.
    """
    global _hooked
    from jaxrdma import _native

    with _hook_lock:
        if _hooked:
            return
        _hooked = True
    previous = sys.excepthook

    def hook(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        interrupted: bool,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            if _is_ours(error.__context__):
                error.__suppress_context__ = True
        elif interrupted and _is_ours(error):
            error = sys.last_value = KeyboardInterrupt().with_traceback(trace)
            previous(KeyboardInterrupt, error, trace)
            sys.exit(128 + signal.SIGINT)
        previous(kind, error, trace)

    sys.excepthook = _native.exception_hook(hook)


def _is_ours(error: BaseException | None) -> bool:
    while error is not None:
        if _OURS in str(error):
            return True
        error = error.__context__
    return False
