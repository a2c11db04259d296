"""Tests in this folder need RDMA devices: `make test-verbs` runs them in a guest, and elsewhere they say so."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verbs.job import Job, plug_the_cable, stop_forking

HERE = Path(__file__).parent
NEEDED = ("rxe0", "rxe1")  # as tests/guest/devices.sh makes them, each reached from the other
NOT_RUN = "not run: needs an RDMA device; make test-verbs runs it in a guest"


def have_devices() -> bool:
    return all(Path("/sys/class/infiniband", name).exists() for name in NEEDED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if have_devices():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=NOT_RUN))


@pytest.fixture(scope="session", autouse=True)
def forks_end(session_mark: str) -> Iterator[None]:
    """Before it is looked for processes that are left."""
    yield
    stop_forking()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    try:
        yield job
    finally:
        job.end()
        subprocess.run(
            ["tc", "qdisc", "del", "dev", "v0", "root"], capture_output=True, check=False
        )
        plug_the_cable()
