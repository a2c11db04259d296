"""A worker that ends in a way of its own. Usage: ending.py STEPS WAY; the session is never closed, but for "twice".

Ways: jit (steps of a compiled loop, nobody awaits them), scan, eager, twice (closed twice, and used after), dead
(worker 1 kills itself after STEPS steps, worker 0 ends with a step in flight that can never be answered).
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import optax

import jaxrdma

steps, way = int(sys.argv[1]), sys.argv[2]
session = jaxrdma.connect()
state = session.init({"w": jnp.ones((64, 8)), "b": jnp.zeros(8)}, update=optax.sgd(0.1))
step = jax.jit(lambda state: jaxrdma.ps_step(state, state.params))

if way == "scan":
    state = jax.jit(lambda s: jax.lax.scan(lambda c, _: (step(c), None), s, None, length=steps)[0])(state)
elif way == "twice":
    for _ in range(steps):
        state = step(state)
    session.close()
    session.close()
    session.leave()
    assert session.stats().steps == steps, session.stats()
    try:
        step(state)
    except (jaxrdma.CancelledError, jax.errors.JaxRuntimeError) as error:
        print(f"refused: {error}", flush=True)
else:
    one = jaxrdma.ps_step if way == "eager" else None
    for _ in range(steps - 1):
        state = step(state) if one is None else one(state, state.params)
    if way == "dead":
        jax.block_until_ready(state)
        print("about to end", flush=True)
        if session.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    # The last line of the program: a step that nobody waits for.
    step(state) if one is None else one(state, state.params)
