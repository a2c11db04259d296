"""Many small leaves against one large leaf of as many bytes.

    jaxrdma launch --workers 2 benchmarks/leaves.py
    jaxrdma launch --workers 2 benchmarks/leaves.py 2000 1

Steps of both models in turn, in one job; arguments: how many leaves, and of how many KiB each. Worker 0 tells.
"""

import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxrdma

STEPS = 60


def main() -> None:
    """Measure."""
    leaves = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    elements = 256 * (int(sys.argv[2]) if len(sys.argv) > 2 else 4)
    shapes = {"many": [(elements,)] * leaves, "one": [(elements * leaves,)]}
    with jaxrdma.connect() as session:
        step = jax.jit(jaxrdma.ps_step, donate_argnums=0)
        grads = {name: [jnp.zeros(shape) for shape in each] for name, each in shapes.items()}
        states: dict[str, Any] = {
            name: session.init(each, update=optax.sgd(1.0)) for name, each in grads.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in shapes}
        for _ in range(STEPS):
            for name in shapes:
                begin = time.perf_counter()
                states[name] = jax.block_until_ready(step(states[name], grads[name]))
                taken[name].append(time.perf_counter() - begin)
    many, one = (statistics.median(taken[name][5:]) * 1e3 for name in ("many", "one"))
    if session.index == 0:
        print(
            f"{leaves} leaves of {elements // 256} KiB: {many:.1f} ms a step; one leaf of as many bytes: {one:.1f} ms; "
            f"{many / one:.1f} times"
        )


if __name__ == "__main__":
    main()
