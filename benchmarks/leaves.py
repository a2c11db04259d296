"""Many small leaves against one large leaf of as many bytes.

    jaxrdma launch --workers 2 benchmarks/leaves.py
    jaxrdma launch --workers 2 benchmarks/leaves.py 2000 1

Steps of both models in turn, in one job; arguments: how many leaves, and of how many KiB each. Worker 0 tells, of
programs of one step, and of programs of several. The difference is what JAX does in Python, at each call of a program
with side effects, for every array that goes in or comes out.
"""

import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxrdma

CALLS = 60
TOGETHER = 5  # steps of one program


def train(state: Any, grads: Any, steps: int) -> Any:
    """Some steps."""
    if steps == 1:
        return jaxrdma.ps_step(state, grads)
    return jax.lax.scan(lambda s, _: (jaxrdma.ps_step(s, grads), None), state, length=steps)[0]


def main() -> None:
    """Measure."""
    leaves = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    elements = 256 * (int(sys.argv[2]) if len(sys.argv) > 2 else 4)
    shapes = {"many": [(elements,)] * leaves, "one": [(elements * leaves,)]}
    with jaxrdma.connect() as session:
        grads = {name: [jnp.zeros(shape) for shape in each] for name, each in shapes.items()}
        states: dict[str, Any] = {
            name: session.init(each, update=optax.sgd(1.0)) for name, each in grads.items()
        }
        texts = [
            f"{compare(states, grads, steps)}, {steps} step{'s' * (steps > 1)} a program"
            for steps in (1, TOGETHER)
        ]
    if session.index == 0:
        print(f"{leaves} leaves of {elements // 256} KiB against one of as many bytes:")
        print("\n".join(texts))


def compare(states: dict[str, Any], grads: dict[str, Any], steps: int) -> str:
    """Steps of both models, so many in one call; how long one of them takes."""
    call = jax.jit(train, static_argnums=2, donate_argnums=0)
    taken: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(CALLS):
        for name in states:
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(call(states[name], grads[name], steps))
            taken[name].append(time.perf_counter() - begin)
    many, one = (statistics.median(taken[name][5:]) * 1e3 / steps for name in ("many", "one"))
    return f"{many:.1f} ms a step against {one:.1f}, {many / one:.1f} times"


if __name__ == "__main__":
    main()
