"""`jaxrdma trace`, of a job that runs and of the files that its processes leave: the late one is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrdma.dump import read_folder
from tests.cluster.job import PATIENCE, Job


def trace(*options: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    return subprocess.run(
        [sys.executable, "-m", "jaxrdma", "trace", *map(str, options)],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )


def wait_for_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30 * PATIENCE
    while not folder.is_dir() or len(list(folder.glob("*.trace"))) < count:
        assert time.monotonic() < deadline, "the files have not come"
        time.sleep(0.02)  # a file has no completion to wait for


@pytest.mark.timeout(100)
def test_a_worker_that_sleeps_is_named_while_the_job_runs_on_a_signal_and_at_its_failure(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    job = make_job(2, 2, trace_dir=folder).start("late.py", 1, 0.1)
    job.wait_for_output("worker 0", "step 8")

    # Of the job as it runs.
    out = tmp_path / "trace.json"
    asked = trace("--coordinator", job.address, "--json", "--steps", 5, "--out", out)
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert [p["name"] for p in found["processes"]] == [
        "server 0",
        "server 1",
        "worker 0",
        "worker 1",
    ]
    # One machine has one clock.
    assert {p["clock_offset"] for p in found["processes"]} == {0}
    assert found["missing"] == []
    check_blame(found, Counter({(1, "compute"): 4}))
    names = {
        e["args"]["name"] for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "M"
    }
    assert "update" in names and "push of partition 0" in names

    # Strangers get nothing.
    refused = trace("--coordinator", job.address, JAXRDMA_SECRET="another")
    assert refused.returncode == 1
    assert "the job's secret was expected, a wrong one came" in refused.stderr

    # A signal for all of them: none ends by it.
    for name in job.processes:
        job.kill(name, signal.SIGUSR1)
    wait_for_files(folder, 4)
    assert {dump.reason for dump in read_folder(folder)} == {"SIGUSR1"}

    job.kill("server 1")
    codes = job.wait(40)
    assert {codes[name] for name in ("coordinator", "server 0", "worker 0", "worker 1")} == {1}
    reasons = Counter(dump.reason for dump in read_folder(folder))
    assert reasons == {"the job failed": 3, "SIGUSR1": 1}, job.outputs()
    shown = trace(folder, "--steps", 30, COLUMNS="120")
    assert shown.returncode == 0, shown.stderr
    assert "worker 1: compute" in shown.stdout
    picture = tmp_path / "picture.png"
    drawn = trace(folder, "--json", "--picture", picture)
    assert drawn.returncode == 0, drawn.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_blame(found: dict, at_least: "Counter[tuple[int, str]]") -> None:
    """On a machine that is busy any step may have been late by something else too."""
    blamed = Counter((step["worker"], step["late"]) for step in found["steps"])
    assert all(blamed[who] >= count for who, count in at_least.items()), found["steps"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "which job? Give a folder"),
        (["--coordinator", "nowhere"], "expected host:port"),
        (["nowhere"], "JAXRDMA_TRACE_DIR"),
        (["nowhere", "--coordinator", "127.0.0.1:1"], "not both"),
        (["nowhere", "--steps", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_traced_is_refused(options: list[str], text: str) -> None:
    run = trace(*options)
    assert run.returncode == 2
    assert text in run.stderr
