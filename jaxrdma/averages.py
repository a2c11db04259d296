"""Moving averages of the parameters, as a part of an update's state."""

from typing import Any, NamedTuple

from jaxrdma.errors import ConfigError


class Averaged(NamedTuple):
    """State of `track_average`: that of the transformation, and the averages, a tree like the parameters."""

    inner: Any
    average: Any


def track_average(update: Any, decay: float) -> Any:
    """An optax transformation that does what `update` does, and keeps an exponential moving average of the parameters.

    After each step `average = decay * average + (1 - decay) * parameters`, of the new parameters, from those of the
    start on (Polyak and Juditsky 1992, in the exponential form that is usual with neural networks). 16-bit parameters
    have averages in float32.

    **Raises:** `ConfigError` unless 0 < `decay` < 1.
    """
    import jax
    import jax.numpy as jnp
    import optax

    if not 0 < decay < 1:
        raise ConfigError(
            f"ema={decay!r}: expected a decay between 0 and 1, e.g. 0.999: that much of the average stays at each step"
        )

    def widen(param: Any) -> Any:
        if param.dtype.itemsize != 2:
            return param
        # Rounded for good: XLA may drop a conversion to 16 bits and back.
        kind = jnp.finfo(param.dtype)
        return jax.lax.reduce_precision(param.astype(jnp.float32), kind.nexp, kind.nmant)

    def follow(average: Any, param: Any) -> Any:
        return decay * average + (1 - decay) * widen(param)

    def init(params: Any) -> Averaged:
        return Averaged(update.init(params), jax.tree.map(widen, params))

    def step(grads: Any, state: Any, params: Any = None) -> tuple[Any, Averaged]:
        updates, inner = update.update(grads, state.inner, params)
        new = optax.apply_updates(params, updates)
        return updates, Averaged(inner, jax.tree.map(follow, state.average, new))

    # optax types states and trees as Any-like protocols that a plain function cannot spell.
    return optax.GradientTransformation(init, step)  # pyright: ignore[reportArgumentType]
