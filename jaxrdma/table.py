"""The JAX side of embedding tables: `Embedding`, whose rows are looked up and pushed by custom calls."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrdma import _native
from jaxrdma.errors import ConfigError
from jaxrdma.step import check_open

TARGET = "jaxrdma_rows"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step"],
    meta_fields=["name", "rows", "columns", "session", "number"],
)
@dataclasses.dataclass(frozen=True)
class Embedding:
    """A table of rows on the servers, at one version, as a worker sees it. A pytree, with nothing hidden.

    Made by `Session.embedding`. `lookup` brings rows; `push` hands their gradients over and returns the table of the
    next step. As with a `PSState`, threading it is what orders the calls of a program: they run eagerly and inside
    `jit`, `lax.scan`, `lax.while_loop`.

    ```python
    @jax.jit
    def train_step(table, ids, targets):
        rows = table.lookup(ids)
        grads = jax.grad(loss)(rows, targets)
        return table.push(ids, grads)
    ```

    **Attributes:**

    - `step`: int32 scalar: how often this worker has pushed.
    - `name`, `rows`, `columns`: of the table; static.
    - `session`, `number`: small numbers that say which connection and which table; static.
    """

    step: jax.Array
    name: str
    rows: int
    columns: int
    session: int
    number: int

    def lookup(self, ids: Any) -> jax.Array:
        """Rows of the table, as they are after the pushes that led to this step.

        Waits until those are applied: with `SyncReplicas()` until every worker has pushed as often. Each row travels
        once, however often it is asked for. May be called under `vmap` too.

        **Arguments:**

        - `ids`: integers of any shape, from 0 on, below `rows`.

        **Returns:** float32 of shape `(*ids.shape, columns)`.

        **Raises:** `ConfigError` for ids that are no integers, or are concrete and out of range, naming the table, the
        id and the rows; ids that are traced are looked at when the program runs, which then raises
        `jax.errors.JaxRuntimeError`. `CancelledError` if the session is closed; `TypeError` under `grad`.
        """
        check_open(self.session, "lookup")
        ids = self._check_ids(ids)
        flat = _calls(self.session, self.number, self.columns).lookup(self.step, ids.reshape(-1))
        return flat.reshape(*ids.shape, self.columns)

    def push(self, ids: Any, grads: Any) -> "Embedding":
        """Hand over the gradients of rows. They are on their way when this returns.

        Gradients of a row that is named several times are summed. With `SyncReplicas()`, the default, every worker
        calls this once per step, with no ids if it has none, and each row takes the mean over those workers that
        touched it; with `Async()` what comes is applied at once.

        **Arguments:**

        - `ids`: as of `lookup`.
        - `grads`: of shape `(*ids.shape, columns)`, float32, bfloat16 or float16; summed in float32.

        **Returns:** the table of the next step, which later calls must take.

        **Raises:** as `lookup`; `ConfigError` for gradients of another shape or type; `TypeError` under `vmap`.
        """
        check_open(self.session, "push")
        ids = self._check_ids(ids)
        grads = jnp.asarray(grads)
        expected = (*ids.shape, self.columns)
        if grads.shape != expected or grads.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"push to embedding {self.name!r}: gradients: expected float32, bfloat16 or float16 of shape "
                f"{expected}, as the ids are {ids.shape}, got {grads.dtype.name} of shape {grads.shape}"
            )
        rows = grads.astype(jnp.float32).reshape(-1, self.columns)
        calls = _calls(self.session, self.number, self.columns)
        return dataclasses.replace(self, step=calls.push(self.step, ids.reshape(-1), rows))

    def _check_ids(self, ids: Any) -> jax.Array:
        # On this side of the conversion, in which JAX would make an int64 an int32.
        known = None if isinstance(ids, Tracer) else np.asarray(ids)
        dtype = ids.dtype if known is None else known.dtype
        if known is not None and known.size == 0 and not hasattr(ids, "dtype"):
            dtype = np.dtype(np.int32)  # an empty list, which NumPy takes for floats
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ConfigError(
                f"embedding {self.name!r}: ids: expected integers, got {np.dtype(dtype).name}"
            )
        if known is not None and known.size > 0:
            for value in (int(known.min()), int(known.max())):
                if not 0 <= value < self.rows:
                    raise ConfigError(
                        f"embedding {self.name!r} has rows 0 to {self.rows - 1}, and one of the ids is {value}"
                    )
        wide = dtype.itemsize == 8 and isinstance(ids, Tracer)
        return jnp.asarray(ids) if wide else jnp.asarray(ids, jnp.int32)


class _Calls(NamedTuple):
    lookup: Callable[[Any, Any], jax.Array]
    push: Callable[[Any, Any, Any], jax.Array]


@functools.cache
def _calls(session: int, number: int, columns: int) -> _Calls:
    """The compiled calls of one table; made once, so that eager use hits JAX's own cache."""

    def call(kind: _native.OperationKind, result: jax.ShapeDtypeStruct, *operands: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(
            *operands,
            session=np.int64(session),
            flow=np.int64(number),
            kind=np.int64(kind.value),
            columns=np.int64(columns),
        )

    def check_device(what: str) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes and mesh.size > 1:
            raise TypeError(
                f"Embedding.{what} inside shard_map: each of the {mesh.size} devices would do it. Look rows up before, "
                "and push their gradients after it"
            )

    def lookup(step: Any, ids: Any) -> Any:
        check_device("lookup")
        rows = jax.ShapeDtypeStruct((ids.size, columns), np.float32)
        return call(_native.OperationKind.PULL_ROWS, rows, step, ids)

    def push(step: Any, ids: Any, grads: Any) -> Any:
        check_device("push")
        following = jax.ShapeDtypeStruct((), np.int32)
        return call(_native.OperationKind.PUSH_ROWS, following, step, ids, grads)

    def lookup_all(size: int, batched: Any, step: Any, ids: Any) -> tuple[Any, Any]:
        if batched[0]:
            raise TypeError("Embedding.lookup under a vmap over the table: map over the ids alone")
        return guarded_lookup(step, ids.reshape(-1)).reshape(size, -1, columns), True

    guarded_lookup = _guard(
        lookup,
        vmapped=lookup_all,
        differentiated=(
            "Embedding.lookup cannot be differentiated: look the rows up first, take the gradient of the loss by them, "
            "then push it"
        ),
    )
    guarded_push = _guard(
        push,
        vmapped=(
            "Embedding.push under vmap: a step is one push of each worker. Push the gradients of all ids at once, "
            "after the vmap"
        ),
        differentiated="Embedding.push cannot be differentiated: push the gradient of the loss by the rows",
    )
    return _Calls(guarded_lookup, guarded_push)


def _guard(
    function: Callable[..., Any],
    *,
    vmapped: str | Callable[..., tuple[Any, Any]],
    differentiated: str,
) -> Callable[..., Any]:
    """`function`, jitted, with an error of these texts where JAX would transform it; `vmapped` may be a rule too."""
    batchable = jax.custom_batching.custom_vmap(function)

    @batchable.def_vmap
    def batch(axis_size: int, in_batched: Any, *args: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        if isinstance(vmapped, str):
            raise TypeError(vmapped)
        return vmapped(axis_size, in_batched, *args)

    guarded = jax.custom_jvp(batchable)

    @guarded.defjvp
    def refuse_jvp(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        raise TypeError(differentiated)

    return jax.jit(guarded, inline=True)
