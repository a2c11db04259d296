"""A worker that ends in a way of its own. Usage: ending.py STEPS WAY [FILE]; the session is closed where that is said.

Ways: jit (compiled steps, nobody awaits them), scan, eager, twice (closed twice, and used after), dead (worker 1
kills itself after STEPS steps, worker 0 ends with steps in flight that can never be answered), after (as dead, but
worker 0 waits until they have failed, and ends with one more), dead-with and dead-exit (as dead, but worker 0 closes
by the end of a `with` block, in the second one by sys.exit(0)), blind (as dead, but worker 0 makes steps for 15 s
more), late (worker 0 makes FILE and closes while its last step waits for worker 1, which takes it then), late-inside
(the same, and the last step is one whose program does not use it), leaving (closes once there is FILE; interrupted in
that, it says which threads the session has left), alone, alone-many (worker 0 ends while its step
waits for worker 1, which sleeps).
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxrdma

steps, way = int(sys.argv[1]), sys.argv[2]
session = jaxrdma.connect()
# A program with many leaves JAX calls in another way.
more = [jnp.ones(4)] * (40 if way in ("late", "late-inside", "alone-many") else 0)
params = {"w": jnp.ones((256, 256)), "b": jnp.zeros(8), "more": more}
state = session.init(params, update=optax.sgd(0.1))


@jax.jit
def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
    """Enough work for JAX to return from the call at once: small programs it runs in the calling thread."""
    w = state.params["w"]
    return jaxrdma.ps_step(state, {**state.params, "w": jnp.sin(w @ w @ w)})


def wait_for_the_others_end(file: Path) -> None:
    """Until worker 0 closes, and then until it has left: it must not, so not for long."""
    while not file.exists():
        time.sleep(0.01)
    deadline = time.monotonic() + 1
    while 0 in session.active_workers and time.monotonic() < deadline:
        time.sleep(0.01)


if way in ("late", "late-inside"):
    file = Path(sys.argv[3])
    for _ in range(steps - 1):
        state = step(state)
    jax.block_until_ready(state)
    last = step if way == "late" else jax.jit(lambda state: (step(state), 0)[1])
    jax.jit(last).lower(state).compile()
    if session.index == 1:
        wait_for_the_others_end(file)
    last(state)
    del state
    if session.index == 0:
        file.touch()
    session.close()
elif way == "leaving":
    for _ in range(steps):
        state = step(state)
    jax.block_until_ready(state)
    print("ready", flush=True)
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    print("ends", flush=True)
    try:
        session.close()
    except KeyboardInterrupt:
        mine = [t.name for t in threading.enumerate() if t.name.startswith("jaxrdma")]
        print(f"threads left: {mine}", flush=True)
        raise
elif way in ("alone", "alone-many"):
    if session.index == 1:
        time.sleep(60)
    step(state)
    print("ends", flush=True)
elif way == "scan":
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
elif way in ("dead", "after", "dead-with", "dead-exit", "blind"):
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
    end = time.monotonic() + (15 if way == "blind" else 0)
    while time.monotonic() < end:
        state = step(state)
        time.sleep(0.01)
    print("at the end", flush=True)
    if way in ("dead-with", "dead-exit"):
        with session:
            if way == "dead-exit":
                sys.exit(0)
else:
    one = step if way == "jit" else lambda state: jaxrdma.ps_step(state, state.params)
    for _ in range(steps - 1):
        state = one(state)
    # The last line of the program: a step that nobody waits for.
    one(state)
