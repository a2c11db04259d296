"""What goes wrong in a transport is named: by whom it is missed, of which step and partition, and how far that came."""

import re
from collections.abc import Callable

import pytest

from jaxrdma.control import LeafSpec
from jaxrdma.plan import assign_partitions
from tests.cluster.job import PATIENCE, TRANSPORT, Job

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

SWALLOWED = "worker 1: swallowed 23"
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
    SWALLOWED: [
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


# What a worker sends over verbs is a copy: steps do not wait until it may go.
HARMLESS = [SWALLOWED] if TRANSPORT == "verbs" else []


@pytest.mark.timeout(100)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in HARMLESS])
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


HAS_WAITED = r"worker 0 \(\S+, pid \d+\) has waited \d+ s in step {step} of model 0, longest for partition \d"

# Of the control plane, a message that is lost, the script, and what is said of it. Here not all have to wait for the
# deadline: who left before has ended well.
MISSED = {
    # A server is not told whose gradients form the mean of step 4.
    "server 1: missed decided 5": (
        ("policies.py", "sync:2:shrink", "v1000"),
        HAS_WAITED.format(step=4) + r" at server 1 .*"
        r"server 1 \(\S+, pid \d+\) has not made step 5 of model 0, of which it was told whose gradients form the mean",
    ),
    # The coordinator is not told that a gradient has landed, and decides nothing: the 7th and 8th are those of step 3.
    "server 1: missed landed 7": (
        ("policies.py", "sync:2:shrink", "v1000"),
        HAS_WAITED.format(step=3)
        + r".*server 1 has not told that the gradient of worker \d for step 3 of model 0 has landed",
    ),
    # A server waits for one of whose leaving it is not told.
    "server 0: missed member_left 1": (
        ("steps.py", SIZE, "1:5:leave"),
        HAS_WAITED.format(step=5) + r" at server 0 .*"
        r"\(for \d+ s without partition \d of worker 1's gradient for step 5 of model 0\).*"
        r"worker 1 \(\S+, pid \d+\) has left, last at step 5: no server may wait for it",
    ),
    # A worker waits in init for a model that has started.
    "worker 1: missed flow_start 1": (
        ("steps.py", SIZE),
        HAS_WAITED.format(step=0)
        + r".*The step lacks the gradients of worker 1 \(\S+, pid \d+\), computing for \d+ s "
        r"\(steps\.py:\d+ in main\)",
    ),
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("fault", MISSED)
def test_who_misses_a_change_or_a_decision_is_named_and_the_deadline_ends_the_job(
    make_job: Callable[..., Job], fault: str
) -> None:
    work, expected = MISSED[fault]
    warning, deadline = 2 * PATIENCE, 6 * PATIENCE
    servers = 1 if "member_left" in fault else 2  # the other would be told, and end the job
    job = make_job(
        servers, 2, fault=fault, partition_bytes=PIECE, stall_warning=warning, step_timeout=deadline
    )
    job.start(*work)
    codes = job.wait(90)
    assert "here a drill loses a message" in job.output(fault.partition(":")[0]), job.outputs()
    if "member_left" in fault:
        assert codes.pop("worker 1") == 0, job.outputs()
    assert set(codes.values()) == {1}, job.outputs()
    for name in codes:
        (text,) = re.findall(f".*No step may take longer than .*{deadline:g} s", job.output(name))[
            :1
        ]
        assert re.search(expected, text), text


@pytest.mark.timeout(100)
def test_a_server_that_missed_a_decision_does_not_carry_out_the_next(
    make_job: Callable[..., Job],
) -> None:
    """Where steps do not wait for each other."""
    job = make_job(2, 2, fault="server 1: missed decided 5", partition_bytes=PIECE)
    job.start("policies.py", "async", "v1000")
    codes = job.wait(60)
    assert set(codes.values()) == {1}, job.outputs()
    told = (
        r"server 1 cannot form the mean of step (\d+) of flow 0: "
        r"the next one is of step (\d+), and what was decided of that was not told here"
    )
    for name in codes:
        who = "server 1: " if name == "server 1" else r"server 1 \(\S+, pid \d+\) raised: .*"
        found = re.search(f"{who}{told}", job.output(name))
        assert found and int(found[1]) > int(found[2]), job.output(name)


@pytest.mark.timeout(100)
def test_a_server_that_is_not_told_who_comes_back_is_named(make_job: Callable[..., Job]) -> None:
    job = make_job(2, 2, fault="server 1: missed admit_worker 1", partition_bytes=PIECE)
    work = ("policies.py", "sync:2:wait", "v1000", 0.02, 0.02)
    job.start(*work)
    job.wait_for_output("worker 0", '"batch": 5,')
    job.kill("worker 1")
    job.wait_for_output("coordinator", "its place is kept")
    job.start_worker(1, *work, name="again")
    told = "training stands still, and waits for server 1 ("
    for name in ("coordinator", "worker 0", "again"):
        text = job.wait_for_output(name, told, 60).partition(told)[2]
        assert re.match(
            r"\S+, pid \d+\) to let worker 1 \(\S+, pid \d+\) in, which came back$",
            text.splitlines()[0],
        ), text
    for name in job.processes:  # it would wait as long as anybody may be waited for
        job.kill(name)
    job.wait(10)


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
@pytest.mark.parametrize(
    "fault", ["worker 1: delayed 23 1500", "worker 1: reordered 23", *HARMLESS]
)
def test_what_comes_late_or_in_another_order_is_no_fault(
    make_job: Callable[..., Job], fault: str
) -> None:
    job = make_job(2, 2, fault=fault, partition_bytes=PIECE)
    job.start("steps.py", SIZE, "0:9:leave", "1:9:leave")
    assert set(job.wait(60).values()) == {0}, job.outputs()
