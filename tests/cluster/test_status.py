"""`jaxrdma status` of a real job: for people, for programs, and until the end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.job import PATIENCE, Job
from tests.cluster.job import ask as run_command
from tests.cluster.test_follow import stop_at


def ask(job: Job, *options: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return run_command("status", job.address, *options, **env)


@pytest.mark.timeout(100)
def test_a_job_is_shown_while_it_trains_and_watched_to_its_end(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = make_job(1, 2).start("followed.py", "sync", stop)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    command = [sys.executable, "-m", "jaxrdma", "status", "--coordinator", job.address]
    with subprocess.Popen(
        [*command, "--watch", "0.2", "--json"], env=environment, stdout=subprocess.PIPE, text=True
    ) as watch:
        assert watch.stdout is not None
        seen: list[dict[str, Any]] = []
        for line in watch.stdout:
            seen.append(json.loads(line))
            by_name = {p["name"]: p for p in seen[-1]["processes"]}
            if len(by_name) == 3 and all(
                p["step_seconds"] > 0 and p["sent"] > 0 and p["received"] > 0
                for p in by_name.values()
            ):
                break
        assert seen[0]["phase"] in ("starting", "training")
        status = seen[-1]
        assert status["phase"] == "training"
        assert set(by_name) == {"server 0", "worker 0", "worker 1"}
        assert {p["pid"] for p in by_name.values()} == {job.pid(name) for name in by_name}
        assert status["models"][0]["parameters"] == 4000 + 1001 + 1
        shown = ask(job)
        assert shown.returncode == 0, shown.stderr
        for word in ("training", "worker 1", "server 0", "transport", "sync_replicas(2 of 2"):
            assert word in shown.stdout, shown.stdout
        refused = ask(job, JAXRDMA_SECRET="another")
        assert refused.returncode == 1
        assert "the job's secret was expected, a wrong one came" in refused.stderr
        stop_at(stop, status["processes"][1]["step"] + 200)
        watch.stdout.read()
        assert watch.wait(60 * PATIENCE) == 0
    assert set(job.wait(30).values()) == {0}, job.outputs()
    gone = ask(job)
    assert gone.returncode == 1
    assert "cannot be reached" in gone.stderr
    assert "Has the job ended?" in gone.stderr


@pytest.mark.timeout(100)
def test_a_reader_that_has_seen_enough_is_no_error(make_job: Callable[..., Job]) -> None:
    job = make_job(1, 1)
    job.start_coordinator()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    command = [sys.executable, "-m", "jaxrdma", "status", "--coordinator", job.address]
    with subprocess.Popen(
        [*command, "--watch", "0.1", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert json.loads(watch.stdout.readline())["phase"] == "starting"
        watch.stdout.close()
        assert watch.wait(60 * PATIENCE) == 128 + signal.SIGPIPE
        assert watch.stderr.read() == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "which job? Give --coordinator"),
        (["--coordinator", "nowhere"], "expected host:port"),
        (["--coordinator", "127.0.0.1:1", "--watch", "0"], "above 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: list[str], text: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXRDMA_")}
    run = subprocess.run(
        [sys.executable, "-m", "jaxrdma", "status", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert text in run.stderr
