"""What a checkpoint costs one server: how long training stands still, and how fast the file is written.

    python benchmarks/checkpoint.py --folder /where/checkpoints/go

In turn, in one run: a copy of the same bytes in memory; the standstill of a save, which is the call that a server makes
between two steps; the whole save, until its file is on the disk; and the same bytes written to a file in the same
folder with plain writes of the same size, and flushed. Parameters are one float32 leaf, the state that of adam, three
times as much together. How long an update takes beside a save says what the writing thread takes from it.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jaxrdma import checkpoint
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import ClientMessage, FlowAgreed, LeafSpec, SaveEnded, ShardSaved
from jaxrdma.plan import assign_partitions
from jaxrdma.policy import SyncReplicas, to_wire
from jaxrdma.saver import Saver
from jaxrdma.update import ServerUpdate, StatePart, analyse, export_update


class Server:
    """One server's parameters and their update, without a network."""

    def __init__(self, leaf: LeafSpec) -> None:
        treedef = jax.tree.structure(0)
        analysis = analyse(optax.adam(1e-3), treedef, [leaf])
        self.plan = assign_partitions([leaf], 1, 1 << 20)
        self.update = ServerUpdate(export_update(analysis, self.plan).programs[0])
        self.params = np.ones(leaf.shape, np.float32)
        self.gradient = np.full(leaf.shape, 0.5, np.float32)
        self.update.initialise([self.params])
        self.step()

    def step(self) -> float:
        """One update; its seconds."""
        begin = time.perf_counter()
        self.update.step([self.gradient], [self.params])
        return time.perf_counter() - begin

    def parameters(self) -> list[Any]:
        return [self.params.view(np.uint8)]

    def state_parts(self) -> list[StatePart]:
        return self.update.state_parts()

    def state(self) -> list[Any]:
        return self.update.state()

    def load_state(self, fill: Any) -> None:
        self.update.load_state(fill)


def plain_write(folder: Path, data: np.ndarray) -> float:
    """Seconds to write and flush a file of these bytes."""
    path = folder / "plain"
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, data.size, checkpoint.BLOCK_BYTES):
        view = data[at : at + checkpoint.BLOCK_BYTES].data
        while view:
            view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def measure(folder: Path, mib: int, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes of a save, and seconds by what was measured."""
    leaf = LeafSpec("params", (mib << 18,), "float32")
    server = Server(leaf)
    saved = threading.Event()
    problems: list[ClientMessage] = []

    def send(message: ClientMessage) -> None:
        if not isinstance(message, ShardSaved):
            problems.append(message)
        saved.set()

    spec = ClusterSpec("127.0.0.1:1", "server", 0, 1, 1, checkpoint=str(folder), checkpoint_steps=1)
    saver = Saver(spec, send, print)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    try:
        saver.prepare(
            FlowAgreed(
                0, [leaf], server.plan.digest, "update", to_wire(SyncReplicas(1, 1).complete(1)), ""
            ),
            server.plan,
            server,
        )
        saver.started(0, None)
        sources = [*server.parameters(), *server.state()]
        total = sum(source.size for source in sources)
        target = np.empty(total, np.uint8)
        target.fill(0)  # or the first copy would count the kernel's work
        for number in range(1, rounds + 1):
            times["update"].append(server.step())
            begin, at = time.perf_counter(), 0
            for source in [*server.parameters(), *server.state()]:
                np.copyto(target[at : at + source.size], source)
                at += source.size
            times["copy"].append(time.perf_counter() - begin)

            # One save beside an update, as in training, and one by itself.
            for step, beside in ((2 * number, True), (2 * number + 1, False)):
                saved.clear()
                begin = time.perf_counter()
                saver.after_step(0, step)
                times["standstill"].append(time.perf_counter() - begin)
                if beside:
                    times["update beside a save"].append(server.step())
                saved.wait()
                if not beside:
                    times["save"].append(time.perf_counter() - begin)
                if problems:
                    raise SystemExit(f"a save failed: {problems[0]}")
                saver.handle(SaveEnded(0, step, False))  # removes the file

            times["plain write"].append(plain_write(folder, target))
        return total, times
    finally:
        saver.close()


NAMES = ("copy", "standstill", "plain write", "save", "update", "update beside a save")
AGAINST = {"standstill": "copy", "save": "plain write", "update beside a save": "update"}


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: the temporary folder"
    )
    parser.add_argument("--mib", type=int, default=128, help="of parameters; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        total, times = measure(Path(folder), options.mib, options.rounds)
    table = Table(title=f"one save of {total / 2**20:.0f} MiB, medians of {options.rounds} rounds")
    for column in ("what", "ms", "GB/s", "against", "ratio", "least", "most"):
        table.add_column(column, justify="left" if column in ("what", "against") else "right")
    for name in NAMES:
        seconds = times[name]
        row = [name, f"{statistics.median(seconds) * 1e3:.1f}"]
        row.append(
            "" if name.startswith("update") else f"{total / statistics.median(seconds) / 1e9:.2f}"
        )
        if name in AGAINST:
            others = times[AGAINST[name]]
            each = len(seconds) // len(others)
            ratios = [value / others[i // each] for i, value in enumerate(seconds)]
            row += [AGAINST[name], f"{statistics.median(ratios):.2f}"]
            row += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=100)
    console.print(table)
    if load > 0.5:
        console.print(f"The machine was not idle: its load was {load:.1f} at the start.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
