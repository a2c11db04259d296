"""Worker 1 has a first step that takes XLA longer to compile than anybody waits. Usage: compiling.py."""

import time

import jax
import jax.numpy as jnp
import optax

import jaxrdma


def main() -> None:
    """One step."""
    with jaxrdma.connect() as session:
        state = session.init({"w": jnp.ones(8)}, update=optax.sgd(0.1))

        @jax.jit
        def step(state: jaxrdma.PSState) -> jaxrdma.PSState:
            w = state.params["w"]
            if session.index == 1:
                began = time.monotonic()
                # Traced for as long as it takes, and then compiled for longer.
                while time.monotonic() - began < 2.0:
                    w = jnp.sort(w + 1)
            return jaxrdma.ps_step(state, {"w": w})

        jax.block_until_ready(step(state))
    print("done", flush=True)


if __name__ == "__main__":
    main()
