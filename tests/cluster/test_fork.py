"""Processes that a worker forks after it has connected: they do it no harm, and are told what they may not do."""

import re
from collections.abc import Callable

import pytest

from tests.cluster.job import Job


@pytest.mark.timeout(100)
def test_forked_loaders_do_no_harm_and_a_step_in_one_is_an_error(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 2).start("forking.py", 100)
    job.succeed(60)
    for worker in range(2):
        said = job.output(f"worker {worker}")
        for pattern in (
            r"^step: JaxRuntimeError: .*jaxrdma: session 0 of this program is not open in this process \(.*forked from",
            rf"^init: ConfigError: init in process \d+, which was forked from worker {worker}, process \d+: ",
            "^child ended with 7$",
            "^SIGTERM ended a child$",
            "^SIGINT ended a child$",
            "^SIGHUP ended a child$",
            "^closed$",
        ):
            assert re.search(pattern, said, re.MULTILINE), (pattern, job.outputs())
