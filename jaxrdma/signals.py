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
import weakref
from collections.abc import Callable, Generator, Sequence
from types import FrameType, TracebackType
from typing import ClassVar


def do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler that leaves the signal to a wake-up descriptor, which sees only signals with a Python handler."""
    del number, frame


def see_signal(number: int) -> None:
    """Let a watch see a signal that nobody handles here, and that would end the process. In the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, do_nothing)


def ending_signals() -> list[signal.Signals]:
    """By which people end a process: Ctrl-C, `kill`, and a terminal that closes, unless nohup has that ignored."""
    every = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [n for n in every if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def end_by_interrupt() -> None:
    """End the program by SIGINT. For callbacks of `atexit`, in the main thread.

    Of a KeyboardInterrupt in one of these Python tells "Exception ignored", and it ends with 0.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os.kill(os.getpid(), signal.SIGINT)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP told this process to end. `code` is 128 and the signal's number, as a shell has it."""


class OrderlyEnd:
    """While one of these is started, SIGTERM and SIGHUP end the program by `Terminated`, raised in the main thread.

    That is between two bytecodes, so a step that is under way ends first. A second signal ends the process at once.
    What the program handles itself, or ignores, stays as it is; and outside the main thread nothing is done.

    **Arguments:** `over`: whether there is nothing to end in good order any more: then the signal does what it does.

    **Attributes:** `told`: the signal that came, or 0.
    """

    told: ClassVar[int] = 0
    _users: ClassVar[set["OrderlyEnd"]] = set()
    _closing: ClassVar[int] = 0

    def __init__(self, over: Callable[[], bool] = lambda: False) -> None:
        self._over = over

    def start(self) -> "OrderlyEnd":
        if threading.current_thread() is threading.main_thread():
            self._users.add(self)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, OrderlyEnd._end)
        return self

    def stop(self) -> None:
        self._users.discard(self)
        if not self._users and threading.current_thread() is threading.main_thread():
            self._restore()

    @classmethod
    @contextlib.contextmanager
    def put_off(cls) -> Generator[None, None, None]:
        """What is done in here is not interrupted: who is told to end meanwhile does so afterwards."""
        before = cls.told
        cls._closing += 1
        try:
            yield
        finally:
            cls._closing -= 1
        if cls.told != before and threading.current_thread() is threading.main_thread():
            raise Terminated(128 + cls.told)

    @classmethod
    def is_due(cls, number: int) -> bool:
        """Whether this signal ends the program. One with a handler of its own may only take note of it."""
        return signal.getsignal(number) in (cls._end, signal.SIG_DFL)  # the latter once it has come

    @classmethod
    def forget(cls) -> None:
        """In a forked child, which has no session to leave."""
        cls._users.clear()
        cls._restore()

    @classmethod
    def _restore(cls) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == OrderlyEnd._end:
                signal.signal(number, signal.SIG_DFL)

    @staticmethod
    def _end(number: int, frame: FrameType | None) -> None:
        del frame
        OrderlyEnd.told = number
        signal.signal(number, signal.SIG_DFL)
        if all(user._over() for user in OrderlyEnd._users):
            os.kill(os.getpid(), number)
        if not OrderlyEnd._closing:
            raise Terminated(128 + number)


def _wake(descriptor: int) -> int:
    """Have a byte written there at every signal: nowhere, if whose it was has closed it. Returns where before."""
    try:
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except (OSError, ValueError):  # no file, or by now another one, which would block
        return signal.set_wakeup_fd(-1)


class SignalWatch:
    """Calls `notify(signal number)` from its own thread as soon as a signal arrives. A context manager.

    Only signals that have a Python handler are seen. Bytes go on to the descriptor that was set before (asyncio's, for
    instance, or another watch's: they may be stopped in any order). Outside the main thread, where Python allows no
    such watch, this does nothing. A forked child has its own signals, of which its parent hears nothing.
    """

    # Guards what is linked to what, and its use. A signal's handler may stop a watch amid what the main thread does.
    _chain: ClassVar[threading.RLock] = threading.RLock()
    _live: ClassVar[list["SignalWatch"]] = []  # as they were started

    def __init__(self, notify: Callable[[int], None]) -> None:
        self._notify = notify
        self._thread: threading.Thread | None = None
        self._previous = -1
        reference = weakref.ref(self)

        def forget() -> None:
            watch = reference()
            if watch is not None:
                watch.forget()

        os.register_at_fork(after_in_child=forget)

    def start(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        with SignalWatch._chain:
            self._previous = _wake(self._writer.fileno())
            self._live.append(self)
        self._thread = threading.Thread(target=self._watch, name="jaxrdma-signals", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Idempotent; who is interrupted in here may come again."""
        thread = self._thread
        if thread is None:
            return
        self._unlink()
        # To close it does not do: somebody may hold a copy. A call that was interrupted may have closed it.
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_WR)
        self._writer.close()
        thread.join()
        self._reader.close()
        self._thread = None

    def forget(self) -> None:
        """In a forked child: what it writes would reach its parent, and it has not the thread."""
        SignalWatch._chain = threading.RLock()  # a thread that is not here may have held it
        if self._thread is None:
            return
        self._thread = None
        current = _wake(-1)  # who forks is the main thread of the child
        if current not in (-1, self._writer.fileno()):
            _wake(current)
        if self in self._live:
            self._live.remove(self)
        self._writer.close()
        self._reader.close()

    def _unlink(self) -> None:
        """Nobody writes to this watch any more. It must be done before its number can be another file's."""
        with SignalWatch._chain:
            if self not in self._live:
                return
            number = self._writer.fileno()
            later = self._live[self._live.index(self) + 1 :]
            heirs = [watch for watch in later if watch._previous == number]
            for heir in heirs:
                heir._previous = self._previous
            if not heirs:
                self._give_back(number)
            self._live[:] = [watch for watch in self._live if watch is not self]

    def _give_back(self, number: int) -> None:
        """Have the interpreter write where it did before, unless somebody came after us: leave theirs."""
        if threading.current_thread() is threading.main_thread():
            current = _wake(self._previous)
            if current not in (-1, number):
                _wake(current)
            return
        # Nobody may tell it so here. The number stays, and leads nowhere.
        writer = self._writer.dup()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), number, inheritable=False)
        self._writer.detach()
        self._writer = writer

    def _watch(self) -> None:
        while True:
            received = self._reader.recv(64)
            if not received:
                return
            for number in received:
                self._notify(number)
            with SignalWatch._chain, contextlib.suppress(OSError):
                if self._previous >= 0:
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
# Whose `except` clauses are their own affair: the interpreter's library, and what a training loop passes through.
_LIBRARIES = sys.stdlib_module_names | {"jax", "jaxlib", "jaxrdma", "numpy", "optax"}
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
            # JAX's trace of the program that it was lowering, which it puts before whatever ends that.
            if type(error.__cause__).__name__ == "JaxStackTraceBeforeTransformation":
                error.__cause__ = None
            _forget_lookups(error)
            if _is_ours(error.__context__):
                error.__suppress_context__ = True
        elif interrupted and OrderlyEnd.told and _is_ours(error):
            sys.exit(128 + OrderlyEnd.told)
        elif interrupted and _is_ours(error):
            error = sys.last_value = KeyboardInterrupt().with_traceback(trace)
            previous(KeyboardInterrupt, error, trace)
            sys.exit(128 + signal.SIGINT)
        previous(kind, error, trace)

    sys.excepthook = _native.exception_hook(hook)


def _forget_lookups(interrupt: BaseException) -> None:
    """Drops what a library was handling when the interrupt came, a cache that had no entry for instance.

    Python tells it as "during handling of the above exception, another exception occurred". What the program itself
    was handling stays: it may be why somebody pressed Ctrl-C.
    """
    error = interrupt
    while (handled := error.__context__) is not None:
        trace = handled.__traceback__  # begins in the function that handles it
        name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
        if name.partition(".")[0] in _LIBRARIES:
            error.__context__ = handled.__context__
        else:
            error = handled


def _is_ours(error: BaseException | None) -> bool:
    while error is not None:
        if _OURS in str(error):
            return True
        error = error.__context__
    return False
