"""What somebody got wrong at the start is named within seconds, with who, where, what was expected and what to do."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.job import SCRIPTS, Job, free_address

pytestmark = pytest.mark.timeout(110)

COORDINATOR = (sys.executable, "-m", "jaxrdma", "coordinator")
WHO = r"server 0 \(\S+, pid {pid}\)"


def refused(job: Job, name: str) -> str:
    """What the coordinator said, and the process that it refused, within seconds."""
    assert job.wait(15, [name])[name] == 1, job.outputs()
    (told,) = re.findall("^jaxrdma: refused: (.*)$", job.output("coordinator"), re.MULTILINE)
    assert told in job.output(name), job.outputs()
    assert "Traceback" not in job.output(name)
    return told


@pytest.mark.parametrize("role", ["server", "worker"])
def test_two_of_one_index_are_both_named_and_the_first_goes_on(
    make_job: Callable[..., Job], role: str
) -> None:
    job = make_job(1, 1)
    job.start_coordinator()
    if role == "server":
        job.start_server(0)
    else:
        job.start_worker(0, "one_layer.py", 50)
    job.wait_for_output("coordinator", f"1 of 1 {role}")
    if role == "server":
        job.start_server(0, name="second")
    else:
        job.start_worker(0, "one_layer.py", 50, name="second")
    first = job.pid(f"{role} 0")
    job.wait_for_output("coordinator", f"two processes claim to be {role} 0: ")
    assert re.search(
        rf"two processes claim to be {role} 0: \S+, pid {first}, which came first, and now \S+, "
        rf"pid {job.pid('second')}\. Give each its own JAXRDMA_INDEX",
        job.output("coordinator"),
    ), job.outputs()
    assert job.wait(15, ["second"])["second"] == 1
    assert job.processes[f"{role} 0"].poll() is None, job.outputs()


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            {"JAXRDMA_NUM_WORKERS": "3"},
            f"{WHO} expects 3 workers, the coordinator 2. Set JAXRDMA_NUM_WORKERS alike",
        ),
        (
            {"JAXRDMA_NUM_SERVERS": "2"},
            f"{WHO} expects 2 servers, the coordinator 1. Set JAXRDMA_NUM_SERVERS alike",
        ),
        (
            {"JAXRDMA_JOB": "another"},
            f"{WHO} belongs to job 'another', this is the coordinator of job 'jaxrdma'. Set JAXRDMA_JOB or",
        ),
        (
            {"PYTHONPATH": str(SCRIPTS / "older")},
            f"{WHO} runs jaxrdma 0.0.9, the coordinator 0.1.0. Install the same release everywhere",
        ),
    ],
    ids=["workers", "servers", "job", "version"],
)
def test_what_differs_from_the_coordinators_is_named_with_both(
    make_job: Callable[..., Job], env: dict[str, str], told: str
) -> None:
    job = make_job(1, 2)
    job.start_coordinator()
    job.start_server(0, **env)
    assert re.match(told.format(pid=job.pid("server 0")), refused(job, "server 0")), job.outputs()
    # Who waits for it is told why it does not come.
    job.start_server(0, name="right")
    job.wait_for_output("right", "waiting for worker 0 and worker 1, ")
    # Of another job no word is repeated.
    again = re.search(r"\(refused \d+ s ago: server 0 ", job.output("right"))
    assert (again is None) == ("JAXRDMA_JOB" in env), job.outputs()


def test_settings_that_two_processes_have_differently_name_both(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 1)
    job.start_coordinator()
    job.start_server(0)
    job.wait_for_output("coordinator", "have 0 of 1 worker and 1 of 2 servers")
    job.start_server(1, JAXRDMA_PARTITION_BYTES="4096")
    assert re.fullmatch(
        rf"server 1 \(\S+, pid {job.pid('server 1')}\) has partition_bytes=4096, server 0 \(\S+, "
        rf"pid {job.pid('server 0')}\) has partition_bytes=1048576\. Set JAXRDMA_PARTITION_BYTES alike on every "
        r"process\.",
        refused(job, "server 1"),
    ), job.outputs()


def test_a_second_job_on_a_port_is_told_who_has_it(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 1)
    address = job.start_coordinator()
    second = subprocess.run(
        [*COORDINATOR, "--listen", address, "--workers=1", "--servers=1"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 2
    assert re.search(
        rf"cannot listen at {address}: Address already in use \(errno 98\), by process "
        rf"{job.pid('coordinator')} \(.*jaxrdma coordinator .*\)\. Give every job, and every server, a port of its own",
        second.stderr,
    ), second.stderr


def test_two_servers_at_one_port_are_both_named(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 1)
    job.start_coordinator()
    listen = free_address()
    for index in range(2):
        job.start_server(index, "--listen", listen)
    job.start_worker(0, "one_layer.py", 50)
    codes = job.wait(40)
    assert set(codes.values()) == {1}, job.outputs()
    told = re.search(
        rf"server (\d) .*: could not listen at {listen}: Address already in use(?: \(errno 98\))?, by process (\d+)",
        job.output("coordinator"),
    )
    assert told is not None, job.outputs()
    assert int(told[2]) == job.pid(f"server {1 - int(told[1])}"), job.outputs()


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        (
            "198.51.100.77:0",
            r"Cannot assign requested address \(errno 99\): 198.51.100.77 is not an address of this machine. Give",
        ),
        ("no-such-host.invalid:0", r"its host name does not resolve \(.*\)"),
    ],
    ids=["of-another-machine", "unknown"],
)
@pytest.mark.parametrize("who", ["coordinator", "server"])
def test_an_address_that_cannot_be_listened_at_is_named_at_once(
    make_job: Callable[..., Job], who: str, listen: str, told: str
) -> None:
    place = (
        ["--workers=1", "--servers=1"]
        if who == "coordinator"
        else ["--coordinator=127.0.0.1:1", "--index=0", "--num-workers=1", "--num-servers=1"]
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxrdma", who, "--listen", listen, *place],
        env=os.environ | {"JAXRDMA_SECRET": "secret"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2, done.stderr
    assert re.search(rf"{who} cannot listen at {listen}: {told}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


class Proxy:
    """Something at which a proxy is said to be: counts who comes."""

    def __init__(self) -> None:
        self.came = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.came += 1
            with peer:
                peer.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.close()


def test_peers_are_never_looked_for_behind_a_proxy(
    make_job: Callable[..., Job], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv(name.upper(), proxy.url)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")
    make_job(1, 1).start("one_layer.py", 50).succeed()
    assert proxy.came == 0


def test_clocks_that_differ_do_not_matter(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(1, 2, heartbeat_timeout=5, checkpoint=tmp_path / "saved", checkpoint_steps=20)
    skewed = {"PYTHONPATH": str(SCRIPTS / "skewed")}
    job.start_coordinator()
    job.start_server(0, **skewed, CLOCK_AHEAD="-3600")
    job.start_worker(0, "one_layer.py", 50, **skewed, CLOCK_AHEAD=str(400 * 86400))
    job.start_worker(1, "one_layer.py", 50)
    job.succeed()
    # It was another clock, and not only said to be.
    assert "the clock is ahead by 34560000 s" in job.output("worker 0"), job.outputs()
    assert "ahead" not in job.output("worker 1")
    counted = "50 steps; gradients accepted from worker 0: 50, worker 1: 50; 0 dropped"
    assert counted in job.output("server 0")
