"""The long forms of tests of this folder. A line for each job, then a summary.

Needs the devices that tests/guest/ makes:
  python -m tests.guest run --time-limit 3000 -- .venv/bin/python tests/verbs/full.py WHAT
WHAT is:
  loss     100 steps of 1 MB on a cable that loses 0.5 %, then 3 % of the packets; with --transport tcp, 1 %
  kills    kill -9 of a worker and of the server, 20 times each (--times N)
  cable    20 cuts of 0.3 to 3 s in one job (--times N)
  demo     one epoch of the digits, over tcp and over verbs: the same bits (--memory 6G: eight processes with JAX)
With TEST_TRANSPORT=verbs TEST_PATIENCE=5, tests/cluster/full.py kills and idle run over verbs too, with JAX.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.verbs.job import QUICK, Command, Job, plug_the_cable, pull_the_cable, run
from tests.verbs.network import route_by_the_cable, undoing

LOSS_S = 1500  # an idle emulated machine takes a tenth of it
SOON_S = 30
DEMO_S = 1500  # of which an idle emulated machine imports and compiles for most
# Compiles in half of the time, to the same code on either transport; and may be slow to import.
LIGHT = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SLOW_MACHINE = (f"XLA_FLAGS={LIGHT}", f"JAXRDMA_CONNECT_TIMEOUT={DEMO_S}")


@dataclass(frozen=True)
class Loss:
    """Where packets are lost, and how the engines are told to go there.

    - `ends`: of the cable; what leaves by them is lost.
    - `percents`: how much of it, a job each.
    - `options`: of the engines.
    """

    ends: tuple[str, ...]
    percents: tuple[float, ...]
    options: tuple[str, ...]


LOSSES = {
    "verbs": Loss(("v0",), (0.5, 3.0), ()),
    # Both ways, or the pulls would not be tried. A server that listens there is reached by the cable alone.
    "tcp": Loss(("v0", "v1"), (1.0,), ("--transport", "tcp", "--listen", "10.88.0.2:0")),
}


@contextlib.contextmanager
def lossy(ends: tuple[str, ...], percent: float) -> Iterator[None]:
    """These ends of the cable lose packets, one by one: a segment of 64 KiB, which TCP leaves to a device to cut, would
    be lost as one."""
    undo = [
        (f"tc qdisc del dev {end} root", f"ip link set {end} gso_max_segs 65535") for end in ends
    ]
    with undoing(*(command for pair in undo for command in pair)):
        for end in ends:
            run("ip", "link", "set", end, "gso_max_segs", "1")
            run("tc", "qdisc", "add", "dev", end, "root", "netem", "loss", f"{percent}%")
        yield


def check_lost(end: str, percent: float, least: int) -> None:
    """At least so many bytes left by this end of the cable, and about `percent` of the packets were lost there."""
    command = ("tc", "-s", "-j", "qdisc", "show", "dev", end)
    told = subprocess.run(command, check=True, timeout=20, capture_output=True, text=True)
    (netem,) = [each for each in json.loads(told.stdout) if each["kind"] == "netem"]
    through, lost = netem["packets"], netem["drops"]
    share = 100 * lost / max(1, through + lost)
    print(
        f"{end}: {netem['bytes']} bytes in {through} packets, {lost} lost: {share:.2f} %",
        flush=True,
    )
    assert netem["bytes"] >= least, f"{end}: {netem['bytes']} bytes went by it, not {least}"
    assert percent / 2 < share < percent * 2, f"{end}: {share:.2f} % lost, not about {percent} %"


def lose(percent: float, transport: str) -> float:
    """Seconds for 100 steps of a model of 1 MB on a cable that loses packets."""
    loss, elements, steps = LOSSES[transport], 262144, 100
    job = Job()
    with route_by_the_cable(), lossy(loss.ends, percent):
        try:
            # Losses are repaired by the devices, or by TCP: nothing is to break.
            sizes = ("--elements", str(elements), "--steps", str(steps))
            _, workers = job.train(*sizes, *loss.options, verbs=("retry_count=7",))
            began = time.monotonic()
            for worker in workers:
                worker.finish("done", LOSS_S)
            seconds = time.monotonic() - began
        finally:
            job.end()
        for end in loss.ends:
            check_lost(end, percent, len(workers) * steps * elements * 4)
        return seconds


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
    began = time.monotonic()
    saved: dict[str, dict[str, bytes]] = {}
    rows = {"tcp": "tcp", "verbs": r"verbs, rxe0 port 1, GID .*MTU 4096"}
    jobs: dict[str, Command] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            # At the same time: most of it is imports, on one processor of two.
            for transport in rows:
                totals = ("--servers", "1", "--workers", "2", "--ordered", "--transport", transport)
                launch = (sys.executable, "-m", "jaxrdma", "launch", *totals, "examples/digits.py")
                end = ("--epochs", "1", "--save", f"{folder}/{transport}.npz")
                # As wide as it takes to name a device in one line.
                jobs[transport] = Command("env", *SLOW_MACHINE, "COLUMNS=160", *launch, *end)
            for transport, job in jobs.items():
                assert job.wait(DEMO_S) == 0, job.output
                print(f"{transport}: {time.monotonic() - began:.0f} s\n{job.output}", flush=True)
                job.wait_for(f"transport to server 0 .*{rows[transport]}")
                file = np.load(f"{folder}/{transport}.npz")
                saved[transport] = {name: leaf.tobytes() for name, leaf in file.items()}
        finally:
            for job in jobs.values():
                job.end()
    assert len(saved["tcp"]) == 8 and saved["tcp"] == saved["verbs"]
    return time.monotonic() - began


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
    parser.add_argument("--transport", choices=LOSSES, default="verbs", help="of loss")
    args = parser.parse_args()
    chance = random.Random(args.seed)

    groups: dict[str, list[Callable[[], float]]]
    if args.what == "loss":
        groups = {
            f"{percent} % lost over {args.transport}": [lambda p=percent: lose(p, args.transport)]
            for percent in LOSSES[args.transport].percents
        }
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
