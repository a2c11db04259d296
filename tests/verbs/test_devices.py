"""What the readers say of devices that are really there."""

import ipaddress
import json
import subprocess
import sys

import pytest

from jaxrdma import devices
from jaxrdma.errors import TransportError


def test_both_readers_agree() -> None:
    native = devices.read_with_native()
    if not native:
        pytest.skip("not run: there is no RDMA device here")
    try:
        devices.import_pyverbs()
    except TransportError as error:
        pytest.skip(f"not run: {error}")
    assert devices.read_with_pyverbs() == native
    assert any(port.gids for device in native for port in device.ports)


def test_the_command_chooses_the_device_that_has_the_address_of_the_route() -> None:
    everything = [
        (device, gid)
        for device in devices.read_with_native()
        for port in device.ports
        if port.active
        for gid in port.gids
        if gid.kind == "ipv4"
    ]
    if not everything:
        pytest.skip("not run: there is no active RDMA device with an IPv4 address here")
    device, gid = everything[-1]  # not the one that would be taken anyway
    # To its own address a machine goes by loopback, from that very address.
    assert isinstance(gid.address, ipaddress.IPv4Address)
    command = [sys.executable, "-m", "jaxrdma", "devices", "--json", "--peer", str(gid.address)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    choice = json.loads(result.stdout)["choice"]
    assert (choice["device"], choice["address"]) == (device.name, str(gid.address))
