"""What a real job tells Prometheus is what docs/metrics.md names, and counts what was done."""

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.job import PATIENCE, Job

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def scrape(job: Job, name: str) -> "dict[tuple[str, frozenset[tuple[str, str]]], float]":
    text = job.wait_for_output(name, "/metrics")
    url = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", text)
    assert url is not None, text
    with urllib.request.urlopen(url.group(1), timeout=20 * PATIENCE) as answer:
        page = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def documented(heading: str) -> set[str]:
    section = PAGE[PAGE.index(heading) :].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    return {
        f"{name}{suffix}"
        for name, kind in rows
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }


@pytest.mark.timeout(100)
def test_a_scrape_of_a_job_has_what_is_documented_and_counts_what_was_done(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(1, 2, metrics=0).start("steps.py", 8, "1:30:sleep")
    job.wait_for_output("worker 1", "sleeping")
    labels = frozenset({("server", "0")})
    deadline = time.monotonic() + 30 * PATIENCE
    # Until a heartbeat has found the job at rest.
    while (found := scrape(job, "server 0")).get(("jaxrdma_steps_total", labels)) != 30:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    assert {name for name, _ in found} == documented("## Of every server")
    # Of version 0 to 30, the last step is not over.
    for part in ("step", "push", "reduce", "update", "pull"):
        assert found[f"jaxrdma_{part}_seconds_count", labels] == 29, part
        assert 0 < found[f"jaxrdma_{part}_seconds_sum", labels] < 100 * PATIENCE, part
    accepted = [
        count for (name, _), count in found.items() if name == "jaxrdma_gradients_accepted_total"
    ]
    assert accepted == [30, 30]
    # 72 numbers: both workers' gradients of 30 steps, and the chief's first parameters.
    bytes_in = found["jaxrdma_received_bytes_total", labels]
    assert bytes_in in (72 * 4 * (2 * 30 + 1), 72 * 4 * (2 * 30 + 2))
    job_wide = scrape(job, "coordinator")
    assert {name for name, _ in job_wide} == documented("## Of the coordinator")
    assert job_wide["jaxrdma_job_failed", frozenset()] == 0
    processes = {dict(key)["process"] for name, key in job_wide if name == "jaxrdma_process_step"}
    assert processes == {"server 0", "worker 0", "worker 1"}
    for name in job.processes:
        job.kill(name)
    job.wait(10)
