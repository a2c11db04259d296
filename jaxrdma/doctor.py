"""What this machine needs for RDMA, and whether it is there. Facts are gathered first; what they mean is pure."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrdma import devices
from jaxrdma.cluster import VerbsSettings
from jaxrdma.errors import ConfigError, TransportError
from jaxrdma.memory import (
    CURE,
    SLOTS_PER_WORKER,
    LockLimit,
    connections_bytes,
    need_text,
    read_lock_limit,
)

OK, WARNING, FAILED = "ok", "warning", "failed"

# Each by a folder that it makes, also where it is built into the kernel.
_CORE = {"ib_core": "/sys/class/infiniband", "ib_uverbs": "/sys/class/infiniband_verbs"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `outcome` is "ok", "warning" or "failed"; `advice` is empty if it is ok."""

    name: str
    outcome: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """The job that this machine shall be part of. Sizes in bytes; what is locked, by each device."""

    workers: int = 1
    servers: int = 1
    slots: int = SLOTS_PER_WORKER
    partition_bytes: int = 1 << 20
    parameter_bytes: int = 256 << 20

    @property
    def server_bytes(self) -> int:
        """What a server locks: for its connections, and as much as all of them hold of sums and parameters."""
        connections = connections_bytes(self.workers, self.partition_bytes, self.slots)
        return connections + 2 * -(-self.parameter_bytes // self.servers)

    @property
    def worker_bytes(self) -> int:
        """What a worker locks: for its connections, and a copy of the parameters."""
        return (
            connections_bytes(self.servers, self.partition_bytes, self.slots) + self.parameter_bytes
        )


@dataclass(frozen=True)
class Node:
    """The node of a device under /dev/infiniband, as this user sees it. `mode`: "0666"; empty if it is not there."""

    path: str
    device: str
    mode: str
    usable: bool


@dataclass(frozen=True)
class Facts:
    """What was found on this machine. Nothing here is judged yet.

    **Arguments:**

    - `modules`: those of ib_core and ib_uverbs that are loaded, or built in.
    - `kernel_devices`: names in /sys/class/infiniband.
    - `nodes`: /dev/infiniband/uverbs*, as the kernel's devices should have them.
    - `library`, `library_problem`: libibverbs's path, or why it cannot be opened.
    - `providers`: file names of the drivers that lie beside the library.
    - `limit`: how much memory this process may lock.
    - `seen`, `seen_problem`: the devices as libibverbs shows them, or why it cannot.
    - `none_reason`: why it shows none; empty if it shows some.
    """

    modules: frozenset[str]
    kernel_devices: tuple[str, ...]
    nodes: tuple[Node, ...]
    library: str
    library_problem: str
    providers: tuple[str, ...]
    limit: LockLimit
    seen: tuple[devices.Device, ...]
    seen_problem: str
    none_reason: str


def gather() -> Facts:
    """Look at this machine. Changes nothing."""
    from jaxrdma import _native

    path = _native.ibverbs_path()
    library, problem = (path, "") if isinstance(path, str) else ("", path.message)
    seen: tuple[devices.Device, ...] = ()
    seen_problem = none_reason = ""
    try:
        shown = devices.read_with_native()  # by the library that training uses
        names = {device.name for device in shown}
        # What it leaves out is judged by itself: see device nodes and providers.
        seen = tuple(device for device in devices.complete(shown) if device.name in names)
    except TransportError as error:
        seen_problem = str(error)
    else:
        none_reason = "" if seen else devices.why_there_is_none()
    return Facts(
        modules=frozenset(name for name, folder in _CORE.items() if Path(folder).exists()),
        kernel_devices=devices.kernel_devices(),
        nodes=tuple(
            Node(str(path), name, _mode(path), os.access(path, os.R_OK | os.W_OK))
            for name, path in devices.device_nodes().items()
        ),
        library=library,
        library_problem=problem,
        providers=_providers(library),
        limit=read_lock_limit(),
        seen=seen,
        seen_problem=seen_problem,
        none_reason=none_reason,
    )


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _mode(path: Path) -> str:
    try:
        return f"{path.stat().st_mode & 0o777:04o}"
    except OSError:
        return ""


def _providers(library: str) -> tuple[str, ...]:
    folder = Path(os.path.realpath(library)).parent / "libibverbs"
    return tuple(sorted(n for n in _names(folder) if n.endswith(".so"))) if library else ()


def examine(facts: Facts, needs: Needs, settings: VerbsSettings) -> list[Check]:
    """What `facts` mean for a job of that size, and for the devices that the settings name. Pure.

    What only a device has (ports, addresses, MTU) is judged where there is one.
    """
    count, found = _device_check(facts, settings)
    checks = [
        _modules(facts),
        _nodes(facts),
        _library(facts),
        _provider_check(facts),
        _locked("server", needs.server_bytes, count, facts.limit),
        _locked("worker", needs.worker_bytes, count, facts.limit),
        found,
    ]
    for device in facts.seen:
        checks += _ports(device, facts.seen)
    return checks


def _modules(facts: Facts) -> Check:
    missing = [name for name in _CORE if name not in facts.modules]
    if missing:
        return Check(
            "kernel modules",
            FAILED,
            f"not loaded: {', '.join(missing)}",
            f"`modprobe -a {' '.join(missing)}` and the driver of the device (mlx5_ib, ...), as root and on the host",
        )
    if not facts.kernel_devices:
        return Check(
            "kernel modules",
            FAILED,
            "loaded, but no driver shows a device in /sys/class/infiniband",
            "load the driver of the device (mlx5_ib, ...); without one, Soft-RoCE: `modprobe rdma_rxe`, "
            "`rdma link add rxe0 type rxe netdev eth0`",
        )
    return Check("kernel modules", OK, f"the kernel has {', '.join(facts.kernel_devices)}")


def _nodes(facts: Facts) -> Check:
    name = "device nodes"
    if not facts.nodes:
        advice = "see kernel modules: they come with the first device"
        return Check(name, FAILED, "no device has one", advice)
    bad = [node for node in facts.nodes if not node.usable]
    if not bad:
        shown = ", ".join(f"{node.path} ({node.device}, {node.mode})" for node in facts.nodes)
        return Check(name, OK, shown)
    absent = ", ".join(f"{node.path} ({node.device})" for node in bad if not node.mode)
    closed = ", ".join(f"{node.path} ({node.device}, {node.mode})" for node in bad if node.mode)
    found: list[str] = []
    advices: list[str] = []
    if absent:
        found.append(f"missing: {absent}")
        advices.append("in a container pass them in (docker: --device=/dev/infiniband)")
    if closed:
        found.append(f"this user may not open {closed}")
        advices.append("mode 0666 is usual: install rdma-core's udev rules, or join their group")
    outcome = FAILED if len(bad) == len(facts.nodes) else WARNING
    return Check(name, outcome, "; ".join(found), "; ".join(advices))


def _library(facts: Facts) -> Check:
    if facts.library_problem:
        return Check(
            "libibverbs",
            FAILED,
            facts.library_problem,
            "install libibverbs1 and ibverbs-providers (Debian), or rdma-core and libibverbs (others)",
        )
    return Check("libibverbs", OK, facts.library)


def _provider_check(facts: Facts) -> Check:
    name = "providers"
    if facts.library_problem:
        return Check(name, FAILED, "unknown without libibverbs", "see libibverbs")
    shown = {device.name for device in facts.seen}
    # Without its node libibverbs leaves a device out before it looks for a driver.
    lost = [node.device for node in facts.nodes if node.mode and node.device not in shown]
    known = [re.sub(r"^lib|-rdmav\d+\.so$|\.so$", "", provider) for provider in facts.providers]
    found = ", ".join(known) or f"none beside {facts.library}"
    if lost:
        return Check(
            name,
            FAILED,
            f"none for {', '.join(lost)}; there are {found}",
            "install the providers (Debian: ibverbs-providers) of libibverbs's own version",
        )
    if not known:
        return Check(
            name,
            # A distribution may keep them elsewhere: then the devices are there all the same.
            OK if facts.seen else WARNING,
            found,
            "" if facts.seen else "install ibverbs-providers (Debian) or rdma-core (others)",
        )
    return Check(name, OK, found)


def _locked(role: str, need: int, count: int, limit: LockLimit) -> Check:
    name = f"locked memory, {role}"
    found = f"needs {need_text(need, count)}; {limit.text}"
    allowed = limit.allows(count * need)
    return Check(name, OK, found) if allowed else Check(name, FAILED, found, CURE)


def _device_check(facts: Facts, settings: VerbsSettings) -> tuple[int, Check]:
    """Over how many devices a job stripes, and whether it has one to use."""

    def failed(found: str, advice: str) -> tuple[int, Check]:
        return 1, Check("devices", FAILED, found, advice)

    if not facts.seen:
        why = facts.seen_problem or facts.none_reason
        return failed(why, "mend the above first; transport tcp works without")
    try:
        ranking = devices.rank(facts.seen, settings=settings)
    except ConfigError as error:
        return failed(str(error), "correct or unset that variable")
    if not ranking.choices:
        wanted = settings.device or [device.name for device in facts.seen]
        found = f"none of {', '.join(wanted)} can be used"
        if len(settings.device or ()) > 1:
            found = ranking.reason
        return failed(found, "see ports and addresses; `jaxrdma devices` says why of each")
    count = len(ranking.choices)
    verb = "the choice is" if count == 1 else "tensors are striped over"
    return count, Check("devices", OK, f"without a peer in mind, {verb} {ranking.name}")


def _ports(device: devices.Device, everything: Sequence[devices.Device]) -> list[Check]:
    if device.problem:
        return [Check(device.name, FAILED, device.problem, "see device nodes")]
    # A spare port may be down; the only one may not.
    spare = any(port.active for other in everything for port in other.ports)
    checks: list[Check] = []
    for port in device.ports:
        name = f"{device.name} port {port.number}"
        if not port.active:
            checks.append(
                Check(
                    name,
                    WARNING if spare else FAILED,
                    f"{port.state}, {port.link_layer}",
                    "check the cable, the switch, and `ip link` of its network device"
                    + ("" if port.link_layer == "Ethernet" else "; a subnet manager must run"),
                )
            )
            continue
        checks.append(Check(name, OK, f"{port.state}, {port.link_layer}"))
        checks += [_addresses(name, port), _mtu(name, port)]
    return checks


def _addresses(name: str, port: devices.Port) -> Check:
    name = f"{name}, GIDs"
    found = ", ".join(f"{gid.index}: {gid.address} ({gid.type})" for gid in port.gids)
    if not port.gids:
        return Check(
            name,
            FAILED,
            "the GID table is empty",
            "give its network device an address, or run on the host's network: it may be in another "
            "network namespace",
        )
    if port.link_layer != "Ethernet":
        return Check(name, OK, found)
    if not any(gid.net_device for gid in port.gids):
        return Check(
            name,
            FAILED,
            f"{found}; the network device is not in this network namespace",
            "run on the host's network, or move the device into the container",
        )
    if all(gid.kind == "link-local" for gid in port.gids):
        return Check(
            name,
            WARNING,
            f"{found}; only link-local",
            "give its network device an address: link-local reaches no other network",
        )
    if all(gid.type == "RoCE v1" for gid in port.gids):
        return Check(
            name, WARNING, f"{found}; only RoCE v1", "RoCE v1 is not routed: enable v2 if it can"
        )
    return Check(name, OK, found)


def _mtu(name: str, port: devices.Port) -> Check:
    name = f"{name}, MTU"
    found = f"{port.active_mtu} bytes of payload per packet"
    if port.link_layer != "Ethernet" or port.active_mtu >= 4096:
        return Check(name, OK, found)
    net_device = next((gid.net_device for gid in port.gids if gid.net_device), "DEVICE")
    return Check(
        name,
        WARNING,
        found,
        f"`ip link set {net_device} mtu 9000` (4200 at least) on both ends and on the switches between: fewer packets",
    )
