"""Between two machines something lets nothing through: it is said which two, how, since when, and what to look at."""

import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.cluster.blame import check_all_name
from tests.cluster.job import TRANSPORT, Job
from tests.cluster.namespace import HERE, THERE, Namespace

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(TRANSPORT != "tcp", reason="tests/guest/ pulls the cables of RDMA devices"),
]

# How the machine on the way deals with it, and what is made of that.
WAYS = {
    "blackhole": r"no answer; does a firewall drop what is sent there\?",
    "prohibit": r"no route to host \(errno 113\); is the address right, and does a firewall reject it\?",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_coordinator_behind_a_firewall_is_named_with_what_becomes_of_the_attempts(
    make_job: Callable[..., Job], namespace: Namespace, way: str
) -> None:
    namespace.ip(f"route add {way} 203.0.113.7/32")
    job = make_job(1, 1, connect_timeout=7, secret="secret")
    job.at("203.0.113.7:7000")
    job.start_server(0)
    assert job.wait(20)["server 0"] == 1, job.outputs()
    # Machines send few rejections in a second.
    told = rf"the coordinator at 203\.0\.113\.7:7000: (?:no answer; before that: )?{WAYS[way]}, (\d+) s"
    waiting, ended = job.output("server 0").splitlines()[0], job.output("server 0").splitlines()[-1]
    assert re.fullmatch(f"jaxrdma: waiting for {told}", waiting), waiting
    found = re.search(rf"server 0 gave up on {told}\. Is it started, and is JAXRDMA_COORD", ended)
    assert found and 7 <= int(found[1]) <= 9, ended


def retransmitted(namespace: Namespace) -> int:
    """Segments that the other machine has had to send again. There is nobody there but the server."""
    told = subprocess.run(
        [*namespace.within, "cat", "/proc/net/snmp"], capture_output=True, text=True, check=True
    ).stdout
    names, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def train_over_losses(
    job: Job, namespace: Namespace, per_mille: int, size: int, steps: int, limit_s: float
) -> float:
    """Two workers here train a leaf of `size` bytes with a server there: right numbers, or the job says what it lacks.

    **Returns:** the seconds of the steps.
    """
    job.start_coordinator(host=HERE)
    job.start_server(0, "--listen", f"{THERE}:0", within=namespace.within)
    with namespace.lossy(per_mille):
        before = retransmitted(namespace)
        for worker in range(2):
            job.start_worker(worker, "running.py", "large", steps, size)
        job.wait_for_output("worker 0", "step 1\n", limit_s)
        begin = time.monotonic()
        job.succeed(limit_s)
        seconds = time.monotonic() - begin
        again = retransmitted(namespace) - before
        print(f"{again} segments sent again")
        # A few are on a busy machine anyway. In the parameters alone go 1400 bytes at a time.
        assert again > steps * 2 * size / 1400 * per_mille / 1000 / 4, again
    for worker in ("worker 0", "worker 1"):
        assert job.output(worker).rstrip().endswith("done"), job.outputs()
    last = job.output("server 0").splitlines()[-1]
    assert f"accepted from worker 0: {steps}, worker 1: {steps}; 0 dropped" in last, last
    return seconds


def test_lost_packets_change_no_number(make_job: Callable[..., Job], namespace: Namespace) -> None:
    job = make_job(1, 2, secret="secret")
    train_over_losses(job, namespace, per_mille=10, size=4 << 20, steps=12, limit_s=80)


def start_apart(job: Job, namespace: Namespace) -> None:
    """A job whose worker does not reach server 1 for data, but both reach the coordinator."""
    # Over there, what comes from the address for data never leaves.
    namespace.ip("address add 203.0.113.5/32 dev lo")
    namespace.ip("rule add from 203.0.113.5 blackhole")
    job.start_coordinator(host=HERE)
    job.start_server(0)
    job.start_server(1, "--listen", "203.0.113.5:4321", within=namespace.within)
    job.start_worker(0, "one_layer.py", 50)


def test_a_pair_that_cannot_reach_each_other_is_named_while_all_wait_and_at_the_end(
    make_job: Callable[..., Job], namespace: Namespace
) -> None:
    job = make_job(2, 1, connect_timeout=8, secret="secret")
    start_apart(job, namespace)
    why = r"no answer from the host; does a firewall drop what is sent there\?"
    job.wait_for_output("worker 0", "no connection to 203.0.113.5:4321 for ")
    assert re.search(
        rf"^jaxrdma: worker 0: no connection to 203\.0\.113\.5:4321 for \d\.\d s: {why}$",
        job.output("worker 0"),
        re.MULTILINE,
    ), job.outputs()
    pair = rf"cannot connect to server 1 \(203\.0\.113\.5:4321\): .* within 8\.\d s \(.*{why}\)"
    check_all_name(job, pair, 20)
    for name in ("coordinator", "server 0", "server 1"):
        assert re.search(rf"worker 0 \(\S+, pid \d+\) .*{pair}", job.output(name)), job.outputs()


@pytest.mark.parametrize(
    ("number", "last"),
    [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "")],
    ids=["ctrl-c", "sigterm"],
)
def test_a_worker_that_waits_for_a_data_connection_can_be_ended(
    make_job: Callable[..., Job], namespace: Namespace, number: signal.Signals, last: str
) -> None:
    job = make_job(2, 1, secret="secret")
    start_apart(job, namespace)
    job.wait_for_output("worker 0", "no connection to 203.0.113.5:4321 for ")
    job.kill("worker 0", number)
    code = job.wait(4, ["worker 0"])["worker 0"]
    assert code in (-number, 128 + number), job.outputs()
    if last:
        assert job.output("worker 0").rstrip().endswith(last), job.outputs()
    else:
        assert "Traceback" not in job.output("worker 0"), job.outputs()
    job.wait(10)
    how = "was: interrupted" if last else "was: ended by SIGTERM"
    for name in ("coordinator", "server 0", "server 1"):
        assert re.search(rf"worker 0 \(\S+, pid \d+\) {how}", job.output(name)), job.outputs()


@pytest.mark.parametrize("seconds", [3, None], ids=["for-3-s", "for-good"])
def test_a_cable_that_comes_back_is_survived_and_one_that_does_not_is_named(
    make_job: Callable[..., Job], namespace: Namespace, seconds: float | None
) -> None:
    job = make_job(1, 2, secret="secret", heartbeat_timeout=15 if seconds else 5)
    job.start_coordinator(host=HERE)
    job.start_server(0, "--listen", f"{THERE}:0", within=namespace.within)
    for worker in range(2):
        job.start_worker(worker, "steps.py", 64, "0:1000:leave", "1:1000:leave")
    job.wait_for_output("worker 0", "step 20\n")
    namespace.pull_the_cable()
    pulled = time.monotonic()
    if seconds is None:
        check_all_name(job, r"server 0 \(.*silent for \d+ s", 20, ["worker 0", "worker 1"])
        job.wait(20, ["server 0"])
        there = job.output("server 0")
        assert re.search(rf"the coordinator at {re.escape(HERE)}:\d+ is lost: silent for", there)
        assert time.monotonic() - pulled < 20
        return
    time.sleep(seconds)  # without a cable: that is the test
    namespace.plug_the_cable()
    assert "left" not in job.output("worker 0"), "the cable was not missed"
    job.succeed(40)
