"""The RDMA devices of this machine: read in two ways, and ranked for a peer by one pure function."""

import contextlib
import difflib
import errno
import importlib
import importlib.machinery
import importlib.util
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrdma.cluster import MOST_DEVICES, VerbsSettings, setting_text
from jaxrdma.errors import ConfigError, TransportError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

READERS = ("auto", "pyverbs", "native")

# Where Debian's python3-pyverbs lies; a virtual environment does not look there.
_DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")
_SYSFS = Path("/sys/class")
_DEV = Path("/dev/infiniband")


@dataclass(frozen=True)
class Gid:
    """One filled slot of a port's GID table.

    **Arguments:**

    - `index`: where it stands in the table. It may change when the link does; the address does not.
    - `address`: IPv4 where the GID is an IPv4-mapped one.
    - `type`: "RoCE v2", "RoCE v1" or "IB".
    - `net_device`: "eth0"; empty where there is none, or it is in another network namespace.
    """

    index: int
    address: Address
    type: str
    net_device: str

    @property
    def kind(self) -> str:
        """Its class: "ipv4", "ipv6" (global) or "link-local"."""
        return address_kind(self.address)

    @property
    def raw(self) -> bytes:
        """Its 16 bytes, as devices have them."""
        if isinstance(self.address, ipaddress.IPv4Address):
            return bytes(10) + b"\xff\xff" + self.address.packed
        return self.address.packed


@dataclass(frozen=True)
class Port:
    """What is known of a port without sending anything. `state` is "ACTIVE", "DOWN", ...; MTU and message in bytes."""

    number: int
    state: str
    link_layer: str
    active_mtu: int
    max_message: int
    lid: int
    pkeys: tuple[int, ...]
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Device:
    """An RDMA device that the kernel shows. `problem`: why it could not be opened; then only `name` is known."""

    name: str
    firmware: str = ""
    max_qp: int = 0
    max_qp_wr: int = 0
    max_cqe: int = 0
    max_mr_size: int = 0
    ports: tuple[Port, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Inventory:
    """What `reader` ("pyverbs" or "native") found. `why`: why it was that one that read."""

    reader: str
    why: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Candidate:
    """A source for traffic: a GID of a port of a device."""

    device: str
    port: Port
    gid: Gid

    @property
    def name(self) -> str:
        return (
            f"{self.device} port {self.port.number} GID {self.gid.index} "
            f"({self.gid.address}, {self.gid.type})"
        )


@dataclass(frozen=True)
class Ranking:
    """The outcome of `rank`.

    **Arguments:**

    - `choices`: what to send from, each of another device: one, or several to stripe tensors over; the first rail
      first. Empty if none may be used.
    - `reason`: why those, or why none.
    - `others`: the other candidates, best first, each with what it lost by.
    - `unusable`: devices and ports that have no candidate at all, and why.
    - `on_route`: whether the route to the peer is known to go by one of the choices, or InfiniBand needs no route.
    """

    choices: tuple[Candidate, ...]
    reason: str
    others: tuple[tuple[Candidate, str], ...] = ()
    unusable: tuple[tuple[str, str], ...] = ()
    on_route: bool = False

    @property
    def choice(self) -> Candidate | None:
        """The first rail, or the only one."""
        return self.choices[0] if self.choices else None

    @property
    def name(self) -> str:
        """Of all the choices."""
        return _enumerated([choice.name for choice in self.choices])

    @property
    def down(self) -> Candidate | None:
        """The first of the choices whose port is not active: chosen all the same, as it was named."""
        return next((choice for choice in self.choices if not choice.port.active), None)


@dataclass(frozen=True)
class Survey:
    """What `survey` found: the devices, the peer's address and the one that packets to it come from, the ranking."""

    inventory: Inventory
    peer: Address | None
    source: Address | None
    ranking: Ranking


# Reading.


def read_devices(reader: str = "auto") -> Inventory:
    """The RDMA devices of this machine. Sends nothing, and changes nothing.

    **Arguments:**

    - `reader`: "pyverbs", "native", or "auto": pyverbs where it can be used, else native. Both give the same.

    **Raises:** `TransportError` if the reader asked for, or the native one, cannot read: no libibverbs, no pyverbs.
    """
    if reader not in READERS:
        raise ConfigError(f"there is no reader {reader!r}: expected one of {', '.join(READERS)}")
    why = "asked for"
    if reader == "auto":
        library = os.environ.get("JAXRDMA_IBVERBS_LIB")
        if library:
            why = f"JAXRDMA_IBVERBS_LIB={library} is for it alone"
        else:
            try:
                return Inventory("pyverbs", "it can be imported", complete(read_with_pyverbs()))
            except TransportError as error:
                why = str(error)
    if reader == "pyverbs":
        return Inventory(reader, why, complete(read_with_pyverbs()))
    return Inventory("native", why, complete(read_with_native()))


def kernel_devices() -> tuple[str, ...]:
    """The names of the RDMA devices that the kernel shows, whether libibverbs does or not."""
    return tuple(sorted(path.name for path in (_SYSFS / "infiniband").glob("*")))


def device_nodes() -> dict[str, Path]:
    """The path under /dev that each device should have, whether it is there or not."""
    found: dict[str, Path] = {}
    for entry in sorted((_SYSFS / "infiniband_verbs").glob("uverbs*")):
        with contextlib.suppress(OSError):  # gone meanwhile
            found[(entry / "ibdev").read_text().strip()] = _DEV / entry.name
    return found


def complete(found: Sequence[Device]) -> tuple[Device, ...]:
    """`found`, and what libibverbs hides.

    It leaves out a device without a node or a driver, says of a node that may not be opened that there is none, and
    takes a network device of another namespace for one of this.
    """
    from jaxrdma import _native

    nodes = {name: node for name, node in device_nodes().items() if node.exists()}
    made: list[Device] = []
    for device in found:
        node = nodes.get(device.name)
        if device.problem and node is not None and not os.access(node, os.R_OK | os.W_OK):
            text = _native.explain_open(device.name, errno.EACCES)
            made.append(Device(device.name, problem=f"{text} (here {node})"))
        else:
            ports = tuple(
                replace(port, gids=tuple(_own_net_device(device, port, gid) for gid in port.gids))
                for port in device.ports
            )
            made.append(replace(device, ports=ports))
    for name in kernel_devices():
        if any(name == device.name for device in found):
            continue
        if name in nodes:
            problem = (
                "libibverbs has no driver for it: install the providers (Debian: ibverbs-providers) of its own "
                "version"
            )
        else:
            problem = _native.explain_open(name, errno.ENOENT)
        made.append(Device(name, problem=problem))
    return tuple(made)


def _own_net_device(device: Device, port: Port, gid: Gid) -> Gid:
    """`gid`, without a network device that is another namespace's.

    libibverbs gives the number of the network device, which may be another one's number in this namespace; the kernel
    gives its name.
    """
    place = _SYSFS / "infiniband" / device.name / "ports" / str(port.number)
    try:
        name = (place / "gid_attrs" / "ndevs" / str(gid.index)).read_text().strip()
    except OSError:
        return gid  # some kernels and containers do not tell
    return gid if name == gid.net_device else replace(gid, net_device="")


def read_with_native() -> tuple[Device, ...]:
    """The devices as the native module sees them.

    **Raises:** `TransportError` if libibverbs cannot be opened.
    """
    from jaxrdma import _native

    found = _native.rdma_devices()
    if isinstance(found, _native.Status):
        raise TransportError(found.message)
    return tuple(
        Device(
            name=device.name,
            firmware=device.firmware,
            max_qp=device.max_qp,
            max_qp_wr=device.max_qp_wr,
            max_cqe=device.max_cqe,
            max_mr_size=device.max_mr_size,
            ports=tuple(
                Port(
                    number=port.number,
                    state=port.state,
                    link_layer=port.link_layer,
                    active_mtu=port.active_mtu,
                    max_message=port.max_message,
                    lid=port.lid,
                    pkeys=tuple(port.pkeys),
                    gids=tuple(
                        Gid(
                            gid.index,
                            plain_address(ipaddress.IPv6Address(gid.gid)),
                            gid.type,
                            gid.net_device,
                        )
                        for gid in port.gids
                    ),
                )
                for port in device.ports
            ),
            problem=device.problem,
        )
        for device in found
    )


def why_there_is_none() -> str:
    """Why `read_devices` found nothing, as the native module explains it."""
    from jaxrdma import _native

    return _native.explain_no_device()


def import_pyverbs() -> Any:
    """The module `pyverbs.device`, from where Python looks, or Debian's.

    Only the package pyverbs is taken from Debian's folder: whatever else lies there could hide what a virtual
    environment has. Its compiled modules fit the Python that Debian has, and no other.

    **Raises:** `TransportError`, saying why it cannot be used.
    """
    try:
        return importlib.import_module("pyverbs.device")
    except ImportError as error:
        problem = f"pyverbs cannot be imported: {error}"
    known = [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]
    if known or not (_DEBIAN / "__init__.py").exists():
        raise TransportError(problem)
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any((_DEBIAN / f"device{suffix}").exists() for suffix in suffixes):
        raise TransportError(f"pyverbs in {_DEBIAN} is for another Python than this one")
    spec = importlib.util.spec_from_file_location(
        "pyverbs", _DEBIAN / "__init__.py", submodule_search_locations=[str(_DEBIAN)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
        return importlib.import_module("pyverbs.device")
    except ImportError as error:
        for name in [n for n in sys.modules if n == "pyverbs" or n.startswith("pyverbs.")]:
            del sys.modules[name]
        raise TransportError(f"pyverbs in {_DEBIAN} cannot be imported: {error}") from None


_GID_TYPES = ("IB", "RoCE v1", "RoCE v2")
_PORT_STATES = {1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
# ib_uverbs answers at most 64 KiB at a time, in entries of 32 bytes.
_MAX_GIDS = 65535 // 32


def read_with_pyverbs() -> tuple[Device, ...]:
    """The devices as pyverbs sees them.

    **Raises:** `TransportError` if pyverbs cannot be used, or is too old to read GID tables.
    """
    pyverbs = import_pyverbs()
    try:
        names = [str(device.name.decode()) for device in pyverbs.get_device_list()]
    except pyverbs.PyverbsRDMAError:
        return ()  # ENOSYS where the kernel has no ib_uverbs: there is no device then
    found: list[Device] = []
    for name in names:
        try:
            context = pyverbs.Context(name=name)
        except pyverbs.PyverbsRDMAError as error:
            from jaxrdma import _native

            found.append(Device(name, problem=_native.explain_open(name, int(error.error_code))))
            continue
        with contextlib.closing(context):
            try:
                found.append(_pyverbs_device(name, context))
            except pyverbs.PyverbsError as error:
                raise TransportError(f"pyverbs cannot read device {name}: {error}") from None
    return tuple(found)


def _pyverbs_device(name: str, context: Any) -> Device:
    attributes = context.query_device()
    table: list[tuple[int, Gid]] = []
    for entry in context.query_gid_table(_MAX_GIDS):
        address = ipaddress.IPv6Address(entry.gid_str())
        if int(address):
            net_device = _interface_name(entry.ndev_ifindex)
            gid = Gid(
                entry.gid_index, plain_address(address), _GID_TYPES[entry.gid_type], net_device
            )
            table.append((entry.port_num, gid))
    ports: list[Port] = []
    for number in range(1, attributes.phys_port_cnt + 1):
        port = context.query_port(number)
        ports.append(
            Port(
                number=number,
                state=_PORT_STATES.get(port.state, "UNKNOWN"),
                link_layer="Ethernet" if port.link_layer == 2 else "InfiniBand",
                active_mtu=128 << port.active_mtu,
                max_message=port.max_msg_sz,
                lid=port.lid,
                # As they are on the wire.
                pkeys=tuple(
                    socket.ntohs(context.query_pkey(number, i)) for i in range(port.pkey_tbl_len)
                ),
                gids=tuple(gid for owner, gid in table if owner == number),
            )
        )
    return Device(
        name=name,
        firmware=attributes.fw_version,
        max_qp=attributes.max_qp,
        max_qp_wr=attributes.max_qp_wr,
        max_cqe=attributes.max_cqe,
        max_mr_size=attributes.max_mr_size,
        ports=tuple(ports),
    )


def _interface_name(index: int) -> str:
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""  # in another network namespace


# Addresses.


def plain_address(address: Address) -> Address:
    """IPv4 for IPv4-mapped IPv6, and without the scope ("%eth0") of a link-local one."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))
    return address


def address_kind(address: Address) -> str:
    """The class of an address: "ipv4", "ipv6" (global) or "link-local" (IPv6)."""
    if isinstance(address, ipaddress.IPv4Address):
        return "ipv4"
    return "link-local" if address.is_link_local else "ipv6"


def find_route(host: str) -> tuple[Address, Address | None]:
    """The address of `host`, and the one of this machine that packets to it come from; `None` without a route.

    Asks the resolver for the name and the kernel for the route; sends nothing to `host`.

    **Raises:** `ConfigError` if the name cannot be resolved.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(f"peer {host!r} has no address: {error.strerror}") from None
    peer = plain_address(ipaddress.ip_address(where[0]))
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)  # of UDP: looks up the route, and sends nothing
        except OSError:
            return peer, None
        return peer, plain_address(ipaddress.ip_address(probe.getsockname()[0]))


# Ranking.

_NOTHING_NAMED = VerbsSettings()

_OVERLAY = re.compile(
    r"(docker|podman|cni|flannel|cali|cilium|lxc|lxdbr|kube|weave|virbr|veth|vxlan|vnet|tun|tap|wg|ovn)"
    r"|br-[0-9a-f]{12}$"
)
_KIND_NAMES = {"ipv4": "IPv4", "ipv6": "global IPv6", "link-local": "link-local"}


@dataclass(frozen=True)
class _Question:
    """What candidates are held against. `near`: the network devices that have the route's source address."""

    peer: Address | None
    source: Address | None
    near: frozenset[str]

    @property
    def goal(self) -> str:
        return f"the route to {self.peer}" if self.peer is not None else "the route"

    @property
    def kind(self) -> str:
        return "ipv4" if self.peer is None else address_kind(self.peer)


@dataclass(frozen=True)
class _Criterion:
    """One step of the order: those for which `holds` go before those for which it does not."""

    holds: Callable[[Candidate, _Question], bool]
    praise: Callable[[Candidate, _Question], str]
    blame: Callable[[Candidate, _Question], str]


def _foreign(c: Candidate) -> bool:
    return c.port.link_layer == "Ethernet" and not c.gid.net_device


def _on_route(c: Candidate, q: _Question) -> bool:
    return q.source is None or c.gid.address == q.source or c.gid.net_device in q.near


def _praise_route(c: Candidate, q: _Question) -> str:
    if q.source is None:
        return ""
    by = "" if c.gid.address == q.source else f", by its network device {c.gid.net_device}"
    return f"{q.goal} leaves from {q.source}{by}"


def _blame_route(c: Candidate, q: _Question) -> str:
    if not c.gid.net_device:
        return f"its network device is not known, so neither is whether {q.goal} leaves by it"
    return f"{q.goal} leaves from {q.source}, not by this port"


def _is_infiniband(c: Candidate) -> bool:
    # Addressed by LID: what its GID looks like is no matter.
    return c.port.link_layer == "InfiniBand"


def _subnet(c: Candidate) -> ipaddress.IPv6Network:
    """Of an InfiniBand port: the upper half of its GID, which the subnet manager gives."""
    return ipaddress.IPv6Network((int.from_bytes(c.gid.raw) >> 64 << 64, 64))


# The order, most important first.
_CRITERIA = (
    _Criterion(
        lambda c, q: c.port.active, lambda c, q: "", lambda c, q: f"its port is {c.port.state}"
    ),
    _Criterion(
        lambda c, q: not _foreign(c),
        lambda c, q: "",
        lambda c, q: "its network device is not in this network namespace",
    ),
    _Criterion(
        lambda c, q: _OVERLAY.match(c.gid.net_device) is None,
        lambda c, q: "",
        lambda c, q: f"{c.gid.net_device} is of an overlay or a container",
    ),
    _Criterion(_on_route, _praise_route, _blame_route),
    _Criterion(
        lambda c, q: c.gid.type != "RoCE v1",
        lambda c, q: "InfiniBand" if _is_infiniband(c) else c.gid.type,
        lambda c, q: "RoCE v1, which is not routed",
    ),
    _Criterion(
        lambda c, q: _is_infiniband(c) or c.gid.kind == q.kind,
        lambda c, q: (
            "" if _is_infiniband(c) else _KIND_NAMES[q.kind] + (" like the peer" if q.peer else "")
        ),
        lambda c, q: (
            f"{_KIND_NAMES[c.gid.kind]}, and "
            + (f"the peer is {_KIND_NAMES[q.kind]}" if q.peer else "IPv4 goes first")
        ),
    ),
    _Criterion(
        lambda c, q: _is_infiniband(c) or c.gid.kind != "link-local",
        lambda c, q: "",
        lambda c, q: "link-local: reaches no other network",
    ),
    _Criterion(
        lambda c, q: q.source is None or c.gid.address == q.source,
        lambda c, q: "",
        lambda c, q: f"not the address {q.source} that {q.goal} leaves from",
    ),
)


def _grades(c: Candidate, q: _Question) -> tuple[bool, ...]:
    """What it lacks, most important first: the least is the best."""
    return tuple(not criterion.holds(c, q) for criterion in _CRITERIA)


def rank(
    devices: Sequence[Device],
    peer: Address | None = None,
    route_source: Address | None = None,
    settings: VerbsSettings = _NOTHING_NAMED,
) -> Ranking:
    """Choose where to send from, and say why. Pure: the same for the same arguments, in whatever order they come.

    On the route to the peer before elsewhere, RoCE v2 before v1, the peer's family before another, routable before
    link-local; network devices of overlays and containers last. Among equals the order is by name, port and index.
    What the settings name is taken or refused; a port that is not active, or a GID whose network device is not in
    this network namespace, is taken only where they name it.

    Of several devices that the settings name, each gives its best, or nothing is chosen. Where they name none, tensors
    are striped over several only if all are as good, and a peer that one reaches is known to be reached by the others:
    InfiniBand ports of one subnet, or RoCE by the network device that has the route, as in a bond. Of RoCE devices on
    several networks nothing says that the peer is on the others too; those have to be named.

    **Arguments:**

    - `devices`: of this machine.
    - `peer`: the peer's address; `None`: not known, so that IPv4 goes first, and nothing is striped unless named.
    - `route_source`: the address of this machine that packets to the peer come from (`find_route`); `None`: not known.
    - `settings`: `device`, `port` and `gid_index` restrict the choice.

    **Returns:** the ranking; it has no choice if nothing may be used.

    **Raises:** `ConfigError` if the settings name what is not there, with the nearest that is, and a list of all.
    """
    peer = None if peer is None else plain_address(peer)
    source = None if route_source is None else plain_address(route_source)
    everything = [Candidate(d.name, p, g) for d in devices for p in d.ports for g in p.gids]
    near = frozenset(
        c.gid.net_device for c in everything if c.gid.net_device and c.gid.address == source
    )
    question = _Question(peer, source, near)

    def order(candidate: Candidate) -> tuple[Any, ...]:
        barred = bool(_barred(candidate, settings))
        return (barred, _grades(candidate, question), *_position(candidate))

    ranked = sorted(everything, key=order)
    _check_names(devices, settings)
    for device in settings.device or (None,):
        _check_places(devices, ranked, device, settings)
    unusable = tuple(
        (where, why) for where, why in _without_candidates(devices) if _is_wanted(where, settings)
    )
    usable = [c for c in ranked if not _barred(c, settings)]
    choices = _choices(usable, question, settings)
    if not choices:
        fit = {c.device for c in usable}
        barred = [(c, _barred(c, settings)) for c in ranked]
        reason = _no_choice(
            [(c, why) for c, why in barred if c.device not in fit],
            [(where, why) for where, why in unusable if where.split(" ")[0] not in fit],
        )
        if settings.device is not None and len(settings.device) > 1:
            reason = f"JAXRDMA_DEVICE names {_enumerated(settings.device)}, and not all can be used: {reason}"
        return Ranking((), reason, tuple((c, why or reason) for c, why in barred), unusable)
    others = tuple(
        (c, _barred(c, settings) or _lost_by(c, choices, question))
        for c in ranked
        if c not in choices
    )
    on_route = any(
        _is_infiniband(c) or (source is not None and _on_route(c, question)) for c in choices
    )
    return Ranking(choices, _reason(choices, question, settings), others, unusable, on_route)


def spare_devices(ranking: Ranking) -> tuple[str, ...]:
    """Where one device was chosen that nobody named: the others of its kind, which may be named to stripe over them."""
    if len(ranking.choices) != 1:
        return ()
    layer = ranking.choices[0].port.link_layer
    fit = [
        c.device
        for c, why in ranking.others
        if not why.startswith("JAXRDMA_")
        and (c.port.active, c.port.link_layer) == (True, layer)
        and not _foreign(c)
        and not _OVERLAY.match(c.gid.net_device)
    ]
    return tuple(name for name in dict.fromkeys(fit) if name != ranking.choices[0].device)


def survey(
    host: str | None = None,
    settings: VerbsSettings = _NOTHING_NAMED,
    reader: str = "auto",
    own: bool = False,
) -> Survey:
    """Read this machine's devices and rank them: what `jaxrdma devices` shows is what the transport takes.

    A peer on loopback is on this machine, where every device reaches every other: the ranking is then as without one.

    **Arguments:**

    - `host`: the peer, by name or address; `None`: not known.
    - `settings`, `reader`: as for `rank` and `read_devices`. A reader that cannot read leaves no choice, and says why.
    - `own`: `host` is where this machine is reached by its peers, so packets come from it, whatever leads to it.

    **Raises:** `ConfigError` as `find_route` and `rank` do.
    """
    peer, source = find_route(host) if host else (None, None)
    source = peer if own else source
    try:
        inventory = read_devices(reader)
    except TransportError as error:
        inventory = Inventory(reader, str(error), ())
        return Survey(inventory, peer, source, Ranking((), str(error)))
    if not inventory.devices:
        return Survey(inventory, peer, source, Ranking((), why_there_is_none()))
    near = peer is not None and peer.is_loopback
    ranking = rank(inventory.devices, None if near else peer, None if near else source, settings)
    return Survey(inventory, peer, source, ranking)


def _position(candidate: Candidate) -> tuple[Any, ...]:
    # mlx5_2 before mlx5_10.
    parts = re.split(r"(\d+)", candidate.device)
    natural = tuple((int(p), "") if p.isdecimal() else (-1, p) for p in parts)
    gid = candidate.gid
    return (
        natural,
        candidate.device,
        candidate.port.number,
        gid.index,
        str(gid.address),
        repr(candidate),
    )


def _barred(candidate: Candidate, settings: VerbsSettings) -> str:
    """Why `candidate` may not be used at all; empty if it may."""
    if settings.device is not None and candidate.device not in settings.device:
        return f"JAXRDMA_DEVICE names {_enumerated(settings.device)}"
    if settings.port is not None and candidate.port.number != settings.port:
        return f"JAXRDMA_PORT names port {settings.port}"
    if settings.gid_index is not None and candidate.gid.index != settings.gid_index:
        return f"JAXRDMA_GID_INDEX names {settings.gid_index}"
    if not candidate.port.active and settings.port is None:
        return (
            f"its port is {candidate.port.state}: check the cable, the switch, and `ip link` of its "
            "network device"
        )
    if _foreign(candidate) and settings.gid_index is None:
        return (
            "its network device is not in this network namespace: run on the host's network, or move the "
            "device (or an SR-IOV function of it) into the container"
        )
    return ""


def _no_choice(others: Sequence[tuple[Candidate, str]], unusable: Sequence[tuple[str, str]]) -> str:
    """Every cause once, with the places that have it."""
    places: dict[str, list[str]] = {}
    causes = [(f"{c.device} port {c.port.number}", why) for c, why in others]
    for where, why in [*causes, *unusable]:
        if why and not why.startswith("JAXRDMA_") and where not in places.setdefault(why, []):
            places[why].append(where)
    text = "; ".join(f"{', '.join(where)}: {why}" for why, where in places.items())
    return text or "there is no RDMA device"


def _choices(
    usable: Sequence[Candidate], question: _Question, settings: VerbsSettings
) -> tuple[Candidate, ...]:
    """What to send from, of `usable`, which is in order; nothing if a device that is named has none of these."""
    if settings.device is not None:
        best = {c.device: c for c in reversed(usable)}
        found = tuple(best[name] for name in settings.device if name in best)
        return found if len(found) == len(settings.device) else ()
    taken = list(usable[:1])
    for candidate in usable:
        if all(_is_beside(candidate, other, question) for other in taken):
            taken.append(candidate)
    return tuple(taken[:MOST_DEVICES])


def _is_beside(c: Candidate, other: Candidate, question: _Question) -> bool:
    """Whether tensors may be striped over both unasked: as good, and what reaches one is known to reach the other."""
    if question.peer is None or c.device == other.device:
        return False
    if _grades(c, question) != _grades(other, question):
        return False
    if _is_infiniband(c) and _is_infiniband(other):
        # One LID in one subnet is one port, seen twice: by SR-IOV.
        return _subnet(c) == _subnet(other) and c.port.lid != other.port.lid
    return c.gid.net_device == other.gid.net_device and c.gid.net_device in question.near


def _lost_by(loser: Candidate, winners: Sequence[Candidate], question: _Question) -> str:
    # Each of several devices has its own race.
    winner = next((winner for winner in winners if winner.device == loser.device), winners[0])
    for criterion in _CRITERIA:
        if criterion.holds(winner, question) and not criterion.holds(loser, question):
            return criterion.blame(loser, question)
    if len(winners) == MOST_DEVICES and _is_beside(loser, winner, question):
        return f"as good, but {MOST_DEVICES} devices are the most of a process, and others come first in order"
    return f"as good, but {winner.device} port {winner.port.number} GID {winner.gid.index} comes first in order"


def _reason(choices: Sequence[Candidate], question: _Question, settings: VerbsSettings) -> str:
    named = [
        f"JAXRDMA_{name.upper()}={setting_text(value)}"
        for name in ("device", "port", "gid_index")
        if (value := getattr(settings, name)) is not None
    ]
    said = [f"as {' '.join(named)} says"] if named else []
    merits = [_merits(choice, question) for choice in choices]
    if all(one == merits[0] for one in merits):
        praise, flaws = merits[0]
        text = _judgement([*said, *praise], flaws)
    else:
        each = [f"{c.device}: {_judgement(*one)}" for c, one in zip(choices, merits, strict=True)]
        text = "; ".join([*said, *each])
    if len(choices) == 1:
        return text
    over = f"striped over {_enumerated([choice.device for choice in choices])}"
    return f"{over}{'' if settings.device else _common(choices[0])}: {text}"


def _common(c: Candidate) -> str:
    """What the choices that nobody named are reached alike by."""
    if _is_infiniband(c):
        return f" of one InfiniBand subnet ({_subnet(c)})"
    return f" of one network device ({c.gid.net_device})"


def _merits(choice: Candidate, question: _Question) -> tuple[list[str], list[str]]:
    """What speaks for it, and what against it."""
    praise: list[str] = []
    flaws: list[str] = []
    for criterion in _CRITERIA:
        if criterion.holds(choice, question):
            praise.append(criterion.praise(choice, question))
        else:
            flaws.append(criterion.blame(choice, question))
    if question.peer is not None and question.source is None:
        flaws.append(f"no route to {question.peer} is known")
    return [*filter(None, praise)], flaws


def _judgement(praise: Sequence[str], flaws: Sequence[str]) -> str:
    return ", ".join(praise) + (f"; but {', '.join(flaws)}" if flaws else "")


def _enumerated(names: Sequence[str]) -> str:
    """For people: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _without_candidates(devices: Sequence[Device]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for device in devices:
        if device.problem or not device.ports:
            found.append((device.name, device.problem or "it has no port"))
        for port in device.ports:
            if not port.gids:
                why = (
                    "its GID table is empty: its network device has no address, or is in another network "
                    "namespace"
                )
                found.append((f"{device.name} port {port.number}", why))
    return sorted(found)


def _is_wanted(where: str, settings: VerbsSettings) -> bool:
    return settings.device is None or where.split(" ")[0] in settings.device


def _check_names(devices: Sequence[Device], settings: VerbsSettings) -> None:
    """Refuse settings that name a device that is not there."""
    names = sorted(d.name for d in devices)
    wrong = next((name for name in settings.device or () if name not in names), None)
    if wrong is not None:
        match = difflib.get_close_matches(wrong, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"JAXRDMA_DEVICE={setting_text(settings.device)}: there is no RDMA device {wrong} on this machine"
            + (f"; did you mean {match[0]}? There is {', '.join(names)}" if match else ", nor any")
        )


def _check_places(
    devices: Sequence[Device],
    ranked: Sequence[Candidate],
    device: str | None,
    settings: VerbsSettings,
) -> None:
    """Refuse settings that name what is not there, on `device` if one is named; `ranked` says what is nearest."""
    wanted = [d for d in devices if device in (None, d.name)]
    ports = sorted((d.name, p.number) for d in wanted for p in d.ports)
    if wanted and not ports:
        return  # none of them could be read, and that is what there is to say
    wrong_port = settings.port is not None and settings.port not in {n for _, n in ports}
    if settings.port is not None and wrong_port:
        nearest = min((abs(n - settings.port), n) for _, n in ports)[1] if ports else None
        raise ConfigError(
            f"JAXRDMA_PORT={settings.port}: there is no such port of "
            + (device or "any RDMA device")
            + (f"; did you mean {nearest}? There is " if ports else "")
            + ", ".join(f"{name} port {number}" for name, number in ports)
        )
    left = [
        c for c in ranked if device in (None, c.device) and settings.port in (None, c.port.number)
    ]
    if settings.gid_index is not None and settings.gid_index not in {c.gid.index for c in left}:
        # The best one, rather than the next in number: neighbours in a GID table have little in common.
        usable = [c for c in left if not _barred(c, VerbsSettings(port=settings.port))] or left
        raise ConfigError(
            f"JAXRDMA_GID_INDEX={settings.gid_index}: that slot is empty"
            + (f" on {device}" if device else "")
            + (f"; did you mean {usable[0].gid.index}? Filled is " if left else ", as all are")
            + ", ".join(c.name for c in sorted(left, key=_position))
        )
