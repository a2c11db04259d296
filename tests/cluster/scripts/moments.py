"""A worker that says where in its life it is, to be interrupted there. Usage: moments.py STEPS."""

import gc
import os
import sys

import jax
import jax.numpy as jnp
import optax

import jaxrdma


def say(text: str) -> None:
    """A whole line or none: what `print` was interrupted in would come after the traceback."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


@jax.jit
def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
    """Enough work for JAX to return from the call at once."""
    w = state.params["w"]
    return jaxrdma.ps_step(state, {"w": jnp.sin(w @ w @ w)})


connect = jaxrdma.connect  # imports it
gc.disable()  # JAX has a hook in it, and what interrupts that is lost: Python prints it, and goes on
say("begins")
with connect() as session:
    say("connected")
    state = session.init({"w": jnp.ones((256, 256))}, update=optax.sgd(0.1))
    say("initialised")
    for number in range(int(sys.argv[1])):
        state = step(state)
        say(f"step {number}")
    jax.block_until_ready(state)
    say("ends")
say("closed")
