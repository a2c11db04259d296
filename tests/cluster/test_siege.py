"""Strangers at every open port of a job that trains: they are disconnected and counted; training does not notice."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np
import psutil
import pytest

from jaxrdma import control
from jaxrdma.cluster import parse_address
from jaxrdma.control import JobStatus, Refused
from tests.cluster.job import PATIENCE, SCRIPTS, Job
from tests.cluster.scripts import model
from tests.cluster.test_follow import stop_at

SECRET, NAME = "open sesame", "besieged"
# Of the data ports, 5 s for a hello; of the coordinator's, 10 s for a call. And for a busy machine.
LIMIT = 10 + 20 * PATIENCE

# A frame of the tcp fabric, as native/fabric/tcp/frame.h has it.
HEADER = struct.Struct("<IB3xIIIIQQ")
MAGIC, HELLO, WRITE = 0x3154524A, 1, 3


def frame(kind: int, body: bytes = b"", length: int | None = None, credits: int = 8) -> bytes:
    size = len(body) if length is None else length
    return HEADER.pack(MAGIC, kind, credits, 0, 0, 0, 0, size) + body


def hello(token: bytes = bytes(16), worker: int = 0) -> bytes:
    name = NAME.encode()
    fixed = struct.pack("<QIHHHHI", 1, worker, 8, len(name), len(token), 0, 0)
    return frame(HELLO, fixed + name + token)


class Eavesdropper:
    """Hears the first hello on loopback. Only root may; else it hears nothing."""

    def __init__(self) -> None:
        self.heard = b""
        self.listens = False
        self._stop = False
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            self._socket.bind(("lo", 0))
            self._socket.settimeout(0.2)
        except OSError:
            return
        self.listens = True
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with self._socket:
            while not self.heard and not self._stop:
                try:
                    packet = self._socket.recv(65536)
                except TimeoutError:
                    continue
                at = packet.find(struct.pack("<IB", MAGIC, HELLO))
                if at > 0 and NAME.encode() in packet:
                    self.heard = packet[at:]

    def stop(self) -> bytes:
        self._stop = True
        if self.listens:
            self._thread.join()
        return self.heard


class Attack:
    """Connections to one port, each of which must be closed by the other side within LIMIT."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.open: list[tuple[str, socket.socket]] = []
        self.made = 0

    def connect(self, what: str, *words: bytes) -> None:
        """Say this, and wait for the answer another time."""
        sock = socket.create_connection(("127.0.0.1", self.port), 10 * PATIENCE)
        self.made += 1
        self.open.append((what, sock))
        try:
            for word in words:
                sock.sendall(word)
        except OSError:
            pass  # it has had enough already

    def outlast(self, deadline: float) -> None:
        """Until all are closed. What trickles, trickles on meanwhile."""
        for what, sock in self.open:
            with sock:
                sock.settimeout(0.2)
                while True:
                    assert time.monotonic() < deadline, f"still connected: {what}"
                    try:
                        if what == "a trickle":
                            sock.sendall(b"\0")
                        if not sock.recv(65536):
                            break
                    except TimeoutError:
                        continue
                    except OSError:
                        break  # reset
        self.open = []


def besiege_data(attack: Attack, copied: bytes) -> None:
    noise = random.Random(1)
    for _ in range(20):
        attack.connect("noise", noise.randbytes(noise.choice([1, 39, 40, 4096])))
        attack.connect("a wrong token", hello(noise.randbytes(16)))
        attack.connect("no token", hello(b""))
        attack.connect("a worker that there is not", hello(worker=noise.randrange(1 << 32)))
    for length in (1 << 14, 1 << 40, (1 << 64) - 1):
        attack.connect("a huge hello", frame(HELLO, length=length))
    attack.connect("a write", frame(WRITE, b"x" * 100), b"y" * 10_000)
    attack.connect("half a header", hello()[:17])
    attack.connect("half a hello", hello()[:-9])
    attack.connect("HTTP", b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
    attack.connect("a trickle", hello()[:40])
    if copied:
        for _ in range(3):
            attack.connect("a copied hello", copied)
    for _ in range(150):  # more than may be pending
        attack.connect("silence")


def besiege_coordinator(attack: Attack) -> None:
    noise = random.Random(2)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = bytes.fromhex("000000 04 00 00000000".replace(" ", ""))
    for _ in range(20):
        attack.connect("noise", noise.randbytes(noise.choice([1, 39, 4096])))
        attack.connect("noise after the preface", preface + settings + noise.randbytes(100))
    attack.connect("HTTP", b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
    attack.connect("half a preface", preface[:10])
    attack.connect("a huge frame", preface + settings + b"\xff\xff\xff\x01\x04\0\0\0\1")
    attack.connect("half of the headers", preface + settings + b"\0\x10\0\x01\x00\0\0\0\1abc")
    attack.connect("an idle connection", preface + settings)
    for _ in range(50):
        attack.connect("silence")


def call(address: str, secret: bytes | None, *messages: bytes) -> Any:
    """The answer to a stream that begins with these."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        metadata = () if secret is None else ((control.SECRET_KEY, secret),)
        stream = channel.stream_stream(control.METHOD)(
            iter(messages), metadata=metadata, timeout=LIMIT
        )
        return control.decode_coordinator(next(stream))


def knock(address: str) -> int:
    """Calls of strangers; how many."""
    great = b"\xc6" + struct.pack(">I", 32 << 20) + bytes(32 << 20)
    for secret, word in ((None, b""), (b"open", b"\x80"), (b"\xff" * 32, great)):
        refused = call(address, secret, word)
        assert isinstance(refused, Refused)
        assert refused.kind == "secret"
    return 3


@pytest.fixture
def besieged(make_job: Callable[..., Job]) -> Iterator[tuple[Job, Eavesdropper]]:
    listener = Eavesdropper()
    yield make_job(1, 2, ordered=1, secret=SECRET, job=NAME, partition_bytes=256), listener
    listener.stop()


@pytest.mark.timeout(240)
def test_training_goes_on_under_siege(besieged: tuple[Job, Eavesdropper], tmp_path: Path) -> None:
    job, eavesdropper = besieged
    stop, out = tmp_path / "stop", tmp_path / "parameters"
    job.start("besieged.py", out, stop)

    def status() -> JobStatus:
        return control.observe(job.address, SECRET, NAME, LIMIT)

    def step() -> int:
        return min((p.step for p in status().processes if "worker" in p.name), default=-1)

    wait_until(lambda: step() > 10, job)
    _, port = parse_address(job.address)
    listening = psutil.Process(job.pid("server 0")).net_connections("tcp")
    (data,) = [c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN]
    coordinator = psutil.Process(job.pid("coordinator"))
    memory = coordinator.memory_info().rss
    attacks = [Attack(data), Attack(port)]
    copied = eavesdropper.stop()
    assert copied or not eavesdropper.listens
    besiege_data(attacks[0], copied)
    besiege_coordinator(attacks[1])
    begun = step()
    known = knock(job.address)
    deadline = time.monotonic() + LIMIT
    for attack in attacks:
        attack.outlast(deadline)
    wait_until(lambda: step() > begun + 10, job)
    assert coordinator.memory_info().rss - memory < 24 << 20, "it took in what strangers sent"

    # Counted, by the server with its next heartbeats.
    def counted() -> bool:
        (server,) = [p for p in status().processes if p.name == "server 0"]
        return server.refused >= attacks[0].made

    wait_until(counted, job)
    seen = status()
    assert seen.phase == "training"
    assert seen.refused >= known
    stop_at(stop, step() + 100)
    job.succeed(100)
    log = job.output("coordinator")
    assert "turned a stranger away: the job's secret was expected" in log
    assert "server 0 (" in log and "data connections so far" in log
    assert log.count("turned") < 12, "a flood of strangers is a flood of lines"

    with np.load(f"{out}0.npz") as first, np.load(f"{out}1.npz") as second:
        steps = int(first["step"])
        expected = jax.tree.leaves(model.reference("momentum", 2, steps))
        for i, leaf in enumerate(expected):
            for got in (first, second):
                np.testing.assert_array_equal(got[f"arr_{i}"], np.asarray(leaf))


def wait_until(holds: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 60 * PATIENCE
    while not holds():
        assert all(process.poll() is None for process in job.processes.values()), job.outputs()
        assert time.monotonic() < deadline, job.outputs()
        time.sleep(0.1)  # what another process counts has no completion to wait for


@pytest.mark.timeout(120)
def test_nothing_is_unpickled(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS / "unpickling"))
    for attempt in range(2):  # the second goes on from the checkpoint of the first
        job = make_job(1, 1, checkpoint=tmp_path / "saved")
        stop = tmp_path / f"stop{attempt}"
        stop.write_text(str(10 * (attempt + 1)))
        job.start("besieged.py", tmp_path / "parameters", stop).succeed(60)
        assert "unpickles" not in job.outputs()
        assert f"step {10 * (attempt + 1)} is saved, the last" in job.output("coordinator")
    probe = make_job(1, 1)
    probe.spawn(
        "probe",
        ["-c", "import pickle, collections; pickle.loads(pickle.dumps(collections.OrderedDict()))"],
        dict(os.environ),
    )
    probe.wait(30)
    assert "unpickles collections.OrderedDict" in probe.output("probe"), "the watch sees"
