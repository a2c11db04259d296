"""The long forms of tests of this folder. A line for each job, then a summary.

Needs the devices that tests/guest/ makes:
  python -m tests.guest run --time-limit 3000 -- .venv/bin/python tests/verbs/full.py WHAT
WHAT is:
  loss     100 steps of 1 MB on a cable that loses 0.5 %, then 3 % of the packets
  kills    kill -9 of a worker and of the server, 20 times each (--times N)
  cable    20 cuts of 0.3 to 3 s in one job (--times N)
  demo     one epoch of the digits over tcp, then over verbs: the same bits
With TEST_TRANSPORT=verbs TEST_PATIENCE=5, tests/cluster/full.py kills and idle run over verbs too, with JAX.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.verbs.job import QUICK, Command, Job, plug_the_cable, pull_the_cable, run

LOSS_S = 1500  # an idle emulated machine takes a tenth of it
SOON_S = 30
DEMO_S = 900  # of which an idle emulated machine compiles for most


def lose(percent: float) -> float:
    """Seconds for 100 steps of a model of 1 MB on a cable that loses packets."""
    job = Job()
    run("tc", "qdisc", "add", "dev", "v0", "root", "netem", "loss", f"{percent}%")
    try:
        # Losses are repaired by the devices: nothing is to break.
        _, workers = job.train("--elements", "262144", "--steps", "100", verbs=("retry_count=7",))
        began = time.monotonic()
        for worker in workers:
            worker.finish("done", LOSS_S)
        return time.monotonic() - began
    finally:
        job.end()
        run("tc", "qdisc", "del", "dev", "v0", "root")


def kill(role: str, chance: random.Random) -> float:
    """Seconds from the death of one process until all others have said so."""
    job = Job()
    try:
        server, workers = job.train("--steps", "100000", "--pause", "0.01")
        workers[1].wait_for(f"^step {chance.randrange(1, 30)}$", 120)
        began = time.monotonic()
        if role == "worker":
            workers[1].signal(signal.SIGKILL)
            server.wait_for("^WORKER_LOST worker 1", SOON_S)
        else:
            server.signal(signal.SIGKILL)
            for worker in workers:
                assert worker.wait(SOON_S) == 3, worker.output
                worker.wait_for("^failed UNAVAILABLE: lost the data connection to server 0")
        return time.monotonic() - began
    finally:
        job.end()


def cut(times: int, chance: random.Random) -> list[float]:
    """Seconds from each end of a cut to the next step of both workers."""
    job = Job()
    try:
        _, workers = job.train("--steps", "1000000", "--pause", "0.05", verbs=QUICK)
        resumed: list[float] = []
        for _ in range(times):
            pull_the_cable()
            time.sleep(chance.uniform(0.3, 3))
            plug_the_cable()
            began = time.monotonic()
            for worker in workers:
                at = len([line for line in worker.lines if line.startswith("step")])
                worker.wait_for(f"^step {at + 1}$", SOON_S)
            resumed.append(time.monotonic() - began)
        return resumed
    finally:
        job.end()
        plug_the_cable()


def demo() -> float:
    """Seconds for the digits over verbs; the parameters are those of tcp, bit for bit."""
    saved: dict[str, dict[str, bytes]] = {}
    seconds = 0.0
    for transport in ("tcp", "verbs"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "parameters.npz"
            totals = ("--servers", "1", "--workers", "2", "--ordered", "--transport", transport)
            command = (sys.executable, "-m", "jaxrdma", "launch", *totals, "examples/digits.py")
            began = time.monotonic()
            job = Command(*command, "--epochs", "1", "--save", str(file))
            try:
                assert job.wait(DEMO_S) == 0, job.output
            finally:
                job.end()
            seconds = time.monotonic() - began
            print(f"{transport}: {seconds:.0f} s\n{job.output}", flush=True)
            row = r"transport to server 0 .*" + (
                r"verbs, rxe0 port 1, GID .*MTU 4096" if transport == "verbs" else "tcp"
            )
            job.wait_for(row)
            saved[transport] = {name: leaf.tobytes() for name, leaf in np.load(file).items()}
    assert len(saved["tcp"]) == 8 and saved["tcp"] == saved["verbs"]
    return seconds


def measured(name: str, what: Callable[[], float]) -> tuple[float | None, str]:
    """Also what kept it from ending well."""
    try:
        seconds, error = what(), ""
    except BaseException as failed:  # pytest's own are no Exceptions
        if isinstance(failed, KeyboardInterrupt):
            raise
        seconds, error = None, str(failed)
    print(f"{name}: {'FAILED ' + error if seconds is None else f'{seconds:.2f} s'}", flush=True)
    return seconds, error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("loss", "kills", "cable", "demo"))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)

    groups: dict[str, list[Callable[[], float]]]
    if args.what == "loss":
        groups = {f"{percent} % lost": [lambda p=percent: lose(p)] for percent in (0.5, 3.0)}
    elif args.what == "kills":
        groups = {
            role: [lambda r=role: kill(r, chance)] * args.times for role in ("worker", "server")
        }
    elif args.what == "demo":
        groups = {"digits over verbs": [demo]}
    else:
        groups = {"longest pause after a cut": [lambda: max(cut(args.times, chance))]}

    failures = 0
    for name, jobs in groups.items():
        results = [measured(f"{name} {i}", job) for i, job in enumerate(jobs)]
        seconds = [s for s, _ in results if s is not None]
        failures += len(jobs) - len(seconds)
        if seconds:
            print(
                f"{name}: {len(seconds)} of {len(jobs)} well, median {statistics.median(seconds):.2f} s, "
                f"longest {max(seconds):.2f} s",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
