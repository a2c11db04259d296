"""Which device, port and GID a process takes: by the route to its peer, as `jaxrdma devices` shows."""

import json
import sys
from pathlib import Path

import pytest

from jaxrdma import cli, devices, memory, transport
from jaxrdma.cluster import ClusterSpec, VerbsSettings
from jaxrdma.control import LeafSpec, Offer
from jaxrdma.plan import assign_partitions
from tests.verbs.job import QUICK, Job, Process, pull_the_cable, run
from tests.verbs.network import (
    cable_to_be_plugged,
    ipv6_pair,
    mtu,
    passable,
    route_by_the_cable,
    spare_device,
    undoing,
    wait_for_gid,
)

SMALL = ("--workers", "1", "--elements", "20000", "--steps", "3")


def shown(peer: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `jaxrdma devices` says it would take."""
    assert cli.main(["devices", "--json", "--reader", "native", "--peer", peer]) == 0
    return json.loads(capsys.readouterr().out)["choice"]


def train_by_route(job: Job, server: str, *options: str) -> tuple[Process, Process]:
    """A server that listens at the address `server`, and a worker; each chooses for itself."""
    host = f"[{server}]" if ":" in server else server
    listening = job.start(
        "server", "0", *SMALL, *options, "--listen", f"{host}:0", "--coordinator", f"{host}:1",
        "--verbs", *QUICK,
    )  # fmt: skip
    address = listening.wait_for("^listening (.*)$")[1]
    worker = job.start(
        "worker", "0", address, *SMALL, *options, "--coordinator", f"{host}:1", "--verbs", *QUICK
    )
    worker.finish("done", 60)
    return listening, worker


@pytest.mark.timeout(180)
def test_a_job_takes_what_the_command_shows(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with route_by_the_cable():
        server, worker = train_by_route(job, "10.88.0.2")
        choice = shown("10.88.0.2", capsys)
    assert (choice["device"], choice["address"]) == ("rxe0", "10.88.0.1")
    index = choice["gid_index"]
    worker.wait_for(
        rf"^verbs, rxe0 port 1 GID {index} \(10\.88\.0\.1, RoCE v2\): the route to 10\.88\.0\.2 leaves "
        r"from 10\.88\.0\.1, RoCE v2, IPv4 like the peer$"
    )
    worker.wait_for(rf"^transport verbs, rxe0 port 1, GID 10\.88\.0\.1 \(index {index}, RoCE v2\)")
    server.wait_for(r"^verbs, rxe1 port 1 GID \d \(10\.88\.0\.2, RoCE v2\): ")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ends", "used", "said"),
    [
        ((1500, 1500), "MTU 1024", ""),
        (
            (9000, 1500),
            r"MTU 1024, the peer's \(4096 here\)",
            "MTU 1024 is used: rxe0 port 1 has 4096, the peer 1024",
        ),
    ],
)
def test_the_smaller_mtu_of_the_two_ends_is_used_and_said(
    job: Job, ends: tuple[int, int], used: str, said: str
) -> None:
    # 4096 and 4096: see test_faults.py.
    with route_by_the_cable(), mtu("v0", ends[0]), mtu("v1", ends[1]):
        _, worker = train_by_route(job, "10.88.0.2")
    worker.wait_for(rf"^transport verbs, rxe0 .*{used}$")
    if said:
        worker.wait_for(f"^notice {said}")
    else:
        assert "notice" not in worker.output


def test_a_device_whose_port_is_down_is_not_chosen() -> None:
    with spare_device(), cable_to_be_plugged():
        assert devices.survey(None, reader="native").ranking.choice.device == "rxe0"  # type: ignore[union-attr]
        pull_the_cable()
        ranking = devices.survey(None, reader="native").ranking
    assert ranking.choice is not None
    assert ranking.choice.device == "rxe2"
    assert {c.device: why for c, why in ranking.others}["rxe0"].startswith("its port is DOWN")


def test_the_route_decides_between_devices_and_a_setting_leaves_the_rest_ranked() -> None:
    def choice(**settings: object) -> tuple[str, str]:
        made = VerbsSettings(**settings)  # type: ignore[arg-type]
        found = devices.survey("198.51.100.9", made, "native").ranking.choice
        assert found is not None
        return found.device, str(found.gid.address)

    with spare_device():
        assert choice() == ("rxe2", "198.51.100.1")
        assert choice(port=1) == ("rxe2", "198.51.100.1")
        assert choice(device=("rxe1",)) == ("rxe1", "10.88.0.2")


def test_of_several_gids_the_one_of_the_peers_network_and_family_is_taken() -> None:
    with spare_device():
        run("ip", "address", "add", "203.0.113.1/24", "dev", "d0")
        run("ip", "-6", "address", "add", "2001:db8::1/64", "dev", "d0", "nodad")
        wait_for_gid("rxe2", "cb00:7101")
        wait_for_gid("rxe2", "2001:0db8:0000:0000:0000:0000:0000:0001")
        for peer, expected in (
            ("198.51.100.9", "198.51.100.1"),
            ("203.0.113.9", "203.0.113.1"),
            ("2001:db8::9", "2001:db8::1"),
        ):
            survey = devices.survey(peer, reader="native")
            assert survey.ranking.choice is not None
            assert str(survey.ranking.choice.gid.address) == expected, survey.ranking
            assert survey.ranking.on_route


@pytest.mark.timeout(180)
def test_a_server_answers_a_peer_of_another_family_from_that_family(job: Job) -> None:
    with ipv6_pair(job):
        run("ip", "address", "add", "198.51.100.1/24", "dev", "w1")
        wait_for_gid("rxe5", "c633:6401")
        at = "198.51.100.1"
        server = job.start("server", "0", *SMALL, "--listen", f"{at}:0", "--coordinator", f"{at}:1")
        server.wait_for(r"^verbs, rxe5 port 1 GID \d \(198\.51\.100\.1, RoCE v2\)")
        address = server.wait_for("^listening (.*)$")[1]
        worker = job.start("worker", "0", address, *SMALL, "--verbs", "device=rxe4")
        worker.finish("done", 60)
        worker.wait_for("^transport verbs, rxe4 port 1, GID fd88::1 ")


@pytest.mark.timeout(180)
def test_a_job_runs_where_there_is_only_ipv6(job: Job) -> None:
    with ipv6_pair(job):
        server, worker = train_by_route(job, "fd88::2")
    worker.wait_for(r"^verbs, rxe4 port 1 GID \d \(fd88::1, RoCE v2\): the route to fd88::2 leaves")
    worker.wait_for(r"^transport verbs, rxe4 port 1, GID fd88::1 ")
    server.wait_for(r"^verbs, rxe5 port 1 GID \d \(fd88::2, RoCE v2\): ")


def test_a_wrong_gid_index_is_refused_with_the_best_of_those_there_are(job: Job) -> None:
    process = job.start(
        *("server", "0", "--coordinator", "127.0.0.1:1"),
        environment={"JAXRDMA_GID_INDEX": "99"},
    )
    assert process.wait() == 3, process.output
    process.wait_for(
        r"^failed ConfigError: JAXRDMA_GID_INDEX=99: that slot is empty; did you mean 1\? Filled is rxe0 port 1"
    )


def test_what_is_locked_is_what_is_reckoned(job: Job) -> None:
    """The kernel counts what Soft-RoCE locks; its queues are not in memory of the process."""
    sizes = ("--elements", "50001", "--partition-bytes", "65536")
    server, workers = job.train(*sizes, "--steps", "2")
    for worker in workers:
        worker.finish("done")
    plan = assign_partitions([LeafSpec("w", (50001,), "float32")], 1, 65536)
    slots = memory.slots_bytes(memory.SLOTS_PER_WORKER, 65536)
    assert memory.connections_bytes(2, 65536) == 2 * (slots + memory.QUEUE_BYTES)
    need = {
        server: 2 * slots + memory.shard_bytes(plan, 0, "average", 2),
        workers[0]: slots + memory.copy_bytes(plan),
    }
    for process, bytes_ in need.items():
        assert process.wait_for(r"^pinned (\d+) KiB$")[1] == str(bytes_ // 1024)


@pytest.mark.timeout(180)
def test_a_user_who_is_not_root_is_told_need_limit_and_cure(job: Job) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
    limited = (*nobody, "prlimit", "--memlock=65536:65536")
    with passable(Path(sys.executable).resolve()):
        process = job.start("server", "0", "--coordinator", "127.0.0.1:1", prefix=limited)
        assert process.wait(60) == 3, process.output
        process.wait_for("^verbs, rxe0 ")  # the device may be used, and was found
        process.wait_for(
            r"^failed TransportError: server 0 cannot lock the memory for .*: it needs 2.5\d* MiB.*; limit of "
            r"this process 64 KiB \(hard limit 64 KiB\), no CAP_IPC_LOCK. Raise it: `ulimit -l unlimited`"
        )
        # Without that check, the device says it.
        process = job.start("server", "0", "--verbs", "device=rxe0", prefix=limited)
        assert process.wait(60) == 3, process.output
        process.wait_for("^failed RESOURCE: .*this process may lock 64 KiB .*ulimit -l unlimited")


def offers(coordinator: str, listen: str) -> tuple[Offer, Offer]:
    """Of a worker and a server of one job under "auto"."""

    def spec(role: str) -> ClusterSpec:
        return ClusterSpec(f"{coordinator}:1", role, 0, 1, 1, secret="s")

    worker, server = spec("worker"), spec("server")
    return (
        transport.offer(worker, transport.place(worker)),
        transport.offer(server, transport.place(server, f"{listen}:0")),
    )


def test_auto_takes_verbs_where_the_route_goes_by_the_devices_and_tells_why_not_elsewhere() -> None:
    with route_by_the_cable():
        made = offers("10.88.0.2", "10.88.0.2")
        assert made == (Offer("auto", True, ""), Offer("auto", True, ""))
        run("ip", "address", "add", "192.0.2.1/24", "dev", "lo")
        with undoing("ip address del 192.0.2.1/24 dev lo"):
            by_another_way = offers("192.0.2.1", "10.88.0.2")[0]
    expected = "does not reach 192.0.2.1 by an RDMA device, but from 192.0.2.1"
    assert by_another_way == Offer("auto", False, expected)
    worker, server = offers("127.0.0.1", "127.0.0.1")
    assert worker == server == Offer("auto", False, "is on loopback")
    with cable_to_be_plugged():
        pull_the_cable()
        worker = offers("10.88.0.2", "10.88.0.2")[0]
    assert not worker.verbs
    assert worker.why.startswith("has no RDMA device to use: ")
    assert "its port is DOWN" in worker.why
