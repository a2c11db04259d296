"""A worker that pushes the same gradient at every step, and tells what came back.

Usage: policies.py POLICY STEPS [PAUSE_S]... POLICY: sync:N, async, bounded:K, and :shrink or :wait after it. STEPS: how
many batches each worker has; or, as v20, until which version it trains, or, as v@FILE, until the one that the file will
have; one for all, or one for each worker by commas.
Or, as !5, before which batch it raises.
PAUSE_S: how long each worker sleeps before a step; left out: not at all.

Every element of worker w's gradient is 4**w, and the servers do p -= gradient: what a version differs by from the one
before tells of whom its mean was. A line is: batch, version before, version after, the values that the parameters have
(one, or the sets differed), and the gradients of this worker that were accepted and dropped so far.
"""

import itertools
import json
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma
from jaxrdma.policy import LOSSES, Policy


def policy_of(text: str) -> Policy:
    """What POLICY names."""
    on_loss = next((each for each in LOSSES if text.endswith(f":{each}")), None)
    name, _, number = text.removesuffix(f":{on_loss}").partition(":")
    if name == "sync":
        return jaxrdma.SyncReplicas(int(number), on_loss=on_loss)
    if name == "async":
        return jaxrdma.Async(on_loss=on_loss)
    return jaxrdma.BoundedStaleness(int(number), on_loss=on_loss)


def end_of(wanted: str) -> float:
    """Where to stop, as far as is known."""
    if not wanted.startswith("@"):
        return int(wanted)
    file = Path(wanted[1:])
    return int(file.read_text()) if file.exists() else math.inf


def main() -> None:
    """Train on all batches."""
    policy = policy_of(sys.argv[1])
    batches = sys.argv[2].split(",")
    session = jaxrdma.connect()
    wanted = batches[session.index % len(batches)]
    pauses = [float(pause) for pause in sys.argv[3:]]
    pause = pauses[session.index] if session.index < len(pauses) else 0.0
    params = {"a": jnp.zeros((40, 13)), "b": jnp.zeros(1001), "c": jnp.zeros(())}
    state = session.init(params, update=optax.sgd(1.0), policy=policy)
    gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 4.0**session.index), params)
    step = jax.jit(lambda state: jaxrdma.ps_step(state, gradient))

    for batch in itertools.count():
        if wanted == f"!{batch}":
            raise ValueError("the loss is not a number")
        if (int(state.step) if wanted[0] == "v" else batch) >= end_of(wanted.lstrip("v!")):
            break
        time.sleep(pause)
        before = int(state.step)
        state = jax.block_until_ready(step(state))
        leaves = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(state.params)]
        stats = session.stats()
        print(
            json.dumps(
                {
                    "batch": batch,
                    "before": before,
                    "after": int(state.step),
                    "values": sorted({float(x) for leaf in leaves for x in leaf}),
                    "accepted": stats.gradients_accepted,
                    "dropped": int(state.dropped),
                }
            )
        )
    session.leave()


if __name__ == "__main__":
    main()
