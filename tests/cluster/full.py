"""The long forms of tests of this folder, with a table of what happened at the end.

Usage, from any folder:
  python tests/cluster/full.py orders    all 24 orders of starts, delays of 0 to 20 s, three jobs at a time
  python tests/cluster/full.py late      servers that wait 60 s for their workers, and workers for their servers
  python tests/cluster/full.py loss      200 MB of parameters, 2000 steps (--times), 1 % of the packets lost; root
  python tests/cluster/full.py interrupts   Ctrl-C at a random moment of each part of a worker's life, 20 times each
  python tests/cluster/full.py kills     kill -9 of a worker, a server, the coordinator, 20 times each
  python tests/cluster/full.py recover   kill -9 of the chief, another worker, a server, the coordinator, 20 times each:
                                         the job starts itself again; how long that takes, how many steps are lost;
                                         and of two launchers of one job, each part in turn
  python tests/cluster/full.py copies    the same of workers and servers with --replicate 1: no step may be lost
  python tests/cluster/full.py rejoin    kill -9 of the chief and of another worker, 20 times each: all wait for it
  python tests/cluster/full.py one-core  20 starts of 1000 steps on one core with one thread
  python tests/cluster/full.py devices   20 starts of 1000 steps, 8 devices in each worker, on two cores and on one
  python tests/cluster/full.py soak      100,000 steps of three workers, of whom one is killed and replaced every minute
  python tests/cluster/full.py many      500 followers and 500 workers that come and go; 8 to 64 workers of one server
  python tests/cluster/full.py idle      what a session that does nothing costs in 60 s: processor time of the busiest
  python tests/cluster/full.py stops     SIGSTOP of a worker for 60 s, then SIGCONT, under every policy
  python tests/cluster/full.py leaves    every kind of leaf, one of 512 MiB; needs 20 GiB of memory
  python tests/cluster/full.py embedding 5 million rows of 64 columns, of which 3 workers touch 1 % each in a step
  python tests/cluster/full.py large     a leaf of 5 GiB float32, of one worker; says first how much memory it needs
Options: --times N instead of 20 (or of all orders), --delay S instead of 20, --jobs N at a time, --seed N; of large
--gib G instead of 5, --dtype bfloat16 (5 GiB are more than 2**31 elements then), --servers N instead of 1.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.blame import check_all_name, error_of
from tests.cluster.job import Job
from tests.cluster.namespace import make_namespace
from tests.cluster.scripts.large import BITS
from tests.cluster.test_embedding import train_rows
from tests.cluster.test_interrupt import MOMENTS, interrupt_at
from tests.cluster.test_kill import VICTIMS, kill_at_random_step
from tests.cluster.test_large import check_room, train_large
from tests.cluster.test_leaves import train_every_leaf
from tests.cluster.test_many import check_flat, come_and_go, follow_and_leave, serve_many
from tests.cluster.test_network import train_over_losses
from tests.cluster.test_one_core import train_on_one_core
from tests.cluster.test_rejoin import rejoin_at_random_step
from tests.cluster.test_restarts import VICTIMS as LOST
from tests.cluster.test_restarts import (
    Recovery,
    recover_at_random_step,
    recover_on_two_machines,
    recover_without_loss,
)
from tests.cluster.test_several_devices import train as train_a_mesh
from tests.cluster.test_soak import check_leaks, live_long
from tests.cluster.test_start import MEMBERS, ORDERS, run_in_order, start_member
from tests.conftest import MARK, describe, marked_processes

IDLE_S = 60
STOPPED_S = 60
LATE_S = 60


@dataclass(frozen=True)
class Case:
    """One job to run. `run` returns what is measured, in seconds, or what a restart cost, or raises."""

    group: str
    name: str
    run: Callable[[Job], float | Recovery]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Outcome:
    case: Case
    seconds: float
    error: str
    lost: int | None = None  # steps


def struck(
    run: Callable[[Job, str, random.Random], float], role: str, victim: str, seed: int
) -> Case:
    """One process, of that role, is lost at a random step."""
    return Case(role, victim, lambda job: run(job, victim, random.Random(seed)))


def cases_of(
    what: str,
    times: int | None,
    delay: float,
    chance: random.Random,
    leaf: tuple[float, str],
) -> list[Case]:
    """`leaf`: GiB and type of the large one."""
    if what == "orders":

        def ordered(order: tuple[str, ...], seed: int) -> Case:
            return Case(
                "order",
                ", ".join(order),
                lambda job: run_in_order(job, order, delay, random.Random(seed)),
            )

        return [ordered(order, chance.getrandbits(32)) for order in ORDERS[:times]]
    if what == "late":
        long = {"connect_timeout": 60 + LATE_S}
        return [
            Case("late", f"{first}s wait for {last}s", lambda job, r=first: come_late(job, r), long)
            for first, last in (("server", "worker"), ("worker", "server"))
        ] * (times or 1)
    if what == "loss":
        return [Case("loss", "1 %, 200 MB", lambda job: lose(job, times or 2000), {"secret": "s"})]
    if what == "interrupts":
        return [
            struck(interrupt_at, moment, moment, chance.getrandbits(32))
            for _ in range(times or 20)
            for moment in MOMENTS
        ]
    if what == "kills":
        return [
            struck(kill_at_random_step, role, victim, chance.getrandbits(32))
            for _ in range(times or 20)
            for role, victim in VICTIMS.items()
        ]

    if what == "rejoin":
        return [
            struck(rejoin_at_random_step, role, LOST[role], chance.getrandbits(32))
            for _ in range(times or 20)
            for role in ("chief", "worker")
        ]

    if what == "recover":
        apart = Case("machines", "coordinator, worker, launchers in turn", recover_on_two_machines)
        return [
            case
            for _ in range(times or 20)
            for case in (
                *(
                    struck(recover_at_random_step, role, victim, chance.getrandbits(32))
                    for role, victim in LOST.items()
                ),
                apart,
            )
        ]

    if what == "copies":
        return [
            struck(recover_without_loss, victim, victim, chance.getrandbits(32))
            for _ in range(times or 20)
            for victim in ("server 0", "server 1", "worker 0", "worker 1")
        ]

    if what == "leaves":

        def leaves(job: Job) -> float:
            begin = time.monotonic()
            train_every_leaf(job, 512 << 20, x64=False, limit_s=900)
            return time.monotonic() - begin

        return [Case("leaves", "one of 512 MiB", leaves)] * (times or 1)

    if what == "embedding":

        def rows(job: Job) -> float:
            begin = time.monotonic()
            train_rows(job, 5_000_000, 64, 3, "adagrad", limit_s=900)
            return time.monotonic() - begin

        return [Case("embedding", "5,000,000 rows of 64 columns", rows)] * (times or 1)

    if what == "large":
        gib, dtype = leaf
        size = int(gib * 2**30)
        name = f"{gib:g} GiB of {dtype}"
        return [Case("large", name, lambda job: train_a_large_leaf(job, size, dtype))] * (
            times or 1
        )

    if what == "stops":
        return [
            Case("stops", policy, lambda job, p=policy: stop_and_wake(job, p))
            for policy in POLICIES
        ] * (times or 1)

    if what == "idle":
        return [Case("idle", "all wait for a worker that sleeps", rest)] * (times or 1)

    if what == "soak":
        seed = chance.getrandbits(32)
        return [Case("soak", f"seed {seed}", lambda job: soak(job, seed))] * (times or 1)

    if what == "many":
        return [
            Case("many", "500 followers", lambda job: come_to_one(job, 500, follow=True)),
            Case("many", "500 lives of a worker", lambda job: come_to_one(job, 500, follow=False)),
            Case("many", "8 to 64 workers", more_and_more),
        ] * (times or 1)

    if what == "devices":

        def several(cores: int) -> Case:
            return Case("devices", f"{cores} cores", lambda job: train_on_devices(job, cores))

        return [several(1 + number % 2) for number in range(times or 20)]

    def one_core(number: int) -> Case:
        threads = ("1", "8")[number % 2]
        return Case(
            "one core", f"PJRT_NPROC={threads}", lambda job: train_on_one_core(job, threads)
        )

    return [one_core(number) for number in range(times or 20)]


def come_late(job: Job, first: str) -> float:
    """Who has the role `first` waits a minute for the others. Seconds from their start to the end of the training."""
    job.at(job.start_coordinator())
    for late in (False, True):
        if late:
            time.sleep(LATE_S)
        begin = time.monotonic()
        for name in MEMBERS:
            if name.startswith(first) != late:
                start_member(job, name)
    job.succeed()
    return time.monotonic() - begin


def lose(job: Job, steps: int) -> float:
    """Seconds of so many steps of 200 MB on a cable that loses 1 % of the packets."""
    with make_namespace() as namespace:
        return train_over_losses(job, namespace, 10, 200_000_000, steps, 60 + 60 * steps)


WAITING = ("sync:3:wait", "bounded:2:wait")
POLICIES = ("sync:3", "sync:2", "async", "sync:3:shrink", "bounded:2", "bounded:2:shrink", *WAITING)


def stop_and_wake(job: Job, policy: str) -> float:
    """Worker 2 stands still for 60 s, then goes on: by policy the job has ended with its name, or goes on without it.

    Or with another in its place, where all wait for that. Seconds until the job had ended, or made a step.
    """
    work = ("policies.py", policy, "v1000000", 0.02, 0.02, 0.02)
    job.start(*work)
    job.wait_for_output("worker 0", '"batch": 15,')
    job.kill("worker 2", signal.SIGSTOP)
    began = time.monotonic()
    if policy in ("sync:3", "bounded:2"):
        names = ["worker 0", "worker 1", "server 0", "coordinator"]
        seconds = check_all_name(job, "worker 2 .*silent for", 60, names)
    else:
        waits = policy in WAITING
        says = "its place is kept" if waits else "the job goes on without it"
        job.wait_for_output("coordinator", says, 60)
        if waits:
            job.start_worker(2, *work, name="again")
        before = job.output("worker 0").count("after")
        while job.output("worker 0").count("after") < before + 10:
            assert time.monotonic() - began < 60, job.outputs()
            time.sleep(0.1)
        seconds = time.monotonic() - began
    time.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
    job.kill("worker 2", signal.SIGCONT)
    assert job.wait(60, ["worker 2"])["worker 2"] == 1, job.outputs()
    assert "silent for" in error_of(job, "worker 2"), job.output("worker 2")
    if policy in ("sync:3", "bounded:2"):
        return seconds
    # The others have noticed nothing.
    before = job.output("worker 1").count("after")
    while job.output("worker 1").count("after") < before + 10:
        assert job.processes["worker 1"].poll() is None, job.outputs()
        time.sleep(0.1)
    return seconds


def soak(job: Job, seed: int) -> float:
    """A job of 100,000 steps, and what its processes hold; the seconds that it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        leaks = live_long(job, Path(folder) / "out", 100_000, 2, 60.0, random.Random(seed))
    print(leaks.table(), flush=True)
    check_leaks(job, leaks)
    return time.monotonic() - begin


def come_to_one(job: Job, times: int, follow: bool) -> float:
    """So many that come and go, the last as fast as the first; the seconds that all took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        if follow:
            check_flat(follow_and_leave(job, stop, times))
        else:
            lives = come_and_go(job, stop, times, 1800)
            fifth = times // 5
            first, last = (statistics.median(each) for each in (lives[:fifth], lives[-fifth:]))
            print(f"a life: {first * 1e3:.1f} ms at first, {last * 1e3:.1f} ms at last")
            assert last < 1.5 * first, (first, last)
    return time.monotonic() - begin


def more_and_more(job: Job) -> float:
    """8 to 64 workers of one server: 8 times as many may take 8 times as long. The seconds of all.

    Each has a process: threads of one would wait for Python's lock more than for the server.
    """
    begin = time.monotonic()
    took: dict[int, float] = {}
    for workers in (8, 16, 32, 64):
        # The best of three: other things run on this machine too.
        jobs = (
            Job(job.folder / f"{workers}-{number}", 1, workers, connect_timeout=300)
            for number in range(3)
        )
        times: list[float] = []
        for each in jobs:
            with each:
                times.append(serve_many(each, 200, apart=True, limit_s=600))
        took[workers] = min(times)
    print(", ".join(f"{n} workers {t:.2f} ms a step" for n, t in took.items()), flush=True)
    assert took[64] < 8 * took[8], took
    return time.monotonic() - begin


def train_a_large_leaf(job: Job, size: int, dtype: str) -> float:
    """One leaf of so many bytes, compared whole; the seconds that it took. What it had resident is told."""
    begin = time.monotonic()
    check_room(size, dtype, job.servers)
    peaks = train_large(job, size, dtype, limit_s=3600)
    print(job.output("worker 0"), end="")
    for name, most in peaks.items():
        copies = most / size
        print(f"{name}: at most {most / 2**30:.2f} GiB resident, {copies:.2f} times the leaf")
    return time.monotonic() - begin


def train_on_devices(job: Job, cores: int) -> float:
    """1000 steps of two workers of 8 devices each, on so many cores; the seconds that it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        some = sorted(os.sched_getaffinity(0))[:cores]
        train_a_mesh(job, Path(folder) / "out", 1000, "mesh", some)
    return time.monotonic() - begin


def rest(job: Job) -> float:
    """Seconds of processor time, in 60 s, of the busiest session of a job in which nobody has anything to do."""
    job.start("steps.py", 8, "0:20:sleep", "1:20:sleep")
    for worker in ("worker 0", "worker 1"):
        job.wait_for_output(worker, "sleeping")

    def used() -> dict[str, float]:
        times = {name: psutil.Process(p.pid).cpu_times() for name, p in job.processes.items()}
        return {name: t.user + t.system for name, t in times.items()}

    time.sleep(2)  # what the last step left to do
    before = used()
    time.sleep(IDLE_S)
    seconds = {name: after - before[name] for name, after in used().items()}
    print(", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()), flush=True)
    # The coordinator hears everybody; there is one in a job.
    sessions = [s for name, s in seconds.items() if name != "coordinator"]
    assert max(sessions) < 0.01 * IDLE_S, seconds
    return max(sessions)


def run(case: Case, number: int, workers: tuple[int, int]) -> Outcome:
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Job(Path(folder) / "job", *workers, **case.settings) as job,
    ):
        recovery = None
        try:
            measured, error = case.run(job), ""
            recovery = measured if isinstance(measured, Recovery) else None
            seconds = measured.seconds if isinstance(measured, Recovery) else measured
        except (Exception, BaseException) as problem:  # pytest.fail raises a BaseException
            if isinstance(problem, KeyboardInterrupt):
                raise
            seconds, error = time.monotonic() - begin, str(problem)
    went = f", killed at step {recovery.killed}, {recovery.lost} lost" if recovery else ""
    print(
        f"{number:3} {case.group}: {case.name}: {'FAILED' if error else 'well'}, {seconds:.2f} s{went} {error}",
        flush=True,
    )
    return Outcome(case, seconds, error, recovery.lost if recovery else None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    doings = [
        "orders",
        "late",
        "loss",
        "interrupts",
        "kills",
        "recover",
        "copies",
        "rejoin",
        "one-core",
        "devices",
        "soak",
        "many",
        "idle",
        "leaves",
        "stops",
        "embedding",
        "large",
    ]
    parser.add_argument("what", choices=doings)
    parser.add_argument("--times", type=int)
    parser.add_argument("--delay", type=float, default=20.0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--dtype", choices=BITS, default="float32")
    parser.add_argument("--servers", type=int, default=1)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    mark = os.environ[MARK] = uuid.uuid4().hex
    chance, leaf = random.Random(args.seed), (args.gib, args.dtype)
    cases = cases_of(args.what, args.times, args.delay, chance, leaf)
    sizes = {
        "one-core": (1, 2),
        "devices": (1, 2),
        "loss": (1, 2),
        "interrupts": (1, 2),
        "soak": (2, 3),
        "stops": (2, 3),
        "embedding": (2, 3),
        "large": (args.servers, 1),
    }
    workers = sizes.get(args.what, (2, 2))
    at_once = args.jobs or (3 if args.what == "orders" else 1)
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(lambda pair: run(pair[1], pair[0], workers), enumerate(cases)))
    left = [describe(process) for process in marked_processes(mark)]
    print(f"\n{'':12} {'well':>5} {'of':>4} {'median s':>9} {'longest s':>9}")
    for group in dict.fromkeys(case.group for case in cases):
        mine = [o for o in outcomes if o.case.group == group]
        seconds = [o.seconds for o in mine if not o.error]
        median, longest = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
        lost = sorted(o.lost for o in mine if o.lost is not None)
        steps = (
            f"   steps lost: median {statistics.median(lost):g}, most {lost[-1]}" if lost else ""
        )
        print(f"{group:12} {len(seconds):5} {len(mine):4} {median:9.2f} {longest:9.2f}{steps}")
    print(f"left behind: {', '.join(left) or 'nothing'}")
    return 1 if left or any(o.error for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
