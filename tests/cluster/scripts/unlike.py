"""A worker whose model, on worker 1, is not that of worker 0. Usage: unlike.py shape|dtype|order|more."""

import sys
from collections import OrderedDict

import jax.numpy as jnp
import optax

import jaxrdma

ALIKE = OrderedDict(w=jnp.ones((4, 3)), b=jnp.zeros(3))
UNLIKE = {
    "shape": OrderedDict(w=jnp.ones((4, 5)), b=jnp.zeros(3)),
    "dtype": OrderedDict(w=jnp.ones((4, 3)), b=jnp.zeros(3, jnp.bfloat16)),
    "order": OrderedDict(b=jnp.zeros(3), w=jnp.ones((4, 3))),
    "more": OrderedDict(w=jnp.ones((4, 3)), b=jnp.zeros(3), extra=jnp.zeros(7)),
}

with jaxrdma.connect() as session:
    session.init(ALIKE if session.index == 0 else UNLIKE[sys.argv[1]], update=optax.sgd(0.1))
    print("init went well", flush=True)
