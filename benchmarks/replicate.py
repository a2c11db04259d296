"""What copies of the servers' parts cost a step.

    python benchmarks/replicate.py
    python benchmarks/replicate.py --mib 64 --sgd

Two jobs of one worker each stand side by side on this machine, over tcp, one with replicate=1; their worker, this
process, makes steps of one and the other in turn. All processors are shared: what the mirrors compute is taken from the
servers and the worker, so this is the most that it may cost. On machines of their own the updates run side by side.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
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


def stepper(session: jaxrdma.Session, options: argparse.Namespace) -> Callable[[], float]:
    """What makes one step, and tells how long that took."""
    update = optax.sgd(1e-3) if options.sgd else optax.adam(1e-3)
    state = session.init(parameters(options.mib), update=update)

    def gradient(leaf: jax.Array) -> jax.Array:
        return leaf + 1

    @jax.jit
    def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
        return jaxrdma.ps_step(state, jax.tree.map(gradient, state.params))

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state))
        return time.perf_counter() - begin

    return run


def measure(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of a step, medians of each round: without copies, and with them."""
    rounds: list[tuple[float, float]] = []
    with ExitStack() as stack:
        steps: list[Callable[[], float]] = []
        for replicate in (0, 1):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            cluster = stack.enter_context(
                jaxrdma.local_cluster(
                    servers=options.servers, replicate=replicate, checkpoint=folder
                )
            )
            session = stack.enter_context(jaxrdma.connect(**cluster))
            steps.append(stepper(session, options))
        for step in steps:
            for _ in range(5):
                step()
        for _ in range(options.rounds):
            without, with_ = (
                statistics.median(step() for _ in range(options.steps)) for step in steps
            )
            rounds.append((without, with_))
    return rounds


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=16, help="of parameters; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of a round, each; default: 20")
    parser.add_argument("--sgd", action="store_true", help="a cheap update instead of adam")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = measure(options)
    table = Table(
        title=f"one worker, {options.servers} servers, {options.mib} MiB of parameters, medians of "
        f"{options.rounds} rounds of {options.steps} steps"
    )
    for column in ("what", "ms a step", "ratio", "least", "most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, place in (("without copies", 0), ("with copies", 1)):
        table.add_row(name, f"{statistics.median(each[place] for each in rounds) * 1e3:.2f}")
    ratios = [with_ / without for without, with_ in rounds]
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    table.add_row("by round", "", f"{statistics.median(ratios):.2f}", least, most)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table)
    if load > 0.5:
        console.print(f"The machine was not idle: its load was {load:.1f} at the start.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
