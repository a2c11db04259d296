"""What goes wrong in a transport is named: by whom it is missed, of which step and partition, and how far that came."""

import re
from collections.abc import Callable

import pytest

from jaxrdma.control import LeafSpec
from jaxrdma.plan import assign_partitions
from tests.cluster.job import PATIENCE, Job

# Of 4 KiB: the larger leaf is four of them.
SIZE, PIECE = 64, 4096
LEAVES = [LeafSpec("b", (8,), "float32"), LeafSpec("w", (SIZE, SIZE), "float32")]


def written(number: int) -> tuple[int, int, int]:
    """Step, partition and server of the write of data by a worker: in each step to one server after the other."""
    partitions = assign_partitions(LEAVES, 2, PIECE).partitions
    order = sorted(range(len(partitions)), key=lambda i: partitions[i].server)
    step, place = divmod(number - 1, len(order))
    return step, order[place], partitions[order[place]].server


STEP, PART, SERVER = written(23)
WAITS = (
    r"{who} \(\S+, pid \d+\) has waited \d+ s in step {step} of model 0, "
    r"longest for partition {part} at server {server} \({stage}\)"
)
LACKS = (
    r"server {server} \(\S+, pid \d+\), .* "
    r"\(for \d+ s without partition {part} of worker 1's gradient for step {step} of model 0\)"
)

# What goes wrong, and what is said of it by everybody who waits.
FAULTS = {
    # A message is lost: it was sent, as far as the worker knows, and has not come; no part of the server's is answered.
    "worker 1: lost 23": [
        WAITS.format(who="worker 1", step=STEP, part=r"\d", server=SERVER, stage="completed"),
        LACKS.format(server=SERVER, part=PART, step=STEP),
    ],
    # It was never sent.
    "worker 1: withheld 23": [
        WAITS.format(who="worker 1", step=STEP, part=r"\d", server=SERVER, stage=r"\w+"),
        LACKS.format(server=SERVER, part=PART, step=STEP),
    ],
    # It was sent and answered, and the worker is never told that it was sent.
    "worker 1: swallowed 23": [
        WAITS.format(who="worker 1", step=STEP, part=PART, server=SERVER, stage="posted"),
        LACKS.format(server=r"\d", part=r"\d", step=STEP + 1),
    ],
    # The answer is lost: to either worker.
    "server 0: lost 40": [
        r"worker \d \(\S+, pid \d+\) has waited \d+ s in step (?P<step>\d+) of model 0, longest for partition \d "
        r"at server 0 \(completed\)",
        r"server 0 \(.*: it has answered step (?P=step), and the answer is lost, or on its way",
    ],
    # The server gives no slot back: sooner or later there is none to write to.
    "server 0: uncredited 40": [
        r"worker \d \(\S+, pid \d+\) has waited \d+ s in step \d+ of model 0, longest for partition \d "
        r"at server 0 \(queued\)"
    ],
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_who_waits_and_the_deadline_ends_the_job(
    make_job: Callable[..., Job], fault: str
) -> None:
    warning, deadline = 2 * PATIENCE, 6 * PATIENCE
    job = make_job(
        2, 2, fault=fault, partition_bytes=PIECE, stall_warning=warning, step_timeout=deadline
    )
    job.start("steps.py", SIZE)
    codes = job.wait(90)
    assert set(codes.values()) == {1}, job.outputs()
    for name in codes:
        (text,) = re.findall(f".*No step may take longer than .*{deadline:g} s", job.output(name))[
            :1
        ]
        assert re.search(".*".join(FAULTS[fault]), text), text


@pytest.mark.timeout(100)
def test_what_comes_twice_ends_the_job_and_names_whose_it_is(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2, fault="server 0: duplicated 9", partition_bytes=PIECE)
    job.start("steps.py", SIZE)
    codes = job.wait(60)
    assert set(codes.values()) == {1}, job.outputs()
    told = r"worker \d \(\S+\) broke the protocol towards server 0: .*slot"
    for name in codes:
        assert re.search(told, job.output(name)), job.output(name)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("fault", ["worker 1: delayed 23 1500", "worker 1: reordered 23"])
def test_what_comes_late_or_in_another_order_is_no_fault(
    make_job: Callable[..., Job], fault: str
) -> None:
    job = make_job(2, 2, fault=fault, partition_bytes=PIECE)
    job.start("steps.py", SIZE, "0:9:leave", "1:9:leave")
    assert set(job.wait(60).values()) == {0}, job.outputs()
