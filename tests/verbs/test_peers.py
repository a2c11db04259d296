"""An independent peer, made with pyverbs from the protocol's headers, trains with our engines."""

from pathlib import Path

import pytest

from tests.verbs.job import Job
from tests.verbs.test_bench import SYSTEM_PYTHON

MEMBER = (*SYSTEM_PYTHON, str(Path(__file__).parent / "peers" / "pyverbs_member.py"))
SIZES = ("--elements", "2000", "--partition-bytes", "4096")
STEPS = ("--steps", "3")


@pytest.mark.timeout(120)
def test_a_worker_made_with_pyverbs_averages_with_ours(job: Job) -> None:
    server = job.start("server", "0", *SIZES, "--verbs", "device=rxe1")
    address = server.wait_for("^listening (.*)$")[1]
    ours = job.start("worker", "0", address, *SIZES, *STEPS, "--verbs", "device=rxe0")
    theirs = job.run(*MEMBER, "worker", "rxe0", address, *SIZES, *STEPS)
    theirs.finish("verified")
    ours.finish("done")


@pytest.mark.timeout(120)
def test_our_worker_pushes_to_a_server_made_with_pyverbs(job: Job) -> None:
    theirs = job.run(*MEMBER, "server", "rxe1", *SIZES, *STEPS)
    address = theirs.wait_for("^listening (.*)$")[1]
    options = ("--workers", "1", *SIZES, *STEPS, "--verbs", "device=rxe0")
    ours = job.start("worker", "0", address, *options)
    theirs.finish("verified")
    ours.finish("done")
