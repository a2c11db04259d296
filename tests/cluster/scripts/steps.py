"""A worker that steps a model, prints every step, and does at one step what it is told.

Usage: steps.py SIZE [INDEX:STEP:DEED]... JAX runs programs of a small SIZE in the calling thread, and returns at once
from those of a large one, such as 256. Deeds, done before the step: raise, exit, exit-inside (a with block), leave,
sleep. LAST_STEP_SECONDS in the environment: for a step under way when this is told to end.
"""

import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import optax

import jaxrdma
import jaxrdma.session

if "LAST_STEP_SECONDS" in os.environ:
    jaxrdma.session.LAST_STEP_SECONDS = float(os.environ["LAST_STEP_SECONDS"])


def say(text: str) -> None:
    """A whole line or none: what `print` was interrupted in would come after the traceback."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def main() -> None:
    """Step, until the deed or the end of somebody else."""
    size = int(sys.argv[1])
    deeds = {tuple(map(int, d.split(":")[:2])): d.split(":")[2] for d in sys.argv[2:]}
    session = jaxrdma.connect()
    state = session.init({"w": jnp.ones((size, size)), "b": jnp.zeros(8)}, update=optax.sgd(0.1))

    @jax.jit
    def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
        w = state.params["w"]
        return jaxrdma.ps_step(state, {"w": jnp.sin(w @ w @ w), "b": state.params["b"]})

    for number in itertools.count():
        deed = deeds.get((session.index, number))
        if deed == "raise":
            raise ValueError("the loss is not a number")
        if deed == "exit":
            sys.exit(3)
        if deed == "exit-inside":
            with session:
                sys.exit(3)
        if deed == "leave":
            break
        if deed == "sleep":
            say("sleeping")
            time.sleep(600)
        say(f"step {number}")
        state = jax.block_until_ready(step(state))
    session.leave()
    say("left")


if __name__ == "__main__":
    main()
