"""Paired benchmark: push and pull over verbs against perftest, between the same two devices, in the same run.

    python benchmarks/against_perftest.py [--devices rxe0,rxe1] [--rounds 5] [--json FILE]
    python -m tests.guest run -- .venv/bin/python benchmarks/against_perftest.py    # where there is no device

A worker engine and a server engine, without JAX, as a session makes them, move a model in partitions: a push counts
from the call until every mean is there (copied, sent, summed), a pull from the publication until the parameters are in
the worker's own buffers. In turn with them, `ib_write_bw` writes messages of one partition's size; it moves nothing
else and sums nothing. Of either, the median counts. `ib_write_lat` gives the time of one write of 4 KiB one way, of
which a push and its pull are two; ours is the time from start to completion of an average of 4 KiB: once with threads
that look for what comes as by default, and once with threads that look for longer than it takes, as perftest's do.
Values that came back are checked.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from jaxrdma import _native

# Bytes of a partition, and of the model. 1 MiB is the partition of a job that does not say otherwise.
SIZES = [
    (4 << 10, 256 << 10),
    (16 << 10, 1 << 20),
    (64 << 10, 4 << 20),
    (256 << 10, 16 << 20),
    (1 << 20, 16 << 20),
    (4 << 20, 64 << 20),
    (1 << 20, 64 << 20),
]
TOKEN = bytes(_native.TOKEN_BYTES)
LATENCY_BYTES = 4 << 10
# Longer than a push and its pull take, so that hardly a thread sleeps meanwhile.
SPIN_US = 3000
LIMIT_S = 120
# As many as its send queue takes, or as many bytes; each is a few times as much as a model of ours.
PERFTEST_WRITES, PERFTEST_BYTES = 128, 256 << 20
# Of a size and round: ours is a median of several transfers too. Soft-RoCE works on one processor or on two, as it
# happens, and perftest then finds some 70 or up to 140 MiB/s. So what stands beside ours is the median of all runs with
# messages of a size, and the table tells how far they differ.
PERFTEST_RUNS = 3
# perftest measures the clock rate, and gives up where a busy machine lets it find none; the next try may.
CALIBRATIONS = 5


class BenchmarkError(Exception):
    """An engine or perftest failed, or a value came back wrong."""


def checked(status: Any) -> Any:
    if isinstance(status, _native.Status) and not status.ok:
        raise BenchmarkError(f"{status.code.name}: {status.message}")
    return status


def float_flow(identity: int, mode: Any, partition: int, size: int) -> Any:
    """One float32 leaf of `size` bytes."""
    elements, piece = size // 4, partition // 4
    partitions = [
        (0, 0, begin, min(piece, elements - begin)) for begin in range(0, elements, piece)
    ]
    return _native.FlowSpec(
        id=identity,
        mode=mode,
        dtypes=[_native.DType.float32],
        elements=[elements],
        partitions=partitions,
    )


def verbs_options(device: str) -> Any:
    options = _native.VerbsOptions()
    options.sources = [_native.VerbsSource(device=device)]
    return options


class Pair:
    """One worker and one server; flow i holds parameters of SIZES[i], the last one averages 4 KiB."""

    def __init__(self, near: str, far: str, spin_us: int, sizes: list[tuple[int, int]]) -> None:
        common: dict[str, Any] = {"job": "benchmark", "spin_us": spin_us, "transport": "verbs"}
        self.server = checked(
            _native.ServerEngine.create(
                server=0,
                servers=1,
                workers=1,
                listen="127.0.0.1:0",
                partition_bytes=max([LATENCY_BYTES, *(partition for partition, _ in sizes)]),
                verbs=verbs_options(far),
                **common,
            )
        )
        checked(self.server.admit(0, 1, TOKEN))
        self.worker = checked(
            _native.WorkerEngine.create(0, incarnation=1, verbs=verbs_options(near), **common)
        )
        checked(self.worker.connect([self.server.address], [TOKEN], 20_000))
        self.specs: dict[int, Any] = {}
        self.steps: dict[int, int] = defaultdict(int)
        self.ready = threading.Semaphore(0)
        self.moments: list[tuple[float, float]] = []
        flows = [(_native.FlowMode.UPDATE, *each) for each in sizes]
        self.latency_flow = len(flows)
        flows.append((_native.FlowMode.AVERAGE, LATENCY_BYTES, LATENCY_BYTES))
        for i, (mode, partition, size) in enumerate(flows):
            self.specs[i] = float_flow(i, mode, partition, size)
            checked(self.server.add_flow(self.specs[i]))
            checked(self.worker.add_flow(self.specs[i]))
        self.closing = False
        self.publisher = threading.Thread(target=self._publish, daemon=True)
        self.publisher.start()

    def _publish(self) -> None:
        """As a server's Python does, but with an update that does nothing."""
        kinds = _native.ServerEvent.Kind
        while True:
            event = self.server.wait_event()
            if event.kind == kinds.STEP_READY:
                # What is pulled is then what was pushed.
                gradient = np.asarray(self.server.gradient(event.flow, 0)).view(np.float32)
                parameters = np.asarray(self.server.parameters(event.flow, 0)).view(np.float32)
                ready = time.perf_counter()
                parameters[:] = gradient
                published = time.perf_counter()
                self.moments.append((ready, published))
                checked(self.server.publish(event.flow, event.step + 1))
            elif event.kind == kinds.INITIALISED:
                checked(self.server.publish(event.flow, event.step))
            elif event.kind == kinds.CLOSED:
                return
            elif event.kind != kinds.WORKER_LOST or not self.closing:
                raise BenchmarkError(event.text)

    def operate(
        self, kind: Any, flow: int, source: NDArray[np.float32], target: NDArray[np.float32]
    ) -> None:
        checked(
            self.worker.run_operation(
                kind,
                flow,
                self.steps[flow],
                [source.view(np.uint8)],
                [target.view(np.uint8)],
                self.specs[flow],
            )
        )

    def initialise(self, flow: int, size: int) -> None:
        zeros = np.zeros(size // 4, np.float32)
        self.operate(_native.OperationKind.INIT, flow, zeros, np.empty_like(zeros))

    def push_and_pull(
        self, flow: int, source: NDArray[np.float32], target: NDArray[np.float32]
    ) -> tuple[float, float]:
        """Seconds of either."""
        began = time.perf_counter()
        self.operate(_native.OperationKind.EXCHANGE, flow, source, target)
        ended = time.perf_counter()
        self.steps[flow] += 1
        ready, published = self.moments.pop()
        return ready - began, ended - published

    def close(self) -> None:
        self.closing = True
        self.worker.close()
        self.server.close()
        self.publisher.join(10)


def ipv4_gid(device: str) -> str:
    gids = Path(f"/sys/class/infiniband/{device}/ports/1/gids")
    for index in range(16):
        if (gids / str(index)).read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            return str(index)
    raise BenchmarkError(f"{device} has no IPv4 address")


def perftest(tool: str, near: str, far: str, *options: str) -> list[str]:
    """The last row of its table."""
    client = run_perftest(tool, near, far, *options)
    for _ in range(CALIBRATIONS - 1):
        if "Correlation coefficient" not in client.stdout + client.stderr:
            break
        client = run_perftest(tool, near, far, *options)
    rows = re.findall(r"^ *\d+ +\d+ +\d.*$", client.stdout, re.MULTILINE)
    if client.returncode != 0 or not rows:
        raise BenchmarkError(f"{tool} failed: {client.stdout}{client.stderr}")
    return rows[-1].split()


def run_perftest(tool: str, near: str, far: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Its client, which has ended."""

    def command(device: str, *peer: str) -> list[str]:
        # An emulated processor does not tell its clock rate.
        return [
            *("stdbuf", "-oL", tool, "-d", device, "-x", ipv4_gid(device), "--CPU-freq"),
            *options,
            *peer,
        ]

    server = subprocess.Popen(
        command(far), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ended = threading.Timer(LIMIT_S, server.kill)
    ended.start()
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "Waiting for client" in line:
                break
        client = subprocess.run(
            command(near, "127.0.0.1"), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        server.stdout.read()
    finally:
        ended.cancel()
        server.wait()
    return client


def write_bandwidth(near: str, far: str, size: int, repeats: int) -> float:
    """Bytes per second of ib_write_bw's average."""
    row = perftest("ib_write_bw", near, far, "--size", str(size), "--iters", str(repeats))
    return float(row[3]) * (1 << 20)  # it says MB and means MiB


def write_latency(near: str, far: str) -> float:
    """Seconds of one write, one way, as ib_write_lat's median."""
    options = ("--size", str(LATENCY_BYTES), "--iters", "1000")
    return float(perftest("ib_write_lat", near, far, *options)[4]) * 1e-6


def measure_size(
    pair: Pair, index: int, near: str, far: str, repeats: int
) -> tuple[float, float, list[float]]:
    """Bytes per second of push, of pull, and of each run of perftest."""
    message, size = SIZES[index]
    flow = index
    source = np.random.default_rng(pair.steps[flow]).random(size // 4, np.float32)
    target = np.empty_like(source)
    pair.push_and_pull(flow, source, target)  # warms up
    times = [pair.push_and_pull(flow, source, target) for _ in range(repeats)]
    np.testing.assert_array_equal(target, source)
    push, pull = (size / statistics.median(column) for column in zip(*times, strict=True))
    count = min(PERFTEST_WRITES, PERFTEST_BYTES // message)
    return push, pull, [write_bandwidth(near, far, message, count) for _ in range(PERFTEST_RUNS)]


def measure_latency(pair: Pair, near: str, far: str) -> tuple[float, float]:
    """Seconds of a 4 KiB push and pull (median), and of one write of as much, one way."""
    flow = pair.latency_flow
    source = np.random.default_rng(0).random(LATENCY_BYTES // 4, np.float32)
    target = np.empty_like(source)
    count = 500
    times: list[float] = checked(
        pair.worker.repeat_operation(
            _native.OperationKind.EXCHANGE,
            flow,
            pair.steps[flow],
            count,
            [source.view(np.uint8)],
            [target.view(np.uint8)],
            pair.specs[flow],
        )
    )
    pair.steps[flow] += count
    np.testing.assert_array_equal(target, source)
    return statistics.median(times), write_latency(near, far)


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="rxe0,rxe1", help="the worker's and the server's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="no new round after so long")
    parser.add_argument("--spin-us", type=int, default=_native.DEFAULT_SPIN_US)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    near, far = args.devices.split(",")
    signal.alarm(int(args.seconds) + 300)  # whatever hangs, ends

    began = time.monotonic()
    pair = Pair(near, far, args.spin_us, SIZES)
    pairs = {"default": pair, "spinning": Pair(near, far, SPIN_US, [])}
    samples: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    peers: dict[int, list[float]] = defaultdict(list)  # by bytes of a message
    latencies: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    try:
        for i, (_, size) in enumerate(SIZES):
            pair.initialise(i, size)
        for _ in range(args.rounds):
            for name, each in pairs.items():
                latencies[name].append(measure_latency(each, near, far))
            for i, sizes in enumerate(SIZES):
                repeats = max(3, min(20, (16 << 20) // sizes[1]))
                push, pull, writes = measure_size(pair, i, near, far, repeats)
                samples[sizes].append((push, pull))
                peers[sizes[0]] += writes
            if time.monotonic() - began > args.seconds:
                break
    finally:
        for each in pairs.values():
            each.close()

    rounds = len(latencies["default"])
    title = (
        f"{pair.worker.transport}; {os.cpu_count()} processors, {platform.machine()}, {rounds} rounds; "
        "MiB/s, medians; ratio: of ours to that of perftest"
    )
    table = Table(
        *("partition", "model", "push", "pull", "ib_write_bw", "of it half are", "push ratio"),
        "pull ratio",
        title=title,
    )
    result: dict[str, Any] = {"transport": pair.worker.transport, "rounds": rounds, "sizes": []}
    for (partition, size), rows in samples.items():
        push, pull = (statistics.median(column) for column in zip(*rows, strict=True))
        low, peer, high = statistics.quantiles(peers[partition], n=4, method="inclusive")
        push_ratio, pull_ratio = push / peer, pull / peer
        result["sizes"].append(
            {
                "partition": partition,
                "model": size,
                "push": push,
                "pull": pull,
                "ib_write_bw": peer,
                "ib_write_bw_quartiles": [low, high],
                "push_ratio": push_ratio,
                "pull_ratio": pull_ratio,
            }
        )
        table.add_row(
            size_text(partition),
            size_text(size),
            *(f"{value / (1 << 20):.1f}" for value in (push, pull, peer)),
            f"{low / (1 << 20):.0f} to {high / (1 << 20):.0f}",
            *(f"{value:.2f}" for value in (push_ratio, pull_ratio)),
        )
    console = Console(width=110)
    console.print(table)
    result["latency"] = {}
    for name, rows in latencies.items():
        ours, write = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(a / (2 * b) for a, b in rows)
        result["latency"][name] = {
            "push_pull_s": ours,
            "write_s": write,
            "ratio_to_two_writes": ratio,
        }
        console.print(
            f"4 KiB push and pull, {name}: {ours * 1e6:.0f} us; one write, one way: {write * 1e6:.0f} us; "
            f"{ratio:.2f} times two writes",
            soft_wrap=True,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
