"""What of a job can be reached from outside of its machine: of one that nobody gave an address, nothing."""

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.job import PATIENCE, SCRIPTS
from tests.cluster.namespace import HERE, Namespace
from tests.cluster.test_follow import stop_at
from tests.conftest import MARK, marked_processes

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_leftovers")]

# Which of the ports can be reached at an address: run in the other namespace.
PROBE = """
import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.socket() as sock:
        sock.settimeout(5)
        if sock.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[tuple[str, int], str]]:
    """A job as `jaxrdma launch` starts it by default, while it trains: where its processes listen."""
    stop = tmp_path / "stop"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    command = [sys.executable, "-m", "jaxrdma", "launch", "--servers", "2", "--workers", "2"]
    with subprocess.Popen(
        [*command, str(SCRIPTS / "besieged.py"), str(tmp_path / "out"), str(stop)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launch:
        try:
            found: dict[tuple[str, int], str] = {}
            for _ in range(int(600 * PATIENCE)):
                found = listening()
                if len(found) >= 3 or launch.poll() is not None:
                    break
                threading.Event().wait(0.1)
            assert len(found) == 3, found  # the coordinator, and each server for data
            yield found
            stop_at(stop, 1)
            assert launch.wait(60 * PATIENCE) == 0, launch.stdout and launch.stdout.read()
        finally:
            if launch.poll() is None:
                os.killpg(launch.pid, signal.SIGKILL)


def listening() -> dict[tuple[str, int], str]:
    """Where the processes of this test listen."""
    found: dict[tuple[str, int], str] = {}
    for process in marked_processes(os.environ[MARK]):
        try:
            for connection in process.net_connections("inet"):
                udp = connection.type == socket.SOCK_DGRAM
                if udp or connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline())
        except psutil.Error:
            continue  # ended meanwhile
    return found


def test_a_job_listens_on_loopback_unless_told_otherwise(
    ports: dict[tuple[str, int], str],
) -> None:
    # gRPC writes an address of IPv4 as one of IPv6.
    addresses = {ipaddress.ip_address(ip.removeprefix("::ffff:")) for ip, _ in ports}
    assert all(address.is_loopback for address in addresses), ports


def test_nothing_of_it_can_be_reached_from_another_namespace(
    namespace: Namespace, ports: dict[tuple[str, int], str]
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        seen = open_to_all.getsockname()[1]
        numbers = [str(port) for _, port in ports]
        command = [*namespace.within, sys.executable, "-c", PROBE]
        for address in (HERE, "127.0.0.1"):
            reached = subprocess.run(
                [*command, address, *numbers, str(seen)],
                capture_output=True,
                text=True,
                check=True,
            )
            # What listens everywhere is reached, so the way is there.
            assert reached.stdout.split() == ([str(seen)] if address == HERE else [])
