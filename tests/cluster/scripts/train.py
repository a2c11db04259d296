"""A worker that trains the model of model.py and writes its parameters.

Usage: train.py OUT_PREFIX OPTIMISER[,OPTIMISER] STEPS MODE [POLICY], where MODE is eager, jit, donate, average, halves,
and POLICY async, bounded (not at all stale) or held (a mean of all that may shrink); left out: the default.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent))
import model

import jaxrdma
from jaxrdma.policy import Policy

POLICIES: dict[str, Policy | None] = {
    "": None,
    "async": jaxrdma.Async(),
    "bounded": jaxrdma.BoundedStaleness(0),
    "held": jaxrdma.SyncReplicas(on_loss="shrink"),
}


def train(session: jaxrdma.Session, optimiser: str, steps: int, mode: str, policy: str = "") -> Any:
    """The parameters after `steps` steps."""
    params = model.parameters()
    if mode == "average":
        update = optax.chain(jaxrdma.average_gradients(session), model.OPTIMISERS[optimiser]())
        opt_state = update.init(params)

        @jax.jit
        def average_step(params: Any, opt_state: Any, grads: Any) -> Any:
            updates, opt_state = update.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        for step in range(steps):
            grads = model.gradient(params, session.index, step)
            params, opt_state = average_step(params, opt_state, grads)
        return params
    state = session.init(params, update=model.OPTIMISERS[optimiser](), policy=POLICIES[policy])
    ps_step = {
        "eager": jaxrdma.ps_step,
        "jit": jax.jit(jaxrdma.ps_step),
        "donate": jax.jit(jaxrdma.ps_step, donate_argnums=0),
        "halves": jax.jit(lambda state, grads: jaxrdma.pull(jaxrdma.push(state, grads))),
    }[mode]
    for step in range(steps):
        state = ps_step(state, model.gradient(state.params, session.index, step))
    assert int(state.step) == steps
    return state.params


def main() -> None:
    """Train one model per optimiser, one after the other, in one session."""
    out, optimisers, steps, mode = (
        sys.argv[1],
        sys.argv[2].split(","),
        int(sys.argv[3]),
        sys.argv[4],
    )
    with jaxrdma.connect() as session:
        for optimiser in optimisers:
            params = train(session, optimiser, steps, mode, *sys.argv[5:])
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
            np.savez(f"{out}-{optimiser}-{session.index}.npz", *leaves)
        stats = session.stats()
        assert stats.gradients_accepted == steps * len(optimisers), stats
        assert stats.gradients_dropped == 0, stats


if __name__ == "__main__":
    main()
