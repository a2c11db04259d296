"""The launcher: what it starts, what it prints, and that nothing is left of it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrdma.cli import main
from jaxrdma.cluster import _PARSERS, ClusterSpec
from jaxrdma.control import ControlClient, Failed
from jaxrdma.launch import Lines, Screen, kill_sessions, server_environment, worker_environment
from tests.cluster.job import free_address

SPEC = ClusterSpec("127.0.0.1:7", "worker", 0, 1, 1, secret="s")

# The control half of a worker, in the place of a training script. argv: what worker 1 does, in the first attempt and in
# those that follow: "killed,good".
WORKER = """
import os, signal, subprocess, sys, time
from jaxrdma.cluster import _PARSERS, ClusterSpec
from jaxrdma.control import ControlClient, Failed
from jaxrdma.errors import JaxRdmaError

spec = ClusterSpec.from_environment()
deeds = sys.argv[1].split(",")
what = deeds[min(spec.attempt, len(deeds) - 1)]
if what == "stubborn":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if what == "early" and spec.index == 1:
    sys.exit(5)
client = ControlClient(spec, spec.role, spec.index, 1)
child = subprocess.Popen(["sleep", "100"])  # as a data loader would be
try:
    client.join()
    print("files", len(os.listdir(f"/proc/{os.getppid()}/fd")), flush=True)
    print("attempt", os.environ["JAXRDMA_ATTEMPT"], spec.job, spec.secret, flush=True)
    print("joined", spec.index, child.pid, flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if spec.index == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises and stays":
            client.send(Failed("raised", "ValueError: x"))
            time.sleep(60)
        if what == "unfit":
            client.send(Failed("config", "PlanError: x"))
            client.close()
            sys.exit(3)
        if what == "raises":
            client.send(Failed("raised", "ValueError: x"))
            client.close()
            time.sleep(0.7)  # the other one ends first
            sys.exit(3)
    if what == "good":
        client.leave(7)
    elif what == "stubborn":
        time.sleep(60)
    else:
        client.wait(lambda message: False, 60)
except JaxRdmaError as error:
    print("error:", error, flush=True)
    if what == "lingers":
        time.sleep(60)
    sys.exit(1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(9)
finally:
    client.close()
"""

# Another, whose job bears its loss. argv: on_loss, and what worker 1 does in each of its lives: "killed,good".
LASTING_WORKER = """
import os, secrets, signal, sys, time
from pathlib import Path
from jaxrdma.cluster import _PARSERS, ClusterSpec
from jaxrdma.control import ControlClient, Failed, FlowProposal, FlowStart, MemberLeft
from jaxrdma.policy import Async, to_wire

spec = ClusterSpec.from_environment()
deeds = sys.argv[2].split(",")
lives = Path(__file__).with_name(f"lives of {spec.index}")
with lives.open("a") as file:
    file.write(f"{os.getpid()}\\n")
life = len(lives.read_text().splitlines()) - 1
deed = deeds[min(life, len(deeds) - 1)] if spec.index == 1 else "good"
if deed == "early":
    sys.exit(5)
with ControlClient(spec, spec.role, spec.index, secrets.randbits(60)) as client:
    client.join()
    policy = to_wire(Async(on_loss=sys.argv[1]).complete(spec.places))
    client.send(FlowProposal(0, [], "d", "update", policy, "u"))
    client.wait(lambda message: isinstance(message, FlowStart), 60)
    print("life", life, flush=True)
    if deed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "waits":
        client.wait(lambda message: False, 60)
    if deed == "unfit":
        client.send(Failed("config", "PlanError: x"))
        client.close()
        sys.exit(3)
    if spec.index == 0:
        client.wait(lambda message: isinstance(message, MemberLeft), 60)
    client.leave(0)
"""

# The control half of a server.
SERVER = """
import sys
from jaxrdma.control import (
    Admitting, AdmitWorker, ControlClient, FlowAgreed, FlowReady, Shutdown, WorkerAdmitted
)
from jaxrdma.errors import JaxRdmaError

def run_server(spec, listen, metrics):
    def answer(message):
        if isinstance(message, FlowAgreed):
            client.send(FlowReady(message.flow, holds=False))
        if isinstance(message, AdmitWorker):
            client.send(WorkerAdmitted(message.index, message.incarnation))

    client = ControlClient(spec, "server", spec.index, 1, on_message=answer)
    try:
        client.join()
        client.send(Admitting("127.0.0.1:1"))
        client.wait(lambda message: isinstance(message, Shutdown))
        client.leave(-1)
        return 0
    except JaxRdmaError as error:
        print("server error:", error)
        client.close()
        return 1
"""

# Puts SERVER in the place of jaxrdma.server in every Python that is started with it on its path.
SITE = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "jaxrdma.server":
            return importlib.util.spec_from_file_location(name, {path!r})

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "lasting.py").write_text(LASTING_WORKER)
    (tmp_path / "fake_server.py").write_text(SERVER)
    (tmp_path / "sitecustomize.py").write_text(SITE.format(path=str(tmp_path / "fake_server.py")))
    return tmp_path


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, scripts: Path, *arguments: str, secret: str = "", **options) -> None:
        path = [str(scripts), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = [str(Path(p).resolve()) for p in path]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrdma", "launch", *arguments],
            env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path), "JAXRDMA_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.lines: list[str] = []

    def until(self, text: str, count: int = 1) -> None:
        while sum(text in line for line in self.lines) < count:
            line = self.process.stdout.readline()
            assert line, "".join(self.lines) + self.process.stderr.read()
            self.lines.append(line)

    def errors_until(self, text: str) -> None:
        while text not in (line := self.process.stderr.readline()):
            assert line, "".join(self.lines)

    def end(self, timeout: float = 30) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.lines) + out, err


@pytest.fixture
def launch(no_leftovers: None, scripts: Path) -> Iterator:
    started: list[Launched] = []

    def start(*arguments: str, **options) -> Launched:
        started.append(Launched(scripts, *arguments, **options))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()
        for pipe in (launched.process.stdout, launched.process.stderr):
            pipe.close()


def wait_for_worker(launcher: int, index: str) -> psutil.Process:
    """The worker `index` of a launcher, once it is there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in psutil.Process(launcher).children():
            env = child.environ()
            if (env.get("JAXRDMA_ROLE"), env.get("JAXRDMA_INDEX")) == ("worker", index) and (
                "worker.py" in " ".join(child.cmdline())
            ):
                return child
        time.sleep(0.02)
    raise AssertionError(f"worker {index} was not started")


def two(scripts: Path, what: str) -> list[str]:
    return ["--workers", "2", "--servers", "1", str(scripts / "worker.py"), what]


cluster_test = pytest.mark.timeout(60)


# --- whole jobs ---


@cluster_test
def test_a_good_job_ends_with_0_and_prefixes_its_lines(launch, scripts):
    code, out, err = launch(*two(scripts, "good")).end()
    assert code == 0, out + err
    assert "worker 0    | joined 0" in out
    assert "worker 1    | joined 1" in out
    assert "worker 1    | to stderr" in err
    assert "failed" not in err


@cluster_test
def test_a_module_is_run_and_its_options_are_its_own(launch, scripts):
    (scripts / "show.py").write_text("import sys; print(sys.argv[1:]); sys.exit(4)")
    launched = launch("--workers", "1", "-m", "show", "--servers", "9", "-x")
    code, out, _ = launched.end()
    assert code == 4
    assert "worker 0    | ['--servers', '9', '-x']" in out


@cluster_test
def test_a_killed_worker_gives_its_code_and_its_name(launch, scripts):
    code, out, err = launch(*two(scripts, "killed")).end()
    assert code == 128 + signal.SIGKILL
    last = err.strip().splitlines()[-1]
    assert last.startswith("jaxrdma: worker 1 failed first: killed by SIGKILL; worker 1 (")
    assert "worker 0    | error: worker 1 (" in out


@cluster_test
def test_the_cause_gives_the_code_even_if_it_ends_last(launch, scripts):
    code, _, err = launch(*two(scripts, "raises")).end()
    assert code == 3, err
    assert "worker 1 failed first: ended with exit code 3; worker 1 (" in err
    assert "ValueError: x" in err.strip().splitlines()[-1]


@cluster_test
def test_a_cause_that_has_to_be_stopped_was_not_killed_by_others(launch, scripts):
    code, _, err = launch(*two(scripts, "raises and stays")).end()
    assert code == 1, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("jaxrdma: worker 1 failed first: did not end by itself; worker 1 ("), err
    assert "ValueError: x" in last


@cluster_test
def test_a_worker_that_fails_before_it_joins_ends_the_job(launch, scripts):
    begin = time.monotonic()
    code, _, err = launch(*two(scripts, "early")).end()
    assert code == 5
    assert time.monotonic() - begin < 15
    assert "jaxrdma: worker 1 failed first: ended with exit code 5" in err


@cluster_test
def test_others_that_linger_after_a_failure_are_ended(launch, scripts):
    launched = launch(*two(scripts, "lingers"))
    launched.until("joined", 2)
    pid = int(next(x for x in launched.lines if "joined 1" in x).split()[-1])
    worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    begin = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    code, _, _ = launched.end()
    assert code == 137
    assert 4 < time.monotonic() - begin < 9


@cluster_test
def test_a_script_that_never_joins_is_named(launch, scripts):
    (scripts / "quick.py").write_text("print('hi')")
    code, out, err = launch("--workers", "1", str(scripts / "quick.py")).end()
    assert code == 1
    assert "worker 0    | hi" in out
    assert "coordinator, server 0 did not end within 10 s of the last worker" in err


# --- jobs on several machines: here, several launchers on one ---


@pytest.fixture
def launch_both(launch, scripts):
    """Two launchers of one job of `two`: the first has worker 0 and all else, the second worker 1."""

    def start(what: str) -> tuple[Launched, Launched]:
        coordinator = ["--coordinator", free_address()]
        shares = ("coordinator,server:0,worker:0", "worker:1")
        first, second = (
            launch(*coordinator, "--here", share, *two(scripts, what)) for share in shares
        )
        return first, second

    return start


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@cluster_test
def test_two_launchers_start_one_job(launch_both):
    first, second = (launched.end() for launched in launch_both("good"))
    assert first[0] == second[0] == 0, first + second
    assert "worker 0    | joined 0" in first[1] and "joined 1" not in first[1]
    assert "worker 1    | joined 1" in second[1] and "joined 0" not in second[1]


@cluster_test
def test_a_launcher_whose_workers_have_left_waits_for_the_end_of_the_job(launch, scripts):
    address = free_address()
    arguments = ("--coordinator", address, *two(scripts, "good"))
    second = launch("--here", "worker:0-1", *arguments)
    first = launch("--here", "server:0,coordinator", *arguments)
    assert (first.end()[0], second.end()[0]) == (0, 0)


@cluster_test
def test_a_killed_worker_is_named_by_both_launchers(launch_both):
    first, second = (launched.end() for launched in launch_both("killed"))
    assert second[0] == 128 + signal.SIGKILL
    assert last_line(second[2]).startswith("jaxrdma: worker 1 failed first: killed by SIGKILL; ")
    assert first[0] == 1
    assert last_line(first[2]).startswith("jaxrdma: the job failed: worker 1 (")
    assert "worker 0    | error: worker 1 (" in first[1]


@cluster_test
def test_a_worker_that_fails_before_it_joins_ends_both(launch_both):
    begin = time.monotonic()
    first, second = (launched.end() for launched in launch_both("early"))
    assert (first[0], second[0]) == (1, 5), first[2] + second[2]
    assert time.monotonic() - begin < 25
    for _, _, err in (first, second):
        assert "ended with exit code 5 and had never joined" in last_line(err)


@cluster_test
def test_the_others_end_with_a_launcher_that_is_killed(launch_both):
    first, second = launch_both("stubborn")
    first.until("joined")
    second.until("joined")
    second.process.kill()
    code, _, err = first.end()
    assert code == 1
    assert re.search(r"the job failed: (worker 1|launcher) \(.*died", last_line(err)), err


@cluster_test
def test_ctrl_c_at_one_launcher_ends_both(launch_both):
    first, second = launch_both("waits")
    first.until("joined")
    second.until("joined")
    second.process.send_signal(signal.SIGINT)
    assert second.end(5)[0] == 130
    code, _, err = first.end()
    assert code == 1
    assert re.search(r"the job failed: launcher \(.*was: ended by SIGINT", last_line(err)), err


@cluster_test
def test_ctrl_c_waits_for_a_slow_machine_to_say_what_it_is(launch_both):
    """Else the end of its workers would be taken for their death, from which a job recovers."""
    first, second = launch_both("waits")
    first.until("joined")
    second.until("joined")
    delegate = next(
        p
        for p in psutil.Process(second.process.pid).children()
        if "jaxrdma.delegate" in p.cmdline()
    )
    delegate.suspend()
    second.process.send_signal(signal.SIGINT)
    time.sleep(0.6)  # how slow it is
    delegate.resume()
    assert second.end(5)[0] == 130
    assert re.search(r"the job failed: launcher \(.*was: ended by SIGINT", first.end()[2])


@cluster_test
def test_a_launcher_whose_secret_is_wrong_ends_and_the_job_goes_on_waiting(launch, scripts):
    arguments = ("--coordinator", free_address(), *two(scripts, "good"))
    first = launch("--here", "coordinator,server:0,worker:0", *arguments, secret="right")
    code, _, err = launch("--here", "worker:1", *arguments, secret="wrong").end()
    assert code == 1
    assert "the job's secret was expected, a wrong one came" in last_line(err)
    second = launch("--here", "worker:1", *arguments, secret="right").end()
    ended = first.end()
    assert (ended[0], second[0]) == (0, 0), (ended, second)


@cluster_test
def test_a_coordinator_that_is_killed_ends_the_other_launchers(launch_both):
    first, second = launch_both("waits")
    first.until("joined")
    second.until("joined")
    coordinator = next(
        p for p in psutil.Process(first.process.pid).children() if "coordinator" in p.cmdline()
    )
    coordinator.kill()
    code, _, err = second.end()
    assert code == 1
    assert re.search("the job failed: the coordinator at .* is lost", last_line(err)), err
    assert first.end()[0] == 128 + signal.SIGKILL


@cluster_test
@pytest.mark.parametrize("end", ["killed", "early", signal.SIGKILL, signal.SIGINT], ids=str)
def test_a_launcher_of_spare_places_does_no_harm_whatever_becomes_of_it(launch, scripts, end):
    address = free_address()

    def start(here: str, deed: str):
        counts = ("--workers", "1", "--most-workers", "3")
        place = ("--coordinator", address, "--here", here)
        return launch(*place, *counts, str(scripts / "lasting.py"), "shrink", deed)

    first = start("coordinator,server:0,worker:0", "")
    first.until("life 0")
    second = start("worker:1", end if isinstance(end, str) else "waits")
    if isinstance(end, signal.Signals):
        second.until("life 0")
        second.process.send_signal(end)
        assert second.end()[0] == (130 if end == signal.SIGINT else -signal.SIGKILL)
        first.errors_until("the job goes on without what it started")
    elif end == "early":
        assert second.end()[0] == 5
        first.errors_until("ended with exit code 5 and had never joined; the job does not need it")
    else:
        first.errors_until("the job goes on without it")
    # Whoever comes next ends the job in good order: worker 0 waits for somebody to leave.
    third = start("worker:2", "good").end()
    code, out, err = first.end()
    assert (code, third[0]) == (0, 0), out + err + third[2]
    if end == "killed":
        assert second.end()[0] == 0


# --- jobs that are started again ---


def attempts(out: str) -> list[tuple[str, ...]]:
    """Number, job name and secret of each attempt, as its workers know them."""
    return sorted(set(re.findall(r"\| attempt (\d+) (\S+) ?(\S*)", out)))


def last_words(err: str) -> list[str]:
    """What the launcher itself said."""
    return [line for line in err.splitlines() if line.startswith("jaxrdma: ")]


@cluster_test
def test_a_job_whose_worker_is_killed_is_started_again_as_another_job(launch, scripts):
    code, out, err = launch("--restarts", "2", *two(scripts, "killed,raises,good")).end(50)
    assert code == 0, out + err
    assert [line.partition("; worker 1 (")[0] for line in last_words(err)] == [
        "jaxrdma: --restarts without --checkpoint: each attempt begins at step 0 again",
        "jaxrdma: worker 1 failed first: killed by SIGKILL",
        "jaxrdma: worker 1 failed first: ended with exit code 3",
    ]
    for number in (1, 2):
        assert last_words(err)[number].endswith(f"; starting again: attempt {number + 1} of 3")
    first, second, third = attempts(out)
    assert (first[0], second[0], third[0]) == ("0", "1", "2")
    assert len({*first, *second, *third}) == 9, "a name and a secret were used twice"


@cluster_test
def test_when_the_restarts_are_used_up_the_last_attempt_gives_the_code(launch, scripts):
    code, out, err = launch("--restarts", "1", *two(scripts, "killed,raises")).end(50)
    assert code == 3, err
    assert [number for number, *_ in attempts(out)] == ["0", "1"]
    assert last_words(err)[-1].endswith("ValueError: x; attempt 2 of 2 was the last")


@cluster_test
def test_what_would_fail_again_is_not_started_again(launch, scripts):
    code, out, err = launch("--restarts", "5", *two(scripts, "unfit")).end()
    assert code == 3, err
    assert [number for number, *_ in attempts(out)] == ["0"]
    assert last_words(err)[-1].endswith("not started again, for the same settings would fail again")


@cluster_test
def test_a_signal_in_a_second_attempt_ends_the_job(launch, scripts):
    launched = launch("--restarts", "5", *two(scripts, "killed,waits"))
    launched.until("attempt 1", 2)
    launched.until("joined", 4)
    begin = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert (code, last_line(err)) == (130, "jaxrdma: ended by SIGINT")
    assert time.monotonic() - begin < 3


@cluster_test
def test_nothing_outlives_a_launcher_that_is_killed_in_a_second_attempt(launch, scripts):
    launched = launch("--restarts", "1", *two(scripts, "killed,stubborn"))
    launched.until("joined", 4)
    launched.process.kill()
    launched.process.communicate(timeout=5)  # the pipes end; and `no_leftovers` looks for processes


@cluster_test
def test_an_attempt_leaves_no_file_open(launch, scripts):
    code, out, err = launch("--restarts", "2", *two(scripts, "killed")).end(50)
    assert code == 137, err
    counts = [int(count) for count in re.findall(r"worker 1 +\| files (\d+)", out)]
    assert len(counts) == 3 and max(counts) <= counts[0], counts


@cluster_test
@pytest.mark.parametrize("late", [False, True], ids=["both", "one-comes-later"])
def test_launchers_of_one_job_start_their_shares_again(launch, scripts, late):
    arguments = ("--restarts", "2", "--coordinator", free_address(), *two(scripts, "killed,good"))
    first = launch("--here", "coordinator,server:0,worker:1", *arguments)
    if late:
        # In the first attempt it is not there yet: worker 1 is killed as it waits for worker 0.
        child = first.process.pid
        victim = wait_for_worker(child, "1")
        victim.kill()
        first.errors_until("starting again: attempt 2 of 3")
    second = launch("--here", "worker:0", *arguments)
    ended = first.end(50), second.end(50)
    assert [code for code, *_ in ended] == [0, 0], ended
    (one, other) = (attempts(out)[-1] for _, out, _ in ended)
    assert one == other and one[0] == "1", "of the same attempt, under the same name"
    if late:
        assert "the coordinator is at attempt 2 of the job, and so is this machine" in ended[1][2]
    else:
        assert last_words(ended[1][2])[-1].endswith("; starting again: attempt 2 of 3")


@cluster_test
def test_a_launcher_that_comes_as_the_job_fails_waits_for_the_attempt_after(launch, scripts):
    address = free_address()
    spec = ClusterSpec(address, "worker", 0, 2, 1, attempt=3)
    arguments = ["--listen", address, "--workers", "2", "--servers", "1"]
    coordinator = subprocess.Popen(
        [sys.executable, "-m", "jaxrdma", "coordinator", *arguments],
        env=dict(os.environ) | {"JAXRDMA_ATTEMPT": "3"},
        stderr=subprocess.DEVNULL,
    )
    with ControlClient(spec, "worker", 0, 1) as client:  # while it stays, so does the coordinator
        client.reach()
        client.send(Failed("raised", "ValueError: x"))
        options = ("--restarts", "9", "--coordinator", address, "--here", "worker:1")
        launched = launch(*options, *two(scripts, "good"))
        launched.errors_until("ValueError: x; starting again: attempt 5 of 10")
        launched.process.terminate()
        assert launched.end()[0] == 143
    assert coordinator.wait(10) == 1


@cluster_test
def test_an_interrupted_launcher_is_no_reason_for_the_others_to_start_again(launch, scripts):
    arguments = ("--restarts", "2", "--coordinator", free_address(), *two(scripts, "waits"))
    first = launch("--here", "coordinator,server:0,worker:0", *arguments)
    second = launch("--here", "worker:1", *arguments)
    first.until("joined")
    second.until("joined")
    second.process.send_signal(signal.SIGTERM)
    assert second.end(5)[0] == 143
    code, _, err = first.end()
    assert code == 1
    assert last_line(err).endswith("ended by SIGTERM; not started again, for somebody ended it")


# --- workers that are started again ---


def lasting(scripts: Path, on_loss: str, deeds: str) -> list[str]:
    return ["--workers", "2", "--servers", "1", str(scripts / "lasting.py"), on_loss, deeds]


@cluster_test
def test_a_worker_that_is_waited_for_is_started_again(launch, scripts):
    # Also if it ends before anybody but the launcher knows of it.
    code, out, err = launch(*lasting(scripts, "wait", "killed,early,killed,good")).end(50)
    assert code == 0, out + err
    assert last_words(err) == [
        "jaxrdma: worker 1 killed by SIGKILL; starting it again, 1 of 3",
        "jaxrdma: worker 1 ended with exit code 5; starting it again, 2 of 3",
        "jaxrdma: worker 1 killed by SIGKILL; starting it again, 3 of 3",
    ]
    assert re.findall(r"worker 1 +\| life (\d)", out) == ["0", "2", "3"]
    assert re.findall(r"worker 0 +\| life (\d)", out) == ["0"]


@cluster_test
@pytest.mark.parametrize(
    ("options", "deeds", "code", "why"),
    [
        (["--worker-restarts", "1"], "killed", 137, "that was done 1 times of 1"),
        (["--worker-restarts", "0"], "killed", 137, "that was done 0 times of 0"),
        ([], "unfit", 3, "for the same settings would fail again"),
    ],
)
def test_a_job_ends_that_waits_for_a_worker_which_does_not_come(
    launch, scripts, options, deeds, code, why
):
    begin = time.monotonic()
    ended = launch(*options, *lasting(scripts, "wait", deeds)).end(50)
    assert ended[0] == code, ended
    assert re.fullmatch(
        f"jaxrdma: worker 1 failed first: .*; worker 1 was lost: not started again, {why}",
        last_words(ended[2])[-1],
    ), ended[2]
    assert time.monotonic() - begin < 20


@cluster_test
def test_who_can_be_spared_is_started_again_only_if_asked_for(launch, scripts):
    code, out, err = launch(*lasting(scripts, "shrink", "good")).end()
    assert (code, last_words(err)) == (0, []), out + err
    (scripts / "lives of 1").unlink()
    asked = ("--worker-restarts", "2", *lasting(scripts, "shrink", "killed,good"))
    code, out, err = launch(*asked).end()
    assert (code, len(last_words(err))) == (0, 1), out + err
    assert re.findall(r"worker 1 +\| life (\d)", out) == ["0", "1"]


@cluster_test
def test_a_worker_that_stands_still_ends_before_another_takes_its_place(
    launch, scripts, monkeypatch
):
    monkeypatch.setenv("JAXRDMA_HEARTBEAT_TIMEOUT", "2")
    code, out, err = launch(*lasting(scripts, "wait", "stopped,good")).end(50)
    assert code == 0, out + err
    assert "jaxrdma: worker 1 killed by SIGKILL; starting it again, 1 of 3" in last_words(err)


@cluster_test
def test_on_two_machines_a_worker_is_started_again_on_its_own(launch, scripts):
    address = free_address()

    def start(here: str, *options: str):
        place = ("--here", here, "--coordinator", address)
        return launch(*place, *options, *lasting(scripts, "wait", "killed"))

    first, second = (
        start("coordinator,server:0,worker:0"),
        start("worker:1", "--worker-restarts", "1"),
    )
    (code, _, err), (code_1, out_1, err_1) = first.end(50), second.end(50)
    assert (code, code_1) == (1, 137), err + err_1
    assert re.findall(r"worker 1 +\| life (\d)", out_1) == ["0", "1"]
    why = "worker 1 was lost: not started again, that was done 1 times of 1"
    assert re.search(rf"the job failed: launcher \(.*\) reports: {why}", last_line(err)), err
    assert last_line(err_1) == f"jaxrdma: worker 1 failed first: killed by SIGKILL; {why}"


# --- signals ---


@cluster_test
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_job(launch, scripts, number, code):
    launched = launch(*two(scripts, "waits"))
    launched.until("joined", 2)
    begin = time.monotonic()
    launched.process.send_signal(number)
    got, out, err = launched.end()
    assert got == code
    assert time.monotonic() - begin < 3
    assert f"ended by {number.name}" in err
    if number == signal.SIGINT:
        assert "worker 0    | interrupted" in out
        assert "worker 1    | interrupted" in out


@cluster_test
def test_those_who_ignore_signals_are_killed_within_3_seconds(launch, scripts):
    launched = launch(*two(scripts, "stubborn"))
    launched.until("joined", 2)
    begin = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert 2 < time.monotonic() - begin < 3


@cluster_test
def test_a_stopped_worker_does_not_outlive_a_signal(launch, scripts):
    launched = launch(*two(scripts, "waits"))
    launched.until("joined", 2)
    pid = int(launched.lines[0].split()[-1])
    worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGSTOP)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end(5)[0] == 130


@cluster_test
def test_a_second_signal_kills_at_once(launch, scripts):
    launched = launch(*two(scripts, "stubborn"))
    launched.until("joined", 2)
    begin = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert time.monotonic() - begin < 1.4


@cluster_test
def test_a_signal_while_starting_ends_the_job(launch, scripts):
    launched = launch(*two(scripts, "waits"))
    time.sleep(0.25)  # anywhere in the start
    launched.process.send_signal(signal.SIGINT)
    assert launched.end(6)[0] in (130, -signal.SIGINT)


@cluster_test
def test_nothing_outlives_a_killed_launcher(launch, scripts):
    launched = launch(*two(scripts, "stubborn"))
    launched.until("joined", 2)
    pids = [int(x.split()[-1]) for x in launched.lines if "joined" in x]
    launched.process.kill()
    launched.process.communicate(timeout=5)  # the pipes end: nobody holds them
    deadline = time.monotonic() + 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    # `no_leftovers` looks for all the others.
    assert not any(
        Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        for pid in pids
    )


@cluster_test
def test_a_reader_that_goes_away_does_not_end_the_job(launch, scripts):
    launched = launch(*two(scripts, "good"))
    launched.process.stdout.close()
    assert launched.process.wait(30) == 0


# --- command line ---

HERE = ("launch", "--coordinator", "127.0.0.1:7", "--here")
MORE = ("launch", "--coordinator", "127.0.0.1:7", "--workers", "2", "--most-workers")
NEVER = ("launch", "--checkpoint", "d", "--checkpoint-restore", "never")
COPIES = ("launch", "--servers", "2", "--replicate", "1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["launch"], "which script"),
        (["launch", "no-such.py"], "no script 'no-such.py'"),
        (["launch", "--workers", "0", __file__], "num_workers is 0"),
        (["launch", "--servers", "0", __file__], "num_servers is 0"),
        (["launch", "--partition-bytes", "1", __file__], "partition_bytes is 1"),
        (["launch", "--restarts", "-1", __file__], "--restarts -1: expected at least 0"),
        (["launch", "--worker-restarts", "-1", __file__], "--worker-restarts -1: expected at"),
        ([*NEVER, "--restarts", "1", __file__], "Give --checkpoint another folder"),
        (["launch", "--replicate", "1", __file__], "replicate=1 needs at least 2 servers"),
        ([*COPIES, __file__], "what they hold: set JAXRDMA_CHECKPOINT too"),
        ([*COPIES, *NEVER[1:], __file__], "replicate=1 with checkpoint_restore never"),
        (["launch", "--here", "worker:0", __file__], "--here needs --coordinator HOST:PORT"),
        (["launch", "--coordinator", "127.0.0.1:7", __file__], "--coordinator needs --here"),
        (["launch", "--listen", "127.0.0.1", __file__], "--listen is for a job on several"),
        (["launch", "--metrics", "x", __file__], "metrics address"),
        (["launch", "--secret-file", "x", __file__], "--secret-file is for a job on several"),
        ([*HERE, "worker:7", __file__], "a job of 1 worker has worker:0; did you mean worker:0?"),
        ([*MORE, "4", "--here", "worker:4", __file__], "a job of 4 workers has worker:0-3"),
        ([*MORE, "1", "--here", "worker:0", __file__], "most_workers is 1: expected at least num"),
        (["launch", "--most-workers", "2", __file__], "--most-workers needs --coordinator HOST:"),
        (
            ["coordinator", "--servers", "1", "--workers", "2", "--most-workers", "1"],
            "at least --w",
        ),
        ([*HERE, "worker:0", "--listen", "::", __file__], "workers are told this address"),
        (["coordinator", "--servers", "1"], "--workers"),
        (["server", "--index", "0"], "coordinator, num_workers, num_servers not given"),
    ],
)
def test_wrong_arguments_are_named(arguments, text, capsys):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_variable_that_does_not_exist_is_named(monkeypatch, capsys):
    monkeypatch.setenv("JAXRDMA_TRANSPROT", "tcp")
    assert main(["launch", __file__]) == 2
    assert "did you mean JAXRDMA_TRANSPORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["launch", "coordinator", "server"])
def test_help_has_examples_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit codes:" in out


def test_the_list_of_commands_is_shown(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("launch", "coordinator", "server", "exit codes:"))


# --- environments ---


def test_servers_never_see_a_gpu_and_workers_have_threads_to_wait_on():
    env = {"HOME": "/h", "JAXRDMA_INDEX": "9", "TF_CONFIG": "{}", "JAX_PLATFORMS": "cuda"}
    server = server_environment(env, SPEC)
    assert (server["JAX_PLATFORMS"], server["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    worker = worker_environment(env, SPEC)
    assert (worker["PJRT_NPROC"], worker["JAX_PLATFORMS"], worker["HOME"]) == ("8", "cuda", "/h")
    assert "CUDA_VISIBLE_DEVICES" not in worker
    assert worker_environment({"PJRT_NPROC": "3"}, SPEC)["PJRT_NPROC"] == "3"
    for result in (server, worker):
        assert "TF_CONFIG" not in result
        assert ClusterSpec.from_environment(result) == SPEC


def test_which_library_has_verbs_reaches_every_process():
    env = {"JAXRDMA_IBVERBS_LIB": "/lib/own.so"}
    for environment in (server_environment, worker_environment):
        assert environment(env, SPEC)["JAXRDMA_IBVERBS_LIB"] == "/lib/own.so"


@pytest.mark.parametrize("several", [[], ["--coordinator", "127.0.0.1:7", "--here", "worker:0"]])
def test_every_setting_reaches_the_processes_but_those_of_each(monkeypatch, several):
    # Where 1 will not do.
    values = {"partition_bytes": "64", "checkpoint_restore": "auto", "transport": "tcp"}
    values |= {"metrics": "9400", "device": "a,b", "fault": "worker 1: lost 4"}
    plans = []
    monkeypatch.setattr("jaxrdma.cli.launch.launch", lambda plan: plans.append(plan) or 0)
    for name in _PARSERS:
        monkeypatch.setenv(f"JAXRDMA_{name.upper()}", values.get(name, "1"))
    assert main(["launch", "--servers", "2", *several, __file__]) == 0
    settings = dict(plans[0].settings)
    told = set(settings) | {k for k, v in vars(settings["verbs"]).items() if v is not None}
    of_each = {"coordinator", "role", "index", "num_workers", "num_servers", "attempt"}
    assert set(_PARSERS) - (told - {"verbs"}) == of_each | (set() if several else {"secret", "job"})
    assert settings["metrics"] == "9400" and settings["verbs"].device == ("a", "b")


# --- output ---


@pytest.mark.parametrize(
    ("data", "lines", "unfinished"),
    [
        (b"a\nb", [b"a"], b"b"),
        (b"a\r\nb\r\n", [b"a", b"b"], b""),
        (b"\r10%\r20%", [], b"20%"),
        (b"10%\r20%\r", [], b"20%"),
        (b"\r10%\r20%\n", [b"20%"], b""),
        (b"10%\r20%\r\n\n", [b"20%", b""], b""),
    ],
)
def test_what_follows_a_carriage_return_replaces_the_line(data, lines, unfinished):
    for size in range(1, len(data) + 1):
        cut = Lines()
        got = []
        for i in range(0, len(data), size):
            got += cut.feed(data[i : i + size])
        assert (got, cut.unfinished) == (lines, unfinished)


@given(st.lists(st.binary(max_size=20)))
def test_text_without_carriage_returns_passes_unchanged(chunks):
    chunks = [chunk.replace(b"\r", b"") for chunk in chunks]
    cut = Lines()
    got = [line for chunk in chunks for line in cut.feed(chunk)]
    assert b"\n".join([*got, cut.unfinished]) == b"".join(chunks)


def test_a_line_without_end_does_not_grow_for_ever():
    cut = Lines()
    lines = [line for _ in range(100) for line in cut.feed(b"x" * 4096)]
    assert sum(map(len, lines)) > 300_000
    assert len(cut.unfinished) <= 1 << 16


def terminal_output(draw) -> bytes:
    """What `draw` writes to a terminal 40 columns wide."""
    ours, theirs = pty.openpty()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        draw(Screen(theirs, theirs, lambda fd: True))
        os.write(theirs, b"END")
        data = b""
        while not data.endswith(b"END"):
            data += os.read(ours, 4096)
        return data[:-3].replace(b"\r\n", b"\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_progress_bar_stays_below_the_lines_of_others():
    def draw(screen: Screen) -> None:
        screen.bar("err", b"10%")
        screen.line("out", b"hello")
        screen.bar("out", b"")  # not its bar
        screen.bar("err", b"20%")
        screen.bar("err", b"")

    clear = b"\r\x1b[K"
    assert terminal_output(draw) == (
        clear + b"10%" + clear + b"hello\n" + clear + b"10%" + clear + b"20%" + clear
    )


def test_a_progress_bar_is_cut_to_the_terminal():
    output = terminal_output(lambda screen: screen.bar("out", b"\x1b[36mw\x1b[0m" + b"x" * 100))
    assert output.count(b"x") == 38
    assert b"\x1b[36mw\x1b[0m" in output


def test_no_colour_where_there_is_no_terminal():
    reading, writing = os.pipe()
    try:
        assert Screen(writing, writing, lambda fd: True).prefix("worker 0", 11, "out") == (
            b"worker 0    | "
        )
    finally:
        os.close(reading)
        os.close(writing)


# --- ending ---


@pytest.mark.usefixtures("no_leftovers")
def test_a_session_is_killed_with_all_its_process_groups():
    code = "import os, subprocess, time; p = subprocess.Popen(['sleep', '60'], process_group=0)"
    code += "; print(p.pid, flush=True); time.sleep(60)"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    leader.stdout.readline()
    kill_sessions([leader.pid])
    assert leader.wait(5) == -signal.SIGKILL
    leader.stdout.close()


def test_json_is_what_the_coordinator_reports(no_leftovers):
    reading, writing = os.pipe()
    coordinator = [sys.executable, "-m", "jaxrdma", "coordinator", "--listen=127.0.0.1:0"]
    process = subprocess.Popen(
        [*coordinator, "--workers=1", "--servers=1", f"--report-fd={writing}"],
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    with os.fdopen(reading) as report:
        assert json.loads(report.readline())["address"].startswith("127.0.0.1:")
        process.terminate()
        fact = json.loads(report.readline())
    assert (fact["kind"], fact["role"]) == ("interrupted", "coordinator")
    assert process.wait(5) == 143


def test_settings_of_verbs_reach_every_process(launch, scripts, monkeypatch):
    monkeypatch.setenv("JAXRDMA_LINK_TIMEOUT", "7.5")
    (scripts / "show.py").write_text("import os; print(os.environ['JAXRDMA_LINK_TIMEOUT'])")
    launched = launch("--workers", "1", str(scripts / "show.py"))
    launched.until("worker 0    | 7.5")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143


def test_the_test_process_has_no_threads_left():
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxrdma")]
