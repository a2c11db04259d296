"""What is found on a machine is judged rightly, with what to do about it, and the exit code follows."""

import ipaddress
import json
from dataclasses import replace

import pytest

from jaxrdma import cli, doctor, memory
from jaxrdma.cluster import VerbsSettings
from jaxrdma.devices import Device, Gid, Port
from jaxrdma.doctor import FAILED, OK, WARNING, Check, Facts, Needs, Node, examine
from jaxrdma.memory import LockLimit

GID = Gid(3, ipaddress.ip_address("10.0.0.1"), "RoCE v2", "eth0")
PORT = Port(1, "ACTIVE", "Ethernet", 4096, 1 << 31, 0, (0xFFFF,), (GID,))
HEALTHY = Facts(
    modules=frozenset({"ib_core", "ib_uverbs"}),
    kernel_devices=("mlx5_0",),
    nodes=(Node("/dev/infiniband/uverbs0", "mlx5_0", "0666", True),),
    library="/usr/lib/libibverbs.so.1",
    library_problem="",
    providers=("libmlx5-rdmav34.so", "librxe-rdmav34.so"),
    limit=LockLimit(None, None, exempt=False),
    seen=(Device("mlx5_0", ports=(PORT,)),),
    seen_problem="",
    none_reason="",
)


NEEDS = Needs()
NOTHING_NAMED = VerbsSettings()


def judged(facts: Facts, needs: Needs = NEEDS, settings: VerbsSettings = NOTHING_NAMED):
    return {check.name: check for check in examine(facts, needs, settings)}


def with_port(**changes: object) -> Facts:
    return replace(HEALTHY, seen=(Device("mlx5_0", ports=(replace(PORT, **changes),)),))


def test_a_healthy_machine_has_nothing_to_be_told():
    checks = judged(HEALTHY)
    assert all((c.outcome, c.advice) == (OK, "") for c in checks.values()), checks
    assert list(checks) == [
        "kernel modules",
        "device nodes",
        "libibverbs",
        "providers",
        "locked memory, server",
        "locked memory, worker",
        "devices",
        "mlx5_0 port 1",
        "mlx5_0 port 1, GIDs",
        "mlx5_0 port 1, MTU",
    ]


NOTHING = replace(
    HEALTHY, modules=frozenset(), kernel_devices=(), nodes=(), seen=(), none_reason="none at all"
)


@pytest.mark.parametrize(
    ("facts", "name", "outcome", "words"),
    [
        (NOTHING, "kernel modules", FAILED, "modprobe -a ib_core ib_uverbs"),
        (replace(NOTHING, modules=HEALTHY.modules), "kernel modules", FAILED, "rdma link add rxe0"),
        (
            replace(HEALTHY, modules=frozenset({"ib_core"})),
            "kernel modules",
            FAILED,
            "-a ib_uverbs`",
        ),
        (NOTHING, "device nodes", FAILED, "see kernel modules"),
        (replace(HEALTHY, nodes=()), "device nodes", FAILED, "no device has one"),
        (
            replace(HEALTHY, nodes=(Node("/dev/infiniband/uverbs0", "mlx5_0", "", False),)),
            "device nodes",
            FAILED,
            "--device=/dev/infiniband",
        ),
        (
            replace(
                HEALTHY, nodes=(Node("/dev/infiniband/uverbs0", "mlx5_0", "", False),), seen=()
            ),
            "providers",
            OK,
            "mlx5, rxe",
        ),
        (
            replace(HEALTHY, nodes=(Node("/dev/infiniband/uverbs0", "mlx5_0", "0600", False),)),
            "device nodes",
            FAILED,
            "uverbs0 (mlx5_0, 0600)",
        ),
        (
            replace(
                HEALTHY,
                nodes=(*HEALTHY.nodes, Node("/dev/infiniband/uverbs1", "mlx5_1", "0600", False)),
            ),
            "device nodes",
            WARNING,
            "uverbs1 (mlx5_1, 0600)",
        ),
        (replace(HEALTHY, library_problem="no such file"), "libibverbs", FAILED, "libibverbs1"),
        (replace(HEALTHY, library_problem="no such file"), "providers", FAILED, "see libibverbs"),
        (replace(HEALTHY, seen=()), "providers", FAILED, "none for mlx5_0; there are mlx5, rxe"),
        (replace(HEALTHY, providers=()), "providers", OK, "none beside"),
        (replace(NOTHING, providers=()), "providers", WARNING, "ibverbs-providers"),
        (NOTHING, "devices", FAILED, "none at all"),
        (replace(NOTHING, seen_problem="broken"), "devices", FAILED, "broken"),
        (with_port(state="DOWN"), "devices", FAILED, "none of mlx5_0 can be used"),
        (with_port(state="DOWN"), "mlx5_0 port 1", FAILED, "ip link"),
        (
            with_port(state="INIT", link_layer="InfiniBand"),
            "mlx5_0 port 1",
            FAILED,
            "subnet manager",
        ),
        (with_port(gids=()), "mlx5_0 port 1, GIDs", FAILED, "the GID table is empty"),
        (
            with_port(gids=(replace(GID, net_device=""),)),
            "mlx5_0 port 1, GIDs",
            FAILED,
            "network namespace",
        ),
        (
            with_port(gids=(replace(GID, address=ipaddress.ip_address("fe80::1")),)),
            "mlx5_0 port 1, GIDs",
            WARNING,
            "only link-local",
        ),
        (
            with_port(gids=(replace(GID, type="RoCE v1"),)),
            "mlx5_0 port 1, GIDs",
            WARNING,
            "only RoCE v1",
        ),
        (with_port(active_mtu=1024), "mlx5_0 port 1, MTU", WARNING, "ip link set eth0 mtu 9000"),
        (with_port(active_mtu=2048, link_layer="InfiniBand"), "mlx5_0 port 1, MTU", OK, "2048"),
        (
            replace(HEALTHY, seen=(Device("mlx5_0", problem="may not be opened"),)),
            "mlx5_0",
            FAILED,
            "may not be opened",
        ),
    ],
)
def test_what_is_wrong_is_found_and_has_its_remedy(facts, name, outcome, words):
    check = judged(facts)[name]
    assert check.outcome == outcome
    assert words in check.found + check.advice
    assert (check.advice == "") == (outcome == OK)


def test_a_spare_port_may_be_down():
    spare = replace(PORT, number=2, state="DOWN", gids=())
    checks = judged(replace(HEALTHY, seen=(Device("mlx5_0", ports=(PORT, spare)),)))
    assert checks["mlx5_0 port 2"].outcome == WARNING
    assert "mlx5_0 port 2, GIDs" not in checks
    assert FAILED not in {check.outcome for check in checks.values()}


def test_a_device_that_is_named_and_not_there_fails():
    check = judged(HEALTHY, settings=VerbsSettings(device=("mlx5_1",)))["devices"]
    assert check.outcome == FAILED
    assert "did you mean mlx5_0?" in check.found


def test_several_devices_that_are_named_are_judged_together():
    second = Device("mlx5_1", ports=(PORT,))
    facts = replace(HEALTHY, seen=(*HEALTHY.seen, second), limit=LockLimit(1 << 29, 1 << 29, False))
    named = VerbsSettings(device=("mlx5_1", "mlx5_0"))
    alone, both = judged(facts, Needs(servers=2)), judged(facts, Needs(servers=2), named)
    assert "the choice is mlx5_0 port 1" in alone["devices"].found
    assert "tensors are striped over mlx5_1 port 1" in both["devices"].found
    assert alone["locked memory, server"].outcome == OK
    assert both["locked memory, server"].outcome == FAILED
    assert "by each of 2 devices" in both["locked memory, server"].found
    down = replace(second, ports=(replace(PORT, state="DOWN"),))
    check = judged(replace(facts, seen=(*HEALTHY.seen, down)), settings=named)["devices"]
    assert check.outcome == FAILED
    assert "not all can be used: mlx5_1 port 1: its port is DOWN" in check.found


def test_locked_memory_is_held_against_what_the_job_needs():
    needs = Needs(workers=4, servers=3, slots=2, partition_bytes=1000, parameter_bytes=5000)
    slots = memory.slots_bytes(2, 1000)
    assert slots == 4096  # 2 x (64 + 1024), by pages
    assert needs.worker_bytes == 5000 + 3 * (slots + memory.QUEUE_BYTES)
    assert needs.server_bytes == 2 * 1667 + 4 * (slots + memory.QUEUE_BYTES)

    def outcomes(soft: int | None, exempt: bool = False) -> list[str]:
        facts = replace(HEALTHY, limit=LockLimit(soft, soft, exempt))
        checks = judged(facts, needs)
        return [checks[f"locked memory, {role}"].outcome for role in ("server", "worker")]

    assert outcomes(needs.server_bytes) == [OK, OK]
    assert outcomes(needs.worker_bytes) == [FAILED, OK]
    assert outcomes(needs.worker_bytes - 1) == [FAILED, FAILED]
    assert outcomes(0, exempt=True) == [OK, OK]
    assert outcomes(None) == [OK, OK]
    limited = replace(HEALTHY, limit=LockLimit(8 << 20, None, exempt=False))
    failed = judged(limited)["locked memory, worker"]
    assert failed.found == (
        "needs 272.3 MiB; limit of this process 8 MiB (hard limit unlimited), no CAP_IPC_LOCK"
    )
    assert "ulimit -l unlimited" in failed.advice


def test_looking_at_this_machine_finds_its_limit_and_no_contradiction():
    facts = doctor.gather()
    assert bool(facts.library) != bool(facts.library_problem)
    assert bool(facts.seen) != bool(facts.seen_problem or facts.none_reason)
    assert {device.name for device in facts.seen} <= set(facts.kernel_devices)
    assert facts.limit.hard is None or (facts.limit.soft or 0) <= facts.limit.hard


@pytest.mark.parametrize(("outcome", "code"), [(OK, 0), (WARNING, 0), (FAILED, 1)])
def test_only_what_failed_makes_exit_code_1(outcome, code, monkeypatch, capsys):
    checks = [Check("one", OK, "fine"), Check("two", outcome, "found 10::ab:1", "do [this]")]
    monkeypatch.setattr(doctor, "examine", lambda facts, needs, settings: checks)
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    for text in (outcome, "found 10::ab:1", "do [this]"):
        assert text in out
    assert cli.main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    assert told["checks"][1] == vars(checks[1])


def test_the_numbers_of_the_job_come_from_the_command_line(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(doctor, "examine", lambda facts, needs, settings: seen.append(needs) or [])
    assert cli.main(["doctor", "--workers", "8", "--partition-bytes", "64", "--json"]) == 0
    assert seen == [Needs(workers=8, partition_bytes=64)]
    capsys.readouterr()
    assert cli.main(["doctor", "--slots", "0"]) == 2
    assert "--slots 0: expected at least 1" in capsys.readouterr().err
