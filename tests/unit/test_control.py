"""The coordinator and its clients as real processes: any order of starts, every way to die."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrdma import control
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import (
    Admitting,
    Failed,
    FlowAgreed,
    FlowProposal,
    FlowReady,
    FlowStart,
    JobFailed,
    LeafSpec,
    MemberLeft,
    Shutdown,
)
from jaxrdma.errors import CancelledError, ConnectError, MismatchError, PeerFailedError
from jaxrdma.policy import SyncReplicas, to_wire

pytestmark = [pytest.mark.usefixtures("no_leftovers"), pytest.mark.timeout(60)]

POLICY = to_wire(SyncReplicas().complete(1))
PROPOSAL = FlowProposal(0, [LeafSpec("w", (2,), "float32")], "d", "average", POLICY, "")

# A member in a process of its own: joins, and then waits for the end of the job or of itself.
MEMBER = """
import multiprocessing, os, sys, time
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import Admitting, ControlClient
from jaxrdma.errors import JaxRdmaError

if __name__ == "__main__":
    spec = ClusterSpec.from_environment()
    client = ControlClient(spec, spec.role, spec.index, 1, progress=lambda: (17, "busy"))
    try:
        client.join()
        if spec.role == "server":
            client.send(Admitting("127.0.0.1:1"))
        if "fork" in sys.argv and os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        print("joined", flush=True)
        if "return" in sys.argv:
            sys.exit(0)
        client.wait(lambda message: False, 50)
    except JaxRdmaError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    finally:
        if "return" not in sys.argv:
            client.close()
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Cluster:
    """Starts the processes and clients of one job, and ends them."""

    def __init__(self, workers: int = 1, servers: int = 1, **settings) -> None:
        self.workers, self.servers = workers, servers
        self.settings = {"secret": "s", "job": "j", "heartbeat_timeout": 5.0, **settings}
        self.address = ""
        self.processes: list[subprocess.Popen] = []
        self.clients: list[control.ControlClient] = []
        self.threads: list[threading.Thread] = []
        self.heard: dict[str, list] = {}
        self.said: list[str] = []

    def spec(self, name: str, **changes) -> ClusterSpec:
        role = "worker" if name[0] == "w" else "server"
        values = {**self.settings, **changes}
        return ClusterSpec(self.address, role, int(name[1:]), self.workers, self.servers, **values)

    def start_coordinator(self, listen: str = "127.0.0.1:0") -> subprocess.Popen:
        reading, writing = os.pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
        env |= {f"JAXRDMA_{k.upper()}": str(v) for k, v in self.settings.items()}
        command = [sys.executable, "-m", "jaxrdma", "coordinator", "--listen", listen]
        command += ["--workers", str(self.workers), "--servers", str(self.servers)]
        process = subprocess.Popen(
            [*command, "--report-fd", str(writing)],
            env=env,
            pass_fds=[writing],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        os.close(writing)
        with os.fdopen(reading) as report:
            line = report.readline()
        assert line, process.communicate()[1]
        self.address = json.loads(line)["address"]
        return process

    def start_member(self, name: str, *arguments: str, **changes) -> subprocess.Popen:
        env = dict(os.environ) | self.spec(name, **changes).to_environment()
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def client(self, name: str, **changes) -> control.ControlClient:
        heard = self.heard.setdefault(name, [])
        spec = self.spec(name, **changes)
        client = control.ControlClient(
            spec, spec.role, spec.index, 1, heard.append, self.said.append
        )
        self.clients.append(client)
        return client

    def join(self, *names: str) -> list[control.ControlClient]:
        """Clients of these names, all joined."""
        clients = [self.client(name) for name in names]

        def join(client: control.ControlClient, name: str) -> None:
            client.join()
            if name[0] == "s":
                client.send(Admitting("127.0.0.1:1"))

        threads = [
            threading.Thread(target=join, args=pair) for pair in zip(clients, names, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return clients

    def start_joining(self, name: str, welcome: bool = True) -> control.ControlClient:
        """A client that has been welcomed and waits for the others, until it is closed."""
        client = self.client(name)

        def join() -> None:
            with pytest.raises((CancelledError, PeerFailedError)):
                client.join()

        thread = threading.Thread(target=join)
        self.threads.append(thread)
        thread.start()
        if welcome:
            self.await_welcome(client)
        return client

    @staticmethod
    def await_welcome(client: control.ControlClient) -> None:
        deadline = time.monotonic() + 20
        while client._welcome is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close_clients(self) -> None:
        for client in self.clients:
            client.close()
        for thread in self.threads:
            thread.join()

    def close(self) -> None:
        self.close_clients()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def joined(process: subprocess.Popen) -> None:
    line = process.stdout.readline()
    assert line == "joined\n", line + process.stderr.read()


def failure(client: control.ControlClient, timeout: float = 10) -> str:
    with pytest.raises(PeerFailedError) as caught:
        client.wait(lambda message: False, timeout)
    return str(caught.value)


# --- a good job ---


def test_a_job_from_start_to_end(cluster):
    coordinator = cluster.start_coordinator()
    cluster.workers = 1
    worker, server = cluster.join("w0", "s0")
    worker.send(PROPOSAL)
    agreed = server.wait(lambda m: isinstance(m, FlowAgreed), 5)
    assert agreed.leaves == PROPOSAL.leaves
    server.send(FlowReady(0))
    worker.wait(lambda m: isinstance(m, FlowStart), 5)
    worker.leave(9)
    assert server.wait(lambda m: isinstance(m, MemberLeft), 5).step == 9
    server.wait(lambda m: isinstance(m, Shutdown), 5)
    server.leave(-1)
    assert coordinator.wait(5) == 0
    assert coordinator.stderr.read() == ""
    assert [type(m) for m in cluster.heard["w0"]] == [FlowAgreed, FlowStart]
    assert [type(m) for m in cluster.heard["s0"]] == [FlowAgreed, FlowStart, MemberLeft, Shutdown]


def test_a_model_with_large_programs_arrives(cluster):
    cluster.start_coordinator()
    worker, server = cluster.join("w0", "s0")
    program = os.urandom(1 << 20) * 20
    worker.send(FlowProposal(0, [], "d", "update", POLICY, "u", [program]))
    agreed = server.wait(lambda m: isinstance(m, FlowAgreed), 30)
    assert agreed.program == program


@pytest.mark.parametrize("order", ["scw", "wsc", "cws", "wcs"])
def test_any_order_of_starts_works(cluster, order):
    port = free_port()
    cluster.address = f"127.0.0.1:{port}"
    started = {}
    for who in order:
        if who == "c":
            cluster.start_coordinator(f"127.0.0.1:{port}")
        else:
            started[who] = cluster.start_member(f"{who}0", "return" if who == "w" else "stay")
        time.sleep(0.3)  # the delay is the test
    for process in started.values():
        joined(process)


def test_proxies_are_not_asked(cluster, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    cluster.start_coordinator()
    joined_clients = cluster.join("w0", "s0")
    assert all(client.failure is None for client in joined_clients)


# --- start-up that fails ---


def test_no_coordinator_is_named_with_the_reason(cluster, monkeypatch):
    monkeypatch.setattr(control, "PROGRESS_SECONDS", 0.5)
    cluster.address = f"127.0.0.1:{free_port()}"
    client = cluster.client("w0", connect_timeout=1.5)
    with pytest.raises(ConnectError, match=f"worker 0 gave up.*{cluster.address}.*refused, [12] s"):
        client.join()
    assert cluster.said
    assert (
        f"waiting for the coordinator at {cluster.address}: connection refused" in cluster.said[0]
    )


def test_a_host_that_does_not_resolve_is_named(cluster):
    cluster.address = "no-such-host.invalid:1"
    with pytest.raises(
        ConnectError, match="no-such-host.invalid:1: its host name does not resolve"
    ):
        cluster.client("w0", connect_timeout=0.5).join()


def test_a_port_that_is_not_a_coordinator_is_named(cluster):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        cluster.address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ConnectError, match="nothing answers like a coordinator"):
            cluster.client("w0", connect_timeout=1).join()


def test_a_missing_worker_is_named_by_the_coordinator_which_ends(cluster):
    cluster.settings |= {"connect_timeout": 4.0}
    cluster.workers = 2
    coordinator = cluster.start_coordinator()
    text = "have 1 of 2 workers and 0 of 1 server, waiting for worker 1 and server 0, 4 s"
    with pytest.raises(ConnectError, match=text):
        cluster.client("w0").join()
    cluster.close_clients()
    assert coordinator.wait(6) == 1
    assert cluster.said[0].endswith("waiting for worker 1 and server 0, 3 s")


def test_a_wrong_secret_is_refused_at_once(cluster):
    cluster.start_coordinator()
    with pytest.raises(ConnectError, match="refused worker 0: the job's secret"):
        cluster.client("w0", secret="wrong").join()


def test_a_second_claimant_is_refused_and_both_are_named(cluster):
    cluster.workers = 2
    cluster.start_coordinator()
    cluster.start_joining("w0")
    text = rf"two processes claim to be worker 0: \S+, pid {os.getpid()}, .* now \S+, pid {os.getpid()}"
    with pytest.raises(ConnectError, match=text):
        cluster.client("w0").join()


def test_a_setting_that_differs_is_named(cluster):
    cluster.workers = 2
    cluster.start_coordinator()
    cluster.start_joining("w0")
    with pytest.raises(MismatchError, match="partition_bytes=128.*partition_bytes=1048576"):
        cluster.client("w1", partition_bytes=128).join()


def test_a_coordinator_of_an_older_attempt_is_waited_out(cluster, monkeypatch):
    monkeypatch.setattr(control, "PROGRESS_SECONDS", 0.3)
    old = cluster.start_coordinator()
    cluster.settings |= {"attempt": 1}
    client = cluster.start_joining("w0", welcome=False)
    deadline = time.monotonic() + 20
    while not cluster.said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "it is still at attempt 1 of the job, worker 0 (" in cluster.said[0]
    assert "belongs to attempt 2, " in cluster.said[0]
    old.kill()
    assert old.wait(5) == -signal.SIGKILL
    assert "refused" not in old.stderr.read(), "it was asked ten times a second"
    cluster.start_coordinator(cluster.address)
    cluster.await_welcome(client)
    assert client.attempt == 1


def test_a_process_of_an_older_attempt_is_refused(cluster):
    cluster.settings |= {"attempt": 2}
    cluster.start_coordinator()
    with pytest.raises(ConnectError, match="belongs to attempt 1 of the job, which is over; this"):
        cluster.client("w0", attempt=0).join()


def test_a_taken_port_is_named_with_the_reason(cluster):
    coordinator = [sys.executable, "-m", "jaxrdma", "coordinator", "--workers=1", "--servers=1"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [*coordinator, f"--listen=127.0.0.1:{taken.getsockname()[1]}"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["coordinator", "server"])
def test_by_hand_an_open_address_needs_a_secret_from_a_file_or_variable(command, tmp_path):
    if command == "server":
        where = ["--coordinator=127.0.0.1:1", "--index=0", "--num-workers=1", "--num-servers=1"]
    else:
        where = ["--workers=1", "--servers=1"]
    base = [sys.executable, "-m", "jaxrdma", command, *where, "--listen=0.0.0.0:0"]
    done = subprocess.run(base, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--secret-file" in done.stderr
    Path(tmp_path / "empty").write_text("\n")
    for name, text in (("empty", "is empty"), ("none", "No such file")):
        done = subprocess.run(
            [*base, f"--secret-file={tmp_path / name}"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert text in done.stderr


# --- every way to die ---


def test_a_killed_worker_is_seen_at_once_and_named(cluster):
    cluster.workers = 2
    coordinator = cluster.start_coordinator()
    victim = cluster.start_member("w1")
    worker, server = cluster.join("w0", "s0")
    joined(victim)
    begin = time.monotonic()
    victim.kill()
    for client in (worker, server):
        assert f"worker 1 ({socket.gethostname()}, pid {victim.pid}) died" in failure(client)
    assert time.monotonic() - begin < 1
    cluster.close_clients()
    assert coordinator.wait(6) == 1


def test_a_killed_worker_is_seen_although_its_forked_child_lives(cluster):
    cluster.workers = 2
    cluster.start_coordinator()
    victim = cluster.start_member("w1", "fork")
    worker, _ = cluster.join("w0", "s0")
    joined(victim)
    begin = time.monotonic()
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    victim.kill()
    try:
        assert "worker 1" in failure(worker)
        assert time.monotonic() - begin < 1
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


# JAX, if an earlier test loaded it, warns of every fork; its warning is an error inside its own hook.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forked_child_does_not_disturb_its_parent(cluster):
    cluster.start_coordinator()
    worker, server = cluster.join("w0", "s0")
    pid = os.fork()
    if pid == 0:
        worker.close()
        worker.send(Failed("raised", "from the child"))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    worker.send(PROPOSAL)
    server.wait(lambda m: isinstance(m, FlowAgreed), 5)


def test_a_stopped_worker_is_found_silent_and_told_so_when_it_wakes(cluster):
    cluster.settings |= {"heartbeat_timeout": 2.0}
    cluster.workers = 2
    cluster.start_coordinator()
    victim = cluster.start_member("w1")
    worker, _ = cluster.join("w0", "s0")
    joined(victim)
    begin = time.monotonic()
    victim.send_signal(signal.SIGSTOP)
    assert "worker 1" in (text := failure(worker))
    assert "silent for" in text
    assert 1.5 < time.monotonic() - begin < 5
    victim.send_signal(signal.SIGCONT)
    assert victim.wait(5) == 1
    assert "silent for" in victim.stdout.read()


@pytest.mark.parametrize("seconds", [2.1, 3.0])
def test_one_that_wakes_when_the_coordinator_has_gone_names_its_own_silence(cluster, seconds):
    cluster.settings |= {"heartbeat_timeout": 2.0}
    coordinator = cluster.start_coordinator()
    victim = cluster.start_member("w0")
    cluster.join("s0")
    joined(victim)
    victim.send_signal(signal.SIGSTOP)
    coordinator.kill()
    time.sleep(seconds)  # longer than the heartbeat timeout: so long it is to stand still
    victim.send_signal(signal.SIGCONT)
    assert victim.wait(5) == 1
    text = victim.stdout.read()
    assert re.search(
        "worker 0 itself was silent for [234] s, and JAXRDMA_HEARTBEAT_TIMEOUT is 2 s", text
    )
    assert f"the coordinator at {cluster.address} ended its connection" in text


def test_a_killed_coordinator_is_named_by_everybody(cluster):
    coordinator = cluster.start_coordinator()
    clients = cluster.join("w0", "s0")
    coordinator.kill()
    for client in clients:
        text = failure(client, 2)
        assert f"the coordinator at {cluster.address} is lost" in text
    assert [m.kind for m in cluster.heard["w0"]] == ["coordinator_lost"]


def test_a_stopped_coordinator_is_found_silent(cluster):
    cluster.settings |= {"heartbeat_timeout": 2.0}
    coordinator = cluster.start_coordinator()
    worker, _ = cluster.join("w0", "s0")
    coordinator.send_signal(signal.SIGSTOP)
    assert "is lost: silent for" in failure(worker)


def test_a_coordinator_told_to_stop_says_so(cluster):
    coordinator = cluster.start_coordinator()
    worker, server = cluster.join("w0", "s0")
    coordinator.terminate()
    assert "the coordinator was stopped: SIGTERM" in failure(worker)
    server.close()
    worker.close()
    assert coordinator.wait(5) == 143


def test_what_a_member_says_of_its_failure_reaches_all_even_if_it_ends_at_once(cluster):
    cluster.start_coordinator()
    worker, server = cluster.join("w0", "s0")
    worker.send(Failed("raised", "ValueError: nan"))
    worker.close()
    assert "worker 0" in (text := failure(server))
    assert text.endswith("raised: ValueError: nan")
    assert [type(m) for m in cluster.heard["s0"]] == [JobFailed]


def test_a_program_that_returns_with_its_client_open_ends_at_once_and_quietly(cluster):
    cluster.start_coordinator()
    member = cluster.start_member("w0", "return")
    (server,) = cluster.join("s0")
    joined(member)
    assert member.wait(3) == 0
    assert member.stderr.read() == ""
    assert "worker 0" in failure(server)


def test_an_error_in_the_callback_is_told_and_the_stream_goes_on(cluster):
    cluster.start_coordinator()
    spec = cluster.spec("w0")

    def callback(message) -> None:
        raise ValueError("oops")

    worker = control.ControlClient(
        spec, "worker", 0, 1, on_message=callback, say=cluster.said.append
    )
    cluster.clients.append(worker)
    thread = threading.Thread(target=worker.join)
    thread.start()
    (server,) = cluster.join("s0")
    thread.join()
    worker.send(PROPOSAL)
    server.wait(lambda m: isinstance(m, FlowAgreed), 5)
    server.send(FlowReady(0))
    worker.wait(lambda m: isinstance(m, FlowStart), 5)
    assert "oops" in cluster.said[0]


def test_waiting_ends_when_the_client_is_closed(cluster):
    cluster.start_coordinator()
    worker, _ = cluster.join("w0", "s0")
    timer = threading.Timer(0.2, worker.close)
    timer.start()
    with pytest.raises(CancelledError):
        worker.wait(lambda message: False, 10)
    timer.join()


def test_a_goodbye_that_is_interrupted_leaves_no_thread(cluster):
    coordinator = cluster.start_coordinator()
    worker, _ = cluster.join("w0", "s0")
    coordinator.send_signal(signal.SIGSTOP)  # so it does not take note
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.leave(3)
    timer.join()
    for thread in (worker._heart, worker._stream.reader):
        assert not thread.is_alive(), thread


def test_a_coordinator_that_waits_rests(cluster):
    coordinator = cluster.start_coordinator()
    cluster.join("w0", "s0")

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{coordinator.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    time.sleep(2)  # what it does in that time is the test
    assert cpu_seconds() - before < 0.5
