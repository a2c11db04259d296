"""Two machines checked as a pair: can they reach each other, do their devices fit, how fast is it.

One runs `listen`, the other `visit`. They speak over one TCP connection, in lines of JSON, once each has proved that it
knows the secret; then the visitor's engine exchanges with the listener's over the transport itself.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import platform
import secrets
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from jaxrdma import devices
from jaxrdma.cluster import ClusterSpec, VerbsSettings, bind, format_address, parse_address
from jaxrdma.doctor import FAILED, OK, WARNING, Check
from jaxrdma.errors import ConfigError, JaxRdmaError, TransportError
from jaxrdma.signals import SignalWatch
from jaxrdma.transport import Place

if TYPE_CHECKING:
    from jaxrdma import _native

T = TypeVar("T")

# The form of what is said here; both must have the same.
PROTOCOL = 2

_REACH_SECONDS = 5.0  # for the TCP connection
_ANSWER_SECONDS = 20.0  # for the other side to look at its devices, or to make an engine
_PROBE_SECONDS = 30.0  # for everything that the engines do, or it is broken
_SMALL_SECONDS = 0.5  # for the latency
_LARGE_SECONDS = 1.0  # for the bandwidth, at one size
_LINE_BYTES = 1 << 16
_PARTITION_BYTES = 1 << 20
# Elements of float32. The first tells the latency; of the others the first that takes long enough, the bandwidth.
_SIZES = (1, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LARGE_ENOUGH_SECONDS = 0.1
_JOB = "doctor"


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The listener's first word."""

    protocol: int
    nonce: bytes


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """The visitor's answer: `proof` that it knows the secret, and the nonce for the listener's."""

    nonce: bytes
    proof: bytes


class Side(msgspec.Struct, frozen=True):
    """What one of the two would use over verbs.

    `problem`: why it has nothing to use; else `choice` names devices, ports and GIDs, `reason` why those, and `doubt`
    what speaks against them. `link_layers`, `mtus` (in bytes): of each of the devices.
    """

    host: str
    problem: str = ""
    choice: str = ""
    reason: str = ""
    doubt: str = ""
    link_layers: tuple[str, ...] = ()
    mtus: tuple[int, ...] = ()


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """The listener's proof, and its side."""

    proof: bytes
    side: Side


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The listener does not do it."""

    text: str


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Make an engine for this transport."""

    transport: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """There is one."""

    address: str
    token: bytes


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The visitor's last word: what came of it."""

    checks: list[dict[str, str]]


_Message = Greeting | Knock | Enter | Refused | Probe | Ready | Report
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Message).decode


class _Failed(Exception):
    """Ends the checks; it is the last of them."""

    def __init__(self, name: str, found: str, advice: str) -> None:
        super().__init__(found)
        self.check = Check(name, FAILED, found, advice)


class _Line:
    """The connection of the two, as whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""

    def send(self, message: _Message) -> None:
        self._socket.settimeout(_ANSWER_SECONDS)
        self._socket.sendall(_encode(message) + b"\n")

    def receive(self, seconds: float, *kinds: type[T]) -> T:
        """The next message, which should be of one of these kinds.

        **Raises:** `TransportError` if it is not, or the other side refused or ended.
        """
        try:
            line = self._line(time.monotonic() + seconds)
        except TimeoutError:
            raise TransportError(f"the other side said nothing for {seconds:.0f} s") from None
        except OSError as error:
            raise TransportError(f"the connection broke: {error.strerror or error}") from None
        if not line:
            raise TransportError("the other side ended the connection")
        try:
            message = _decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise TransportError("what answers there is no `jaxrdma doctor --listen`") from None
        if isinstance(message, Refused):
            raise TransportError(message.text)
        if not isinstance(message, kinds):
            raise TransportError(f"it said {type(message).__name__}, which was not its turn")
        return message

    def _line(self, deadline: float) -> bytes:
        """Up to the next newline or the end, of bounded length; in time as a whole, however slowly it comes."""
        while b"\n" not in self._received and len(self._received) < _LINE_BYTES:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(4096)
            if not data:
                break
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _proof(secret: str, who: str, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), who.encode() + nonces, hashlib.sha256)


def look(where: Place, settings: VerbsSettings) -> Side:
    """What this machine would use over verbs for traffic with `where`."""
    host = platform.node()
    try:
        survey = devices.survey(where.host, settings, "native", where.own)
    except ConfigError as error:
        return Side(host, problem=str(error))
    ranking = survey.ranking
    if not ranking.choices:
        return Side(host, problem=ranking.reason)
    doubt = ""
    if ranking.down is not None:
        doubt = f"the port of {ranking.down.device} is {ranking.down.port.state}"
    elif not ranking.on_route and survey.peer is not None and not survey.peer.is_loopback:
        doubt = "the route between the two goes another way"
    return Side(
        host,
        choice=ranking.name,
        reason=ranking.reason,
        doubt=doubt,
        link_layers=tuple(choice.port.link_layer for choice in ranking.choices),
        mtus=tuple(choice.port.active_mtu for choice in ranking.choices),
    )


# Judging: pure.


def examine_sides(here: Side, there: Side) -> list[Check]:
    """Whether what the two chose fits together."""
    checks = [_side_check("device here", here), _side_check("device there", there)]
    if here.problem or there.problem:
        return checks
    wrong = [
        (near, far) for near, far in joined(here.link_layers, there.link_layers) if near != far
    ]
    if wrong:
        checks.append(
            Check(
                "link layers",
                FAILED,
                "; ".join(f"{near} here, {far} there" for near, far in wrong),
                "they cannot be connected: set JAXRDMA_DEVICE on one of them",
            )
        )
    mtus = joined(here.mtus, there.mtus)
    if all(near == far for near, far in mtus):
        sizes = " and ".join(str(near) for near, _ in mtus)
        checks.append(Check("MTUs", OK, f"{sizes} bytes of payload per packet on both ends"))
    else:
        different = [(near, far) for near, far in mtus if near != far]
        checks.append(
            Check(
                "MTUs",
                WARNING,
                "; ".join(
                    f"{near} bytes of payload per packet here, {far} there: the smaller one is used"
                    for near, far in different
                ),
                "`ip link set DEVICE mtu 9000` (4200 at least) on both ends and on the switches between",
            )
        )
    return checks


def joined(here: Sequence[T], there: Sequence[T]) -> list[tuple[T, T]]:
    """What the links join, each pair once: as many links as the end with more devices has, in turn."""
    links = max(len(here), len(there))
    pairs = ((here[i % len(here)], there[i % len(there)]) for i in range(links))
    return list(dict.fromkeys(pairs))


def _side_check(name: str, side: Side) -> Check:
    if side.problem:
        advice = "`jaxrdma doctor`, there and without --peer, tells what is missing"
        return Check(name, FAILED, f"{side.host}: {side.problem}", advice)
    found = f"{side.host}: {side.choice}: {side.reason}"
    if side.doubt:
        return Check(
            name,
            WARNING,
            f"{found}; {side.doubt}",
            "name another by JAXRDMA_DEVICE, or give --peer an address of the network that its device is on",
        )
    return Check(name, OK, found)


def choose_transport(wanted: str, here: Side, there: Side, loopback: bool) -> tuple[str, str]:
    """What to probe, and why."""
    if wanted != "auto":
        return wanted, "asked for"
    if loopback:
        return "tcp", "both are on loopback"
    for side in (here, there):
        if side.problem or side.doubt:
            return "tcp", f"{side.host} has no device to use"
    return "verbs", "both have a device to use"


# The engines.


@dataclass(frozen=True)
class Speed:
    """What the probe measured: `latency`, seconds for a round trip of 4 bytes; bytes per second each way, at a size."""

    latency: float
    bandwidth: float
    bytes: int
    transport: str
    notice: str


def _flow(number: int, elements: int) -> "_native.FlowSpec":
    from jaxrdma import _native

    piece = _PARTITION_BYTES // 4
    return _native.FlowSpec(
        id=number,
        mode=_native.FlowMode.AVERAGE,
        dtypes=[_native.DType.float32],
        elements=[elements],
        partitions=[(0, 0, b, min(piece, elements - b)) for b in range(0, elements, piece)],
    )


def _arguments(transport: str, where: Place, settings: VerbsSettings, role: str) -> dict[str, Any]:
    from jaxrdma.native import transport_options
    from jaxrdma.transport import choose

    spec = ClusterSpec("peer:1", role, 0, 1, 1, transport=transport, verbs=settings)
    choices = choose(spec, where).choices if transport == "verbs" else ()
    made = transport_options(spec, transport, choices)
    if settings.link_timeout is None:
        made["verbs"].link_timeout_ms = 3000  # nobody is there to mend it
    return {**made}


@contextlib.contextmanager
def serving(
    transport: str, where: Place, address: str, settings: VerbsSettings
) -> Generator[tuple[str, bytes]]:
    """An engine that gives back what it gets: with one worker, the mean is what came. Yields address and token."""
    from jaxrdma import _native
    from jaxrdma.native import raise_for

    engine = raise_for(
        _native.ServerEngine.create(
            server=0,
            servers=1,
            workers=1,
            job=_JOB,
            listen=format_address(address, 0),
            partition_bytes=_PARTITION_BYTES,
            **_arguments(transport, where, settings, "server"),
        )
    )
    try:
        token = secrets.token_bytes(_native.TOKEN_BYTES)
        raise_for(engine.admit(0, 1, token))
        for number, elements in enumerate(_SIZES):
            raise_for(engine.add_flow(_flow(number, elements)))
        yield engine.address, token
    finally:
        engine.close()


def measure(
    transport: str, where: Place, address: str, token: bytes, settings: VerbsSettings
) -> Speed:
    """Exchange with the engine at `address`, for a few seconds."""
    import numpy as np

    from jaxrdma import _native
    from jaxrdma.native import raise_for

    engine = raise_for(
        _native.WorkerEngine.create(0, _JOB, 1, **_arguments(transport, where, settings, "worker"))
    )
    late = _native.Status(
        _native.Code.DEADLINE, f"the probe was not done within {_PROBE_SECONDS:.0f} s"
    )
    watchdog = threading.Timer(_PROBE_SECONDS, engine.fail, (late,))
    watchdog.name = "jaxrdma-probe"
    watchdog.start()

    def on_signal(number: int) -> None:
        if number == signal.SIGINT:
            engine.interrupt()  # KeyboardInterrupt follows where the native call has returned

    signals = SignalWatch(on_signal)
    try:
        signals.start()
        raise_for(engine.connect([address], [token], int(_ANSWER_SECONDS * 1000)))

        def exchange(number: int, seconds: float) -> float:
            """Seconds of an exchange of that size, the median of those that fit into `seconds`."""
            spec = _flow(number, _SIZES[number])
            raise_for(engine.add_flow(spec))
            source = np.arange(_SIZES[number], dtype=np.float32)
            target = np.empty_like(source)

            def repeat(first: int, count: int) -> list[float]:
                took = engine.repeat_operation(
                    _native.OperationKind.EXCHANGE,
                    number,
                    first,
                    count,
                    [source.view(np.uint8)],
                    [target.view(np.uint8)],
                    spec,
                )
                return raise_for(took)

            warm = repeat(0, 4)[1:]  # the first makes the memory ready
            took = repeat(4, max(1, int(seconds / max(warm))))
            if not np.array_equal(source, target):
                raise TransportError("what came back is not what was sent")
            return statistics.median(took)

        latency = exchange(0, _SMALL_SECONDS)
        seconds = size = 0.0
        for number in range(1, len(_SIZES)):
            size = _SIZES[number] * 4
            seconds = exchange(number, _LARGE_SECONDS)
            if seconds > _LARGE_ENOUGH_SECONDS:
                break
        return Speed(latency, size / seconds, int(size), engine.transport, engine.notice)
    finally:
        watchdog.cancel()
        watchdog.join()
        signals.stop()
        engine.close()


# The two ends.


def visit(peer: str, transport: str, secret: str, settings: VerbsSettings) -> list[Check]:
    """Check the way to `peer` ("host:port", where `listen` runs), both devices, and the speed. Never raises for these.

    **Arguments:**

    - `peer`: where the other one listens.
    - `transport`: "tcp", "verbs", or "auto": verbs if both can.
    - `secret`: the same there; may be empty on loopback.
    - `settings`: of this machine's devices.
    """
    checks: list[Check] = []
    try:
        _visit(peer, transport, secret, settings, checks)
    except _Failed as failed:
        checks.append(failed.check)
    return checks


def _visit(
    peer: str, transport: str, secret: str, settings: VerbsSettings, checks: list[Check]
) -> None:
    host, port = parse_address(peer, "peer")
    try:
        address, source = devices.find_route(host)
    except ConfigError as error:
        raise _Failed(
            "name", str(error), "check the spelling, DNS and /etc/hosts, or give an address"
        ) from None
    checks.append(Check("name", OK, f"{host} is {address}"))
    if source is None:
        advice = f"`ip route get {address}`: is the network of the peer configured here?"
        raise _Failed("route", f"no route to {address}", advice)
    checks.append(Check("route", OK, f"from {source}"))
    try:
        sock = socket.create_connection((host, port), _REACH_SECONDS)
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        raise _Failed(
            "tcp",
            f"{peer} cannot be reached: {error.strerror or error}",
            f"start `jaxrdma doctor --listen {port}` there first"
            if refused
            else f"open port {port} in the firewalls; is that machine up?",
        ) from None
    with sock:
        checks.append(Check("tcp", OK, f"port {port} answers"))
        line = _Line(sock)
        where = Place(host)
        there = _enter(line, secret)
        here = look(where, settings)
        if transport != "tcp":
            checks += examine_sides(here, there)
        name, why = choose_transport(transport, here, there, address.is_loopback)
        try:
            if not any(check.outcome == FAILED for check in checks) or name == "tcp":
                checks += _probe(line, name, why, where, settings)
        finally:
            with contextlib.suppress(OSError):
                line.send(Report([asdict(check) for check in checks]))


def _enter(line: _Line, secret: str) -> Side:
    try:
        greeting = line.receive(_ANSWER_SECONDS, Greeting)
    except TransportError as error:
        raise _Failed(
            "counterpart", str(error), "does `jaxrdma doctor --listen` run there, at that port?"
        ) from None
    if greeting.protocol != PROTOCOL:
        raise _Failed(
            "counterpart",
            f"it speaks protocol {greeting.protocol}, this one {PROTOCOL}",
            "install the same release of jaxrdma on both",
        )
    mine = secrets.token_bytes(16)
    nonces = greeting.nonce + mine
    line.send(Knock(mine, _proof(secret, "visitor", nonces)))
    try:
        enter = line.receive(_ANSWER_SECONDS, Enter)
    except TransportError as error:
        raise _Failed(
            "secret", str(error), "set JAXRDMA_SECRET, or --secret-file, alike on both machines"
        ) from None
    if not hmac.compare_digest(enter.proof, _proof(secret, "listener", nonces)):
        raise _Failed(
            "secret",
            "what answers there does not know the secret",
            "is it the right machine and port?",
        )
    return enter.side


def _probe(
    line: _Line, transport: str, why: str, where: Place, settings: VerbsSettings
) -> list[Check]:
    name = f"probe over {transport}"
    advice = "see the rows above; `jaxrdma doctor` on each machine tells more"
    if transport == "verbs":
        advice = (
            "is UDP port 4791 open in the firewalls, and are both devices on connected networks? "
            "`ibv_devinfo` and `rping` look at the same"
        )
    try:
        line.send(Probe(transport))
        ready = line.receive(_ANSWER_SECONDS, Ready)
        # The address that this side reaches it by; the port of the engine.
        address = format_address(where.host, parse_address(ready.address)[1])
        speed = measure(transport, where, address, ready.token, settings)
    except (JaxRdmaError, OSError) as error:
        return [Check(name, FAILED, str(error), advice)]
    checks = [Check(name, OK, f"{speed.transport} ({why})")]
    if speed.notice:
        checks.append(Check("MTU used", WARNING, speed.notice, "see MTUs"))
    return [
        *checks,
        Check("latency", OK, f"{speed.latency * 1e6:.0f} us for a round trip of 4 bytes"),
        Check(
            "bandwidth",
            OK,
            f"{speed.bandwidth / 1e9:.3g} GB/s each way at once, by exchanges of {speed.bytes >> 20} MiB",
        ),
    ]


def listen(
    address: str, secret: str, settings: VerbsSettings, say: Callable[[str], None]
) -> list[Check]:
    """Wait for `visit` from the other machine, and do its part. Returns what the visitor found.

    **Arguments:**

    - `address`: "host:port"; port 0 takes a free one.
    - `secret`: visitors without it are sent away, and the next one is awaited.
    - `say`: prints one line of what happens.

    **Raises:** `ConfigError` if the address cannot be had.
    """
    with bind(address, "this machine") as listening:
        listening.listen()
        shown = format_address(*listening.getsockname()[:2])
        say(f"waiting at {shown} for `jaxrdma doctor --peer` from the other machine")
        while True:
            sock, visitor = listening.accept()
            with sock:
                came = format_address(*visitor[:2])
                try:
                    return _receive(_Line(sock), sock, secret, settings)
                except (TransportError, OSError) as error:
                    say(f"{came}: {error}")


def _receive(line: _Line, sock: socket.socket, secret: str, settings: VerbsSettings) -> list[Check]:
    mine = secrets.token_bytes(16)
    line.send(Greeting(PROTOCOL, mine))
    knock = line.receive(_ANSWER_SECONDS, Knock)
    nonces = mine + knock.nonce
    if not hmac.compare_digest(knock.proof, _proof(secret, "visitor", nonces)):
        line.send(Refused("the secrets of the two machines differ"))
        raise TransportError("sent away: it does not know the secret")
    own = sock.getsockname()[0]
    where = Place(str(devices.plain_address(ipaddress.ip_address(own))), own=True)
    line.send(Enter(_proof(secret, "listener", nonces), look(where, settings)))
    message = line.receive(_ANSWER_SECONDS, Probe, Report)
    if isinstance(message, Probe):
        with contextlib.ExitStack() as stack:
            try:
                made = stack.enter_context(serving(message.transport, where, where.host, settings))
            except JaxRdmaError as error:
                line.send(Refused(f"there: {error}"))
            else:
                line.send(Ready(*made))
            message = line.receive(_PROBE_SECONDS + _ANSWER_SECONDS, Report)
    return [Check(**check) for check in message.checks]
