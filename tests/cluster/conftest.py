"""The fixture of the cluster tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.job import Job


@pytest.fixture
def make_job(tmp_path: Path, no_leftovers: None) -> Iterator[Callable[..., Job]]:
    """`make_job(servers, workers, **settings)`: a job that is gone at the end of the test, whatever happens."""
    jobs: list[Job] = []

    def make(servers: int = 1, workers: int = 2, **settings: Any) -> Job:
        jobs.append(Job(tmp_path / f"job{len(jobs)}", servers, workers, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.__exit__()
