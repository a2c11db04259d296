"""Engines over verbs, without JAX: every fault ends in right numbers, or in an error that names its cause."""

import signal
import time

import pytest

from tests.verbs.job import (
    QUICK,
    Job,
    finished_well,
    named_the_link,
    plug_the_cable,
    pull_the_cable,
    run,
)
from tests.verbs.network import neighbours_known, nothing_leaves

# Where it is not the bytes that take the time: the means are checked on an emulated processor.
SMALL = ("--elements", "10000", "--partition-bytes", "16384")


@pytest.mark.timeout(120)
def test_means_are_right_and_the_choice_is_told(job: Job) -> None:
    server, workers = job.train()
    finished_well(workers)
    for process, device in ((server, "rxe1"), (workers[0], "rxe0")):
        process.wait_for(
            rf"^transport verbs, {device} port 1, GID 10\.88\.0\.\d .*RoCE v2.*MTU 4096"
        )


@pytest.mark.timeout(120)
def test_a_cable_pulled_again_and_again_is_survived(job: Job) -> None:
    # Long enough, now and then, to find no route, an endless retry, or a link that is made and breaks at once.
    _, workers = job.train(*SMALL, "--steps", "100", "--pause", "0.1")
    workers[0].wait_for("^step 5$")
    for cut in (0.3, 1.2, 0.6, 3.0, 0.9, 0.4):
        pull_the_cable()
        time.sleep(cut)
        plug_the_cable()
        time.sleep(1)
    finished_well(workers)


@pytest.mark.timeout(120)
def test_a_cable_pulled_for_good_is_named_on_both_sides(job: Job) -> None:
    server, workers = job.train(
        "--steps", "1000", "--pause", "0.1", verbs=(*QUICK, "link_timeout_ms=3000")
    )
    workers[0].wait_for("^step 5$")
    pull_the_cable()
    named_the_link(server, workers, "port 1 of rxe0 on this side went down")


# Whichever side it was that gave up.
BETWEEN_BOTH = r"(?=.*rxe0 port 1,? GID 10\.88\.0\.1)(?=.*rxe1 port 1,? GID 10\.88\.0\.2)"


@pytest.mark.timeout(120)
def test_a_device_that_cannot_be_reached_is_named_with_both_ends_at_the_start(job: Job) -> None:
    """The signalling connection goes another way; by the cable nobody finds the other."""
    with nothing_leaves("v0"):
        run("ip", "neigh", "flush", "dev", "v0")
        _, workers = job.train()
        for worker in workers:
            assert worker.wait(60) == 3, worker.output
            worker.wait_for(
                rf"^failed UNAVAILABLE: cannot connect to server 0 \(\S+\): {BETWEEN_BOTH}"
                r".*from GID 10\.88\.0\.\d to GID 10\.88\.0\.\d: .*its host or link is down"
            )


@pytest.mark.timeout(120)
def test_a_firewall_that_drops_what_the_devices_send_is_suspected(job: Job) -> None:
    """They know each other's addresses; no packet arrives."""
    with neighbours_known(), nothing_leaves("v0"):
        _, workers = job.train(verbs=(*QUICK, "link_timeout_ms=2000"))
        for worker in workers:
            assert worker.wait(60) == 3, worker.output
            worker.wait_for(
                rf"^failed UNAVAILABLE: lost the data connection to server 0 \(\S+\): {BETWEEN_BOTH}"
                r".*did not answer.*did not come back within 2 s; "
                r"nothing that this side sent was ever acknowledged .*: "
                r"does a firewall drop what RoCE sends, to UDP port 4791\?"
            )


@pytest.mark.timeout(120)
def test_lost_packets_change_nothing(job: Job) -> None:
    run("tc", "qdisc", "add", "dev", "v0", "root", "netem", "loss", "3%")
    _, workers = job.train("--steps", "10")
    finished_well(workers)


@pytest.mark.timeout(120)
def test_a_killed_server_is_noticed_at_once(job: Job) -> None:
    server, workers = job.train("--steps", "1000", "--pause", "0.02")
    workers[1].wait_for("^step 3$")
    server.signal(signal.SIGKILL)
    for worker in workers:
        assert worker.wait(30) == 3, worker.output
        worker.wait_for("^failed UNAVAILABLE: lost the data connection to server 0")


@pytest.mark.timeout(120)
def test_a_killed_worker_is_noticed_at_once(job: Job) -> None:
    server, workers = job.train("--steps", "1000", "--pause", "0.02")
    workers[1].wait_for("^step 3$")
    workers[1].signal(signal.SIGKILL)
    server.wait_for("^WORKER_LOST worker 1", 15)


@pytest.mark.timeout(120)
def test_a_stopped_worker_is_waited_for(job: Job) -> None:
    _, workers = job.train("--steps", "30", "--pause", "0.05")
    workers[1].wait_for("^step 3$")
    workers[1].signal(signal.SIGSTOP)
    time.sleep(5)
    workers[1].signal(signal.SIGCONT)
    finished_well(workers)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("device=rxe9", 'there is no RDMA device "rxe9" on this machine; there is rxe0, rxe1'),
        ("port=7", "device rxe0 has no port 7"),
        (
            "gid_index=99",
            "GID index 99 of rxe0 port 1 is empty; filled are 0 .*, 1 .10.88.0.1, RoCE v2",
        ),
        ("pkey_index=9", "pkey index 9 of rxe0: the table has 1 entries"),
        ("timeout=32", "timeout 0 to 31"),
    ],
)
def test_a_wrong_choice_is_refused_with_what_there_is(
    job: Job, settings: str, expected: str
) -> None:
    device = () if settings.startswith("device") else ("device=rxe0",)
    process = job.start("server", "0", "--verbs", *device, settings)
    assert process.wait() == 3, process.output
    process.wait_for(expected)


@pytest.mark.timeout(60)
def test_a_port_that_is_down_is_named(job: Job) -> None:
    pull_the_cable()
    process = job.start("server", "0", "--verbs", "device=rxe1")
    assert process.wait() == 3, process.output
    process.wait_for("^failed UNAVAILABLE: no port of device rxe1 is active .port 1 is DOWN.")


@pytest.mark.timeout(60)
def test_too_little_locked_memory_is_named_with_the_cure(job: Job) -> None:
    # Root may lock what it likes, unless it lacks the capability.
    limited = ("setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536:65536")
    process = job.start("server", "0", "--verbs", "device=rxe0", prefix=limited)
    assert process.wait() == 3, process.output
    process.wait_for("^failed RESOURCE: .*this process may lock 64 KiB .*ulimit -l unlimited")


@pytest.mark.timeout(60)
def test_missing_device_nodes_are_named(job: Job) -> None:
    hidden = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /dev/infiniband && exec "$@"',
        "sh",
    )
    process = job.start("server", "0", "--verbs", "device=rxe0", prefix=hidden)
    assert process.wait() == 3, process.output
    process.wait_for("^failed UNAVAILABLE: .*/dev/infiniband")


@pytest.mark.timeout(60)
def test_a_worker_of_another_transport_is_told(job: Job) -> None:
    server = job.start("server", "0", "--verbs", "device=rxe1")
    address = server.wait_for("^listening (.*)$")[1]
    worker = job.start("worker", "0", address, "--transport", "tcp")
    assert worker.wait() == 3, worker.output
    worker.wait_for("transport verbs, the peer another")


def test_the_library_that_is_named_must_be_there(job: Job) -> None:
    process = job.start(
        "server", "0", environment={"JAXRDMA_IBVERBS_LIB": "/nowhere/libibverbs.so.1"}
    )
    assert process.wait() == 3, process.output
    process.wait_for("^failed UNAVAILABLE: the verbs library could not be opened: /nowhere")
