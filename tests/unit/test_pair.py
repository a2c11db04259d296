"""Two machines as a pair: what fits and what does not, and a real visit over loopback."""

import contextlib
import dataclasses
import ipaddress
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

import pytest
from msgspec.structs import replace

from jaxrdma import _native, devices, pair
from jaxrdma.cluster import VerbsSettings
from jaxrdma.doctor import FAILED, OK, WARNING
from jaxrdma.errors import TransportError
from jaxrdma.pair import Side
from jaxrdma.transport import Place
from tests.conftest import own_threads

HERE = Side("a", choice="mlx5_0 port 1", reason="RoCE v2", link_layers=("Ethernet",), mtus=(4096,))
THERE = replace(HERE, host="b")
NOTHING = VerbsSettings()
INTERRUPTED_S = 2


def outcomes(here: Side, there: Side) -> dict[str, str]:
    return {check.name: check.outcome for check in pair.examine_sides(here, there)}


def test_devices_that_fit_are_good_and_what_does_not_fit_is_named():
    assert set(outcomes(HERE, THERE).values()) == {OK}
    assert outcomes(HERE, replace(THERE, problem="none")) == {
        "device here": OK,
        "device there": FAILED,
    }
    assert outcomes(replace(HERE, doubt="another way"), THERE)["device here"] == WARNING
    assert outcomes(HERE, replace(THERE, link_layers=("InfiniBand",)))["link layers"] == FAILED
    checks = pair.examine_sides(HERE, replace(THERE, mtus=(1024,)))
    assert checks[-1].outcome == WARNING
    assert "4096 bytes of payload per packet here, 1024 there: the smaller" in checks[-1].found


def test_several_devices_are_held_against_those_that_the_links_join_them_to():
    assert pair.joined("abc", "xy") == [("a", "x"), ("b", "y"), ("c", "x")]
    assert pair.joined((4096, 4096), (4096,)) == [(4096, 4096)]
    here = replace(HERE, link_layers=("Ethernet", "Ethernet"), mtus=(4096, 1024))
    twin = replace(here, host="b")
    assert set(outcomes(here, twin).values()) == {OK}
    assert "4096 and 1024 bytes" in pair.examine_sides(here, twin)[-1].found
    crossed = pair.examine_sides(here, replace(twin, mtus=(1024, 4096)))[-1]
    assert crossed.found.startswith("4096 bytes of payload per packet here, 1024 there")
    assert "; 1024 bytes of payload per packet here, 4096 there" in crossed.found
    mixed = replace(THERE, link_layers=("Ethernet", "InfiniBand"), mtus=(4096, 4096))
    assert outcomes(HERE, mixed)["link layers"] == FAILED
    assert outcomes(HERE, mixed)["MTUs"] == OK


def test_what_a_machine_would_use_tells_of_all_its_devices(monkeypatch):
    ports = [
        devices.Port(
            *(1, state, "Ethernet", mtu, 1 << 31, 0, (0xFFFF,)),
            (devices.Gid(3, ipaddress.ip_address("10.0.0.1"), "RoCE v2", "eth0"),),
        )
        for state, mtu in (("ACTIVE", 4096), ("DOWN", 1024))
    ]
    machine = tuple(devices.Device(f"mlx5_{i}", ports=(port,)) for i, port in enumerate(ports))
    monkeypatch.setattr(
        devices, "read_devices", lambda reader: devices.Inventory(reader, "", machine)
    )
    settings = VerbsSettings(device=("mlx5_0", "mlx5_1"), port=1)
    side = pair.look(Place("127.0.0.1"), settings)
    assert side.choice.startswith("mlx5_0 port 1 GID 3 (10.0.0.1, RoCE v2) and mlx5_1 port 1")
    assert (side.link_layers, side.mtus) == (("Ethernet", "Ethernet"), (4096, 1024))
    assert side.doubt == "the port of mlx5_1 is DOWN"
    problem = pair.look(Place("127.0.0.1"), dataclasses.replace(settings, port=None)).problem
    assert "not all can be used: mlx5_1 port 1: its port is DOWN" in problem


def test_auto_probes_verbs_if_both_can():
    assert pair.choose_transport("auto", HERE, THERE, False)[0] == "verbs"
    assert pair.choose_transport("auto", HERE, THERE, True) == ("tcp", "both are on loopback")
    for wrong in (replace(THERE, problem="none"), replace(THERE, doubt="another way")):
        chosen = pair.choose_transport("auto", HERE, wrong, False)
        assert chosen == ("tcp", "b has no device to use")
        assert pair.choose_transport("verbs", HERE, wrong, False)[0] == "verbs"


class Listener:
    """`jaxrdma doctor --listen` as a process."""

    def __init__(self, secret: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrdma", "doctor", "--listen", "0", "--json"],
            env=environment(secret),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        found = re.search(r"waiting at (\S+):(\d+) for", said)
        assert found, said + self.process.stderr.read()
        self.host, self.port = found[1], int(found[2])

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def environment(secret: str) -> dict[str, str]:
    made = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    return made | ({"JAXRDMA_SECRET": secret} if secret else {})


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("open sesame")
    yield listener
    if listener.process.poll() is None:
        listener.process.kill()
    listener.process.communicate()


def visit(port: int, *arguments: str, secret: str = "open sesame") -> tuple[int, dict]:
    command = [sys.executable, "-m", "jaxrdma", "doctor", "--peer", f"127.0.0.1:{port}", "--json"]
    result = subprocess.run(
        [*command, *arguments],
        env=environment(secret),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode in (0, 1), result.stderr
    made = json.loads(result.stdout)
    assert made["ok"] == (result.returncode == 0)
    return result.returncode, {check["name"]: check for check in made["checks"]}


def test_a_visit_measures_the_pair_over_tcp_and_both_show_it(listener):
    assert listener.host == "0.0.0.0"  # with a secret
    code, checks = visit(listener.port, "--transport", "tcp")
    assert code == 0, checks
    assert list(checks) == ["name", "route", "tcp", "probe over tcp", "latency", "bandwidth"]
    assert float(checks["latency"]["found"].split()[0]) > 0
    assert float(checks["bandwidth"]["found"].split()[0]) > 0
    code, out, err = listener.end()
    assert code == 0, err
    assert [check["name"] for check in json.loads(out)["checks"]] == list(checks)


def test_who_does_not_know_the_secret_is_sent_away_and_the_next_one_awaited(listener):
    for wrong in ("guess", ""):
        code, checks = visit(listener.port, "--transport", "tcp", secret=wrong)
        assert code == 1
        assert "secrets of the two machines differ" in checks["secret"]["found"]
        assert "JAXRDMA_SECRET" in checks["secret"]["advice"]
    for word in (b"GET / HTTP/1.0\r\n\r\n", b'{"type":"\xff"}\n', b"[" * 100_000):
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(word)
            with contextlib.suppress(ConnectionResetError):  # of what was not read
                assert b"refused" not in stranger.makefile("rb").read()
    if not devices.kernel_devices():
        code, checks = visit(listener.port)
        assert code == 1  # no devices: said of both, and the way there is measured all the same
        for side in ("here", "there"):
            assert checks[f"device {side}"]["outcome"] == FAILED
        assert checks["probe over tcp"]["outcome"] == OK
        code, _, err = listener.end()
        assert code == 1
        assert err.count("it does not know the secret") == 2
        assert err.count("no `jaxrdma doctor") == 3


def test_a_message_that_trickles_is_not_awaited_longer_than_one_that_does_not_come():
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.05):
            theirs.sendall(b" ")

    thread = threading.Thread(target=trickle)
    with ours, theirs:
        thread.start()
        begin = time.monotonic()
        with pytest.raises(TransportError, match="said nothing for"):
            pair._Line(ours).receive(0.4, pair.Knock)
        assert time.monotonic() - begin < 20
        done.set()
        thread.join()


def test_a_listener_that_does_not_know_the_secret_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrdma", "doctor", "--peer", f"127.0.0.1:{port}", "--json"],
            env=environment("s"),
            stdout=subprocess.PIPE,
            text=True,
        )
        sock, _ = impostor.accept()
        with sock:
            line = pair._Line(sock)
            line.send(pair.Greeting(pair.PROTOCOL, b"n" * 16))
            line.receive(20, pair.Knock)
            line.send(pair.Enter(b"p" * 32, THERE))
            out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = json.loads(out)["checks"][-1]
    assert last["name"] == "secret"
    assert "does not know the secret" in last["found"]


def test_a_visitor_is_interrupted_while_its_engine_connects():
    """It ends by Ctrl-C, without a traceback; of the engine there it knows the address, and gets no answer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as impostor,
        socket.create_server(("127.0.0.1", 0)) as silent,
        contextlib.ExitStack() as stack,
    ):
        impostor.settimeout(60)
        silent.settimeout(60)
        port = impostor.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrdma", "doctor", "--peer", f"127.0.0.1:{port}"],
            env=environment("s") | {"JAXRDMA_TRANSPORT": "tcp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        sock, _ = impostor.accept()
        with sock:
            line = pair._Line(sock)
            line.send(pair.Greeting(pair.PROTOCOL, b"n" * 16))
            knock = line.receive(20, pair.Knock)
            line.send(pair.Enter(pair._proof("s", "listener", b"n" * 16 + knock.nonce), THERE))
            line.receive(20, pair.Probe)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            line.send(pair.Ready(address, b"t" * _native.TOKEN_BYTES))
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                out, _ = process.communicate(timeout=INTERRUPTED_S)
    assert (process.returncode, out) == (130, "")


def test_a_visitor_is_interrupted_amid_an_exchange(monkeypatch):
    monkeypatch.setattr(pair, "_SMALL_SECONDS", 3000.0)  # one native call
    monkeypatch.setattr(pair, "_PROBE_SECONDS", 100.0)
    where = Place("127.0.0.1")
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with pair.serving("tcp", where, "127.0.0.1", NOTHING) as (address, token):
        timer = threading.Timer(1, interrupt)  # the engines do not say how far they are
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pair.measure("tcp", where, address, token, NOTHING)
        assert time.monotonic() - sent[0] < INTERRUPTED_S
        timer.join()
    assert not own_threads()


@pytest.mark.parametrize(
    ("peer", "name", "words"),
    [
        ("no-such-host.invalid:7", "name", "/etc/hosts"),
        ("127.0.0.1:1", "tcp", "doctor --listen 1` there first"),
    ],
)
def test_what_cannot_be_reached_is_told_with_what_to_do(peer, name, words):
    checks = pair.visit(peer, "tcp", "s", NOTHING)
    assert (checks[-1].name, checks[-1].outcome) == (name, FAILED)
    assert words in checks[-1].advice


def test_one_that_is_no_doctor_is_told(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(20)
        monkeypatch.setattr(pair, "_ANSWER_SECONDS", 0.2)
        checks = pair.visit(f"127.0.0.1:{other.getsockname()[1]}", "tcp", "s", NOTHING)
    assert checks[-1].name == "counterpart"
    assert "said nothing for 0 s" in checks[-1].found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "192.0.2.1:7"], "needs a secret"),
        (["--listen", "192.0.2.1:7"], "there is no secret"),
        (["--transport", "tcp"], "belong to --peer"),
        (["--listen", "7", "--transport", "tcp"], "for the other half"),
        (["--listen", "127.0.0.1:x"], "expected a port"),
        (["--peer", "nowhere"], "expected host:port"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words, monkeypatch, capsys):
    from jaxrdma import cli

    monkeypatch.delenv("JAXRDMA_SECRET", raising=False)
    assert cli.main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err
