"""The ranking of RDMA devices: one order, whatever comes in; what is named is taken or refused; reports of users."""

import ipaddress
import itertools
import json
import sys
import types
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrdma import cli, devices
from jaxrdma.cluster import MOST_DEVICES, ClusterSpec, VerbsSettings
from jaxrdma.devices import Candidate, Device, Gid, Port, Ranking, rank
from jaxrdma.errors import ConfigError, TransportError

hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("steady")

ADDRESSES = [
    ipaddress.ip_address(text)
    for text in (
        "10.0.0.1",
        "10.0.1.1",
        "172.17.0.2",
        "fd00::1",
        "2001:db8::1",
        "fe80::1",
        "fe80::2",
    )
]
addresses = st.sampled_from(ADDRESSES)
gids = st.builds(
    Gid,
    index=st.integers(0, 6),
    address=addresses,
    type=st.sampled_from(["RoCE v1", "RoCE v2", "IB"]),
    net_device=st.sampled_from(["eth0", "eth1", "cni0", "docker0", ""]),
)
ports = st.builds(
    Port,
    number=st.just(0),
    state=st.sampled_from(["ACTIVE", "DOWN", "INIT"]),
    link_layer=st.sampled_from(["Ethernet", "Ethernet", "InfiniBand"]),
    active_mtu=st.sampled_from([1024, 4096]),
    max_message=st.just(1 << 31),
    lid=st.integers(0, 3),
    pkeys=st.just((0xFFFF,)),
    gids=st.lists(gids, max_size=4, unique_by=lambda gid: gid.index).map(tuple),
)


@st.composite
def machines(draw: st.DrawFn) -> list[Device]:
    names = draw(st.lists(st.sampled_from(["mlx5_0", "mlx5_2", "mlx5_10", "rxe0"]), unique=True))
    made = []
    for name in names:
        found = draw(st.lists(ports, max_size=2))
        numbered = tuple(replace(port, number=i + 1) for i, port in enumerate(found))
        problem = "" if numbered or draw(st.booleans()) else "could not be opened"
        made.append(Device(name, ports=numbered, problem=problem))
    return made


@st.composite
def pools(draw: st.DrawFn) -> list[Device]:
    """Machines whose devices are often as good as each other."""
    layer = draw(st.sampled_from(["Ethernet", "InfiniBand"]))
    found = st.builds(
        Gid,
        index=st.just(0),
        address=st.sampled_from([ADDRESSES[0], *ADDRESSES[3:6]]),
        type=st.just("RoCE v2" if layer == "Ethernet" else "IB"),
        net_device=st.sampled_from(["bond0", "bond0", "eth1"] if layer == "Ethernet" else [""]),
    )
    made = ports.flatmap(
        lambda port: st.builds(
            replace,
            st.just(replace(port, state="ACTIVE", link_layer=layer, number=1)),
            lid=st.integers(1, 20),
            gids=st.tuples(found),
        )
    )
    return [Device(f"mlx5_{i}", ports=(draw(made),)) for i in range(draw(st.integers(1, 7)))]


optional_addresses = st.none() | addresses
settings = st.builds(
    VerbsSettings,
    device=st.none()
    | st.lists(
        st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"]), min_size=1, unique=True
    ).map(tuple),
    port=st.none() | st.integers(1, 3),
    gid_index=st.none() | st.integers(0, 7),
)


def candidates(machine: list[Device]) -> list[Candidate]:
    return [Candidate(d.name, p, g) for d in machine for p in d.ports for g in p.gids]


def everything(ranking: Ranking) -> list[Candidate]:
    return [*ranking.choices, *(candidate for candidate, _ in ranking.others)]


@hypothesis.given(machines() | pools(), optional_addresses, optional_addresses, st.randoms())
def test_the_order_is_the_same_however_the_devices_come(machine, peer, source, random):
    expected = rank(machine, peer, source)
    hypothesis.event(f"{len(expected.choices)} choices")
    shuffled = [
        replace(
            device,
            ports=tuple(
                replace(port, gids=tuple(random.sample(port.gids, len(port.gids))))
                for port in random.sample(device.ports, len(device.ports))
            ),
        )
        for device in random.sample(machine, len(machine))
    ]
    again = rank(shuffled, peer, source)
    names = [candidate.name for candidate in everything(expected)]
    assert [candidate.name for candidate in everything(again)] == names
    assert (again.reason, again.unusable) == (expected.reason, expected.unusable)
    assert [why for _, why in again.others] == [why for _, why in expected.others]


@hypothesis.given(machines() | pools(), optional_addresses, optional_addresses)
def test_every_candidate_is_ranked_once_and_every_loser_has_a_reason(machine, peer, source):
    ranking = rank(machine, peer, source)
    names = [candidate.name for candidate in everything(ranking)]
    assert sorted(names) == sorted(candidate.name for candidate in candidates(machine))
    assert len(set(names)) == len(names)
    assert ranking.reason
    assert all(why for _, why in ranking.others)
    for device in machine:
        whole = [f"{device.name} port {p.number}" for p in device.ports if not p.gids]
        whole += [] if device.ports else [device.name]
        assert [
            where for where, _ in ranking.unusable if where.split(" ")[0] == device.name
        ] == whole


@hypothesis.given(machines(), optional_addresses, optional_addresses)
def test_of_any_two_the_better_one_wins_with_or_without_the_others(machine, peer, source):
    # Only of those whose network device stays known: which devices are near the route is a matter of all.
    ranking = rank(machine, peer, source)
    order = [
        c
        for c in everything(ranking)
        if c not in ranking.choices[1:]  # beside the best one, before better ones
        and c.gid.address != source
        and c.gid.net_device
        not in {g.gid.net_device for g in candidates(machine) if g.gid.address == source}
    ]

    def alone(*pair: Candidate) -> list[Device]:
        made: dict[str, Device] = {}
        for c in pair:
            device = made.get(c.device, Device(c.device))
            same = [p for p in device.ports if p.number == c.port.number]
            rest = tuple(p for p in device.ports if p.number != c.port.number)
            gids = (*(same[0].gids if same else ()), c.gid)
            made[c.device] = replace(device, ports=(*rest, replace(c.port, gids=gids)))
        return list(made.values())

    for better, worse in itertools.combinations(order, 2):
        names = [c.name for c in everything(rank(alone(worse, better), peer, source))]
        assert names == [better.name, worse.name]


@hypothesis.given(machines(), optional_addresses, optional_addresses, settings)
def test_what_is_named_is_taken_or_refused(machine, peer, source, named):
    names = [device.name for device in machine]
    matching = [
        c
        for c in candidates(machine)
        if named.port in (None, c.port.number) and named.gid_index in (None, c.gid.index)
    ]
    if named.device is None:
        complete = bool(matching)
    else:
        complete = {c.device for c in matching} >= set(named.device)
    try:
        ranking = rank(machine, peer, source, named)
    except ConfigError as error:
        assert not complete
        assert str(error).startswith("JAXRDMA_")
        if not set(named.device or ()) <= set(names):
            assert all(name in str(error) for name in names)
        return
    assert set(named.device or ()) <= set(names)
    if ranking.choices:
        assert set(ranking.choices) <= set(matching)
        if named.device is not None:
            assert tuple(c.device for c in ranking.choices) == named.device
        for name, variable in (
            ClusterSpec("h:1", "worker", 0, 1, 1, verbs=named).to_environment().items()
        ):
            if name in ("JAXRDMA_DEVICE", "JAXRDMA_PORT", "JAXRDMA_GID_INDEX"):
                assert f"{name}={variable}" in ranking.reason
    elif named.port is not None and named.gid_index is not None:
        assert not complete
    else:
        assert ranking.reason
        assert all(why for _, why in ranking.others)


@hypothesis.given(machines(), optional_addresses, optional_addresses, settings)
def test_each_of_several_devices_that_are_named_gives_what_it_gives_alone(
    machine, peer, source, named
):
    try:
        ranking = rank(machine, peer, source, named)
        alone = [
            rank(machine, peer, source, replace(named, device=(name,)))
            for name in named.device or ()
        ]
    except ConfigError:
        return
    if named.device is not None:
        choices = tuple(one.choice for one in alone)
        assert ranking.choices == (() if None in choices else choices)


@hypothesis.given(machines() | pools(), optional_addresses, optional_addresses)
def test_what_nobody_named_is_striped_only_where_the_peer_is_reached_alike(machine, peer, source):
    ranking = rank(machine, peer, source)
    names = [c.device for c in ranking.choices]
    assert len(set(names)) == len(names) <= MOST_DEVICES
    assert len(names) < 2 or peer is not None
    for first, other in itertools.combinations(ranking.choices, 2):
        assert first.port.active and other.port.active
        assert (first.gid.type == "RoCE v1") == (other.gid.type == "RoCE v1")
        assert first.port.link_layer == other.port.link_layer
        if first.port.link_layer == "InfiniBand":
            assert first.gid.raw[:8] == other.gid.raw[:8]
            assert first.port.lid != other.port.lid
        else:
            assert first.gid.net_device == other.gid.net_device
            assert source in {
                c.gid.address
                for c in candidates(machine)
                if c.gid.net_device == first.gid.net_device
            }
            assert ranking.on_route


@hypothesis.given(machines() | pools(), optional_addresses, optional_addresses)
def test_striping_leaves_the_best_the_first(machine, peer, source):
    ranking = rank(machine, peer, source)
    for choice in ranking.choices[1:]:
        without = [device for device in machine if device.name != choice.device]
        assert rank(without, peer, source).choice == ranking.choice or choice.gid.address == source


@hypothesis.given(machines(), optional_addresses, optional_addresses, settings)
def test_an_inactive_port_is_never_chosen_without_being_named(machine, peer, source, named):
    try:
        ranking = rank(machine, peer, source, named)
    except ConfigError:
        return
    for choice in ranking.choices:
        if not choice.port.active:
            assert named.port == choice.port.number
            assert choice.port.state in ranking.reason
            assert ranking.down is not None


@hypothesis.given(machines(), optional_addresses, optional_addresses)
def test_overlays_are_chosen_only_where_there_is_nothing_else(machine, peer, source):
    choice = rank(machine, peer, source).choice
    if choice is not None and choice.gid.net_device in ("cni0", "docker0"):
        for other in candidates(machine):
            assert (
                not other.port.active
                or other.gid.net_device in ("cni0", "docker0")
                or (other.port.link_layer == "Ethernet" and not other.gid.net_device)
            )


# Reports of users.

PEER = ipaddress.ip_address("10.0.0.2")
V1_LOCAL = Gid(0, ipaddress.ip_address("fe80::1"), "RoCE v1", "eth0")
V2_LOCAL = Gid(1, ipaddress.ip_address("fe80::1"), "RoCE v2", "eth0")
V1_IPV4 = Gid(2, ipaddress.ip_address("10.0.0.1"), "RoCE v1", "eth0")
V2_IPV4 = Gid(3, ipaddress.ip_address("10.0.0.1"), "RoCE v2", "eth0")
V2_IPV6 = Gid(5, ipaddress.ip_address("2001:db8::1"), "RoCE v2", "eth0")


def roce(*gids: Gid, state: str = "ACTIVE", number: int = 1) -> Port:
    return Port(number, state, "Ethernet", 4096, 1 << 31, 0, (0xFFFF,), gids)


def rails(count: int, name: str = "mlx5_") -> list[Device]:
    """Device i has the address 10.0.i.1 on network device eth-i."""
    return [
        Device(
            f"{name}{i}",
            ports=(
                roce(
                    Gid(0, ipaddress.ip_address(f"fe80::{i + 1}"), "RoCE v2", f"eth{i}"),
                    Gid(3, ipaddress.ip_address(f"10.0.{i}.1"), "RoCE v2", f"eth{i}"),
                ),
            ),
        )
        for i in range(count)
    ]


def test_the_first_slot_of_the_table_is_not_taken_for_the_right_one():
    ranking = rank([Device("mlx5_0", ports=(roce(V1_LOCAL, V2_LOCAL, V1_IPV4, V2_IPV4),))], PEER)
    assert ranking.choice is not None
    assert ranking.choice.gid == V2_IPV4
    why = {candidate.gid.index: text for candidate, text in ranking.others}
    assert "RoCE v1" in why[0] and "RoCE v1" in why[2]
    assert "link-local" in why[1]


def test_link_local_is_taken_only_where_there_is_nothing_else_or_the_peer_is_so():
    port = roce(V2_LOCAL, V2_IPV6)
    assert rank([Device("a", ports=(port,))], PEER).choice.gid == V2_IPV6
    assert rank([Device("a", ports=(port,))]).choice.gid == V2_IPV6
    assert rank([Device("a", ports=(roce(V2_LOCAL),))], PEER).choice.gid == V2_LOCAL
    near = ipaddress.ip_address("fe80::2")
    ranking = rank([Device("a", ports=(roce(V2_LOCAL, V2_IPV6, V2_IPV4),))], near)
    assert ranking.choice.gid == V2_LOCAL


def test_a_device_with_ipv6_alone_gets_an_ipv6_address_for_an_ipv4_peer_and_says_so():
    ranking = rank([Device("mlx5_0", ports=(roce(V1_LOCAL, V2_LOCAL, V2_IPV6),))], PEER)
    assert ranking.choice.gid == V2_IPV6
    assert "but global IPv6, and the peer is IPv4" in ranking.reason


def test_holes_in_the_table_and_whole_empty_tables_are_passed_over():
    machine = [Device("mlx5_0", ports=(roce(),)), Device("mlx5_1", ports=(roce(V2_IPV4),))]
    ranking = rank(machine, PEER)
    assert (ranking.choice.device, ranking.choice.gid.index) == ("mlx5_1", 3)
    ((where, why),) = ranking.unusable
    assert where == "mlx5_0 port 1"
    assert "network namespace" in why
    ranking = rank(machine[:1], PEER)
    assert ranking.choice is None
    assert "mlx5_0 port 1: its GID table is empty" in ranking.reason


@pytest.mark.parametrize("rail", range(8))
def test_of_rails_that_are_not_connected_the_peers_is_taken(rail):
    peer, source = ipaddress.ip_address(f"10.0.{rail}.9"), ipaddress.ip_address(f"10.0.{rail}.1")
    ranking = rank(rails(8), peer, source)
    assert (ranking.choice.device, ranking.choice.gid.index) == (f"mlx5_{rail}", 3)
    assert f"the route to {peer} leaves from {source}" in ranking.reason
    assert all(
        f"leaves from {source}, not by this port" in why
        for candidate, why in ranking.others
        if candidate.device != ranking.choice.device
    )


def test_names_of_devices_that_differ_from_host_to_host_do_not_matter():
    peer, source = ipaddress.ip_address("10.0.1.9"), ipaddress.ip_address("10.0.1.1")
    for name in ("mlx5_", "rocep", "bnxt_re"):
        assert rank(rails(3, name), peer, source).choice.device == f"{name}1"


def test_a_device_off_the_route_is_used_if_it_is_named_and_the_route_is_shown():
    peer, source = ipaddress.ip_address("10.0.1.9"), ipaddress.ip_address("10.0.1.1")
    ranking = rank(rails(2), peer, source, VerbsSettings(device=("mlx5_0",)))
    assert ranking.choice.device == "mlx5_0"
    assert ranking.reason.startswith("as JAXRDMA_DEVICE=mlx5_0 says")
    assert "but the route to 10.0.1.9 leaves from 10.0.1.1, not by this port" in ranking.reason
    assert "but no route to 10.0.1.9 is known" in rank(rails(1), peer).reason


def test_a_gid_of_another_network_namespace_is_not_used_and_the_way_out_is_named():
    foreign = replace(V2_IPV4, net_device="")
    ranking = rank([Device("mlx5_0", ports=(roce(foreign),))], PEER)
    assert ranking.choice is None
    for word in ("not in this network namespace", "host's network", "SR-IOV"):
        assert word in ranking.reason
    named = rank([Device("mlx5_0", ports=(roce(foreign),))], PEER, None, VerbsSettings(gid_index=3))
    assert named.choice.gid == foreign
    assert "but its network device is not in this network namespace" in named.reason


# Rules.


def test_the_network_device_of_the_route_counts_if_the_address_has_no_gid_of_v2():
    far = Device("mlx5_0", ports=(roce(replace(V2_IPV4, address=ADDRESSES[1], net_device="eth1")),))
    near = Device("mlx5_1", ports=(roce(V1_IPV4, V2_IPV6),))
    ranking = rank([far, near], PEER, V1_IPV4.address)
    assert (ranking.choice.device, ranking.choice.gid) == ("mlx5_1", V2_IPV6)
    assert "by its network device eth0" in ranking.reason


def test_of_two_addresses_of_one_network_device_the_routes_is_taken():
    second = replace(V2_IPV4, index=9, address=ADDRESSES[1])
    machine = [Device("mlx5_0", ports=(roce(V2_IPV4, second),))]
    assert rank(machine, PEER, second.address).choice.gid == second


def test_infiniband_needs_no_address():
    port = Port(
        1, "ACTIVE", "InfiniBand", 4096, 1 << 30, 7, (0xFFFF,), (Gid(0, ADDRESSES[5], "IB", ""),)
    )
    ranking = rank([Device("mlx4_0", ports=(port,))], PEER)
    assert ranking.choice is not None
    assert "InfiniBand" in ranking.reason
    assert "link-local" not in ranking.reason


def test_a_mapped_peer_is_an_ipv4_peer():
    port = roce(V2_IPV4, V2_IPV6)
    mapped = ipaddress.ip_address("::ffff:10.0.0.2")
    assert rank([Device("a", ports=(port,))], mapped).choice.gid == V2_IPV4


def test_wrong_names_are_refused_with_the_nearest_and_all_that_there_is():
    machine = [*rails(2), Device("bnxt_re0", ports=(roce(V2_IPV4), roce(V2_IPV6, number=2)))]
    with pytest.raises(
        ConfigError, match=r"mlx_1.*did you mean mlx5_1\? .*bnxt_re0, mlx5_0, mlx5_1"
    ):
        rank(machine, settings=VerbsSettings(device=("mlx_1",)))
    with pytest.raises(ConfigError, match=r"PORT=4.*bnxt_re0; did you mean 2\?.*bnxt_re0 port 1, "):
        rank(machine, settings=VerbsSettings(device=("bnxt_re0",), port=4))
    with pytest.raises(ConfigError, match=r"GID_INDEX=1: .*did you mean 3\? .*GID 0 .*fe80.*GID 3"):
        rank(machine, settings=VerbsSettings(device=("mlx5_1",), gid_index=1))
    with pytest.raises(ConfigError, match=r"nor any"):
        rank([], settings=VerbsSettings(device=("mlx5_1",)))


def test_a_device_that_cannot_be_opened_is_not_refused_by_name_but_explained():
    machine = [Device("mlx5_0", problem="could not be opened"), *rails(2)[1:]]
    ranking = rank(machine, settings=VerbsSettings(device=("mlx5_0",), port=1, gid_index=3))
    assert ranking.choice is None
    assert ranking.reason == "mlx5_0: could not be opened"
    assert rank(machine).choice.device == "mlx5_1"


def test_a_port_that_is_down_says_so():
    ranking = rank([Device("mlx5_0", ports=(roce(V2_IPV4, state="DOWN"),))])
    assert ranking.choice is None
    assert "its port is DOWN: check the cable" in ranking.reason


# Several devices.

SOURCE = ipaddress.ip_address("10.0.0.1")


def hcas(*lids: int, prefix: str = "fe80::") -> list[Device]:
    """InfiniBand devices mlx5_0, mlx5_1, ... of one subnet, with these LIDs."""
    return [
        Device(
            f"mlx5_{i}",
            ports=(
                Port(
                    *(1, "ACTIVE", "InfiniBand", 4096, 1 << 30, lid, (0xFFFF,)),
                    (Gid(0, ipaddress.ip_address(f"{prefix}{i + 1}"), "IB", ""),),
                ),
            ),
        )
        for i, lid in enumerate(lids)
    ]


def names(ranking: Ranking) -> list[str]:
    return [choice.device for choice in ranking.choices]


def test_infiniband_ports_of_one_subnet_are_striped_over():
    ranking = rank(hcas(7, 8), PEER, SOURCE)
    assert names(ranking) == ["mlx5_0", "mlx5_1"]
    assert ranking.reason.startswith(
        "striped over mlx5_0 and mlx5_1 of one InfiniBand subnet (fe80::/64): InfiniBand"
    )
    assert ranking.others == ()
    assert ranking.on_route
    assert ranking.name == "mlx5_0 port 1 GID 0 (fe80::1, IB) and mlx5_1 port 1 GID 0 (fe80::2, IB)"


def test_of_eight_the_first_four_are_striped_over_and_the_rest_is_told_why_not():
    ranking = rank(hcas(*range(1, 9)), PEER, SOURCE)
    assert names(ranking) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert "striped over mlx5_0, mlx5_1, mlx5_2 and mlx5_3 of one" in ranking.reason
    assert [c.device for c, _ in ranking.others] == ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"]
    assert all("4 devices are the most" in why for _, why in ranking.others)


@pytest.mark.parametrize(
    ("machine", "peer"),
    [
        (hcas(7, 8), None),
        (hcas(7, 7), PEER),  # one port, and a virtual function of it
        ([*hcas(7), *hcas(0, 8, prefix="fec0::")[1:]], PEER),
        ([*hcas(7), *rails(2)[1:]], PEER),
        ([*hcas(7), replace(hcas(0, 8)[1], ports=(replace(hcas(8)[0].ports[0], state="DOWN"),))], PEER),
        (rails(2), PEER),
        (rails(2), None),
    ],
)  # fmt: skip
def test_a_device_that_may_not_reach_the_peer_is_not_striped_over_unasked(machine, peer):
    for source in (None, SOURCE):
        assert len(rank(machine, peer, source).choices) == 1


def test_ports_are_matched_by_their_subnet_not_by_their_number():
    (first,) = hcas(7)
    (far, near) = (*hcas(8, prefix="fec0::1:"), *hcas(9, prefix="fe80::1:"))
    ports = (far.ports[0], replace(near.ports[0], number=2))
    ranking = rank([first, Device("mlx5_1", ports=ports)], PEER)
    assert [(c.device, c.port.number) for c in ranking.choices] == [("mlx5_0", 1), ("mlx5_1", 2)]
    assert "mlx5_1 port 2 GID 0 comes first in order" in ranking.others[0][1]


def test_two_devices_of_one_bond_are_striped_over():
    bond = (replace(V2_LOCAL, net_device="bond0"), replace(V2_IPV4, net_device="bond0"))
    machine = [Device(f"mlx5_{i}", ports=(roce(*bond),)) for i in range(2)]
    ranking = rank(machine, PEER, SOURCE)
    assert names(ranking) == ["mlx5_0", "mlx5_1"]
    assert ranking.reason == (
        "striped over mlx5_0 and mlx5_1 of one network device (bond0): the route to 10.0.0.2 leaves from "
        "10.0.0.1, RoCE v2, IPv4 like the peer"
    )
    assert all("link-local" in why or "IPv6" in why for _, why in ranking.others)
    assert names(rank(machine, PEER)) == ["mlx5_0"]


def test_rails_that_are_named_are_striped_over_in_the_order_named():
    named = VerbsSettings(device=("mlx5_1", "mlx5_0"))
    ranking = rank(rails(3), PEER, SOURCE, named)
    assert names(ranking) == ["mlx5_1", "mlx5_0"]
    assert [c.gid.index for c in ranking.choices] == [3, 3]
    assert ranking.on_route
    assert ranking.reason == (
        "striped over mlx5_1 and mlx5_0: as JAXRDMA_DEVICE=mlx5_1,mlx5_0 says; mlx5_1: RoCE v2, IPv4 like "
        "the peer; but the route to 10.0.0.2 leaves from 10.0.0.1, not by this port, not the address 10.0.0.1 "
        "that the route to 10.0.0.2 leaves from; mlx5_0: the route to 10.0.0.2 leaves from 10.0.0.1, RoCE v2, "
        "IPv4 like the peer"
    )
    why = {(c.device, c.gid.index): text for c, text in ranking.others}
    assert "link-local" in why["mlx5_1", 0] or "IPv6" in why["mlx5_1", 0]
    assert why["mlx5_2", 3] == "JAXRDMA_DEVICE names mlx5_1 and mlx5_0"
    assert rank(rails(3), settings=named).reason == (
        "striped over mlx5_1 and mlx5_0: as JAXRDMA_DEVICE=mlx5_1,mlx5_0 says, RoCE v2, IPv4"
    )


def test_of_devices_that_are_named_none_is_left_out_silently():
    named = VerbsSettings(device=("mlx5_0", "mlx5_1"))
    closed = Device("mlx5_1", problem="could not be opened")
    down = Device("mlx5_1", ports=(roce(V2_IPV4, state="DOWN"),))
    spare = roce(number=2, state="DOWN")  # of the one that can be used: no matter
    good = replace(rails(1)[0], ports=(*rails(1)[0].ports, spare))
    for other, why in ((closed, "could not be opened"), (down, "its port is DOWN")):
        ranking = rank([good, other], PEER, SOURCE, named)
        assert ranking.choices == ()
        assert ranking.reason.startswith(
            "JAXRDMA_DEVICE names mlx5_0 and mlx5_1, and not all can be used: mlx5_1"
        )
        assert why in ranking.reason
        assert "mlx5_0 port" not in ranking.reason
        assert all(why for _, why in ranking.others)


def test_what_is_named_must_be_there_on_each_device_that_is_named():
    both = ("mlx5_0", "mlx5_1")
    machine = [*rails(1), Device("mlx5_1", ports=(roce(V2_IPV6),))]
    with pytest.raises(
        ConfigError, match=r"mlx5_0,mlx9.* no RDMA device mlx9 .*did you mean mlx5_"
    ):
        rank(machine, settings=VerbsSettings(device=("mlx5_0", "mlx9")))
    with pytest.raises(ConfigError, match=r"INDEX=3: that slot is empty on mlx5_1; did you mean 5"):
        rank(machine, settings=VerbsSettings(device=both, gid_index=3))
    two = replace(machine[0], ports=(*machine[0].ports, roce(V2_IPV4, number=2)))
    with pytest.raises(ConfigError, match=r"PORT=2: there is no such port of mlx5_1"):
        rank([two, machine[1]], settings=VerbsSettings(device=both, port=2))


def test_a_peer_on_loopback_is_no_reason_to_stripe(monkeypatch):
    found = devices.Inventory("native", "a test", tuple(hcas(7, 8)))
    monkeypatch.setattr(devices, "read_devices", lambda reader: found)
    assert names(devices.survey("127.0.0.1").ranking) == ["mlx5_0"]
    assert names(devices.survey(None).ranking) == ["mlx5_0"]
    monkeypatch.setattr(devices, "find_route", lambda host: (PEER, SOURCE))
    assert names(devices.survey("elsewhere").ranking) == ["mlx5_0", "mlx5_1"]


# Looking for the route.


def test_the_route_to_this_machine_is_found_without_sending():
    peer, source = devices.find_route("127.0.0.1")
    assert peer == source == ipaddress.ip_address("127.0.0.1")


def test_a_peer_without_an_address_is_a_mistake_of_the_user():
    with pytest.raises(ConfigError, match=r"peer 'no\.such\.host\.invalid' has no address"):
        devices.find_route("no.such.host.invalid")


# Reading.


class FakeContext:
    closed = 0

    def __init__(self, name: str) -> None:
        if name == "locked":
            raise FakeError(13)

    def query_device(self) -> types.SimpleNamespace:
        numbers = {"max_qp": 1, "max_qp_wr": 2, "max_cqe": 3, "max_mr_size": 4}
        return types.SimpleNamespace(phys_port_cnt=2, fw_version="1.2", **numbers)

    def query_port(self, number: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            state=4 if number == 1 else 1,
            link_layer=2,
            active_mtu=5,
            max_msg_sz=9,
            lid=0,
            pkey_tbl_len=1,
        )

    def query_pkey(self, number: int, index: int) -> int:
        return int.from_bytes((0x80FF).to_bytes(2, "big"), sys.byteorder)

    def query_gid_table(self, most: int) -> list[types.SimpleNamespace]:
        def entry(port: int, index: int, kind: int, text: str, net: int) -> types.SimpleNamespace:
            return types.SimpleNamespace(
                port_num=port,
                gid_index=index,
                gid_type=kind,
                ndev_ifindex=net,
                gid_str=lambda: text,
            )

        return [
            entry(1, 0, 1, "fe80:0000:0000:0000:0000:0000:0000:0001", 1),
            entry(1, 1, 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", 1 << 30),
            entry(2, 0, 2, "0000:0000:0000:0000:0000:0000:0000:0000", 0),
        ]

    def close(self) -> None:
        FakeContext.closed += 1


class FakeError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("refused")
        self.error_code = code


FAKE = types.SimpleNamespace(
    Context=FakeContext,
    PyverbsError=FakeError,
    PyverbsRDMAError=FakeError,
    get_device_list=lambda: [
        types.SimpleNamespace(name=b"fake0"),
        types.SimpleNamespace(name=b"locked"),
    ],
)


def test_pyverbs_is_read_into_the_same_values(monkeypatch):
    monkeypatch.setattr(devices, "import_pyverbs", lambda: FAKE)
    FakeContext.closed = 0
    fake, locked = devices.read_with_pyverbs()
    first, second = fake.ports
    assert (fake.name, fake.firmware, fake.max_qp, fake.max_mr_size) == ("fake0", "1.2", 1, 4)
    assert (first.state, second.state, first.active_mtu) == ("ACTIVE", "DOWN", 4096)
    assert first.pkeys == (0x80FF,)
    assert [(g.index, str(g.address), g.type, g.net_device, g.kind) for g in first.gids] == [
        (0, "fe80::1", "RoCE v1", "lo", "link-local"),
        (1, "10.0.0.1", "RoCE v2", "", "ipv4"),
    ]
    assert second.gids == ()
    assert "may not open /dev/infiniband/uverbs*" in locked.problem
    assert FakeContext.closed == 1


def test_pyverbs_is_taken_where_it_can_be_and_the_reason_is_said(monkeypatch):
    monkeypatch.delenv("JAXRDMA_IBVERBS_LIB", raising=False)
    monkeypatch.setattr(devices, "import_pyverbs", lambda: FAKE)
    monkeypatch.setattr(devices, "read_with_native", lambda: ())
    monkeypatch.setattr(devices, "kernel_devices", lambda: ())
    assert devices.read_devices().reader == "pyverbs"
    assert devices.read_devices("native").reader == "native"

    def missing() -> None:
        raise TransportError("pyverbs is not here")

    monkeypatch.setattr(devices, "import_pyverbs", missing)
    assert devices.read_devices() == devices.Inventory("native", "pyverbs is not here", ())
    with pytest.raises(TransportError, match="pyverbs is not here"):
        devices.read_devices("pyverbs")
    monkeypatch.setattr(devices, "import_pyverbs", lambda: FAKE)
    monkeypatch.setenv("JAXRDMA_IBVERBS_LIB", "/opt/libibverbs.so.1")
    assert devices.read_devices().reader == "native"


def test_what_libibverbs_hides_is_shown_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_SYSFS", tmp_path)
    monkeypatch.setattr(devices, "_DEV", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for number, name in enumerate(["closed", "driverless", "fine", "nodeless"]):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
        (tmp_path / "infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
        (tmp_path / "infiniband_verbs" / f"uverbs{number}" / "ibdev").write_text(f"{name}\n")
        if name != "nodeless":
            (tmp_path / "dev" / f"uverbs{number}").touch()
    monkeypatch.setattr(devices.os, "access", lambda path, mode: not str(path).endswith("uverbs0"))
    found = devices.complete([Device("fine"), Device("closed", problem="No such file")])
    problems = {device.name: device.problem for device in found}
    assert list(problems) == ["fine", "closed", "driverless", "nodeless"]
    assert problems["fine"] == ""
    assert "may not open" in problems["closed"] and "dev/uverbs0" in problems["closed"]
    assert "ibverbs-providers" in problems["driverless"]
    assert "--device=/dev/infiniband" in problems["nodeless"]


def test_a_network_device_that_has_the_number_but_not_the_name_is_another_namespaces(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(devices, "_SYSFS", tmp_path)
    names = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "gid_attrs" / "ndevs"
    names.mkdir(parents=True)
    (names / str(V2_IPV4.index)).write_text("elsewhere\n")
    (names / str(V2_IPV6.index)).write_text("eth0\n")
    (device,) = devices.complete([Device("mlx5_0", ports=(roce(V2_IPV4, V2_IPV6, V2_LOCAL),))])
    assert device.ports[0].gids == (replace(V2_IPV4, net_device=""), V2_IPV6, V2_LOCAL)


def test_a_cause_that_many_share_is_told_once():
    ranking = rank(
        [Device(f"mlx5_{i}", ports=(roce(V2_IPV4, V2_IPV6, state="DOWN"),)) for i in (0, 1)]
    )
    assert ranking.reason.startswith("mlx5_0 port 1, mlx5_1 port 1: its port is DOWN")
    assert ranking.reason.count("DOWN") == 1


def test_pyverbs_of_debian_is_found_without_the_folder_it_lies_in(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n == "pyverbs" or n.startswith("pyverbs.")]:
        monkeypatch.delitem(sys.modules, name)
    real_import = devices.importlib.import_module
    monkeypatch.setattr(devices, "_DEBIAN", tmp_path / "pyverbs")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "dist-packages" not in p])
    (tmp_path / "pyverbs").mkdir()
    with pytest.raises(TransportError, match="cannot be imported: No module named 'pyverbs'"):
        devices.import_pyverbs()
    (tmp_path / "pyverbs" / "__init__.py").touch()
    (tmp_path / "stranger.py").touch()
    with pytest.raises(TransportError, match="for another Python"):
        devices.import_pyverbs()
    suffix = devices.importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "pyverbs" / f"device{suffix}").write_bytes(b"no library")
    with pytest.raises(TransportError, match="cannot be imported"):
        devices.import_pyverbs()
    assert not [n for n in sys.modules if n.startswith("pyverbs")]
    assert str(tmp_path) not in sys.path
    with pytest.raises(ImportError):
        real_import("stranger")


# The command.

MACHINE = (
    Device("mlx5_0", ports=(roce(V1_LOCAL, V2_LOCAL, V2_IPV4), roce(number=2, state="DOWN"))),
    Device("mlx5_1", problem="could not be opened"),
)


def command(monkeypatch, machine: tuple[Device, ...], *arguments: str) -> int:
    for name in ("JAXRDMA_DEVICE", "JAXRDMA_PORT", "JAXRDMA_GID_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")  # the table is as wide as what it is shown on
    monkeypatch.setattr(
        devices, "read_devices", lambda reader: devices.Inventory("native", "a test", machine)
    )
    return cli.main(["devices", *arguments])


def test_the_table_shows_the_choice_and_why_the_others_are_not(monkeypatch, capsys):
    assert command(monkeypatch, MACHINE) == 0
    out = capsys.readouterr().out
    assert "chosen: mlx5_0 port 1 GID 3 (10.0.0.1, RoCE v2): RoCE v2, IPv4" in out
    for text in ("fe80::1", "could not be opened", "eth0", "4096"):
        assert text in out


def test_json_has_everything_that_the_table_has(monkeypatch, capsys):
    assert command(monkeypatch, MACHINE, "--json", "--peer", "127.0.0.1") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choice"]["address"] == "10.0.0.1"
    assert told["route_source"] == told["peer"] == "127.0.0.1"
    assert told["devices"][0]["ports"][0]["gids"][0] == {
        "index": 0,
        "address": "fe80::1",
        "type": "RoCE v1",
        "net_device": "eth0",
        "kind": "link-local",
    }
    assert [other["gid_index"] for other in told["others"]] == [1, 0]
    assert [place["where"] for place in told["unusable"]] == ["mlx5_0 port 2", "mlx5_1"]


def test_several_choices_are_all_shown(monkeypatch, capsys):
    monkeypatch.setattr(devices, "find_route", lambda host: (PEER, SOURCE))
    assert command(monkeypatch, tuple(hcas(7, 8)), "--peer", "elsewhere") == 0
    out = capsys.readouterr().out
    assert out.count(" chosen ") == 2
    assert "striped over mlx5_0 and mlx5_1" in out
    assert "name them" not in out
    assert command(monkeypatch, tuple(hcas(7, 8)), "--peer", "elsewhere", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [choice["device"] for choice in told["choices"]] == ["mlx5_0", "mlx5_1"]
    assert told["choice"] == told["choices"][0]


def test_devices_that_are_left_out_may_be_named(monkeypatch, capsys):
    foreign = Device("mlx5_8", ports=(roce(replace(V2_IPV4, net_device="")),))
    overlay = Device("mlx5_9", ports=(roce(replace(V2_IPV4, net_device="docker0")),))
    assert command(monkeypatch, (*rails(3), foreign, overlay)) == 0
    assert "name them: JAXRDMA_DEVICE=mlx5_0,mlx5_1,mlx5_2." in capsys.readouterr().out
    assert command(monkeypatch, tuple(rails(6))) == 0
    assert "=mlx5_0,mlx5_1,mlx5_2,mlx5_3." in capsys.readouterr().out
    assert command(monkeypatch, (*rails(1), foreign, overlay)) == 0
    assert "name them" not in capsys.readouterr().out
    assert devices.spare_devices(rank(rails(2), settings=VerbsSettings(device=("mlx5_1",)))) == ()


def test_nothing_to_use_is_exit_code_1_with_the_reason(monkeypatch, capsys):
    assert command(monkeypatch, MACHINE[1:]) == 1
    assert "none can be used: mlx5_1: could not be opened" in capsys.readouterr().out
    monkeypatch.setattr(devices, "why_there_is_none", lambda: "the kernel knows of none")
    assert command(monkeypatch, ()) == 1
    assert capsys.readouterr().out == "the kernel knows of none\n"

    def broken(reader: str) -> None:
        raise TransportError("libibverbs is not here")

    monkeypatch.setattr(devices, "read_devices", broken)
    assert cli.main(["devices"]) == 1
    assert capsys.readouterr().out == "libibverbs is not here\n"


def test_a_named_device_that_is_not_there_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(
        devices, "read_devices", lambda reader: devices.Inventory("native", "a test", MACHINE)
    )
    monkeypatch.setenv("JAXRDMA_DEVICE", "mlx5_7")
    assert cli.main(["devices"]) == 2
    assert "did you mean mlx5_" in capsys.readouterr().err
