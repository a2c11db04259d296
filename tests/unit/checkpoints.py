"""Small checkpoints for the tests: what two servers hold is a function of the step, so that any reader can check it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrdma import checkpoint
from jaxrdma.checkpoint import FORMAT, Image, Manifest, Part, Reader
from jaxrdma.control import VERSION, LeafSpec

LEAVES = [LeafSpec("params['w']", (40, 5), "float32"), LeafSpec("params['b']", (7,), "float64")]

# By server. The first leaf is cut, with its state of the same shape; a step count is on both.
PARTS = [
    [
        Part(0, -1, "float32", 4, [(0, 120)]),
        Part(0, 0, "float32", 4, [(0, 120)]),
        Part(-1, 0, "int32", 4, [(0, 1)]),
    ],
    [
        Part(0, -1, "float32", 4, [(120, 80)]),
        Part(1, -1, "float64", 8, [(0, 7)]),
        Part(0, 0, "float32", 4, [(120, 80)]),
        Part(-1, 0, "int32", 4, [(0, 1)]),
    ],
]


def whole(part: Part, step: int, elements: int) -> np.ndarray:
    """All elements of the array that `part` is of, at `step`, as bytes."""
    rng = np.random.default_rng([step, part.leaf + 1, part.slot + 1])
    return rng.integers(0, 256, elements * part.item, np.uint8)


def expected(part: Part, step: int) -> np.ndarray:
    """The bytes of `part` at `step`."""
    size = max(begin + elements for begin, elements in part.ranges)
    array = whole(part, step, size)
    cut = [array[b * part.item : (b + n) * part.item] for b, n in part.ranges]
    return np.concatenate(cut)


def save(model: Path, step: int, keep: int = 3, parts: Sequence[Sequence[Part]] = PARTS) -> None:
    """As the servers do it together, in one process."""
    shards = []
    for server, mine in enumerate(parts):
        image = Image(mine)
        image.copy([expected(part, step) for part in mine])
        name = checkpoint.shard_name(server, len(parts))
        shards.append(checkpoint.write_shard(checkpoint.step_folder(model, step), name, image))
    manifest = Manifest(FORMAT, VERSION, "job", 0, step, LEAVES, "u", len(parts), shards)
    checkpoint.commit(model, manifest)
    checkpoint.prune(model, keep)


def read(model: Path, manifest: Manifest, parts: Sequence[Sequence[Part]] = PARTS) -> None:
    """Every part of a checkpoint, compared with what was saved."""
    with Reader(checkpoint.step_folder(model, manifest.step), manifest) as reader:
        for part in (part for mine in parts for part in mine):
            into = np.empty(part.bytes, np.uint8)
            reader.read(part, into)
            np.testing.assert_array_equal(into, expected(part, manifest.step))


def check_all(model: Path) -> list[int]:
    """The steps of the checkpoints, newest first; each has been read and is what was saved."""
    manifests, damaged = checkpoint.find(model)
    assert not damaged
    for manifest in manifests:
        read(model, manifest)
    return [manifest.step for manifest in manifests]


# What a save asks of the operating system; shutil and pathlib end up in these as well.
CALLS = ("open", "write", "fsync", "replace", "rename", "close", "mkdir", "unlink", "rmdir")


def on_call(number: int, act: Callable[[str, Callable[..., object], tuple], object]) -> Callable:
    """Let the call number `number` from now on, of `CALLS`, be made by `act`. Returns what undoes it.

    `act` gets its name, the real function and its arguments.
    """
    import os

    real = {name: getattr(os, name) for name in CALLS}
    count = 0

    def stand_in(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count - 1 == number:
                return act(name, lambda *a: real[name](*a, **kwargs), args)
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, stand_in(name))

    def undo() -> int:
        for name in CALLS:
            setattr(os, name, real[name])
        return count

    return undo
