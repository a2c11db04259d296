"""A worker that ends in a way of its own. Usage: ending.py STEPS WAY; the session is never closed, but for "twice".

Ways: jit (compiled steps, nobody awaits them), scan, eager, twice (closed twice, and used after), dead (worker 1 kills
itself after STEPS steps, worker 0 ends with steps in flight that can never be answered), after (as dead, but worker 0
waits until they have failed, and ends with one more).
"""

import contextlib
import os
import signal
import sys

import jax
import jax.numpy as jnp
import optax

import jaxrdma

steps, way = int(sys.argv[1]), sys.argv[2]
session = jaxrdma.connect()
state = session.init({"w": jnp.ones((256, 256)), "b": jnp.zeros(8)}, update=optax.sgd(0.1))


@jax.jit
def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
    """Enough work for JAX to return from the call at once: small programs it runs in the calling thread."""
    w = state.params["w"]
    return jaxrdma.ps_step(state, {"w": jnp.sin(w @ w @ w), "b": state.params["b"]})


if way == "scan":
    jax.jit(lambda s: jax.lax.scan(lambda c, _: (step(c), None), s, None, length=steps)[0])(state)
elif way == "twice":
    for _ in range(steps):
        state = step(state)
    session.close()
    session.close()
    session.leave()
    assert session.stats().steps == steps, session.stats()
    try:
        jax.block_until_ready(step(state))
    except (jaxrdma.CancelledError, jax.errors.JaxRuntimeError) as error:
        print(f"refused: {error}", flush=True)
elif way in ("dead", "after"):
    for _ in range(steps):
        state = step(state)
    jax.block_until_ready(state)
    print("about to end", flush=True)
    if session.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    good = state
    for _ in range(steps):
        state = step(state)
    if way == "after":
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(state)
        step(good)
    print("at the end", flush=True)
else:
    one = step if way == "jit" else lambda state: jaxrdma.ps_step(state, state.params)
    for _ in range(steps - 1):
        state = one(state)
    # The last line of the program: a step that nobody waits for.
    one(state)
