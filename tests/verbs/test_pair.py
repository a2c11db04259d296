"""`jaxrdma doctor --peer` and `--listen`, over the cable between two devices."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.verbs.job import Job, Process
from tests.verbs.network import mtu, route_by_the_cable

DOCTOR = (sys.executable, "-m", "jaxrdma", "doctor", "--json")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JAXRDMA_SECRET", "s")
    yield


def start(job: Job) -> tuple[Process, str]:
    """The other machine, and where it listens."""
    listening = job.run(*DOCTOR, "--listen", "10.88.0.2:0")
    return listening, listening.wait_for(r"waiting at (\S+) for", 60)[1]


def findings(process: Process, status: int) -> dict[str, dict[str, Any]]:
    assert process.wait(100) == status, process.output
    text = process.output[process.output.index("{") :]
    return {check["name"]: check for check in json.loads(text)["checks"]}


@pytest.mark.timeout(200)
def test_a_pair_is_measured_over_verbs_and_different_mtus_are_warned_of(job: Job) -> None:
    with route_by_the_cable(), mtu("v1", 1500):
        listening, address = start(job)
        checks = findings(job.run(*DOCTOR, "--peer", address), 0)
    assert "rxe0 port 1 GID" in checks["device here"]["found"]
    assert "rxe1 port 1 GID" in checks["device there"]["found"]
    assert checks["MTUs"]["outcome"] == "warning"
    assert "4096 bytes of payload per packet here, 1024 there" in checks["MTUs"]["found"]
    probe = checks["probe over verbs"]["found"]
    assert "verbs, rxe0 port 1, GID 10.88.0.1" in probe and "MTU 1024" in probe, probe
    for name, unit in (("latency", "us"), ("bandwidth", "GB/s")):
        value, found = checks[name]["found"].split()[:2]
        assert float(value) > 0 and found == unit
    assert list(findings(listening, 0)) == list(checks)
