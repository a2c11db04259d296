"""Train a small convolutional network on handwritten digits, with a parameter server.

    jaxrdma launch --servers 1 --workers 2 examples/digits.py

Every worker takes its share of each batch; the server averages the gradients and applies Adam. Needs
scikit-learn for the data: 1797 images of 8 x 8 pixels, without a download.
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

import jaxrdma

BATCH = 128  # images per step, over all workers
HELD_OUT = 360  # images that are never trained on

Params = dict[str, jax.Array]
Images = np.ndarray[Any, Any]


def load() -> tuple[tuple[Images, Images], tuple[Images, Images]]:
    """The same split on every worker: images and labels to train on, images and labels to test with."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, None] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def init_params(key: jax.Array) -> Params:
    """He initialisation. Only worker 0's values count: the others get them from the server."""
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense": (1024, 128),
        "out": (128, 10),
    }
    params: Params = {}
    for name, shape in shapes.items():
        key, use = jax.random.split(key)
        scale = math.sqrt(2 / math.prod(shape[:-1]))
        params[f"{name}.w"] = scale * jax.random.normal(use, shape)
        params[f"{name}.b"] = jnp.zeros(shape[-1])
    return params


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Two convolutions, the second with stride 2, and two dense layers."""
    x = images
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            params[f"{name}.w"],
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + params[f"{name}.b"])
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["dense.w"] + params["dense.b"])
    return x @ params["out.w"] + params["out.b"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    scores = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@jax.jit
def accuracy(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Share of the images whose digit is found."""
    return (logits(params, images).argmax(-1) == labels).mean()


def batches(size: int, epoch: int, index: int, count: int) -> Iterator[Images]:
    """This worker's share of each batch of an epoch, as positions in the training set.

    Every worker draws the same order, so the shares of a batch never overlap.
    """
    share = max(1, BATCH // count)
    order = np.random.default_rng(epoch + 1).permutation(size)
    for begin in range(0, size - share * count + 1, share * count):
        yield order[begin + index * share :][:share]


def main() -> None:
    """Train, test, and tell."""
    parser = argparse.ArgumentParser(description="digits with a parameter server")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save", metavar="FILE", help="write the parameters, as .npz")
    options = parser.parse_args()

    with jaxrdma.connect() as session:
        (images, labels), held_out = load()
        steps = options.epochs * sum(1 for _ in batches(len(labels), 0, 0, session.num_workers))
        # Adam and the schedule run on the servers; the step count is part of their state.
        adam = optax.adam(optax.cosine_decay_schedule(options.learning_rate, steps))
        state = session.init(init_params(jax.random.key(0)), update=adam)

        # The state is donated: the new parameters take the place of the old ones.
        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(
            state: jaxrdma.PSState, images: jax.Array, labels: jax.Array
        ) -> tuple[jaxrdma.PSState, jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, images, labels)
            return jaxrdma.ps_step(state, grads), loss

        report = Report(steps, shown=session.index == 0)
        with report:
            for epoch in range(options.epochs):
                for chosen in batches(len(labels), epoch, session.index, session.num_workers):
                    state, loss = train_step(state, images[chosen], labels[chosen])
                    report.step(epoch, loss)
        if session.index == 0:
            found = float(accuracy(state.params, *held_out))
            report.table(found, session.stats())
            if options.save:
                np.savez(options.save, **jax.device_get(state.params))


class Report:
    """What is shown: a bar on a terminal, a line per epoch otherwise, and a table at the end."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._console = Console(quiet=not shown)
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=steps, epoch=1, loss="")
        self._steps = self._epoch = 0
        self._begin = self._end = 0.0
        self._losses: list[jax.Array] = []  # of the epoch

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._losses:
            self._line()
            self._end = time.perf_counter()
        self._bar.stop()

    def step(self, epoch: int, loss: jax.Array) -> None:
        """One step was dispatched."""
        if epoch != self._epoch:
            self._line()
            self._epoch = epoch
        self._losses.append(loss)
        self._steps += 1
        if self._steps == 1:  # the first one compiles: it is left out of the time per step
            loss.block_until_ready()
            self._begin = time.perf_counter()
        self._bar.advance(self._task)

    def _line(self) -> None:
        loss = (
            f"{np.mean(jax.device_get(self._losses)):.4f}"  # waits for the last step of the epoch
        )
        self._losses.clear()
        self._bar.update(self._task, epoch=self._epoch + 1, loss=loss)
        if not self._console.is_terminal:
            self._console.print(f"epoch {self._epoch + 1:2}  step {self._steps:4}  loss {loss}")

    def table(self, found: float, stats: jaxrdma.Stats) -> None:
        """The numbers at the end."""
        table = Table(title="digits", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_row("accuracy on held-out images", f"{found:.4f}")
        table.add_row("steps", str(stats.steps))
        seconds = (self._end - self._begin) / max(1, self._steps - 1)
        table.add_row("time per step", f"{seconds * 1e3:.2f} ms")
        table.add_row("bytes pushed", f"{stats.bytes_pushed:,}")
        table.add_row("bytes pulled", f"{stats.bytes_pulled:,}")
        for name, transport, why in stats.transport:
            table.add_row(f"transport to {name}", f"{transport} ({why})")
        table.add_row("gradients accepted", str(stats.gradients_accepted))
        table.add_row("gradients dropped", str(stats.gradients_dropped))
        self._console.print(table)


if __name__ == "__main__":
    sys.exit(main())
