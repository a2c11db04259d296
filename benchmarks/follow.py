"""What a follower does to the steps of a worker.

    python benchmarks/follow.py
    python benchmarks/follow.py --pause 1 --mib 64

In one run, in turn: steps while nobody follows, and steps while a process of its own pulls every new version (with
--pause: one, then none for so many seconds). A step multiplies matrices and pushes and pulls the parameters. All is on
this machine, over tcp: what the follower and the copies of the servers take of its processors shows too; on machines of
its own a follower takes nothing of that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxrdma


def parameters(mib: int) -> Any:
    """Leaves of 4 MiB."""
    return {f"leaf{i}": jnp.zeros((1024, 1024)) for i in range(max(1, mib // 4))}


def follow() -> None:
    """The following process: "on" and "off" come by its input; "off" is answered with the number of pulls so far."""
    said = json.loads(sys.stdin.readline())
    like = jax.eval_shape(lambda: parameters(said["mib"]))
    wanted, resting = threading.Event(), threading.Event()
    pulls = 0

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "on":
                resting.clear()
                wanted.set()
            else:
                wanted.clear()
                resting.wait()
                print(pulls, flush=True)

    with jaxrdma.follow(**said["cluster"]) as follower:
        threading.Thread(target=listen, daemon=True).start()
        step = -1
        try:
            while True:
                if not wanted.is_set():
                    resting.set()
                    wanted.wait(0.05)
                    continue
                try:
                    step = follower.pull(like, newer_than=step, timeout=0.05).step
                    pulls += 1
                except TimeoutError:
                    continue
                end = time.monotonic() + said["pause"]
                while wanted.is_set() and time.monotonic() < end:
                    time.sleep(min(0.02, said["pause"]))
        except jaxrdma.JobEndedError:
            pass


class Follower:
    """The following process, as the measuring one has it."""

    def __init__(self, cluster: dict[str, Any], mib: int, pause: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--follow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say(json.dumps({"cluster": cluster, "mib": mib, "pause": pause}))

    def on(self) -> None:
        self._say("on")

    def off(self) -> int:
        """Once it rests: how many versions it has pulled."""
        self._say("off")
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def measure(options: argparse.Namespace) -> tuple[dict[str, list[list[float]]], int]:
    """Seconds of each step, by whether somebody followed and by round; and the number of pulls."""
    times: dict[str, list[list[float]]] = {"nobody follows": [], "a follower pulls": []}
    pulls = 0
    with (
        jaxrdma.local_cluster(servers=options.servers) as cluster,
        jaxrdma.connect(**cluster) as session,
    ):
        state = session.init(parameters(options.mib), update=optax.sgd(1e-3, momentum=0.9))
        matrix = jnp.ones((options.matrix, options.matrix)) / options.matrix

        @jax.jit
        def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
            product = matrix
            for _ in range(4):
                product = product @ matrix

            def gradient(leaf: jax.Array) -> jax.Array:
                return leaf * 0 + product[0, 0]

            return jaxrdma.ps_step(state, jax.tree.map(gradient, state.params))

        def run(count: int) -> list[float]:
            nonlocal state
            seconds: list[float] = []
            for _ in range(count):
                begin = time.perf_counter()
                state = jax.block_until_ready(step(state))
                seconds.append(time.perf_counter() - begin)
            return seconds

        follower = Follower(cluster, options.mib, options.pause)
        try:
            follower.on()
            run(5)  # compiles, and makes what is made at the first pull
            while follower.off() == 0:
                follower.on()
                run(5)
            before = follower.off()
            for _ in range(options.rounds):
                times["nobody follows"].append(run(options.steps))
                follower.on()
                times["a follower pulls"].append(run(options.steps))
                pulls = follower.off() - before
        finally:
            follower.end()
    return times, pulls


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--servers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=16, help="of parameters; default: %(default)s")
    parser.add_argument("--matrix", type=int, default=1024, help="rows; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of a round, each; default: 20")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds; default: none")
    options = parser.parse_args()
    if options.follow:
        follow()
        return 0
    load = os.getloadavg()[0]
    times, pulls = measure(options)
    table = Table(
        title=f"one worker, {options.servers} servers, {options.mib} MiB of parameters, medians of "
        f"{options.rounds} rounds of {options.steps} steps; {pulls} pulls"
    )
    for column in ("what", "ms a step", "ratio", "least", "most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    medians = {name: [statistics.median(round) for round in each] for name, each in times.items()}
    alone, followed = medians.values()
    ratios = [b / a for a, b in zip(alone, followed, strict=True)]
    of_all = [statistics.median(s for r in each for s in r) for each in times.values()]
    for name, every in zip(times, of_all, strict=True):
        table.add_row(name, f"{every * 1e3:.2f}")
    table.add_row("ratio of medians", "", f"{of_all[1] / of_all[0]:.3f}")
    table.add_row(
        "by round",
        "",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f}",
        f"{max(ratios):.3f}",
    )
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table)
    if load > 0.5:
        console.print(f"The machine was not idle: its load was {load:.1f} at the start.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
