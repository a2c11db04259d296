"""A worker that steps in many ways, and never uses what a step returns. Usage: unused.py.

Prints how many steps it made, and how many came back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxrdma

session = jaxrdma.connect()


def once(state: Any) -> Any:
    """One step."""
    return jaxrdma.ps_step(state, state.params)


def twice(state: Any) -> Any:
    """Two, in a scan."""
    return lax.scan(lambda s, _: (once(s), None), state, length=2)[0]


def repeated(state: Any) -> Any:
    """Two, in a loop."""
    return lax.while_loop(lambda s: s.step < 2, once, state)


def branching(state: Any) -> Any:
    """One, in a branch."""
    return lax.cond(state.step < 2, once, lambda s: s, state)


def unused(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, without its results."""

    def program(*args: Any) -> int:
        run(*args)
        return 0

    return program


def in_scan(state: Any) -> Any:
    """One, whose results are not carried."""
    return lax.scan(lambda s, _: (s, unused(once)(s)), state, length=1)[1]


def differentiated(state: Any) -> Any:
    """One, beside what is differentiated."""

    def loss(params: Any) -> Any:
        return params["w"].sum(), jax.jit(once)(state)

    return jax.grad(jax.jit(loss), has_aux=True)(state.params)[0]


ways: list[tuple[int, Callable[[Any], Any]]] = [
    (1, once),
    (1, jax.jit(unused(once))),
    (1, jax.jit(unused(jax.jit(once)))),
    (2, jax.jit(unused(twice))),
    (2, jax.jit(unused(jax.jit(twice)))),
    (2, lambda state: jax.jit(unused(jax.jit(lambda: twice(state))))()),
    (2, jax.jit(unused(repeated))),
    (1, jax.jit(unused(branching))),
    (1, jax.jit(in_scan)),
    (1, jax.jit(differentiated)),
    (1, lambda state: jax.jit(unused(once)).lower(state).compile()(state)),
    (1, jax.jit(unused(once), donate_argnums=0)),
    (1, jax.jit(unused(once), keep_unused=True)),
]
params = {"w": jnp.ones(4), "more": [jnp.ones(4)] * 40}
for _, way in ways:
    way(session.init(params, update=optax.sgd(0.1)))
session.close()
print(f"made {sum(steps for steps, _ in ways)}, came back {session.stats().steps}", flush=True)
