"""A worker of a job that is followed. Usage: followed.py POLICIES STOP [EMA].

POLICIES: sync, shrink, async, bounded, by commas: of a model each, trained in turn. STOP: a file that will have the
step at which to stop. EMA: the decay of the moving averages that servers keep of each model. Every worker pushes the
same gradient at every step: whoever's gradients a mean is over, the parameters depend on their step alone.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxrdma

POLICIES = {
    "sync": lambda: jaxrdma.SyncReplicas(),
    "shrink": lambda: jaxrdma.SyncReplicas(on_loss="shrink"),
    "async": lambda: jaxrdma.Async(),
    "bounded": lambda: jaxrdma.BoundedStaleness(1),
}


def parameters() -> dict[str, Any]:
    """Leaves that are cut into partitions on several servers, one that is not, one of 16 bits."""
    return {
        "a": jnp.arange(4000, dtype=jnp.float32).reshape(40, 100) / 100,
        "b": jnp.zeros(1001),
        "c": jnp.zeros((), jnp.bfloat16),
    }


def gradient() -> dict[str, Any]:
    """Of the step nothing, of the leaf much."""
    values = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.125), parameters())
    return values | {"b": jnp.linspace(-1, 1, 1001)}


def update() -> optax.GradientTransformation:
    """Has a state, so that no step is like another."""
    return optax.sgd(1e-3, momentum=0.9)


def stops(file: Path, index: int, step: int) -> bool:
    """Whether worker `index`, which has made `step`, is to stop: all at one step, that of the file or a later one.

    Worker 0 decides, before it gives what the next step needs. So nobody has made that one yet, and all will know.
    """
    decided = file.with_suffix(".decided")
    if index == 0 and file.exists() and not decided.exists():
        new = file.with_suffix(".deciding")
        new.write_text(str(max(int(file.read_text()), step + 1)))
        new.rename(decided)
    return decided.exists() and step >= int(decided.read_text())


def main() -> None:
    """Train until told to stop."""
    stop = Path(sys.argv[2])
    ema = float(sys.argv[3]) if len(sys.argv) > 3 else None
    with jaxrdma.connect() as session:
        states = [
            session.init(parameters(), update=update(), policy=POLICIES[policy](), ema=ema)
            for policy in sys.argv[1].split(",")
        ]
        grads = gradient()
        step = jax.jit(lambda state: jaxrdma.ps_step(state, grads))
        while not stops(stop, session.index, int(states[0].step)):
            states = [jax.block_until_ready(step(state)) for state in states]
    print(f"stopped at step {int(states[0].step)}", flush=True)


if __name__ == "__main__":
    main()
