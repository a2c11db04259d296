"""Ctrl-C: KeyboardInterrupt within two seconds, all processes gone within three, and no word more.

SIGTERM, and SIGHUP of a terminal that closes: the step under way ends, the others are told, and there is no traceback.
"""

import contextlib
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.blame import PROGRESS, check_all_name
from tests.cluster.job import PATIENCE, SCRIPTS, Job, free_address
from tests.cluster.test_checkpoint import steps_in
from tests.conftest import MARK, marked_processes

SECONDS = 3
RAISED_S = 2  # the program of the user has it by then; Python with JAX takes its time to end


def check_is_quiet(output: str) -> None:
    """One traceback, that of KeyboardInterrupt, which is the last word, and nothing else but steps and progress."""
    assert output.count("Traceback (most recent call last)") == 1, output
    before, _, traceback = output.partition("Traceback (most recent call last)")
    strange = [
        line
        for line in before.splitlines()
        if not re.match(
            rf"step \d+$|(sleeping|begins|connected|initialised|ends)$|{PROGRESS}", line
        )
    ]
    assert not strange, output
    assert traceback.rstrip().endswith("\nKeyboardInterrupt"), output
    assert not re.search(r"^\S*Error\b", traceback, re.MULTILINE), output


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("blocked", "size"),
    [("in-a-step", 8), ("in-a-step", 256), ("computing", 8)],
    ids=["in-a-call", "in-a-wait", "computing"],
)
def test_a_worker_ends_by_keyboard_interrupt(
    make_job: Callable[..., Job], blocked: str, size: int
) -> None:
    # Worker 1 sleeps before step 5; worker 0 waits for it in that step.
    job = make_job(1, 2).start("steps.py", size, "1:5:sleep")
    job.wait_for_output("worker 1", "sleeping")
    job.wait_for_output("worker 0", "step 5\n")
    victim, other = ("worker 0", "worker 1") if blocked == "in-a-step" else ("worker 1", "worker 0")
    if blocked == "in-a-step":
        # The line is printed before the step begins.
        time.sleep(0.5)
    job.kill(victim, signal.SIGINT)
    job.wait_for_output(victim, "\nKeyboardInterrupt\n", RAISED_S)
    # An interpreter full of JAX takes a second or two to end by itself on a busy machine.
    code = job.wait(SECONDS, [victim])[victim]
    # By the signal, as a shell expects of a program that was interrupted.
    assert code in (-signal.SIGINT, 128 + signal.SIGINT), job.outputs()
    check_is_quiet(job.output(victim))
    # Whoever waits for others is told. Who sleeps in code of its own cannot be.
    waiting = ["server 0"] + ([other] if other == "worker 0" else [])
    job.wait(SECONDS, waiting)
    for name in [*waiting, "coordinator"]:
        assert re.search(f"{victim} .*was: interrupted", job.output(name)), job.outputs()


@pytest.mark.timeout(100)
def test_a_worker_that_waits_for_the_start_ends_by_keyboard_interrupt(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 2)
    job.start_coordinator()
    job.start_server(0)
    job.start_worker(0, "steps.py", 8)
    job.wait_for_output("worker 0", "waiting for worker 1")
    job.kill("worker 0", signal.SIGINT)
    job.wait_for_output("worker 0", "\nKeyboardInterrupt\n", RAISED_S)
    assert job.wait(SECONDS, ["worker 0"])["worker 0"] == -signal.SIGINT
    check_is_quiet(job.output("worker 0"))
    # The others do not wait for it any longer.
    job.wait(SECONDS, ["server 0", "coordinator"])
    assert re.search("worker 0 .*was: interrupted", job.output("server 0")), job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("awaited", ["the coordinator", "worker 0"])
def test_a_server_that_waits_for_the_others_ends_by_a_signal(
    make_job: Callable[..., Job], awaited: str, number: signal.Signals
) -> None:
    job = make_job(1, 1)
    if awaited == "the coordinator":
        job.at(free_address())
    else:
        job.start_coordinator()
    job.start_server(0)
    job.wait_for_output("server 0", f"waiting for {awaited}")
    job.kill("server 0", number)
    assert job.wait(SECONDS, ["server 0"])["server 0"] == 128 + number, job.outputs()
    if awaited != "the coordinator":
        job.wait(SECONDS, ["coordinator"])
        told = rf"server 0 \(.*\) was: ended by {number.name}"
        assert re.search(told, job.output("coordinator")), job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("way", ["alone", "alone-many"])
def test_a_worker_that_waits_at_its_end_for_its_last_step_ends_by_the_signal(
    make_job: Callable[..., Job], way: str
) -> None:
    job = make_job(1, 2).start("ending.py", 1, way)
    job.wait_for_output("worker 0", "ends\n")
    time.sleep(0.5)  # Python ends, and says nothing of how far it is
    job.kill("worker 0", signal.SIGINT)
    assert job.wait(SECONDS, ["worker 0"])["worker 0"] == -signal.SIGINT, job.outputs()
    assert "Exception ignored" not in job.output("worker 0"), job.outputs()
    job.wait(SECONDS, ["server 0"])
    # The coordinator waits for worker 1, which sleeps in code of its own.
    for name in ("server 0", "coordinator"):
        assert re.search("worker 0 .*was: interrupted", job.output(name)), job.outputs()
    job.kill("worker 1")


@pytest.mark.timeout(100)
def test_a_worker_that_is_interrupted_while_it_leaves_has_no_thread_left(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    file = tmp_path / "now"
    job = make_job(1, 1).start("ending.py", 3, "leaving", file)
    job.wait_for_output("worker 0", "ready\n")
    job.kill("coordinator", signal.SIGSTOP)  # so nobody takes note of its goodbye
    file.touch()
    job.wait_for_output("worker 0", "ends\n")
    time.sleep(0.5)  # it says nothing of how far it is
    job.kill("worker 0", signal.SIGINT)
    job.wait_for_output("worker 0", "\nKeyboardInterrupt\n", RAISED_S)
    assert job.wait(SECONDS, ["worker 0"])["worker 0"] == -signal.SIGINT, job.outputs()
    # One that woke up in an interpreter that has ended would abort the process.
    assert "threads left: []" in job.output("worker 0"), job.outputs()
    job.kill("coordinator", signal.SIGCONT)
    job.wait(15, ["server 0", "coordinator"])


# Of the script moments.py. After the last, Python ends, and tells of an interrupt in its own way.
MOMENTS = ("begins", "connected", "initialised", "step 5", "ends")


def interrupt_at(job: Job, moment: str, chance: random.Random) -> float:
    """A worker is interrupted up to half a second after it said so: who had not ended raises, and all say why.

    **Returns:** the seconds until it had raised, or 0 if it had ended well already.
    """
    job.start("moments.py", 100)
    job.wait_for_output("worker 0", f"{moment}\n")
    time.sleep(chance.uniform(0, 0.5))
    worker = job.processes["worker 0"]
    job.kill("worker 0", signal.SIGINT)
    began = time.monotonic()
    while "\nKeyboardInterrupt\n" not in job.output("worker 0") and worker.poll() is None:
        assert time.monotonic() - began < RAISED_S * PATIENCE, job.outputs()
        time.sleep(0.01)  # a file has no completion to wait for
    raised = time.monotonic() - began
    if job.wait(SECONDS, ["worker 0"])["worker 0"] == 0:
        assert "closed\n" in job.output("worker 0"), job.outputs()
        job.succeed()
        return 0.0
    assert worker.returncode == -signal.SIGINT, job.outputs()
    if "closed\n" in job.output("worker 0"):
        return 0.0
    check_is_quiet(job.output("worker 0"))
    if moment == "begins":
        return raised  # it may not have joined: then nobody knows of it
    cause, others = "worker 0 .*was: interrupted", ["worker 1", "server 0", "coordinator"]
    codes = job.wait(15, others)
    if "ends\n" in job.output("worker 0"):
        # Who has left the job before may be the last that it needs.
        others = [name for name in others if codes[name] != 0]
    elif "ends\n" in job.output("worker 1"):
        others.remove("worker 1")  # all its steps had been made
    check_all_name(job, cause, 15, others)
    return raised


@pytest.mark.timeout(100)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_may_be_interrupted_at_any_moment(
    make_job: Callable[..., Job], moment: str
) -> None:
    interrupt_at(make_job(1, 2), moment, random.Random())


@pytest.mark.timeout(100)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "signal"])
@pytest.mark.parametrize("deeds", [[], ["1:5:sleep"]], ids=["stepping", "blocked"])
def test_interrupting_the_launcher_ends_everything(
    no_leftovers: None, terminal: bool, deeds: list[str]
) -> None:
    with _launched(8 if terminal else 256, deeds, terminal) as job:
        job.read_until(
            r"^worker 0 +\| step 5", r"^worker 1 +\| " + ("sleeping" if deeds else "step 5")
        )
        job.interrupt()
        job.check_is_gone(SECONDS)
    output = job.output()
    assert job.process.returncode == 128 + signal.SIGINT, output
    assert output.rstrip().endswith("jaxrdma: ended by SIGINT"), output
    check_is_quiet(job.output("worker 0"))
    check_is_quiet(job.output("worker 1"))


@pytest.mark.timeout(100)
def test_interrupting_a_worker_that_waits_for_a_sleeper_ends_everything(no_leftovers: None) -> None:
    with _launched(256, ["1:5:sleep"], False) as job:
        job.read_until(r"^worker 0 +\| step 5", r"^worker 1 +\| sleeping")
        (worker,) = [
            process
            for process in marked_processes(os.environ[MARK])
            if process.environ().get("JAXRDMA_ROLE") == "worker"
            and process.environ()["JAXRDMA_INDEX"] == "0"
        ]
        worker.send_signal(signal.SIGINT)
        job.check_is_gone(SECONDS)
    output = job.output()
    assert job.process.returncode == 128 + signal.SIGINT, output
    assert re.search("jaxrdma: worker 0 failed first: .*worker 0 .*was: interrupted", output), (
        output
    )
    check_is_quiet(job.output("worker 0"))


NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def check_has_ended(job: Job, worker: str, number: int, rest: str, seconds: float = 10) -> None:
    """By `number`, with one line, which goes on with `rest`, and nothing else but steps and progress."""
    assert job.wait(seconds, [worker])[worker] == 128 + number, job.outputs()
    said = job.output(worker).splitlines()
    assert re.fullmatch(
        rf"jaxrdma: {worker}: ended by {NAMES[signal.Signals(number)]}, after step \d+{rest}",
        said[-1],
    ), job.outputs()
    strange = [line for line in said[:-1] if not re.match(rf"step \d+$|{PROGRESS}", line)]
    assert not strange, job.outputs()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("size", [8, 256])
def test_a_worker_that_is_needed_ends_its_step_and_is_named_by_all(
    make_job: Callable[..., Job], number: int, size: int
) -> None:
    job = make_job(2, 2).start("steps.py", size)
    job.wait_for_output("worker 1", "step 20\n")
    job.kill("worker 1", number)
    check_has_ended(job, "worker 1", number, "")
    cause = (
        rf"worker 1 \(\S+, pid \d+\) was: ended by {NAMES[signal.Signals(number)]}, after step \d+"
    )
    check_all_name(job, cause, 10, ["worker 0", "server 0", "server 1", "coordinator"])


@pytest.mark.timeout(100)
def test_a_worker_that_can_be_spared_leaves_after_its_step(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 3, partition_bytes=256)
    job.start("policies.py", "sync:2", "v60", 0.02, 0.02, 0.02)
    job.wait_for_output("worker 2", '"batch": 10,')
    job.kill("worker 2", signal.SIGTERM)
    assert job.wait(10, ["worker 2"])["worker 2"] == 128 + signal.SIGTERM, job.outputs()
    said = job.output("worker 2").splitlines()[-1]
    assert re.search(r"worker 2: ended by SIGTERM, after step \d+; left the job$", said), said
    others = [name for name in job.processes if name != "worker 2"]
    assert set(job.wait(60, others).values()) == {0}, job.outputs()
    # All that it gave counts: it left, and was not lost.
    assert "without it" not in job.output("coordinator"), job.outputs()


@pytest.mark.timeout(100)
def test_the_only_worker_leaves_and_its_last_step_is_saved(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, 1, checkpoint=tmp_path / "saved").start("steps.py", 8)
    job.wait_for_output("worker 0", "step 20\n")
    job.kill("worker 0", signal.SIGTERM)
    check_has_ended(job, "worker 0", signal.SIGTERM, "; left the job")
    others = ["server 0", "server 1", "coordinator"]
    assert set(job.wait(10, others).values()) == {0}, job.outputs()
    last = re.search(r"after step (\d+)", job.output("worker 0"))
    assert last is not None
    assert steps_in(tmp_path / "saved") == [int(last[1])]


@pytest.mark.timeout(100)
def test_a_worker_whose_step_does_not_come_back_is_not_waited_for_for_ever(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 2)
    job.start_coordinator()
    job.start_server(0)
    for worker in range(2):
        job.start_worker(worker, "steps.py", 256, "1:5:sleep", LAST_STEP_SECONDS="1")
    job.wait_for_output("worker 1", "sleeping")
    job.wait_for_output("worker 0", "step 5\n")
    time.sleep(0.5)  # the line is printed before the step begins
    job.kill("worker 0", signal.SIGTERM)
    check_has_ended(
        job, "worker 0", signal.SIGTERM, "; the step after that did not come back within 1 s"
    )
    job.wait(10, ["server 0", "coordinator"])
    assert re.search("worker 0 .*was: ended by SIGTERM, after", job.output("server 0"))


@pytest.mark.timeout(100)
def test_a_closed_terminal_ends_everything(no_leftovers: None) -> None:
    with _launched(8, [], True) as job:
        job.read_until(r"^worker 0 +\| step 5", r"^worker 1 +\| step 5")
        started = marked_processes(os.environ[MARK])
        job.close_terminal()
        _, left = psutil.wait_procs(started, timeout=2 * SECONDS)
        assert not left, left


@pytest.mark.timeout(100)
def test_under_nohup_a_closed_terminal_ends_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 1)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job.start("steps.py", 8, "0:400:leave")
    finally:
        signal.signal(signal.SIGHUP, before)
    job.wait_for_output("worker 0", "step 5\n")
    for name in job.processes:
        job.kill(name, signal.SIGHUP)
    job.succeed(40)


class _Launched:
    """`jaxrdma launch` in a session of its own, on a terminal or not, with all that it has printed."""

    def __init__(self, command: list[str], terminal: bool) -> None:
        self._terminal = terminal
        self._master, slave = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command] if terminal else command,
            stdin=slave if terminal else subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=not terminal,
        )
        os.close(slave)
        self._text = ""

    def read_until(self, *patterns: str) -> None:
        deadline = time.monotonic() + 60
        while not all(re.search(pattern, self.output(), re.MULTILINE) for pattern in patterns):
            assert self._read(0.1) or (
                self.process.poll() is None and time.monotonic() < deadline
            ), self.output()

    def interrupt(self) -> None:
        if self._terminal:
            os.write(self._master, b"\x03")
        else:
            self.process.send_signal(signal.SIGINT)

    def close_terminal(self) -> None:
        """As if its window were closed."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDONLY)
        self.process.wait()

    def check_is_gone(self, seconds: float) -> None:
        """It, and all that it started, ends within `seconds`."""
        deadline = time.monotonic() + seconds
        while self._read(0.05) or self.process.poll() is None:
            assert time.monotonic() < deadline, self.output()
        left = marked_processes(os.environ[MARK])
        assert not left, left

    def output(self, name: str = "") -> str:
        """What a terminal would show, without colours; all, or the lines of one process."""
        text = self._text.replace("\r\n", "\n").replace("^C", "")
        text = re.sub(r"[^\n]*\r\x1b\[K", "", text)  # progress that was replaced
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
        return "\n".join(re.findall(rf"^{name} +\| (.*)$", text, re.MULTILINE)) if name else text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, timeout: float) -> bool:
        if not select.select([self._master], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # nobody holds the other end of the terminal any more
            return False
        self._text += data.decode(errors="replace")
        return bool(data)


def _launched(size: int, deeds: list[str], terminal: bool) -> "contextlib.closing[_Launched]":
    command = [
        "-m",
        "jaxrdma",
        "launch",
        "--servers",
        "2",
        "--workers",
        "2",
        str(SCRIPTS / "steps.py"),
        str(size),
    ]
    return contextlib.closing(_Launched([sys.executable, *command, *deeds], terminal))
