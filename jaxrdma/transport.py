"""By which transport a process moves tensors, by which devices, and why."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxrdma import control, devices
from jaxrdma.cluster import ClusterSpec, parse_address
from jaxrdma.control import Offer
from jaxrdma.errors import TransportError
from jaxrdma.memory import (
    SLOTS_PER_FOLLOWER,
    Locked,
    connections_bytes,
    need_text,
    read_lock_limit,
)

if TYPE_CHECKING:
    from jaxrdma.native import TransportArguments


@dataclass(frozen=True)
class Place:
    """The host whose traffic decides on the devices. `own`: this machine's own address, where its peers come in."""

    host: str
    own: bool = False


def place(spec: ClusterSpec, listen: str | None = None, servers: Sequence[str] = ()) -> Place:
    """Where this process's peers are.

    **Arguments:**

    - `spec`: the cluster; its coordinator is on the first server's machine.
    - `listen`: of a server, the "host:port" for its workers; a wildcard says nothing.
    - `servers`: of a worker, the servers' addresses, once they are known.
    """
    if listen is not None:
        host, _ = parse_address(listen, "listen address")
        if not _is_wildcard(host):
            return Place(host, own=True)
    if servers:
        return Place(parse_address(servers[0], "server 0")[0])
    return Place(parse_address(spec.coordinator, "coordinator")[0])


def choose(spec: ClusterSpec, where: Place) -> devices.Ranking:
    """The devices, ports and GIDs for traffic with `where`: what `jaxrdma devices --peer` shows.

    **Returns:** a ranking that has a choice.

    **Raises:** `ConfigError` if the settings name what is not there; `TransportError` if no device can be used.
    """
    # Read by the library that the transport uses.
    return _choice(devices.survey(where.host, spec.verbs, "native", where.own))


def _choice(survey: devices.Survey) -> devices.Ranking:
    ranking = survey.ranking
    if not ranking.choices:
        raise TransportError(
            f"transport verbs cannot be used: {ranking.reason}. `jaxrdma doctor` tells what this machine lacks"
        )
    return ranking


def offer(spec: ClusterSpec, where: Place) -> Offer:
    """How this process can move tensors to and from `where`. Where verbs is asked for, `check_verbs` has looked.

    **Raises:** `ConfigError` if the settings name what is not there.
    """
    if spec.transport != "auto":
        wants_verbs = spec.transport == "verbs"
        return Offer(spec.transport, wants_verbs, "" if wants_verbs else "asks for tcp")
    why = why_not_verbs(spec, where)
    return Offer("auto", not why, why)


def prepare(
    spec: ClusterSpec, name: str, where: Place, what: str
) -> tuple["TransportArguments", Locked | None]:
    """What the engine of this process is made with. Over verbs, the devices and the memory to lock are said.

    **Arguments:**

    - `name`: "tcp" or "verbs", as the coordinator decided.
    - `where`: this process's peers.
    - `what`: what its connections lock memory for.

    **Returns:** arguments of both engines' `create`; over verbs, what is locked so far.

    **Raises:** as `choose`; `TransportError` if this process may not lock enough memory.
    """
    from jaxrdma.native import transport_options

    if name != "verbs":
        return transport_options(spec, name), None
    who = f"{spec.role} {spec.index}"
    ranking = choose(spec, where)
    control.say_on_stderr(f"{who}: {describe(ranking)}")
    locked = Locked(who, control.say_on_stderr, devices=len(ranking.choices))
    locked.add(what, _connections_bytes(spec))
    return transport_options(spec, name, ranking.choices), locked


def _connections_bytes(spec: ClusterSpec) -> int:
    """What the connections to everybody lock, by one device."""
    if spec.role == "follower":
        return connections_bytes(spec.num_servers, 0, SLOTS_PER_FOLLOWER)
    peers = spec.num_servers if spec.role == "worker" else spec.places
    return connections_bytes(peers, spec.partition_bytes)


def why_not_verbs(spec: ClusterSpec, where: Place) -> str:
    """Why "auto" does not take verbs for this process, as in "worker 1 has no RDMA device"; empty if it does."""
    peer, _ = devices.find_route(where.host)
    if peer.is_loopback:
        return "is on loopback"
    if not devices.kernel_devices():
        return "has no RDMA device"
    survey = devices.survey(where.host, spec.verbs, "native", where.own)
    ranking = survey.ranking
    if not ranking.choices:
        return f"has no RDMA device to use: {ranking.reason}"
    if ranking.down is not None:
        return f"has no active port: {ranking.down.name} is {ranking.down.port.state}"
    if not ranking.on_route:
        return f"does not reach {where.host} by an RDMA device, but from {survey.source}"
    number, limit = len(ranking.choices), read_lock_limit()
    need = _connections_bytes(spec)
    if not limit.allows(number * need):
        return f"may not lock enough memory: it needs {need_text(need, number)}; {limit.text}"
    return ""


def check_verbs(spec: ClusterSpec) -> None:
    """Refuse at once, before anybody is waited for, what cannot work whoever the peer is.

    **Raises:** as `choose`.
    """
    _choice(devices.survey(None, spec.verbs, "native"))


def describe(ranking: devices.Ranking) -> str:
    """The choices and their reason, in one line."""
    assert ranking.choices
    return f"verbs, {ranking.name}: {ranking.reason}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
