"""A job on several machines: what of it runs on this one, and at which address."""

import difflib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxrdma.cluster import format_address, is_loopback, parse_address
from jaxrdma.devices import find_route
from jaxrdma.errors import ConfigError

_KINDS = ("coordinator", "server", "worker")
_KNOCK_SECONDS = 1.0  # an address of this machine answers at once
_RETRY_SECONDS = 0.5
_PROGRESS_SECONDS = 3.0


@dataclass(frozen=True)
class Share:
    """What of a job one launcher starts: the coordinator or not, and the servers and workers of these indices."""

    coordinator: bool
    servers: tuple[int, ...]
    workers: tuple[int, ...]

    def is_spare(self, needed: int) -> bool:
        """Whether it is of workers alone that a job which begins with so many can do without."""
        return not self.coordinator and not self.servers and all(i >= needed for i in self.workers)

    def __str__(self) -> str:
        """As `parse_share` reads it."""
        parts = ["coordinator"] if self.coordinator else []
        for role, indices in (("server", self.servers), ("worker", self.workers)):
            parts += [f"{role}:{piece}" for piece in _ranges(indices)]
        return ",".join(parts)


def parse_share(text: str, servers: int, workers: int) -> Share:
    """Read "coordinator,server:0,worker:0-3" for a job of so many servers and workers.

    **Raises:** `ConfigError` on what a job of that size does not have, or what is given twice, with the nearest right
    entry.
    """
    counts = {"server": servers, "worker": workers}
    found: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    whole = Share(True, tuple(range(servers)), tuple(range(workers)))
    entries = [entry.strip() for entry in text.split(",")]
    if not any(entries):
        raise ConfigError(f"--here is empty: what runs on this machine? All of the job is {whole}")
    for entry in filter(None, entries):
        kind, colon, numbers = entry.partition(":")
        if kind not in _KINDS:
            raise ConfigError(
                f"--here {entry!r}: there is no {kind!r}{_nearest(kind, numbers, whole)}"
            )
        if kind == "coordinator":
            if colon:
                raise ConfigError(
                    f"--here {entry!r}: there is one coordinator; did you mean coordinator?"
                )
            indices = [0]
        else:
            indices = _indices(entry, kind, numbers, counts[kind])
        for index in indices:
            if index in found[kind]:
                raise ConfigError(_twice(kind, index, found[kind], counts))
            found[kind].append(index)
    return Share(bool(found["coordinator"]), tuple(found["server"]), tuple(found["worker"]))


def check_place(share: Share, coordinator: str, secret: str) -> None:
    """Refuse a share that cannot be this machine's, as far as that can be seen before anything runs.

    **Raises:** `ConfigError`.
    """
    host, port = parse_address(coordinator, "coordinator")
    if is_loopback(host):
        return  # all of the job is here; another launcher may start the coordinator
    if not secret:
        raise ConfigError(
            f"the coordinator at {coordinator} lets other machines in, and there is no secret to keep strangers out: "
            "set JAXRDMA_SECRET, or --secret-file, alike on every machine."
        )
    try:
        peer, source = find_route(host)
    except ConfigError:
        return  # a name that cannot be resolved yet; who needs it waits for it
    if share.coordinator and not _is_own(str(peer)):
        better = (
            ""
            if source is None
            else f"; did you mean --coordinator {format_address(str(source), port)}?"
        )
        raise ConfigError(
            f"--here starts the coordinator, but {host} is no address of this machine{better}"
        )
    if not share.coordinator and peer == source and not _answers(str(peer), port):
        better = Share(True, share.servers, share.workers)
        raise ConfigError(
            f"{host} is an address of this machine, so nobody else can start the coordinator there; "
            f"did you mean --here {better}?"
        )


def listen_address(text: str) -> str:
    """The "host:port" for a server that shall listen for data at the host `text`, any free port.

    **Raises:** `ConfigError` if others cannot reach that, or it is not this machine's.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
        if ":" in host:
            raise ConfigError(
                f"--listen {text}: expected a host, without a port; did you mean {host.rpartition(':')[0]}?"
            ) from None
    if unspecified:
        raise ConfigError(
            f"--listen {text}: workers are told this address, and cannot reach it; give one of this machine"
        )
    if not _is_own(host):
        raise ConfigError(f"--listen {text}: that is no address of this machine")
    return format_address(host, 0)


def route_address(coordinator: str, timeout: float, say: Callable[[str], None]) -> str:
    """The "host:port", any free port, of this machine on its way to the coordinator: where others reach it.

    Waits for a name that cannot be resolved yet and for a route, since machines may come up in any order.

    **Raises:** `ConfigError` after `timeout` seconds without.
    """
    host, _ = parse_address(coordinator, "coordinator")
    begin = said = time.monotonic()
    while True:
        try:
            _, source = find_route(host)
            if source is not None:
                return format_address(str(source), 0)
            problem = f"there is no route to the coordinator at {coordinator}"
        except ConfigError as error:
            problem = str(error)
        now = time.monotonic()
        if now - begin >= timeout:
            raise ConfigError(f"{problem}, for {now - begin:.0f} s; or give --listen")
        if now - said >= _PROGRESS_SECONDS:
            say(f"waiting: {problem}, {now - begin:.0f} s")
            said = now
        # Neither the resolver nor the routing table tells when it changes.
        time.sleep(_RETRY_SECONDS)


def _indices(entry: str, kind: str, numbers: str, count: int) -> list[int]:
    everybody = f"{kind}:0" if count == 1 else f"{kind}:0-{count - 1}"
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers, re.ASCII)
    if match is None:
        raise ConfigError(
            f"--here {entry!r}: expected {kind}:INDEX or {kind}:FIRST-LAST; did you mean {everybody}?"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ConfigError(
            f"--here {entry!r}: the first comes first; did you mean {kind}:{last}-{first}?"
        )
    if last >= count:
        first = min(first, count - 1)
        better = f"{kind}:{first}" if first == count - 1 else f"{kind}:{first}-{count - 1}"
        raise ConfigError(
            f"--here {entry!r}: a job of {count} {kind}{'s' if count > 1 else ''} has {everybody}; "
            f"did you mean {better}?"
        )
    return list(range(first, last + 1))


def _nearest(kind: str, numbers: str, whole: Share) -> str:
    matches = difflib.get_close_matches(kind, _KINDS, n=1, cutoff=0.5)
    if not matches:
        return f"; all of the job is {whole}"
    numbered = numbers and matches[0] != "coordinator"
    return f"; did you mean {matches[0]}{':' + numbers if numbered else ''}?"


def _twice(kind: str, index: int, found: list[int], counts: dict[str, int]) -> str:
    if kind == "coordinator":
        return "--here names the coordinator twice; once is enough"
    left = [i for i in range(counts[kind]) if i not in found]
    nearest = min(left, key=lambda i: (abs(i - index), i), default=None)
    return f"--here names {kind}:{index} twice" + (
        f"; did you mean {kind}:{nearest}?" if nearest is not None else "; once is enough"
    )


def _ranges(indices: Iterable[int]) -> list[str]:
    """Runs of consecutive numbers: "0-3", "5"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]


def _is_own(host: str) -> bool:
    """Whether this machine has the address; true of what cannot be found out."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there: a coordinator that was started by hand."""
    try:
        with socket.create_connection((host, port), _KNOCK_SECONDS):
            return True
    except OSError:
        return False
