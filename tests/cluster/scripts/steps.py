"""A worker that steps a small model, prints every step, and does at one step what it is told.

Usage: steps.py STEPS [INDEX:STEP:DEED]... Deeds: raise, exit, exit-inside (a with block), leave, sleep; done before the step.
"""

import sys
import time

import jax
import jax.numpy as jnp
import optax

import jaxrdma


def main() -> None:
    """Step, until the end or the deed."""
    steps = int(sys.argv[1])
    deeds = {tuple(map(int, d.split(":")[:2])): d.split(":")[2] for d in sys.argv[2:]}
    session = jaxrdma.connect()
    state = session.init({"w": jnp.ones((64, 8)), "b": jnp.zeros(8)}, update=optax.sgd(0.1))
    ps_step = jax.jit(lambda state: jaxrdma.ps_step(state, state.params))
    for number in range(steps):
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
            print("sleeping", flush=True)
            time.sleep(600)
        print(f"step {number}", flush=True)
        state = jax.block_until_ready(ps_step(state))
    session.leave()
    print("left", flush=True)


if __name__ == "__main__":
    main()
