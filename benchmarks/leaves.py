"""Many small leaves against one large leaf of as many bytes, and how much of the difference is JAX's.

    jaxrdma launch --workers 2 benchmarks/leaves.py
    jaxrdma launch --workers 2 benchmarks/leaves.py --leaves 2000 --kib 1 --json leaves.json

In one job, in turn: calls of a jitted step of either model, and calls of a program that takes and gives back the same
arrays, donated in the same way, and does nothing with them. What such a call takes is the limit: no transport could be
faster. The same again with several steps in a program, by `lax.scan`. Such a program has side effects in JAX's eyes,
so JAX calls it in Python, which handles each array that goes in or comes out, but once for all its steps. Worker 0
tells.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxrdma

WARM_UP = 5  # calls that are not counted

# state, gradients -> state
Step = Callable[[Any, Any], Any]


def nothing(state: Any, grads: Any) -> Any:
    """A step that leaves the parameters where they are. The barrier keeps JAX from handing them past the program."""
    number, params = state
    number, params, _ = jax.lax.optimization_barrier((number + 1, params, grads))
    return number, params


def program(step: Step, steps: int) -> Step:
    """So many steps, jitted; the state is donated."""

    def run(state: Any, grads: Any) -> Any:
        if steps == 1:
            return step(state, grads)
        return jax.lax.scan(lambda s, _: (step(s, grads), None), state, length=steps)[0]

    return jax.jit(run, donate_argnums=0)


def measure(session: jaxrdma.Session, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of steps in a program and each kind of step: milliseconds a step, medians, by model."""
    elements = options.kib * 256
    shapes = {"many": [(elements,)] * options.leaves, "one": [(elements * options.leaves,)]}
    grads = {model: [jnp.zeros(shape) for shape in each] for model, each in shapes.items()}
    states: dict[tuple[str, str], Any] = {}
    for model, each in grads.items():
        states["ps_step", model] = session.init(each, update=optax.sgd(1.0))
        states["JAX alone", model] = jnp.zeros(()), [jnp.zeros_like(leaf) for leaf in each]
    kinds: dict[str, Step] = {"ps_step": jaxrdma.ps_step, "JAX alone": nothing}
    rows: list[dict[str, Any]] = []
    for steps in (1, options.together):
        programs = {kind: program(step, steps) for kind, step in kinds.items()}
        taken: dict[tuple[str, str], list[float]] = {subject: [] for subject in states}
        for _ in range(WARM_UP + options.calls):
            for kind, model in states:
                begin = time.perf_counter()
                state = programs[kind](states[kind, model], grads[model])
                states[kind, model] = jax.block_until_ready(state)
                taken[kind, model].append(time.perf_counter() - begin)
        for kind in kinds:
            many, one = (
                statistics.median(taken[kind, model][WARM_UP:]) * 1e3 / steps for model in grads
            )
            rows.append({"steps": steps, "what": kind, "many_ms": many, "one_ms": one})
    return rows


def show(rows: list[dict[str, Any]], options: argparse.Namespace, load: float) -> None:
    """The rows, and below each pair what is left without JAX."""
    console = Console() if sys.stdout.isatty() else Console(width=110)
    total = options.kib * options.leaves
    table = Table(title=f"milliseconds a step, medians of {options.calls} calls")
    titles = (f"{options.leaves} leaves of {options.kib} KiB", f"one of {total} KiB", "times")
    table.add_column("what")
    for title in ("steps a program", *titles):
        table.add_column(title, justify="right")
    for row in rows:
        many, one = row["many_ms"], row["one_ms"]
        numbers = f"{many:.2f}", f"{one:.2f}", f"{many / one:.1f}"
        table.add_row(
            row["what"], str(row["steps"]), *numbers, end_section=row["what"] != "ps_step"
        )
    console.print(table)
    for step, alone in zip(rows[::2], rows[1::2], strict=True):
        more = step["many_ms"] - step["one_ms"]
        share = (alone["many_ms"] - alone["one_ms"]) / more
        console.print(
            f"{step['steps']} a program: of {more:.2f} ms that many leaves take more, {share:.0%} are JAX's own"
        )
    console.print(f"{os.cpu_count()} cores, load {load:.1f} before the first call")


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--leaves", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--kib", type=int, default=4, help="of each leaf; default: %(default)s")
    parser.add_argument("--together", type=int, default=20, help="steps of a program; default: 20")
    parser.add_argument("--calls", type=int, default=60, help="of each; default: %(default)s")
    parser.add_argument(
        "--json", type=Path, help="also write the rows, and where they were measured"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with jaxrdma.connect() as session:
        rows = measure(session, options)
    if session.index == 0:
        show(rows, options, load)
        if options.json is not None:
            where = {
                "jax": jax.__version__,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "load": load,
                "workers": session.num_workers,
                "servers": session.num_servers,
            }
            options.json.write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
