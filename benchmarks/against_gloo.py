"""Paired benchmark: jaxrdma's average against JAX's Gloo all-reduce, both inside a jitted loop, in the same run.

    python benchmarks/against_gloo.py [--rounds 15] [--seconds 150] [--json FILE]

Three clusters are started once and then take turns, block by block, so that all of them see the same machine:

- `gloo 2`: two processes, `psum` by JAX's CPU collectives;
- `jaxrdma 1+1`: one worker, one server, over tcp: the bare exchange;
- `jaxrdma 2+1`: two workers, one server, over tcp: the same job as `gloo 2`.

Each block is checked element by element by its members (see `average_loop.py`). The table shows medians over the
rounds; the ratio is the median over the rounds of (Gloo's time / ours) within one round: above 1 we are faster.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

import psutil
from rich.console import Console
from rich.table import Table

MEMBER = Path(__file__).with_name("average_loop.py")
BASELINE = "gloo 2"

# Bytes of the array, and exchanges per block: a block lasts some tens of milliseconds at least. Gloo's check allows
# 200 exchanges at most.
SIZES: dict[int, int] = {4 << 10: 200, 1 << 20: 60, 64 << 20: 5}

START_LIMIT_S = 90  # importing JAX on a busy two-core machine takes seconds, nine times
BLOCK_LIMIT_S = 60
END_LIMIT_S = 20


class BenchmarkError(Exception):
    """A cluster did not start, did not answer, or answered with a wrong result."""


@dataclass
class Member:
    """A connection to one process of a cluster."""

    connection: socket.socket
    lines: IO[str]

    def order(self, do: str, size: int, iterations: int) -> None:
        """Has the member prepare, run or check a block."""
        order = {"do": do, "bytes": size, "iterations": iterations}
        print(json.dumps(order), file=self.lines, flush=True)

    def answer(self) -> float:
        """Waits until the order is carried out; the seconds it took, if it was `run`."""
        line = self.lines.readline()
        if not line:
            raise BenchmarkError("a member has ended before its answer")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(answer["error"])
        return float(answer.get("seconds", 0.0))

    def close(self) -> None:
        """Hangs up: the member takes this as the end."""
        self.lines.close()
        self.connection.close()


@dataclass
class Cluster:
    """A named set of processes, started and ended by this script."""

    name: str
    members_expected: int
    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    members: list[Member] = field(default_factory=list[Member])
    processes: list[subprocess.Popen[bytes]] = field(
        default_factory=list["subprocess.Popen[bytes]"]
    )
    log: IO[bytes] | None = None

    def __enter__(self) -> "Cluster":
        self.log = tempfile.TemporaryFile()
        for command in self.commands:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that the whole group can be ended
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()
        deadline = time.monotonic() + END_LIMIT_S
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{self.name}: process {process.pid} did not end by itself", file=sys.stderr)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self.log is not None:
            self.log.close()

    def tail(self) -> str:
        """The last lines that the processes printed."""
        if self.log is None:
            return ""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-25:])

    def _all(self, do: str, size: int, iterations: int) -> float:
        for member in self.members:
            member.order(do, size, iterations)
        return max(member.answer() for member in self.members)

    def run_block(self, size: int, iterations: int) -> tuple[float, float]:
        """One block. Seconds per exchange of the slowest member, processor seconds per exchange of all processes."""
        try:
            self._all("prepare", size, iterations)
            cpu_before = self.cpu_seconds()
            seconds = self._all("run", size, iterations)
            cpu = self.cpu_seconds() - cpu_before
            self._all("check", size, iterations)
        except (BenchmarkError, TimeoutError) as error:
            raise BenchmarkError(
                f"{self.name} at {size} bytes: {error or 'no answer'}. It said:\n{self.tail()}"
            ) from error
        return seconds / iterations, cpu / iterations

    def cpu_seconds(self) -> float:
        """Processor time used so far by all processes of the cluster."""
        total = 0.0
        for root in self.processes:
            process = psutil.Process(root.pid)
            for one in [process, *process.children(recursive=True)]:
                times = one.cpu_times()
                total += times.user + times.system
        return total


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gloo_cluster(driver: str) -> Cluster:
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(MEMBER), "--driver", driver, "--name", BASELINE]
    command += ["--gloo-coordinator", coordinator, "--gloo-index"]
    return Cluster(BASELINE, 2, [[*command, str(index)] for index in range(2)])


def jaxrdma_cluster(driver: str, workers: int) -> Cluster:
    name = f"jaxrdma {workers}+1"
    launch = Path(sysconfig.get_path("scripts")) / "jaxrdma"
    command = [str(launch), "launch", "--servers", "1", "--workers", str(workers)]
    command += [str(MEMBER), "--driver", driver, "--name", name]
    return Cluster(name, workers, [command], {"JAXRDMA_TRANSPORT": "tcp"})


def gather(listener: socket.socket, clusters: list[Cluster]) -> None:
    """Waits until every member of every cluster has called in."""
    by_name = {cluster.name: cluster for cluster in clusters}
    deadline = time.monotonic() + START_LIMIT_S
    while any(len(cluster.members) < cluster.members_expected for cluster in clusters):
        for cluster in clusters:
            for process in cluster.processes:
                if process.poll() is not None:
                    raise BenchmarkError(
                        f"{cluster.name}: a process ended with status {process.returncode} during"
                        f" the start. It said:\n{cluster.tail()}"
                    )
        if time.monotonic() > deadline:
            missing = [c.name for c in clusters if len(c.members) < c.members_expected]
            raise BenchmarkError(
                f"{', '.join(missing)}: not up after {START_LIMIT_S} s. Said:\n"
                + "\n".join(c.tail() for c in clusters if c.name in missing)
            )
        listener.settimeout(0.5)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(BLOCK_LIMIT_S)
        lines = connection.makefile("rw", encoding="utf-8")
        cluster = by_name[json.loads(lines.readline())["member"]]
        cluster.members.append(Member(connection, lines))


@dataclass
class Series:
    """What one cluster did at one size, a value per round."""

    seconds: list[float] = field(default_factory=list[float])
    cpu_seconds: list[float] = field(default_factory=list[float])  # per exchange, all processes


def measure(
    clusters: list[Cluster], rounds: int, limit_s: float, console: Console
) -> dict[int, dict[str, Series]]:
    """Alternates the clusters: for every round and size, one block of each."""
    results = {size: {cluster.name: Series() for cluster in clusters} for size in SIZES}
    for size in SIZES:  # compiles, and allocates what is allocated once
        for cluster in clusters:
            cluster.run_block(size, 2)
    deadline = time.monotonic() + limit_s
    for done in range(rounds):
        if time.monotonic() > deadline:
            console.print(f"time is up after {done} of {rounds} rounds")
            break
        for size, iterations in SIZES.items():
            # The order turns with the round, so that nobody is always first.
            for i in range(len(clusters)):
                cluster = clusters[(i + done) % len(clusters)]
                seconds, cpu = cluster.run_block(size, iterations)
                results[size][cluster.name].seconds.append(seconds)
                results[size][cluster.name].cpu_seconds.append(cpu)
    return results


def summarise(results: dict[int, dict[str, Series]]) -> list[dict[str, object]]:
    """One row per size and cluster: medians, spread, rate, and the ratio to Gloo within each round."""
    rows: list[dict[str, object]] = []
    for size, by_cluster in results.items():
        baseline = by_cluster[BASELINE].seconds
        for name, series in by_cluster.items():
            median = statistics.median(series.seconds)
            ratios = [theirs / ours for theirs, ours in zip(baseline, series.seconds, strict=True)]
            rows.append(
                {
                    "bytes": size,
                    "cluster": name,
                    "rounds": len(series.seconds),
                    "median_s": median,
                    "min_s": min(series.seconds),
                    "max_s": max(series.seconds),
                    "gbit_per_s": size * 8 / median / 1e9,
                    "ratio_to_gloo": statistics.median(ratios),
                    "cpu_s_per_exchange": statistics.median(series.cpu_seconds),
                }
            )
    return rows


def format_bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def show(rows: list[dict[str, object]], console: Console) -> None:
    table = Table(title="one exchange in a jitted loop (median over rounds)")
    for column in ("size", "cluster", "median", "fastest", "slowest", "Gbit/s", "CPU", "x Gloo"):
        justify = "left" if column == "cluster" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for previous, row in zip([None, *rows[:-1]], rows, strict=True):
        new = previous is None or previous["bytes"] != row["bytes"]
        if new and previous is not None:
            table.add_section()
        table.add_row(
            format_bytes(int(str(row["bytes"]))) if new else "",
            str(row["cluster"]),
            format_seconds(float(str(row["median_s"]))),
            format_seconds(float(str(row["min_s"]))),
            format_seconds(float(str(row["max_s"]))),
            f"{row['gbit_per_s']:.2f}",
            format_seconds(float(str(row["cpu_s_per_exchange"]))),
            f"{row['ratio_to_gloo']:.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150, help="no new round after this time")
    parser.add_argument(
        "--json", type=Path, help="also write the rows, and where they were measured"
    )
    parser.add_argument(
        "--only-gloo", action="store_true", help="measure the baseline alone, without jaxrdma"
    )
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    load_before = os.getloadavg()[0]
    try:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            driver = f"127.0.0.1:{listener.getsockname()[1]}"
            clusters = [gloo_cluster(driver)]
            if not options.only_gloo:
                clusters += [jaxrdma_cluster(driver, workers) for workers in (1, 2)]
            for cluster in clusters:
                stack.enter_context(cluster)
            gather(listener, clusters)
            results = measure(clusters, options.rounds, options.seconds, console)
    except BenchmarkError as error:
        console.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    rows = summarise(results)
    show(rows, console)
    if load_before > 0.5:
        console.print(f"The machine was not idle: its load was {load_before:.1f} at the start.")
    if options.json is not None:
        report = {
            "python": platform.python_version(),
            "jax": version("jax"),
            "jaxrdma": version("jaxrdma") if not options.only_gloo else None,
            "cores": os.cpu_count(),
            "load_at_start": load_before,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
