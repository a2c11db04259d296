"""An independent peer, made with other bindings from the protocol's headers, works with our engines."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.verbs.job import Job, Process
from tests.verbs.test_bench import SYSTEM_PYTHON

MEMBER = str(Path(__file__).parent / "peers" / "member.py")
BINDINGS = {
    "pyverbs": (*SYSTEM_PYTHON, MEMBER, "pyverbs"),
    "ibverbs": (sys.executable, MEMBER, "ibverbs"),
}
SIZES = ("--elements", "2000", "--partition-bytes", "4096")
STEPS = ("--steps", "3")


@pytest.fixture(params=BINDINGS)
def member(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "ibverbs" and importlib.util.find_spec("ibverbs") is None:
        pytest.skip("not run: needs the package ibverbs, of which there is none for this machine")
    return BINDINGS[request.param]


def serve(job: Job, *options: str) -> tuple[Process, str]:
    server = job.start("server", "0", *SIZES, *options, "--verbs", "device=rxe1")
    return server, server.wait_for("^listening (.*)$")[1]


@pytest.mark.timeout(120)
def test_an_independent_worker_averages_with_ours(job: Job, member: tuple[str, ...]) -> None:
    _, address = serve(job)
    ours = job.start("worker", "0", address, *SIZES, *STEPS, "--verbs", "device=rxe0")
    theirs = job.run(*member, "worker", "rxe0", address, *SIZES, *STEPS)
    theirs.finish("verified")
    ours.finish("done")


@pytest.mark.timeout(120)
def test_our_worker_pushes_to_an_independent_server(job: Job, member: tuple[str, ...]) -> None:
    theirs = job.run(*member, "server", "rxe1", *SIZES, *STEPS)
    address = theirs.wait_for("^listening (.*)$")[1]
    options = ("--workers", "1", *SIZES, *STEPS, "--verbs", "device=rxe0")
    ours = job.start("worker", "0", address, *options)
    theirs.finish("verified")
    ours.finish("done")


@pytest.mark.timeout(120)
def test_an_independent_reader_reads_our_parameters(job: Job, member: tuple[str, ...]) -> None:
    _, address = serve(job, "--update")
    chief = job.start(
        *("worker", "0", address, *SIZES, "--update", "--init"),
        *("--idle", "60", "--verbs", "device=rxe0"),
    )
    chief.wait_for("^initialised$")
    theirs = job.run(*member, "reader", "rxe0", address, *SIZES)
    theirs.finish("verified")


@pytest.mark.timeout(120)
def test_our_worker_reads_the_parameters_of_an_independent_server(
    job: Job, member: tuple[str, ...]
) -> None:
    theirs = job.run(*member, "library", "rxe1", *SIZES)
    address = theirs.wait_for("^listening (.*)$")[1]
    ours = job.start(
        *("worker", "0", address, "--workers", "1", *SIZES, "--update", "--read"),
        *("--verbs", "device=rxe0"),
    )
    ours.wait_for("^read step 7$")
    ours.finish("done")
    theirs.finish("verified")
