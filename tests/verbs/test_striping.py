"""Engines over two cables at once, without JAX: both carry bytes, and one that breaks for a while is done without."""

import time
from collections.abc import Iterator

import pytest

from tests.verbs.job import QUICK, Job, Process, plug_the_cable, pull_the_cable
from tests.verbs.network import bytes_sent, second_cable

BIG = ("--elements", "500000", "--partition-bytes", "262144")
SMALL = ("--elements", "10000", "--partition-bytes", "4096")


@pytest.fixture(autouse=True)
def cables(job: Job) -> Iterator[None]:
    with second_cable(job):
        yield


def train(
    job: Job,
    server_devices: str,
    worker_devices: str,
    *options: str,
    verbs: tuple[str, ...] = QUICK,
) -> tuple[Process, list[Process]]:
    server = job.start("server", "0", *options, "--verbs", f"device={server_devices}", *verbs)
    address = server.wait_for("^listening (.*)$")[1]
    workers = [
        job.start("worker", str(i), address, *options, "--verbs", f"device={devices}", *verbs)
        for i, devices in enumerate((worker_devices, worker_devices))
    ]
    return server, workers


@pytest.mark.timeout(150)
def test_both_cables_carry_about_half(job: Job) -> None:
    before = [bytes_sent(end) for end in ("v0", "v1", "x0", "x1")]
    server, workers = train(job, "rxe1,rxe7", "rxe0,rxe6", *BIG, "--steps", "3")
    for worker in workers:
        worker.finish("done")
    server.wait_for(r"^transport verbs, rxe1 port 1, GID .*; rxe7 port 1, GID 10\.88\.6\.2 ")
    sent = [bytes_sent(end) - b for end, b in zip(("v0", "v1", "x0", "x1"), before, strict=True)]
    pushed, pulled = sent[0] + sent[2], sent[1] + sent[3]
    assert min(pushed, pulled) > 3 * 2 * 2_000_000, sent
    for one, both in ((sent[0], pushed), (sent[1], pulled)):
        assert 0.25 < one / both < 0.75, sent


@pytest.mark.timeout(120)
def test_one_device_talks_to_two(job: Job) -> None:
    # The routes of rxe0 lead to rxe1 alone, so the other side is the one with both of this cable's ends.
    server, workers = train(job, "rxe1", "rxe0,rxe1", *SMALL, "--steps", "20")
    for worker in workers:
        worker.finish("done")
    workers[0].wait_for("^transport verbs, rxe0 port 1, .*; rxe1 port 1, ")
    assert server.wait_for("^transport verbs, rxe1 port 1, [^;]*$")


@pytest.mark.timeout(120)
def test_a_cable_of_two_that_is_pulled_again_and_again_is_survived(job: Job) -> None:
    _, workers = train(job, "rxe1,rxe7", "rxe0,rxe6", *SMALL, "--steps", "100", "--pause", "0.1")
    workers[0].wait_for("^step 5$")
    for cut in (0.3, 2.0, 0.9):
        pull_the_cable()
        time.sleep(cut)
        plug_the_cable()
        time.sleep(1)
    for worker in workers:
        worker.finish("done")


@pytest.mark.timeout(120)
def test_a_cable_of_two_that_is_pulled_for_good_is_named(job: Job) -> None:
    server, workers = train(
        *(job, "rxe7,rxe1", "rxe6,rxe0", "--steps", "1000", "--pause", "0.1"),
        verbs=(*QUICK, "link_timeout_ms=3000"),
    )
    workers[0].wait_for("^step 5$")
    pull_the_cable()
    for worker in workers:
        assert worker.wait() == 3, worker.output
        said = worker.wait_for("^failed UNAVAILABLE: ").string
        assert "server 0" in said and "the link between rxe0 port 1 here and" in said, said
        assert "rxe1 port 1" in said and "did not come back within 3 s" in said, said
    for index in range(2):
        server.wait_for(rf"^WORKER_LOST worker {index}: .*link")
