"""Processes come in any order, some much later: the job starts, and says for whom it waits."""

import itertools
import random
import re
import time
from collections.abc import Callable

import pytest

from tests.cluster.blame import check_all_name
from tests.cluster.job import PATIENCE, Job, free_address

MEMBERS = ("server 0", "server 1", "worker 0", "worker 1")
ORDERS = tuple(itertools.permutations(MEMBERS))


def start_member(job: Job, name: str) -> None:
    role, index = name.split()
    if role == "server":
        job.start_server(int(index))
    else:
        job.start_worker(int(index), "one_layer.py", 50)


def run_in_order(job: Job, order: tuple[str, ...], longest: float, chance: random.Random) -> float:
    """Starts each process after a random delay of 0 to `longest` s, all but the coordinator in `order`.

    **Returns:** the seconds from the first start to the end of the training, which went well.
    """
    address = free_address()
    job.at(address)
    delays = sorted(chance.uniform(0, longest) for _ in order)
    schedule = [*zip(delays, order, strict=True), (chance.uniform(0, longest), "coordinator")]
    begin = time.monotonic()
    for delay, name in sorted(schedule):
        time.sleep(max(0.0, begin + delay - time.monotonic()))
        if name == "coordinator":
            job.start_coordinator(int(address.rpartition(":")[2]))
        else:
            start_member(job, name)
    job.succeed(longest + 60)
    for server in ("server 0", "server 1"):
        last = job.output(server).splitlines()[-1]
        assert "50 steps; gradients accepted from worker 0: 50, worker 1: 50" in last, job.outputs()
    return time.monotonic() - begin


@pytest.mark.timeout(110)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_starts_trains(make_job: Callable[..., Job], seed: int) -> None:
    # The orders of one run differ from those of the next; full.py takes all of them.
    chance = random.Random()
    order = chance.choice(ORDERS[seed::3])
    print("order:", order)
    run_in_order(make_job(2, 2), order, 2, chance)


@pytest.mark.timeout(110)
def test_those_who_wait_say_for_whom(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2)
    address = free_address()
    job.at(address)
    start_member(job, "worker 0")
    job.wait_for_output(
        "worker 0", f"jaxrdma: waiting for the coordinator at {address}: connection refused, "
    )
    job.start_coordinator(int(address.rpartition(":")[2]))
    job.wait_for_output(
        "worker 0",
        "have 1 of 2 workers and 0 of 2 servers, waiting for worker 1, server 0 and server 1, ",
    )
    start_member(job, "server 1")
    job.wait_for_output(
        "server 1", "have 1 of 2 workers and 1 of 2 servers, waiting for worker 1 and server 0, "
    )
    start_member(job, "server 0")
    job.wait_for_output(
        "coordinator", "have 1 of 2 workers and 2 of 2 servers, waiting for worker 1, "
    )
    start_member(job, "worker 1")
    job.succeed(60)
    assert "50 steps in" in job.output("worker 1")


@pytest.mark.timeout(110)
def test_a_worker_that_never_comes_is_told_of_while_all_wait_and_named_at_the_end(
    make_job: Callable[..., Job],
) -> None:
    job, limit = make_job(1, 3), 12 * PATIENCE
    address = free_address()
    job.at(address)
    names = ["server 0", "worker 0", "worker 1"]
    for name in names:
        start_member(job, name)
    for name in names:
        job.wait_for_output(name, "waiting for the coordinator at ")
    # All join at once, however long it took them to begin.
    job.start_coordinator(int(address.rpartition(":")[2]), JAXRDMA_CONNECT_TIMEOUT=str(limit))
    lacks = "have 2 of 3 workers and 1 of 1 server, waiting for worker 2, "
    check_all_name(job, lacks, limit + 15, list(job.processes))
    for name in job.processes:
        told = [int(s) for s in re.findall(f"{lacks}(\\d+) s$", job.output(name), re.MULTILINE)]
        # Every few seconds, and at the end.
        assert len(told) >= 3, job.outputs()
        assert all(after - before <= 8 * PATIENCE for before, after in itertools.pairwise(told))
