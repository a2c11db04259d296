"""TLS of the control plane: files that cannot be used, and peers that cannot speak with each other, each in words."""

import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from jaxrdma import control
from jaxrdma.cluster import TlsFiles, parse_address
from jaxrdma.errors import ConfigError, ConnectError
from jaxrdma.tls import Identity
from tests.certificates import Authority, encrypted, settings
from tests.cluster.test_siege import LIMIT, Attack
from tests.unit.test_control import Cluster, cluster

import grpc  # isort: skip  # after control, which tells it to be quiet

assert cluster is not None  # a fixture

pytestmark = [pytest.mark.usefixtures("no_leftovers"), pytest.mark.timeout(60)]

# What cannot heal is said at once; the tests wait much longer for what may.
AT_ONCE = 5.0
HERE = "127.0.0.1"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "Ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "Theirs")


# --- what stands in the files ---


def test_a_good_identity_is_read_whole(ours: Authority) -> None:
    files = ours.issue(HERE, "localhost")
    for identity in (
        Identity(files, "worker 1"),
        Identity(files, "coordinator", serves=True),
        Identity(files, "launcher", serves=True, named="localhost"),
        Identity(files, "launcher", serves=True, named=HERE),
    ):
        assert identity.cert == Path(files.cert).read_bytes()
        assert identity.key == Path(files.key).read_bytes()
        assert identity.ca == Path(files.ca).read_bytes()


def test_between_the_blocks_of_a_file_may_stand_anything(ours: Authority, tmp_path: Path) -> None:
    files = ours.issue(HERE)
    notes = {name: f"# für {name}\n{Path(path).read_text()}" for name, path in vars(files).items()}
    for name, text in notes.items():
        (tmp_path / name).write_text(text)
    Identity(TlsFiles(*(str(tmp_path / name) for name in notes)), "coordinator", serves=True)


def written(folder: Path, text: str) -> str:
    path = folder / "written.pem"
    path.write_text(text)
    return str(path)


BROKEN = "-----BEGIN {0}-----\nbm90IG9uZQ==\n-----END {0}-----\n"

BAD_FILES: dict[str, tuple[Callable[[TlsFiles, Authority, Path], TlsFiles], str]] = {
    "no file": (
        lambda f, _, folder: replace(f, key=f"{folder}/none.key"),
        r"worker 1: JAXRDMA_TLS_KEY=\S+/none.key cannot be read: no such file or directory \(errno 2\)",
    ),
    "a folder": (
        lambda f, _, folder: replace(f, ca=str(folder)),
        r"worker 1: JAXRDMA_TLS_CA=\S+ cannot be read: is a directory \(errno 21\)",
    ),
    "a key for a certificate": (
        lambda f, _, __: replace(f, cert=f.key),
        r"JAXRDMA_TLS_CERT=.*: expected a file in PEM with a CERTIFICATE, and there is none in it",
    ),
    "a certificate for a key": (
        lambda f, _, __: replace(f, key=f.cert),
        r"JAXRDMA_TLS_KEY=.*: expected a file in PEM with a PRIVATE KEY, and there is none in it",
    ),
    "a broken certificate": (
        lambda f, _, folder: replace(f, cert=written(folder, BROKEN.format("CERTIFICATE"))),
        r"JAXRDMA_TLS_CERT=.*: expected certificates in PEM, and one of them cannot be read",
    ),
    "a broken CA": (
        lambda f, _, folder: replace(f, ca=written(folder, BROKEN.format("CERTIFICATE"))),
        r"JAXRDMA_TLS_CA=.*: expected certificates in PEM, and one of them cannot be read",
    ),
    "a broken key": (
        lambda f, _, folder: replace(f, key=written(folder, BROKEN.format("PRIVATE KEY"))),
        r"JAXRDMA_TLS_KEY=\S+ cannot be used with JAXRDMA_TLS_CERT=.*: .*\. Expected a private key in PEM: RSA",
    ),
    "a key with a password": (
        lambda f, _, __: encrypted(f),
        r"JAXRDMA_TLS_KEY=.* is encrypted, and nobody can be asked for a password.*openssl pkey",
    ),
    "the key of another certificate": (
        lambda f, a, __: replace(f, key=a.issue("another").key),
        r"JAXRDMA_TLS_KEY=.* is not the key of JAXRDMA_TLS_CERT=.*Expected the key with which",
    ),
    "a key that gRPC does not take": (
        lambda _, a, __: a.issue(HERE, key=ed25519.Ed25519PrivateKey.generate()),
        r"JAXRDMA_TLS_KEY=.* is of Ed25519, which gRPC does not take. Expected .* or ECDSA on P-256",
    ),
    "a key on another curve": (
        lambda _, a, __: a.issue(HERE, key=ec.generate_private_key(ec.SECP521R1())),
        r"JAXRDMA_TLS_KEY=.* is of ECDSA on P-521, which gRPC does not take. Expected",
    ),
    "an expired certificate": (
        lambda _, a, __: a.issue(HERE, begins=-9, ends=-2),
        r"JAXRDMA_TLS_CERT=.*\(for 127.0.0.1, issued by Ours.*\) has expired: expected one that is valid now.*Renew",
    ),
    "a certificate of the future": (
        lambda _, a, __: a.issue(HERE, begins=2),
        r"JAXRDMA_TLS_CERT=.*\(for 127.0.0.1, .*\) is not valid before .*: expected one for .* set the clock",
    ),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_files_that_cannot_be_used_are_named_before_anybody_is_asked(
    ours: Authority, tmp_path: Path, what: str
) -> None:
    spoil, text = BAD_FILES[what]
    with pytest.raises(ConfigError, match=text):
        Identity(spoil(ours.issue(HERE), ours, tmp_path), "worker 1")


def test_a_certificate_of_another_ca_than_the_own_is_named(
    ours: Authority, theirs: Authority
) -> None:
    files = replace(ours.issue(HERE), ca=str(theirs.file))
    for serves in (False, True):
        with pytest.raises(ConfigError, match=r"issued by Ours.* is of another CA than expected"):
            Identity(files, "worker 1", serves=serves)


def test_a_certificate_for_another_purpose_is_named(ours: Authority) -> None:
    files = ours.issue(HERE, servers=False)
    Identity(files, "worker 1")
    text = r"coordinator: .* may not be used by a server. Issue one for server authentication"
    with pytest.raises(ConfigError, match=text):
        Identity(files, "coordinator", serves=True)


def test_the_launcher_sees_whom_the_coordinators_certificate_is_for(ours: Authority) -> None:
    text = r"the others know it as 10.0.0.1. Expected a certificate with 10.0.0.1 as subject"
    with pytest.raises(ConfigError, match=text):
        Identity(ours.issue(HERE), "launcher", serves=True, named="10.0.0.1")


# --- two that cannot speak with each other ---


@contextmanager
def serving(files: TlsFiles, ca: Path | None = None) -> Iterator[str]:
    """A port of gRPC with these, whatever is wrong with them: its address. `ca`: whose clients it lets in."""
    read = {name: Path(path).read_bytes() for name, path in vars(files).items()}
    credentials: Any = grpc.ssl_server_credentials(
        [(read["key"], read["cert"])],
        read["ca"] if ca is None else ca.read_bytes(),
        require_client_auth=True,
    )
    server: Any = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(f"{HERE}:0", credentials)
    server.start()
    yield f"{HERE}:{port}"
    server.stop(0).wait()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A port at which each connection is given to `answer`, and closed: its address."""
    with socket.create_server((HERE, 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    answer(peer)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"{HERE}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def refusal(cluster: Cluster, files: TlsFiles | None) -> str:
    """What worker 0 reads, at once, though it would wait for a minute."""
    client = cluster.client("w0", connect_timeout=60.0, **settings(files) if files else {})
    begin = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        client.join()
    assert time.monotonic() - begin < AT_ONCE
    text = str(caught.value)
    start = f"worker 0 cannot speak with the coordinator at {cluster.address}: "
    assert text.startswith(start)
    # Who only asks reads the same.
    tried = time.monotonic()
    with pytest.raises(ConnectError, match="this observer cannot speak with") as caught:
        control.observe(cluster.address, "s", "j", 30, files)
    assert time.monotonic() - tried < AT_ONCE
    # But for the time of day.
    without = re.compile(r"\d\d:\d\d:\d\d|worker 0|this observer")
    assert without.sub("", str(caught.value).partition(" cannot speak ")[2]) == without.sub(
        "", text.partition(" cannot speak ")[2]
    )
    return text[len(start) :]


def test_a_job_over_tls_begins_and_is_observed(cluster: Cluster, ours: Authority) -> None:
    files = ours.issue(HERE)
    cluster.settings |= settings(files)
    coordinator = cluster.start_coordinator()
    worker, server = cluster.join("w0", "s0")
    status = control.observe(cluster.address, "s", "j", 10, ours.issue("another"))
    assert {process.name for process in status.processes} == {"worker 0", "server 0"}
    worker.leave(3)
    server.wait(lambda m: isinstance(m, control.Shutdown), 5)
    server.leave(-1)
    assert coordinator.wait(5) == 0
    assert coordinator.stderr.read() == ""


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_the_certificate_is_for_who_the_coordinator_is_known_as(
    cluster: Cluster, ours: Authority, host: str
) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("not run: this machine has no IPv6")
    # Only the coordinator's has to name a host.
    cluster.settings |= settings(ours.issue(host))
    where = f"[{host}]" if ":" in host else host
    cluster.start_coordinator(f"{where}:0")
    files = ours.issue("nobody")
    cluster.settings |= settings(files)
    worker, _ = cluster.join("w0", "s0")
    assert worker.failure is None


def test_a_certificate_for_another_name_is_refused(cluster: Cluster, ours: Authority) -> None:
    cluster.settings |= settings(ours.issue("node7.example", "10.9.8.7"))
    cluster.start_coordinator()
    text = refusal(cluster, ours.issue(HERE))
    assert text.startswith(
        "its certificate is for node7.example, 10.9.8.7, and 127.0.0.1 was expected, by which this process knows it. "
    )
    assert "Issue it a certificate with 127.0.0.1 as subject alternative name" in text


def test_a_coordinator_of_another_ca_is_refused(
    cluster: Cluster, ours: Authority, theirs: Authority
) -> None:
    cluster.settings |= settings(theirs.issue(HERE))
    cluster.start_coordinator()
    text = refusal(cluster, ours.issue(HERE))
    assert re.match(r"its certificate \(for 127.0.0.1, issued by Theirs, .*, valid until ", text)
    assert f"is of another CA than expected, which stands in JAXRDMA_TLS_CA={ours.file}" in text


def test_a_coordinator_whose_certificate_has_expired_is_refused(
    cluster: Cluster, ours: Authority
) -> None:
    with serving(ours.issue(HERE, begins=-9, ends=-2)) as cluster.address:
        text = refusal(cluster, ours.issue(HERE))
    assert re.match(r"its certificate \(for 127.0.0.1, .*, valid until .*\) has expired: ", text)
    assert "Renew the coordinator's JAXRDMA_TLS_CERT, or set the clock of this machine" in text


def test_a_coordinator_whose_certificate_is_not_valid_yet_is_refused(
    cluster: Cluster, ours: Authority
) -> None:
    with serving(ours.issue(HERE, begins=2)) as cluster.address:
        assert ") is not valid before " in refusal(cluster, ours.issue(HERE))


def test_a_coordinator_with_a_certificate_for_clients_is_refused(
    cluster: Cluster, ours: Authority
) -> None:
    with serving(ours.issue(HERE, servers=False)) as cluster.address:
        assert "may not be used by a server" in refusal(cluster, ours.issue(HERE))


def test_who_is_turned_away_is_told_by_whom_and_which_certificate_that_was(
    cluster: Cluster, ours: Authority, theirs: Authority
) -> None:
    mine = ours.issue("worker7")
    with serving(ours.issue(HERE), ca=theirs.file) as cluster.address:
        text = refusal(cluster, mine)
    assert f"it turns the certificate of this process away, JAXRDMA_TLS_CERT={mine.cert}" in text
    assert "(for worker7, issued by Ours" in text
    assert "Has the coordinator the CA in its JAXRDMA_TLS_CA that issued this one" in text


def test_an_alert_of_the_other_side_is_repeated(
    cluster: Cluster, ours: Authority, theirs: Authority
) -> None:
    """Not every version of gRPC closes without one."""
    files = ours.issue(HERE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(theirs.file)
    context.verify_mode = ssl.CERT_REQUIRED

    def answer(peer: socket.socket) -> None:
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(peer, server_side=True)

    with answering(answer) as cluster.address:
        text = refusal(cluster, files)
    assert f"turns the certificate of this process away, JAXRDMA_TLS_CERT={files.cert}" in text
    assert ": tlsv1 alert unknown ca. Has the coordinator the CA" in text


def test_tls_on_one_side_only_is_named(cluster: Cluster, ours: Authority) -> None:
    files = ours.issue(HERE)
    everybody = "Set JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA on every process of the"
    cluster.start_coordinator()
    text = refusal(cluster, files)
    assert text.startswith(
        f"it answers without TLS, which this process is set to speak. {everybody}"
    )
    cluster.settings |= settings(files)
    cluster.start_coordinator()
    for name in settings(files):
        del cluster.settings[name]
    text = refusal(cluster, None)
    assert re.match(rf"it expects TLS, and (worker 0|this observer) has none. {everybody}", text)


def test_a_port_that_is_something_else_is_said_to_speak_no_tls(
    cluster: Cluster, ours: Authority
) -> None:
    def answer(peer: socket.socket) -> None:
        peer.recv(1000)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(answer) as cluster.address:
        assert "it answers without TLS" in refusal(cluster, ours.issue(HERE))


def test_what_may_heal_is_waited_for(
    cluster: Cluster, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_PROBE_SECONDS", 0.3)
    cluster.settings |= settings(ours.issue(HERE))
    with socket.create_server((HERE, 0)) as deaf:
        cluster.address = f"{HERE}:{deaf.getsockname()[1]}"
        with pytest.raises(ConnectError, match="gave up on .*nothing answers a TLS handshake, 1 s"):
            cluster.client("w0", connect_timeout=1.0).join()


def test_a_certificate_is_renewed_while_the_job_runs(
    cluster: Cluster, ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    files = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))

    def put(issued: TlsFiles, *names: str) -> None:
        for name in names:
            new = tmp_path / "new"
            new.write_bytes(Path(getattr(issued, name)).read_bytes())
            new.rename(getattr(files, name))

    put(ours.issue(HERE), "cert", "key", "ca")
    cluster.settings |= settings(files)
    coordinator = cluster.start_coordinator()
    worker, _ = cluster.join("w0", "s0")
    # Half of it is no certificate; who comes meanwhile sees the old one.
    put(theirs.issue(HERE), "cert")
    known = ours.issue("observer")
    assert control.observe(cluster.address, "s", "j", 10, known).phase == "training"
    put(theirs.issue(HERE), "cert", "key", "ca")
    with pytest.raises(ConnectError, match="issued by Theirs.* is of another CA"):
        control.observe(cluster.address, "s", "j", 10, known)
    other = theirs.issue("observer")
    assert control.observe(cluster.address, "s", "j", 10, other).phase == "training"
    assert worker.failure is None, "who is in stays in"
    cluster.close_clients()
    coordinator.wait(10)
    said = coordinator.stderr.read()
    half = (
        "goes on with the certificate that it has: the coordinator at 127.0.0.1:0: JAXRDMA_TLS_KEY="
    )
    assert said.count(half) == 1, said


@pytest.mark.timeout(100)
def test_strangers_at_a_port_with_tls_are_disconnected(cluster: Cluster, ours: Authority) -> None:
    cluster.settings |= settings(ours.issue(HERE))
    cluster.start_coordinator()
    worker = cluster.start_joining("w0")
    attack = Attack(parse_address(cluster.address)[1])
    attack.connect("noise", b"\xff" * 100)
    attack.connect("HTTP/2 without TLS", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    attack.connect("half a hello", b"\x16\x03\x01\x02\x00\x01")
    attack.connect("a huge record", b"\x16\x03\x01\xff\xff" + bytes(1000))
    for _ in range(20):
        attack.connect("silence")
    attack.outlast(time.monotonic() + LIMIT)
    assert worker.failure is None


# --- what can be read on the way ---


class Relay:
    """Between the processes of a job and its coordinator, as a network would be: hears all that they say."""

    def __init__(self, coordinator: str) -> None:
        self.heard: list[tuple[bytearray, bytearray]] = []  # of each connection, both ways
        self._to = parse_address(coordinator)
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self._start(self._listen)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _listen(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            self.heard.append((bytearray(), bytearray()))
            self._start(self._pass_on, near, far, self.heard[-1])

    @staticmethod
    def _pass_on(near: socket.socket, far: socket.socket, heard: tuple[bytearray, ...]) -> None:
        with near, far:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    try:
                        data = source.recv(1 << 16)
                        (far if source is near else near).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    heard[source is far].extend(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


def tls_records(heard: bytes) -> bool:
    """Whether this is nothing but records of TLS, the last perhaps cut short."""
    while heard:
        kind, version = heard[0], heard[1:2]
        if kind not in range(20, 24) or version not in (b"\3", b""):
            return False
        heard = heard[5 + int.from_bytes(heard[3:5], "big") :]
    return True


@pytest.mark.parametrize("tls", [False, True])
def test_over_tls_nothing_of_the_control_plane_can_be_read_on_the_way(
    cluster: Cluster, ours: Authority, tls: bool
) -> None:
    cluster.settings |= {"job": "a-name-that-stands-in-each-hello"}
    if tls:
        cluster.settings |= settings(ours.issue(HERE))
    cluster.start_coordinator()
    relay = Relay(cluster.address)
    try:
        cluster.address = relay.address
        worker, _ = cluster.join("w0", "s0")
        assert worker._roster is not None
        (token,) = worker._roster.servers[0].tokens.values()
        cluster.close_clients()
    finally:
        relay.close()
    heard = [bytes(way) for ways in relay.heard for way in ways]
    assert any(len(way) > 100 for way in heard)
    readable = [word for word in (b"a-name-that-stands", token) if word in b"".join(heard)]
    assert readable == ([] if tls else [b"a-name-that-stands", token])
    assert all(map(tls_records, heard)) == tls


def test_a_coordinator_with_a_certificate_that_has_expired_does_not_begin(
    cluster: Cluster, ours: Authority
) -> None:
    cluster.settings |= settings(ours.issue(HERE, begins=-9, ends=-2))
    with pytest.raises(AssertionError, match=r"error: the coordinator at 127.0.0.1:0: .* expired"):
        cluster.start_coordinator()
    # What it printed has been read.
    assert cluster.processes.pop().wait(5) == 2
