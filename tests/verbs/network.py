"""Changes to the guest, mostly to its network, that a test needs, and undoes."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verbs.job import Job, plug_the_cable, run

SYSFS = Path("/sys/class/infiniband")


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # an empty slot
        return ""


def addresses(device: str) -> list[str]:
    """What its GID table holds, as the kernel writes it."""
    gids = SYSFS / device / "ports" / "1" / "gids"
    return [text.strip() for index in range(16) if (text := read(gids / str(index)))]


def wait_for_gid(device: str, ending: str) -> None:
    """Until the device has noticed the address of its network device."""
    deadline = time.monotonic() + 20
    while not any(gid.endswith(ending) for gid in addresses(device)):
        if time.monotonic() > deadline:
            pytest.fail(f"{device} has no GID that ends with {ending}: {addresses(device)}")
        time.sleep(0.05)  # the kernel says nothing when it has


@contextlib.contextmanager
def undoing(*commands: str, job: Job | None = None) -> Iterator[None]:
    """Runs `commands` at the end, whatever happens, and whether they work or not.

    The processes of `job` end before: a device that is in use does not go.
    """
    try:
        yield
    finally:
        if job is not None:
            job.end()
        for command in commands:
            subprocess.run(command.split(), capture_output=True, check=False, timeout=20)


@contextlib.contextmanager
def cable_to_be_plugged() -> Iterator[None]:
    """Whatever happens to the cable, it is good again at the end."""
    try:
        yield
    finally:
        plug_the_cable()


@contextlib.contextmanager
def passable(file: Path) -> Iterator[None]:
    """Every user finds his way to `file`, which may lie in root's home."""
    closed = {folder: mode for folder in file.parents if not (mode := folder.stat().st_mode) & 1}
    try:
        for folder, mode in closed.items():
            folder.chmod(mode | 1)
        yield
    finally:
        for folder, mode in closed.items():
            folder.chmod(mode)


@contextlib.contextmanager
def mtu(network_device: str, bytes_: int) -> Iterator[None]:
    with undoing(f"ip link set {network_device} mtu 9000"):
        run("ip", "link", "set", network_device, "mtu", str(bytes_))
        yield


@contextlib.contextmanager
def route_by_the_cable() -> Iterator[None]:
    """What this machine sends to 10.88.0.2 leaves by v0, as if that were another machine's."""
    rule = "pref 15 iif lo to 10.88.0.2 lookup 100"
    with undoing(f"ip rule del {rule}"):
        run("ip", "rule", "add", *rule.split())
        yield


@contextlib.contextmanager
def spare_device(name: str = "rxe2", address: str = "198.51.100.1/24") -> Iterator[None]:
    """One more device, on a network device of its own that leads nowhere."""
    with undoing(f"rdma link delete {name}", "ip link del d0"):
        run("ip", "link", "add", "d0", "type", "dummy")
        run("ip", "address", "add", address, "dev", "d0")
        run("ip", "link", "set", "d0", "up")
        run("rdma", "link", "add", name, "type", "rxe", "netdev", "d0")
        wait_for_gid(name, "c633:6401")
        yield


@contextlib.contextmanager
def ipv6_pair(job: Job) -> Iterator[None]:
    """rxe4 and rxe5 on a cable of their own, w0 and w1, whose ends have fd88::1 and fd88::2, and no IPv4."""
    rules = [
        "pref 10 iif w0 lookup local",
        "pref 10 iif w1 lookup local",
        "pref 15 iif lo to fd88::2 lookup 110",
        "pref 20 from fd88::2 to fd88::1 lookup 111",
    ]
    undo = [f"ip -6 rule del {rule}" for rule in rules]
    undo += ["ip -6 rule add pref 0 lookup local", "ip -6 rule del pref 900 lookup local"]
    with undoing(
        "rdma link delete rxe4", "rdma link delete rxe5", "ip link del w0", *undo, job=job
    ):
        run("ip", "link", "add", "w0", "type", "veth", "peer", "name", "w1")
        run("ip", "-6", "rule", "add", "pref", "900", "lookup", "local")
        run("ip", "-6", "rule", "del", "pref", "0")
        for rule in rules:
            run("ip", "-6", "rule", "add", *rule.split())
        for own, network_device in (("fd88::1", "w0"), ("fd88::2", "w1")):
            run("ip", "-6", "address", "add", f"{own}/128", "dev", network_device, "nodad")
            run("ip", "link", "set", network_device, "mtu", "9000", "up")
        for own, other, network_device, table in (
            ("fd88::1", "fd88::2", "w0", "110"),
            ("fd88::2", "fd88::1", "w1", "111"),
        ):
            route = ("route", "add", other, "dev", network_device, "src", own, "table", table)
            run("ip", "-6", *route)
        for name, network_device, ending in (("rxe4", "w0", "0001"), ("rxe5", "w1", "0002")):
            run("rdma", "link", "add", name, "type", "rxe", "netdev", network_device)
            wait_for_gid(name, f"fd88:0000:0000:0000:0000:0000:0000:{ending}")
        yield


@contextlib.contextmanager
def second_cable(job: Job) -> Iterator[None]:
    """rxe6 and rxe7 on a cable of their own, x0 and x1, whose ends have 10.88.6.1 and 10.88.6.2."""
    ends = (("10.88.6.1", "10.88.6.2", "x0", "106"), ("10.88.6.2", "10.88.6.1", "x1", "107"))
    rules = [
        rule
        for own, other, network_device, table in ends
        for rule in (
            f"pref 10 iif {network_device} lookup local",
            f"pref 20 from {own} to {other} lookup {table}",
        )
    ]
    undo = [f"ip rule del {rule}" for rule in rules]
    with undoing(
        "rdma link delete rxe6", "rdma link delete rxe7", "ip link del x0", *undo, job=job
    ):
        run("ip", "link", "add", "x0", "type", "veth", "peer", "name", "x1")
        for rule in rules:
            run("ip", "rule", "add", *rule.split())
        for own, other, network_device, table in ends:
            run("ip", "address", "add", f"{own}/32", "dev", network_device)
            run("ip", "link", "set", network_device, "mtu", "9000", "up")
            route = ("route", "add", other, "dev", network_device, "src", own, "table", table)
            run("ip", *route)
            settings = Path("/proc/sys/net/ipv4/conf") / network_device
            (settings / "accept_local").write_text("1")
            (settings / "rp_filter").write_text("0")
        for name, network_device, ending in (("rxe6", "x0", "0601"), ("rxe7", "x1", "0602")):
            run("rdma", "link", "add", name, "type", "rxe", "netdev", network_device)
            wait_for_gid(name, f"0a58:{ending}")
        yield


@contextlib.contextmanager
def nothing_leaves(network_device: str) -> Iterator[None]:
    """Its carrier stays, and what it sends is lost."""
    with undoing(f"tc qdisc del dev {network_device} root"):
        run(*f"tc qdisc add dev {network_device} root netem loss 100%".split())
        yield


@contextlib.contextmanager
def neighbours_known() -> Iterator[None]:
    """v0 and v1 need not ask for each other's hardware address."""
    ends = (("10.88.0.2", "v0", "v1"), ("10.88.0.1", "v1", "v0"))
    with undoing(*(f"ip neigh del {address} dev {near}" for address, near, _ in ends)):
        for address, near, far in ends:
            hardware = Path(f"/sys/class/net/{far}/address").read_text().strip()
            entry = f"{address} lladdr {hardware} nud permanent dev {near}"
            run("ip", "neigh", "replace", *entry.split())
        yield


def bytes_sent(network_device: str) -> int:
    return int(Path(f"/sys/class/net/{network_device}/statistics/tx_bytes").read_text())
