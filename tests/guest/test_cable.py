"""Engines on two machines: a cable that comes back is survived, one that does not is named on both sides."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.guest import ENDS, Command, Wire

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "tests" / "verbs" / "engines.py"
# A dead link is noticed within 0.5 s.
QUICK = ("--verbs", "timeout=14", "retry_count=6")
LINK_TIMEOUT_S = 5.0
# An engine waits 8 s more for what the control plane says, and there is none here; and the machine may be busy.
LIMIT_S = LINK_TIMEOUT_S + 8 + 15
# To begin: Python and NumPy are read through the host, on an emulated processor, maybe of a busy machine.
START_S = 150.0


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with Wire(time_limit=900) as wire:
        yield wire


def start(wire: Wire, *options: str) -> tuple[Command, Command, Command]:
    """A server and worker 0 in `a`, worker 1 in `b`; all are at step 5 or later."""
    python = [sys.executable, str(ENGINES)]
    server = wire.a.start(
        [*python, "server", "0", "--listen", f"{ENDS['a'].address}:0", *options], folder=ROOT
    )
    address = server.wait_for("^listening (.*)$", START_S)[1]
    workers = [
        guest.start([*python, "worker", str(index), address, *options], folder=ROOT)
        for index, guest in enumerate((wire.a, wire.b))
    ]
    for worker in workers:
        worker.wait_for("^step 5$", START_S)
    return server, workers[0], workers[1]


def stop(*commands: Command) -> None:
    for command in commands:
        if command.exit_status is None:
            command.kill()
            command.wait()


@pytest.mark.timeout(400)
def test_a_cable_that_was_never_there_is_named_by_who_connects(wire: Wire) -> None:
    """Of the two machines one sees that its own cable is pulled, the other that nobody answers."""
    python = [sys.executable, str(ENGINES)]
    here, there = ENDS["a"], ENDS["b"]
    server = wire.b.start(
        [*python, "server", "0", "--listen", f"{there.address}:0", *QUICK], folder=ROOT
    )
    try:
        address = server.wait_for("^listening (.*)$", START_S)[1]
        wire.pull("b")
        worker = wire.a.start([*python, "worker", "0", address, *QUICK], folder=ROOT)
        said = worker.wait_for("^failed UNAVAILABLE: .*$", START_S)[0]
        print(said)
        assert worker.wait() == 3
        assert f"cannot connect to server 0 ({address})" in said
        assert re.search(r"within \d+\.\d s", said)
        assert f"this side: rxe0 port 1, GID {here.address}" in said
        assert re.search("no route to host|no answer from the host; does a firewall", said, re.I)
    finally:
        wire.plug("b")
        stop(server)


@pytest.mark.timeout(400)
def test_a_cable_that_comes_back_is_survived_and_one_that_does_not_is_named(wire: Wire) -> None:
    """Python takes long to start there, so it is one job."""
    limit = f"link_timeout_ms={LINK_TIMEOUT_S * 1000:.0f}"
    server, near, far = start(wire, "--steps", "100000", "--pause", "0.1", *QUICK, limit)
    try:
        for end in ("a", "b"):
            wire.pull(end)
            time.sleep(3)
            wire.plug(end)
            for worker in (near, far):
                at = len(re.findall("^step", worker.output, re.MULTILINE))
                worker.wait_for(f"^step {at + 10}$", 60)  # and every mean was right
        wire.pull("a")
        begin = time.monotonic()
        said = {
            "b": far.wait_for("^failed UNAVAILABLE: lost the data .* server 0 .*$", LIMIT_S)[0],
            "a": server.wait_for("^WORKER_LOST worker 1: .*$", LIMIT_S)[0],
        }
        seconds = time.monotonic() - begin
        print(f"{seconds:.1f} s", said)
        for here, peer in (("b", "a"), ("a", "b")):
            address = re.escape(ENDS[peer].address)
            link = rf"the link between rxe0 port 1 here and {address}:\d+ \(rxe0 port 1 .*{address}"
            assert re.search(link, said[here]), said
        # Not before its time, and not much later on an emulated processor either.
        assert LINK_TIMEOUT_S - 1 < seconds < LIMIT_S, said
    finally:
        for end in ("a", "b"):
            wire.plug(end)
        stop(server, near, far)
