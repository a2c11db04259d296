"""A worker that trains rows of a table, the same on every run, and saves what they are at the end.

Usage: rows.py OUT ROWS COLUMNS TOUCHED STEPS OPTIMIZER WAY [OPTION]... Ways: jit, eager, scan. Options: async; model:
a model is trained beside the table; rest: worker 2 touches no row in step 1.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import jaxrdma

SEED = 1234
OPTIMIZERS = {
    "sgd": jaxrdma.RowSGD(0.25),
    "momentum": jaxrdma.RowSGD(0.25, momentum=0.5),
    "adagrad": jaxrdma.RowAdagrad(0.125),
    "adam": jaxrdma.RowAdam(0.0625),
}


def draw(
    worker: int, step: int, rows: int, columns: int, touched: int, *, rests: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids that a worker touches in a step, some of them often and by all, and a part of their gradients."""
    random = np.random.default_rng((SEED, worker, step))
    frequent = random.integers(0, max(1, rows // 1000), touched // 10)
    ids = np.concatenate([random.integers(0, rows, touched - len(frequent)), frequent])
    noise = random.standard_normal((touched, columns), np.float32)
    if rests and worker == 2 and step == 1:
        return ids[:0].astype(np.int32), noise[:0]
    return random.permutation(ids).astype(np.int32), noise


def main() -> None:
    """Train, save, tell how many bytes it took."""
    out, (rows, columns, touched, steps) = sys.argv[1], map(int, sys.argv[2:6])
    optimizer, way, options = OPTIMIZERS[sys.argv[6]], sys.argv[7], sys.argv[8:]
    with jaxrdma.connect() as session:
        state: Any = None
        if "model" in options:
            state = session.init({"w": jnp.ones(1000)}, update=optax.sgd(0.1))
        table = session.embedding(
            "words",
            rows=rows,
            columns=columns,
            optimizer=optimizer,
            init=jaxrdma.RowNormal(0.5, seed=SEED),
            policy=jaxrdma.Async() if "async" in options else None,
        )

        def train(
            table: jaxrdma.Embedding, batch: tuple[Any, Any]
        ) -> tuple[jaxrdma.Embedding, None]:
            ids, noise = batch
            grads = 0.125 * table.lookup(ids) + noise
            return table.push(ids, grads), None

        def train_both(state: Any, table: jaxrdma.Embedding, batch: tuple[Any, Any]) -> Any:
            return jaxrdma.ps_step(state, state.params), train(table, batch)[0]

        step = train if way == "eager" else jax.jit(train)
        step_both = jax.jit(train_both)
        rests = "rest" in options
        batches = [
            draw(session.index, number, rows, columns, touched, rests=rests)
            for number in range(steps)
        ]
        if way == "scan":
            ids, noise = (jnp.stack(each) for each in zip(*batches, strict=True))
            table, _ = jax.jit(lambda table: jax.lax.scan(train, table, (ids, noise)))(table)
        elif state is not None:
            for batch in batches:
                state, table = step_both(state, table, batch)
        else:
            for batch in batches:
                table, _ = step(table, batch)
        assert int(table.step) == steps
        stats = session.stats()
        trained = np.unique(
            np.concatenate(
                [
                    draw(worker, number, rows, columns, touched, rests=rests)[0]
                    for worker in range(session.num_workers)
                    for number in range(steps)
                ]
            )
        )
        # Everybody must have pushed: the last lookup of an asynchronous table may be too early.
        values = np.asarray(table.lookup(trained))
        never = np.setdiff1d(np.arange(min(rows, 5 * touched)), trained)[:1000]
        np.savez(
            f"{out}-{session.index}.npz",
            ids=trained,
            values=values,
            never=never,
            started=np.asarray(jax.vmap(table.lookup)(never[:, None]))[:, 0],
        )
        print(json.dumps({"pushed": stats.bytes_pushed, "pulled": stats.bytes_pulled}))


if __name__ == "__main__":
    main()
