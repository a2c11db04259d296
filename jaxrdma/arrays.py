"""Between NumPy's memory, which the engines fill, and JAX's arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def place_like(values: NDArray[Any], like: Any) -> jax.Array:
    """`values` where `like` is, if that is an array on devices; else where JAX puts arrays."""
    if isinstance(like, jax.Array) and not isinstance(like, Tracer):
        return jax.device_put(values, like.sharding)
    return jnp.asarray(values)
