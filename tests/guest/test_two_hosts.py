"""Two machines and a cable between them: bytes cross it, and its end is noticed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.guest import ENDS, Command, Wire, meet

PEER = Path(__file__).parents[1] / "verbs" / "peers" / "pyverbs_rc.py"
TIMEOUT, RETRIES = 14, 6
GIVE_UP_S = (RETRIES + 1) * 4.096e-6 * 2**TIMEOUT  # 0.47 s


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with Wire(time_limit=600) as wire:
        yield wire


def start_peers(wire: Wire, port: int, *options: str) -> tuple[Command, Command]:
    """A server in `b`, a client in `a`."""
    peer = ["/usr/bin/python3", "-I", str(PEER)]
    more = ["--timeout", str(TIMEOUT), "--retry", str(RETRIES), *options]
    server = wire.b.start([*peer, "server", "rxe0", str(port), *more])
    server.wait_for("^listening$")
    client = wire.a.start([*peer, "client", "rxe0", ENDS["b"].address, str(port), *more])
    return client, server


@pytest.mark.timeout(300)
def test_writes_and_reads_cross_the_wire(wire: Wire) -> None:
    client, server = start_peers(wire, 6001)
    assert client.wait() == 0, client.output + server.output
    assert server.wait() == 0, server.output
    assert "verified" in client.output and "verified" in server.output


@pytest.mark.timeout(300)
def test_a_pulled_cable_ends_the_writers_retries_in_time(wire: Wire) -> None:
    client, server = start_peers(wire, 6002, "--stream")
    client.wait_for("^streaming$")
    wire.pull("b")
    try:
        found = client.wait_for(r"^IBV_WC_RETRY_EXC_ERR ([\d.]+) s after", 30)
        assert client.wait() == 0, client.output
        # Emulated, and maybe on a busy machine: what counts is that it neither came early nor hung.
        assert 0.5 * GIVE_UP_S < float(found[1]) < GIVE_UP_S + 10
    finally:
        wire.plug("b")
        server.kill()
    assert server.wait() < 0
    client, server = start_peers(wire, 6003)
    assert client.wait() == 0, client.output  # as good as new
    assert server.wait() == 0, server.output


@pytest.mark.timeout(300)
def test_jobs_of_two_guests_meet(wire: Wire) -> None:
    job = "echo meet here; read -r; cut -d' ' -f1 /proc/uptime; echo met"
    a, b = (guest.start(job, input=True) for guest in (wire.a, wire.b))
    meet("here", a, b)
    assert a.wait() == b.wait() == 0
    assert all(re.search("^met$", command.output, re.MULTILINE) for command in (a, b))
