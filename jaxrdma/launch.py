"""Start a job, or this machine's share of it, carry its output, and leave nothing behind.

One thread, one loop: pipes of the children, their deaths (pidfd), signals, and a schedule of what is due when. A warden
process, forked first, kills everything if the launcher itself is killed. One attempt at the job is one object; another
begins when nothing is left of the one before.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from jaxrdma.cluster import NATIVE_VARIABLES, ROLES, ClusterSpec, parse_address
from jaxrdma.hosts import Share, check_place
from jaxrdma.restarts import Ending, Loss, judge, judge_worker
from jaxrdma.signals import do_nothing, ending_signals, signal_main_thread, signal_together

FAILURE_SECONDS = 5.0  # for the others to raise their own error, after the first failure
ENDING_SECONDS = 10.0  # for servers and coordinator to end, after the last worker
_NOTICE_SECONDS = 1.0  # for the coordinator to learn that this launcher was interrupted
INTERRUPT_SECONDS = 1.5  # for the workers to heed a forwarded signal; with the time of the notice
_HEED_SECONDS = 0.5  # of which they have at least so much
KILL_SECONDS = 1.0  # between SIGTERM and SIGKILL
_START_SECONDS = 30.0  # for the coordinator to report its port
_DRAIN_SECONDS = 0.2  # for the last output of a process that has ended
_USAGE = 2  # the exit code of a command of ours whose arguments or environment are wrong
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1 << 16
_ROLE_COLOURS = {"coordinator": 35, "server": 33, "worker": 36}


@dataclass(frozen=True)
class LaunchPlan:
    """What to start.

    - `servers`, `workers`: how many of each.
    - `command`: what a worker's interpreter is given: `script.py args...` or `-m module args...`.
    - `settings`: fields of `ClusterSpec` that differ from their defaults.
    - `coordinator`, `share`: of a job on several machines, where its coordinator listens, and what of it runs here.
    - `listen`: "host:port" for the servers' data, of such a job. Default: this machine's address on its way to the
      coordinator.
    - `restarts`: how often the job is started again if a process of it is lost.
    - `worker_restarts`: how often each worker is, if the job bears its loss; `None`: as its policy suggests.
    """

    servers: int
    workers: int
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    coordinator: str | None = None
    share: Share | None = None
    listen: str | None = None
    restarts: int = 0
    worker_restarts: int | None = None


def launch(plan: LaunchPlan) -> int:
    """Run a job, or this machine's share of it, to the end of the job, or of its last attempt.

    **Returns:** the exit code of the last attempt: 0; that of the process that failed first, or 1 if that was on
    another machine; or 128+n if signal n came.

    **Raises:** `ConfigError` if `plan` cannot be.
    """
    # Whatever cannot be is found before anything runs.
    spec = _job_spec(plan, 0)
    if plan.share is not None:
        check_place(plan.share, spec.coordinator, spec.secret)
    if spec.tls is not None:
        _check_tls(plan, spec)
    with _Warden() as warden:
        return _Launcher(plan, warden).run()


def _check_tls(plan: LaunchPlan, spec: ClusterSpec) -> None:
    from jaxrdma.tls import Identity  # few need it

    assert spec.tls is not None
    Identity(spec.tls, "launcher")
    if plan.share is None or plan.share.coordinator:
        host, _ = parse_address(spec.coordinator, "coordinator")
        Identity(spec.tls, "launcher", serves=True, named=host.partition("%")[0])


def _job_spec(plan: LaunchPlan, attempt: int) -> ClusterSpec:
    """What all processes of an attempt have in common.

    On one machine each has a name and a secret of its own, by which nobody of another one gets in. On several these are
    given, and the number of the attempt tells them apart.
    """
    settings = dict(plan.settings)
    settings["attempt"] = attempt
    if plan.share is None:
        settings |= {"secret": secrets.token_hex(16), "job": f"job-{secrets.token_hex(4)}"}
    coordinator = plan.coordinator or "127.0.0.1:1"
    return ClusterSpec(coordinator, "worker", 0, plan.workers, plan.servers, **settings)


def coordinator_environment(env: Mapping[str, str], spec: ClusterSpec) -> dict[str, str]:
    """The environment of the coordinator: of the cluster's variables, those that are not about one process."""
    environment = _environment(env, spec)
    for name in ("JAXRDMA_COORDINATOR", "JAXRDMA_ROLE", "JAXRDMA_INDEX"):
        del environment[name]
    return environment


def worker_environment(env: Mapping[str, str], spec: ClusterSpec) -> dict[str, str]:
    """The environment of a worker of `spec`.

    Several programs of a worker may wait for the network at once, each on a thread of XLA's pool, which has as many
    as the machine has cores: PJRT_NPROC makes it large enough on small machines.
    """
    return _environment(env, spec) | {"PJRT_NPROC": env.get("PJRT_NPROC") or "8"}


def server_environment(env: Mapping[str, str], spec: ClusterSpec) -> dict[str, str]:
    """The environment of a server of `spec`: it computes on the CPU and must not take memory of a GPU."""
    return _environment(env, spec) | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _environment(env: Mapping[str, str], spec: ClusterSpec) -> dict[str, str]:
    kept = {
        name: value
        for name, value in env.items()
        if name in NATIVE_VARIABLES or not (name.startswith("JAXRDMA_") or name == "TF_CONFIG")
    }
    kept.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # output goes through a pipe and should still come at once
    return kept | spec.to_environment()


class Lines:
    """Cuts one stream into lines. What follows a carriage return replaces what came before it on the line."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = _overwritten(self._buffer)
        if len(self._buffer) > _MAX_LINE_BYTES:
            lines.append(self._buffer)
            self._buffer = b""
        return [_overwritten(line).rstrip(b"\r") for line in lines]

    @property
    def unfinished(self) -> bytes:
        """What stands on the line that has no end yet."""
        return self._buffer.rstrip(b"\r")


def _overwritten(line: bytes) -> bytes:
    body = line.rstrip(b"\r")
    return body.rpartition(b"\r")[2] + (b"\r" if len(body) < len(line) else b"")


class Screen:
    """Writes whole lines to standard output and error, and keeps one progress bar below them on a terminal."""

    def __init__(self, out: int, err: int, ready: Callable[[int], bool]) -> None:
        self._fds = {"out": out, "err": err}
        self._terminal = {name: os.isatty(fd) for name, fd in self._fds.items()}
        self._ready = ready
        self._bar: tuple[str, bytes] | None = None
        self._broken: set[str] = set()
        self._colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def prefix(self, name: str, width: int, target: str) -> bytes:
        """What stands before every line of the process `name`."""
        if not (self._terminal[target] and self._colour):
            return f"{name:<{width}} | ".encode()
        return f"\x1b[{_ROLE_COLOURS.get(name.partition(' ')[0], 0)}m{name:<{width}} |\x1b[0m ".encode()

    def line(self, target: str, line: bytes) -> None:
        """One line, above the bar."""
        bar = self._bar
        if bar is not None:
            self._write(bar[0], b"\r\x1b[K")
        self._write(target, line + b"\n")
        if bar is not None:
            self._draw(bar)

    def bar(self, target: str, text: bytes) -> None:
        """Replace the bar of `target` by `text`, or take it away. Nothing happens where there is no terminal."""
        if not self._terminal[target]:
            return
        owner = self._bar[0] if self._bar is not None else None
        if owner is not None and (owner != target if text else owner == target):
            self._write(owner, b"\r\x1b[K")
            self._bar = None
        if text:
            self._bar = (target, text)
            self._draw(self._bar)

    def _draw(self, bar: tuple[str, bytes]) -> None:
        target, text = bar
        try:
            columns = os.get_terminal_size(self._fds[target]).columns or 80
        except OSError:
            columns = 80
        self._write(target, b"\r\x1b[K" + _cut(text.decode(errors="replace"), columns - 1).encode())

    def _write(self, target: str, data: bytes) -> None:
        fd = self._fds[target]
        while data and target not in self._broken and self._ready(fd):
            # A descriptor that is ready takes this much without blocking, and a launcher that blocks hears no signal.
            try:
                data = data[os.write(fd, data[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError:
                self._broken.add(target)  # nobody reads any more; the job goes on


def _cut(text: str, columns: int) -> str:
    """The first `columns` visible characters of `text`."""
    out: list[str] = []
    for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z])", text):
        if part.startswith("\x1b["):
            out.append(part)
        else:
            out.append(part[: max(0, columns)])
            columns -= len(part)
    return "".join(out)


class _Child:
    """One process of the job, leader of a session of its own."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.role = name.partition(" ")[0]
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.code: int | None = None
        self.lost = False  # the job bears it
        self.before: Loss | None = None  # of the process in whose place it was started
        self.on_end: Callable[[], None] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Asks it, and what it started, to end. How it ends then is no reason for a failure."""
        self._stopped = self.code is None
        self.signal(signal.SIGCONT)
        self.signal_group(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """To the process alone."""
        if self.code is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """To the process and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """It and what it started, unless it has ended by itself."""
        if self.code is None:
            self.signal_group(signal.SIGKILL)

    @property
    def exit_code(self) -> int:
        code = self.code or 0
        if self._was_stopped(code):
            return 1
        return 128 - code if code < 0 else code

    @property
    def end(self) -> str:
        code = self.code or 0
        if self._was_stopped(code):
            return "did not end by itself"
        if code < 0:
            return f"killed by {_signal_name(-code)}"
        return f"ended with exit code {code}"

    def _was_stopped(self, code: int) -> bool:
        return self._stopped and code in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass
class _Stream:
    """One output pipe of one process."""

    pipe: IO[bytes]
    target: str
    prefix: bytes
    live: bool  # may show a progress bar
    lines: Lines = field(default_factory=Lines)


class _Launcher:
    """One attempt after the other, and what they share: the screen, the warden, the signals."""

    def __init__(self, plan: LaunchPlan, warden: "_Warden") -> None:
        self._plan = plan
        self._warden = warden
        self._wake, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._screen = Screen(
            sys.stdout.fileno(), sys.stderr.fileno(), lambda fd: self._attempt.writable(fd)
        )
        self._attempt = self._make_attempt(0)

    def run(self) -> int:
        numbers = ending_signals()
        # The handlers do nothing: the numbers arrive in the pipe, and the attempt acts on them.
        old = {n: signal.signal(n, do_nothing) for n in numbers}
        old_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        try:
            while True:
                attempt = self._attempt
                ending = attempt.run()
                self._warden.forget()
                again, text = judge(ending, attempt.number, self._plan.restarts)
                if text:
                    self._screen.line("err", f"jaxrdma: {text}".encode())
                if attempt.interrupt is not None:  # perhaps only while the line was written
                    return 128 + attempt.interrupt
                if not again:
                    return ending.code
                self._attempt = self._make_attempt(attempt.number + 1)
        finally:
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._wakeup)

    def _make_attempt(self, number: int) -> "_Attempt":
        return _Attempt(self._plan, number, self._warden, self._screen, self._wake)


class _Attempt:
    """One life of the job, or of this machine's share of it. To be run once.

    - `number`: which attempt this is, from 0. On several machines, what the coordinator says.
    - `wake`: where the numbers of signals arrive.
    - `interrupt`: the signal that ends the job, if one came.
    """

    def __init__(
        self, plan: LaunchPlan, number: int, warden: "_Warden", screen: Screen, wake: int
    ) -> None:
        self._plan = plan
        self._warden = warden
        self._screen = screen
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._pipes: set[int] = set()  # other than the children's output
        self._children: list[_Child] = []
        self._streams: list[_Stream] = []
        self._running = 0
        self._schedule: list[tuple[float, Callable[[], None]]] = []
        self._first: _Child | None = None  # the first to fail
        self._cause: dict[str, Any] | None = None  # as the coordinator told it
        self._complaint: str | None = None  # why the job failed, if by no process of its own doing
        self._losses: set[str] = set()  # that were told
        self._begun_again: Counter[str] = Counter()  # by worker
        self.interrupt: int | None = None
        self._interrupted_at = 0.0
        self._passed_on = False  # the interrupt, to the workers
        self._ending = False
        self._ending_seconds = ENDING_SECONDS
        self._rescue_seconds = 0.0  # what servers save after a failure may take so long
        self._stopping = False
        self._killed = False
        self._report = b""
        self._abandoned = False
        self._spec = _job_spec(plan, number)
        self._share = plan.share or Share(True, (*range(plan.servers),), (*range(plan.workers),))
        self._ends: int | None = None  # where the delegate hears who ended
        self._coordinator = self._spec.coordinator  # its address; "" before it has told it
        longest = max(plan.servers, self._spec.places) - 1
        self._width = max(len("coordinator"), len(f"worker {longest}"))

    @property
    def number(self) -> int:
        return self._spec.attempt

    def run(self) -> Ending:
        self._selector.register(self._wake, selectors.EVENT_READ, self._signals)
        try:
            if self._plan.share is not None:
                self._start_delegate()
            if self._share.coordinator:
                self._start_coordinator()
            while self._running and not self._abandoned:
                self._turn()
        finally:
            # First of all, on any way out: nothing may be left.
            kill_sessions(c.process.pid for c in self._children)
            for child in self._children:
                if child.code is None and not self._abandoned:
                    child.process.wait()
            self._close()
        return self._verdict()

    # --- starting ---

    @property
    def _patience(self) -> float:
        """For the coordinator to open its port. Other machines wait for it as long as they wait for anything."""
        return _START_SECONDS if self._plan.share is None else self._spec.connect_timeout

    def _start_coordinator(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        listen = self._plan.coordinator or "127.0.0.1:0"
        arguments = ["--listen", listen, "--report-fd", str(writing)]
        command = [sys.executable, "-P", "-m", "jaxrdma", "coordinator", *arguments]
        try:
            self._start(
                "coordinator",
                command,
                coordinator_environment(os.environ, self._spec),
                keep=(writing,),
            )
        finally:
            os.close(writing)
        self._hear_reports(reading)
        self._after(self._patience, self._coordinator_is_late)

    def _start_delegate(self) -> None:
        """What failed on other machines is heard, and what fails here is told, by a process that may wait."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        ends, self._ends = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ends, False)
        command = [sys.executable, "-P", "-m", "jaxrdma.delegate", str(writing), str(ends)]
        if self._share.is_spare(self._plan.workers):
            command.append("spare")
        try:
            self._start(
                "launcher", command, worker_environment(os.environ, self._spec), (writing, ends)
            )
        finally:
            os.close(writing)
            os.close(ends)
        self._pipes.add(self._ends)
        self._hear_reports(reading)

    def _hear_reports(self, reading: int) -> None:
        self._pipes.add(reading)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._reported(reading))

    def _start_others(self) -> None:
        listen = [] if self._plan.listen is None else ["--listen", self._plan.listen]
        for index in self._share.servers:
            command = [sys.executable, "-P", "-m", "jaxrdma", "server", *listen]
            spec = replace(self._spec, coordinator=self._coordinator, role="server", index=index)
            self._start(f"server {index}", command, server_environment(os.environ, spec))
        for index in self._share.workers:
            self._start_worker(index)

    def _start_worker(self, index: int) -> _Child:
        spec = replace(self._spec, coordinator=self._coordinator, role="worker", index=index)
        command = [sys.executable, *self._plan.command]
        return self._start(f"worker {index}", command, worker_environment(os.environ, spec))

    def _start(
        self, name: str, command: list[str], env: dict[str, str], keep: tuple[int, ...] = ()
    ) -> _Child:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=keep,
            start_new_session=True,
            # Safe: this process has one thread, and the function calls nothing but prctl and getppid.
            preexec_fn=_die_with(os.getpid()),
        )
        self._warden.watch(process.pid)
        child = _Child(name, process)
        self._children.append(child)
        self._running += 1
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        for target, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            stream = _Stream(
                pipe, target, self._screen.prefix(name, self._width, target), name == "worker 0"
            )
            self._streams.append(stream)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._output, stream))
        return child

    # --- the loop ---

    def _turn(self) -> None:
        now = time.monotonic()
        due = [item for item in self._schedule if item[0] <= now]
        self._schedule = [item for item in self._schedule if item[0] > now]
        for _, action in due:
            action()
        timeout = max(
            0.0, min((at for at, _ in self._schedule), default=now + 60) - time.monotonic()
        )
        # Deaths last: the output of a process, and what the coordinator says of it, come before its end.
        events = self._selector.select(timeout if not due else 0)
        pidfds = {c.pidfd for c in self._children}
        for key, _ in sorted(events, key=lambda event: event[0].fd in pidfds):
            cast(Callable[[], object], key.data)()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._schedule.append((time.monotonic() + seconds, action))

    def _unschedule(self, action: Callable[[], None]) -> None:
        self._schedule = [item for item in self._schedule if item[1] != action]

    def writable(self, fd: int) -> bool:
        """Wait until `fd` takes output; not at all once the end must not be held up."""
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while True:
            if poller.poll(0 if self._stopping or self.interrupt is not None else 100):
                return True
            if self._stopping or self.interrupt is not None:
                return False
            self._signals()

    def _output(self, stream: _Stream) -> bool:
        """Pass on what has come. Whether there may be more."""
        try:
            data = os.read(stream.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
            return False
        lines = stream.lines.feed(data)
        if stream.live and lines:
            self._screen.bar(stream.target, b"")
        for line in lines:
            self._screen.line(stream.target, stream.prefix + line)
        if stream.live:
            text = stream.lines.unfinished
            self._screen.bar(stream.target, stream.prefix + text if text else b"")
        return True

    def _reported(self, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self._selector.unregister(fd)
            self._pipes.remove(fd)
            os.close(fd)
            self._pass_interrupt_on()  # if there is one: no delegate is left that could take notice
            return
        *lines, self._report = (self._report + data).split(b"\n")
        for line in lines:
            fact = json.loads(line)
            if "joined" in fact:
                # Not before: a short job could be over, and its coordinator gone, when the delegate comes.
                if not self._stopping and self.interrupt is None:
                    self._take_part_in(fact["attempt"])
                    self._start_others()
            elif "lost" in fact:
                self._lost(fact["lost"], Loss(fact["kind"], fact["waits"]), fact["text"])
            elif "attempt" in fact:
                self._spec = replace(self._spec, attempt=fact["attempt"])
            elif "noticed" in fact:
                self._pass_interrupt_on()
            elif "saving" in fact:
                self._ending_seconds += fact["saving"]
                if self._ending:
                    self._unschedule(self._end_is_late)
                    self._after(self._ending_seconds, self._end_is_late)
            elif "rescuing" in fact:
                self._allow_rescue(fact["rescuing"])
            elif "address" not in fact:
                if not self._stopping and self._cause is None:  # or the cause is the launcher
                    self._cause = fact
                    self._allow_rescue(0.0)  # it is over
                    if fact["kind"] == "interrupted":
                        # A person waits for the prompt, not for what the others may still have to say.
                        self._after(INTERRUPT_SECONDS, self._stop)
            elif not self._stopping and self.interrupt is None:
                self._unschedule(self._coordinator_is_late)
                self._coordinator = fact["address"]
                if self._plan.share is None:
                    self._start_others()

    def _allow_rescue(self, seconds: float) -> None:
        """The servers save what they hold of a job that has failed: nobody is stopped sooner."""
        if seconds == self._rescue_seconds:
            return
        self._rescue_seconds = seconds
        if self._first is not None:
            self._unschedule(self._stop_for_failure)
            self._after(FAILURE_SECONDS + seconds, self._stop_for_failure)

    def _take_part_in(self, number: int) -> None:
        """The coordinator knows best which attempt this is: some may have failed before this launcher came."""
        if number != self.number:
            text = f"jaxrdma: the coordinator is at attempt {number + 1} of the job, and so is this machine"
            self._screen.line("err", text.encode())
        self._spec = replace(self._spec, attempt=number)

    def _coordinator_is_late(self) -> None:
        self._complaint = f"the coordinator did not open its port within {self._patience:.0f} s"
        self._stop()

    def _ended(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.code = child.process.wait()
        self._running -= 1
        self._tell_delegate(child)
        if child.role == "coordinator":
            self._allow_rescue(0.0)  # nobody leads it
        if (
            child.code != 0
            and self._first is None
            and not child.lost
            and not self._stopping
            and self.interrupt is None
        ):
            self._first = child
            self._after(FAILURE_SECONDS + self._rescue_seconds, self._stop_for_failure)
        self._follow_up(child)
        workers = [c for c in self._children if c.role == "worker"]
        if workers and all(c.code is not None for c in workers):
            if self.interrupt is not None:
                self._stop()
            elif self._plan.share is not None:
                pass  # those of other machines may still need the servers; the coordinator knows when it is over
            elif self._first is None and not self._ending:
                self._ending = True
                self._after(self._ending_seconds, self._end_is_late)

    def _lost(self, name: str, loss: Loss, text: str) -> None:
        """The job bears the loss of that process: its end is no failure. It may be stopped, and never end by itself."""
        child = next((c for c in reversed(self._children) if c.name == name), None)
        if child is None or text in self._losses:
            return  # of another machine, or told twice
        self._losses.add(text)
        self._bury(child, loss)

    def _bury(self, child: _Child, loss: Loss) -> None:
        child.lost = True
        self._after(FAILURE_SECONDS, child.kill)
        if self._first is child:
            self._unschedule(self._stop_for_failure)
            failed = (c for c in self._children if c.code and not c.lost)
            self._first = next(failed, None)
            if self._first is not None:
                self._after(FAILURE_SECONDS, self._stop_for_failure)
        if self._stopping or self.interrupt is not None:
            return
        done = self._begun_again[child.name]
        again, text = judge_worker(loss, done, self._plan.worker_restarts)
        # Only once it has ended: it may hold a device that the next one needs, and may still tell why it failed.
        if again:
            child.on_end = lambda: self._begin_again(child, loss, text)
        elif loss.waits:
            child.on_end = lambda: self._give_up(child, loss, f"{child.name} was lost: {text}")
        if child.code is not None:
            self._follow_up(child)

    def _follow_up(self, child: _Child) -> None:
        """What was to be done once it has ended."""
        action, child.on_end = child.on_end, None
        going_on = not self._stopping and self.interrupt is None and self._cause is None
        if action is not None and going_on:
            action()

    def _begin_again(self, child: _Child, loss: Loss, text: str) -> None:
        self._screen.line("err", f"jaxrdma: {child.name} {child.end}; {text}".encode())
        self._begun_again[child.name] += 1
        self._start_worker(int(child.name.partition(" ")[2])).before = loss
        # It may have been the last.
        self._ending = False
        self._unschedule(self._end_is_late)

    def _give_up(self, child: _Child, loss: Loss, text: str) -> None:
        """The others wait for a worker that will not come."""
        # As a failure, a lost connection would be taken for the echo of something that the coordinator hears of soon.
        kind = "died" if loss.kind == "connection" else loss.kind
        role, _, index = child.name.partition(" ")
        self._cause = {"kind": kind, "text": text, "role": role, "index": int(index)}
        self._first = self._first or child
        if self._ends is None:
            self._after(0, self._stop)
        else:
            self._tell({"gives_up": text, "kind": kind})
            self._after(FAILURE_SECONDS, self._stop)

    def _tell_delegate(self, child: _Child) -> None:
        if self._ends is None or child.role not in ROLES:
            return
        index = int(child.name.partition(" ")[2])
        fact = {"role": child.role, "index": index, "pid": child.process.pid}
        self._tell(fact | {"how": child.end, "well": child.code == 0})

    def _tell(self, fact: dict[str, Any]) -> bool:
        """Whether the delegate takes it: else it has ended itself, and the coordinator knows."""
        assert self._ends is not None
        try:
            os.write(self._ends, json.dumps(fact).encode() + b"\n")
        except OSError:
            return False
        return True

    def _end_is_late(self) -> None:
        late = [c for c in self._children if c.code is None]
        if late and self._first is None:
            names = ", ".join(c.name for c in late)
            self._complaint = (
                f"{names} did not end within {self._ending_seconds:.0f} s of the last worker; "
                "did every worker call jaxrdma.connect() and close its session?"
            )
        self._stop()

    def _signals(self) -> None:
        try:
            numbers = os.read(self._wake, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                continue
            if self.interrupt is not None:
                self._kill()
                continue
            self.interrupt = number
            self._interrupted_at = time.monotonic()
            # First of all the others: for them it must not look like the death of a worker, from which jobs recover.
            if self._ends is not None and self._tell({"interrupted": _signal_name(number)}):
                self._after(_NOTICE_SECONDS, self._pass_interrupt_on)
            else:
                self._pass_interrupt_on()

    def _pass_interrupt_on(self) -> None:
        if self._passed_on or self.interrupt is None:
            return
        self._passed_on = True
        workers = [c for c in self._children if c.role == "worker" and c.code is None]
        pids = [c.process.pid for c in workers]
        signal_together([partial(signal_main_thread, pid) for pid in pids], self.interrupt)
        left = self._interrupted_at + INTERRUPT_SECONDS - time.monotonic()
        self._after(max(_HEED_SECONDS, left) if workers else 0, self._stop)

    def _stop_for_failure(self) -> None:
        first = self._first
        if first is not None and first.before is not None and self._cause is None:
            # It ended before it had joined, so nobody else has missed it.
            self._bury(first, first.before)
            return
        self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for child in self._children:
            child.stop()
        self._after(KILL_SECONDS, self._kill)

    def _kill(self) -> None:
        self._stopping = True
        if self._killed:
            return
        self._killed = True
        kill_sessions(c.process.pid for c in self._children)
        self._after(KILL_SECONDS, self._abandon)

    def _abandon(self) -> None:
        left = [f"{c.name} (pid {c.process.pid})" for c in self._children if c.code is None]
        self._abandoned = bool(left)
        if left:
            self._complaint = f"the kernel does not end {', '.join(left)}"

    # --- ending ---

    def _close(self) -> None:
        for stream in self._streams:
            self._drain(stream)
        self._screen.bar("out", b"")
        self._screen.bar("err", b"")
        self._selector.close()
        self._ends = None
        for fd in self._pipes | {c.pidfd for c in self._children if c.code is None}:
            os.close(fd)

    def _drain(self, stream: _Stream) -> None:
        """What is still in a pipe whose process has ended. A survivor of its session may hold it open: no waiting."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not stream.pipe.closed and time.monotonic() < deadline and self._output(stream):
            pass
        if not stream.pipe.closed:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
        if stream.lines.unfinished:
            self._screen.bar(stream.target, b"")
            self._screen.line(stream.target, stream.prefix + stream.lines.unfinished)

    def _verdict(self) -> Ending:
        if self.interrupt is not None:
            return Ending(128 + self.interrupt, f"ended by {_signal_name(self.interrupt)}")
        why = self._cause["text"] if self._cause is not None else ""
        kind = self._cause["kind"] if self._cause is not None else "died"
        kind = "stuck" if self._abandoned else kind
        first = self._first
        if self._cause is not None:
            # Whoever caused the failure may have taken longer to end than those it brought down.
            role, index = self._cause["role"], self._cause["index"]
            name = "coordinator" if role == "coordinator" else f"{role} {index}"
            last = reversed(self._children)
            culprit = next((c for c in last if c.name == name and c.code), None)
            if culprit is None and (self._plan.share is not None or first is None):
                # On another machine; or all were stopped before the first had ended by itself.
                return Ending(1, f"the job failed: {why}", kind)
            first = culprit or first
        if first is not None:
            if first.role != "worker" and first.code == _USAGE:
                kind = "config"
            text = f"{first.name} failed first: {first.end}" + (f"; {why}" if why else "")
            return Ending(first.exit_code, text, kind)
        if self._complaint is not None:
            text = "; ".join(filter(None, (self._complaint, why)))
            return Ending(1, text, kind if self._abandoned else "timeout")
        return Ending(0)


class _Warden:
    """A process that outlives the launcher by a moment: if the launcher is killed, it kills what the launcher started.

    The kernel kills the launcher's children by itself (PR_SET_PDEATHSIG), but not theirs.
    """

    def __enter__(self) -> "_Warden":
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writing)
                _guard(reading)
            finally:
                os._exit(0)
        os.close(reading)
        return self

    def watch(self, pid: int) -> None:
        """The session of `pid` must not outlive the launcher."""
        self._tell(b"%d\n" % pid)

    def forget(self) -> None:
        """Nothing is left of the sessions to watch, and their numbers may become those of others."""
        self._tell(b"forget\n")

    def __exit__(self, *_: object) -> None:
        self._tell(b"done\n")
        os.close(self._writing)
        os.waitpid(self._pid, 0)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(
            BrokenPipeError
        ):  # somebody killed it; the launcher can do without
            os.write(self._writing, line)


def _guard(reading: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    data = b""
    while chunk := os.read(reading, 4096):
        data += chunk
    words = data.rpartition(b"forget\n")[2].split()
    if b"done" not in words:
        kill_sessions(map(int, words))


def kill_sessions(leaders: Iterable[int]) -> None:
    """SIGKILL every process of the sessions that `leaders` lead or led."""
    sessions = set(leaders) - {0, os.getsid(0)}
    for _ in range(20):  # again for those that were being forked meanwhile
        found = [pid for pid, session in _sessions() if session in sessions]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _sessions() -> Iterable[tuple[int, int]]:
    """Process id and session of every process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[0] not in (b"Z", b"X"):
            yield int(entry.name), int(fields[3])


def _die_with(parent: int) -> Callable[[], None]:
    """To be called in a new child: the kernel kills it when the parent's thread that forked it ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def apply() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(137)  # it died before the call

    return apply


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
