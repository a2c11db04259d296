"""Engines over two cables at once, without JAX: both carry bytes, and one that breaks for a while is done without."""

import time
from collections.abc import Iterator

import pytest

from tests.verbs.job import (
    QUICK,
    Job,
    finished_well,
    named_the_link,
    plug_the_cable,
    pull_the_cable,
)
from tests.verbs.network import bytes_sent, second_cable

BIG = ("--elements", "500000", "--partition-bytes", "262144")
SMALL = ("--elements", "10000", "--partition-bytes", "4096")
BOTH = {"server_devices": "rxe1,rxe7", "worker_devices": "rxe0,rxe6"}


@pytest.fixture(autouse=True)
def cables(job: Job) -> Iterator[None]:
    with second_cable(job):
        yield


@pytest.mark.timeout(150)
def test_both_cables_carry_about_half(job: Job) -> None:
    before = [bytes_sent(end) for end in ("v0", "v1", "x0", "x1")]
    server, workers = job.train(*BIG, "--steps", "3", **BOTH)
    finished_well(workers)
    server.wait_for(r"^transport verbs, rxe1 port 1, GID .*; rxe7 port 1, GID 10\.88\.6\.2 ")
    sent = [bytes_sent(end) - b for end, b in zip(("v0", "v1", "x0", "x1"), before, strict=True)]
    pushed, pulled = sent[0] + sent[2], sent[1] + sent[3]
    assert min(pushed, pulled) > 3 * 2 * 2_000_000, sent
    for one, both in ((sent[0], pushed), (sent[1], pulled)):
        assert 0.25 < one / both < 0.75, sent


@pytest.mark.timeout(120)
def test_one_device_talks_to_two(job: Job) -> None:
    # The routes of rxe0 lead to rxe1 alone, so the other side is the one with both of this cable's ends.
    server, workers = job.train(*SMALL, "--steps", "20", worker_devices="rxe0,rxe1")
    finished_well(workers)
    workers[0].wait_for("^transport verbs, rxe0 port 1, .*; rxe1 port 1, ")
    assert server.wait_for("^transport verbs, rxe1 port 1, [^;]*$")


@pytest.mark.timeout(120)
def test_a_cable_of_two_that_is_pulled_again_and_again_is_survived(job: Job) -> None:
    _, workers = job.train(*SMALL, "--steps", "100", "--pause", "0.1", **BOTH)
    workers[0].wait_for("^step 5$")
    for cut in (0.3, 2.0, 0.9):
        pull_the_cable()
        time.sleep(cut)
        plug_the_cable()
        time.sleep(1)
    finished_well(workers)


@pytest.mark.timeout(120)
def test_a_cable_of_two_that_is_pulled_for_good_is_named(job: Job) -> None:
    server, workers = job.train(
        *("--steps", "1000", "--pause", "0.1"),
        verbs=(*QUICK, "link_timeout_ms=3000"),
        server_devices="rxe7,rxe1",
        worker_devices="rxe6,rxe0",
    )
    workers[0].wait_for("^step 5$")
    pull_the_cable()
    named_the_link(server, workers)
