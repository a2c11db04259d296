"""A worker that asks for what cannot be in a job to which workers may be added, and tells why not.

Usage: grows_not.py
"""

import jax.numpy as jnp
import optax

import jaxrdma


def main() -> None:
    """Ask, and then train a step."""
    with jaxrdma.connect() as session:
        params = {"a": jnp.zeros(3)}
        for ask in (
            lambda: session.init(params, update=optax.sgd(1.0)),
            lambda: session.embedding("rows", rows=5, columns=2, optimizer=jaxrdma.RowSGD(0.1)),
            lambda: jaxrdma.average_gradients(session).init(params),
        ):
            try:
                ask()
            except jaxrdma.ConfigError as error:
                print(f"refused: {error}")
        print(f"places {session.num_workers}, active {session.active_workers}")
        policy = jaxrdma.SyncReplicas(on_loss="shrink")
        state = session.init(params, update=optax.sgd(1.0), policy=policy)
        assert int(jaxrdma.ps_step(state, params).step) == 1


if __name__ == "__main__":
    main()
