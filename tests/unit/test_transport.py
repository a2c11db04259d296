"""Where a process's peers are, which device it takes for them, and what it says where there is none."""

import ipaddress
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrdma import _native, devices, memory, transport
from jaxrdma.cluster import MOST_DEVICES, ClusterSpec, VerbsSettings
from jaxrdma.control import Offer
from jaxrdma.devices import Device, Gid, Inventory, Port
from jaxrdma.errors import ConfigError, TransportError
from jaxrdma.memory import LockLimit, connections_bytes
from jaxrdma.native import transport_options
from jaxrdma.transport import Place


def gid(index: int, address: str, net_device: str, type_: str = "RoCE v2") -> Gid:
    return Gid(index, ipaddress.ip_address(address), type_, net_device)


def device(name: str, *gids: Gid, state: str = "ACTIVE") -> Device:
    return Device(
        name, ports=(Port(1, state, "Ethernet", 4096, 1 << 31, 0, (0xFFFF,), tuple(gids)),)
    )


MACHINE = (
    device("mlx5_0", gid(3, "10.0.0.1", "eth0")),
    device("mlx5_1", gid(3, "10.0.1.1", "eth1"), gid(5, "fd00::1", "eth1")),
    device("mlx5_2", gid(3, "10.0.2.1", "eth2"), state="DOWN"),
)
ROUTES = {
    "10.0.0.9": "10.0.0.1",
    "10.0.1.9": "10.0.1.1",
    "10.0.2.9": "10.0.2.1",
    "fd00::9": "fd00::1",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with three devices, of which one is down, and a route to the network of each."""

    def route(host: str):
        peer = ipaddress.ip_address(host)
        return peer, peer if peer.is_loopback else ipaddress.ip_address(ROUTES.get(host, host))

    monkeypatch.setattr(devices, "find_route", route)
    monkeypatch.setattr(devices, "read_devices", lambda reader: Inventory(reader, "", MACHINE))
    monkeypatch.setattr(devices, "kernel_devices", lambda: tuple(d.name for d in MACHINE))


def spec(coordinator: str = "10.0.0.9:1", role: str = "worker", **changes) -> ClusterSpec:
    verbs = VerbsSettings(**changes.pop("verbs", {}))
    return ClusterSpec(coordinator, role, 0, 2, 1, verbs=verbs, **changes)


def test_peers_are_at_the_servers_or_the_coordinator_or_come_in_where_a_server_listens():
    assert transport.place(spec()) == Place("10.0.0.9")
    assert transport.place(spec(), servers=["10.0.1.9:7"]) == Place("10.0.1.9")
    assert transport.place(spec(), listen="10.0.1.1:0") == Place("10.0.1.1", own=True)
    for wildcard in ("0.0.0.0:0", "[::]:0"):
        assert transport.place(spec(), listen=wildcard) == Place("10.0.0.9")


@pytest.mark.parametrize(
    ("place", "settings", "device", "address"),
    [
        (Place("10.0.0.9"), {}, "mlx5_0", "10.0.0.1"),
        (Place("10.0.1.9"), {}, "mlx5_1", "10.0.1.1"),
        (Place("fd00::9"), {}, "mlx5_1", "fd00::1"),
        (Place("10.0.1.1", own=True), {}, "mlx5_1", "10.0.1.1"),
        (Place("10.0.2.9"), {}, "mlx5_0", "10.0.0.1"),  # by mlx5_2, which is down
        (Place("127.0.0.1"), {}, "mlx5_0", "10.0.0.1"),
        (Place("10.0.0.9"), {"gid_index": 5}, "mlx5_1", "fd00::1"),
        (Place("fd00::9"), {"device": ("mlx5_0",)}, "mlx5_0", "10.0.0.1"),
        (Place("fd00::9"), {"port": 1}, "mlx5_1", "fd00::1"),
    ],
)
def test_the_device_is_that_of_the_route_and_settings_leave_the_rest_ranked(
    machine, place, settings, device, address
):
    cluster = spec(transport="verbs", verbs=settings)
    ranking = transport.choose(cluster, place)
    assert ranking.choice is not None
    assert (ranking.choice.device, str(ranking.choice.gid.address)) == (device, address)
    assert ranking.choice.name in transport.describe(ranking)
    assert ranking.reason in transport.describe(ranking)
    made = transport_options(cluster, "verbs", ranking.choices)
    assert made["transport"] == "verbs"
    (source,) = made["verbs"].sources
    assert (source.device, source.port) == (device, 1)
    assert source.gid == ranking.choice.gid.raw
    assert source.gid_type == "RoCE v2"
    assert source.gid_index == settings.get("gid_index", -1)


def test_every_choice_is_handed_over_and_its_memory_reckoned(machine, capfd):
    named = {"device": ("mlx5_1", "mlx5_0"), "timeout": 12}
    cluster = spec(transport="verbs", verbs=named)
    made, locked = transport.prepare(cluster, "verbs", Place("10.0.0.9"), "its connection")
    sources = made["verbs"].sources
    assert [(s.device, s.port, s.gid_type) for s in sources] == [
        ("mlx5_1", 1, "RoCE v2"),
        ("mlx5_0", 1, "RoCE v2"),
    ]
    assert [s.gid[12:] for s in sources] == [b"\x0a\x00\x01\x01", b"\x0a\x00\x00\x01"]
    assert made["verbs"].timeout == 12
    assert locked is not None
    assert locked.bytes == 2 * connections_bytes(1, cluster.partition_bytes)
    said = capfd.readouterr().err
    assert "worker 0: verbs, mlx5_1 port 1 GID 3 (10.0.1.1, RoCE v2) and mlx5_0 port 1" in said
    assert "striped over mlx5_1 and mlx5_0: as JAXRDMA_DEVICE=mlx5_1,mlx5_0 says" in said
    assert "by each of 2 devices" in said


def test_a_follower_locks_next_to_nothing_before_it_follows_a_model(machine, capfd):
    follower = replace(spec(transport="verbs"), role="follower", index=5, num_servers=3)
    _, locked = transport.prepare(follower, "verbs", Place("10.0.0.9"), "what it asks")
    assert locked is not None
    assert locked.bytes == 3 * (4096 + memory.QUEUE_BYTES)  # a page of requests for each server
    assert "follower 5 locks" in capfd.readouterr().err


def test_without_a_choice_the_settings_are_handed_over(machine):
    assert [s.device for s in transport_options(spec())["verbs"].sources] == [""]
    named = transport_options(spec(verbs={"device": ("a", "b"), "port": 2, "gid_index": 7}))
    assert [(s.device, s.port, s.gid_index) for s in named["verbs"].sources] == [
        ("a", 2, 7),
        ("b", 2, 7),
    ]
    assert _native.MOST_DEVICES == MOST_DEVICES


def test_the_bytes_of_a_gid_are_those_of_the_device():
    assert gid(0, "10.0.0.1", "").raw == bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
    assert gid(0, "fd00::1", "").raw == b"\xfd" + bytes(14) + b"\x01"


def test_what_is_not_there_is_refused_and_none_to_use_names_the_reason(machine):
    with pytest.raises(ConfigError, match="did you mean mlx5_0"):
        transport.choose(spec(verbs={"device": ("mlx4_0",)}), Place("10.0.0.9"))
    with pytest.raises(ConfigError, match="JAXRDMA_GID_INDEX=4.*did you mean 3"):
        transport.check_verbs(spec(verbs={"gid_index": 4}))
    with pytest.raises(TransportError, match="cannot be used: mlx5_2 port 1: its port is DOWN"):
        transport.check_verbs(spec(verbs={"device": ("mlx5_2",)}))


def offer(place: Place, **changes):
    return transport.offer(spec(**changes), place)


def test_auto_offers_verbs_where_the_route_goes_by_a_device(machine, monkeypatch):
    assert offer(Place("10.0.1.9")) == Offer("auto", True, "")
    assert offer(Place("10.0.1.1", own=True)).verbs
    assert offer(Place("10.0.1.9"), verbs={"device": ("mlx5_0", "mlx5_1")}).verbs
    assert offer(Place("10.0.0.9"), transport="verbs") == Offer("verbs", True, "")
    assert offer(Place("10.0.0.9"), transport="tcp") == Offer("tcp", False, "asks for tcp")
    for place, settings, why in (
        (Place("127.0.0.1"), {}, "is on loopback"),
        (Place("10.0.2.9"), {}, "does not reach 10.0.2.9 by an RDMA device, but from 10.0.2.1"),
        (Place("10.0.9.9"), {}, "does not reach 10.0.9.9 by an RDMA device"),
        (
            Place("10.0.2.9"),
            {"device": ("mlx5_2",)},
            "has no RDMA device to use: mlx5_2 port 1: its port",
        ),
        (
            Place("10.0.2.9"),
            {"device": ("mlx5_2",), "port": 1},
            "has no active port: mlx5_2 port 1 GID",
        ),
        (
            Place("10.0.0.9"),
            {"device": ("mlx5_0", "mlx5_2"), "port": 1},
            "has no active port: mlx5_2 port 1 GID",
        ),
        (
            Place("10.0.0.9"),
            {"device": ("mlx5_0", "mlx5_2")},
            "has no RDMA device to use: JAXRDMA_DEVICE names mlx5_0 and mlx5_2, and not all can be used: mlx5_2",
        ),
    ):
        made = offer(place, verbs=settings)
        assert not made.verbs and made.why.startswith(why), made
    with pytest.raises(ConfigError, match="did you mean"):
        offer(Place("10.0.0.9"), verbs={"device": ("mlx9",)})
    monkeypatch.setattr(transport, "read_lock_limit", lambda: LockLimit(65536, 65536, False))
    made = offer(Place("10.0.0.9"))
    assert made.why.startswith("may not lock enough memory: it needs 16.25 MiB; limit of this")
    several = offer(Place("10.0.1.9"), verbs={"device": ("mlx5_0", "mlx5_1")})
    assert "it needs 32.51 MiB (16.25 MiB by each of 2 devices)" in several.why
    monkeypatch.setattr(devices, "kernel_devices", lambda: ())
    assert offer(Place("10.0.0.9")).why == "has no RDMA device"


def test_infiniband_needs_no_route(machine, monkeypatch):
    (port,) = MACHINE[0].ports
    ib = replace(MACHINE[0], ports=(replace(port, link_layer="InfiniBand"),))
    monkeypatch.setattr(devices, "read_devices", lambda reader: Inventory(reader, "", (ib,)))
    assert offer(Place("10.0.9.9")).verbs


def test_verbs_where_there_is_none_is_a_named_error_with_the_cure():
    if devices.kernel_devices():
        pytest.skip("this machine has RDMA devices")
    command = [sys.executable, "-m", "jaxrdma", "server", "--coordinator", "127.0.0.1:1"]
    command += ["--index", "0", "--num-workers", "1", "--num-servers", "1"]
    result = subprocess.run(
        command,
        env=os.environ | {"JAXRDMA_TRANSPORT": "verbs"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # At once: there is no coordinator that it could have waited for.
    assert result.returncode == 1, result.stderr
    assert "server 0: TransportError: transport verbs cannot be used: " in result.stderr
    assert 'rdma link add`, ...), or choose transport="tcp"' in result.stderr


def test_the_independent_peer_speaks_the_engines_protocol():
    """Seen only in a guest otherwise, and long after the change."""
    root = Path(__file__).parents[2]
    wire = (root / "native" / "engine" / "wire.h").read_text()
    peer = (root / "tests" / "verbs" / "peers" / "member.py").read_text()
    (ours,) = re.findall(r"kProtocolVersion = (\d+);", wire)
    (theirs,) = re.findall(r"^VERSION = (\d+)$", peer, re.MULTILINE)
    assert theirs == ours
