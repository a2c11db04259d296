"""A mirror has the bits of what it is a copy of, of the last two steps; and says when it cannot go on."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrdma import _native, plan, update
from jaxrdma.control import Keeps
from jaxrdma.errors import JaxRdmaError
from jaxrdma.mirror import Copier, Keeper, Part
from jaxrdma.plan import Plan, part_plan
from tests.cluster.job import free_address

PARTITION_BYTES = 256
FLOW = 3
EMPTY = part_plan(plan.assign_partitions([], 2, PARTITION_BYTES), 0)
TOKEN = b"t" * _native.TOKEN_BYTES
TCP: Any = {"transport": "tcp", "spin_us": 0, "verbs": _native.VerbsOptions(), "fault": ""}


def params_of(dtype: str) -> dict[str, Any]:
    """Leaves in several pieces, one in a single one, a scalar, an empty one, and one of another type."""
    rng = np.random.default_rng(3)
    shapes = {"w": (30, 40), "v": (30, 40), "b": (7,), "s": (), "z": (0, 2)}
    made = {name: jax.numpy.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}
    return made | {"other": jax.numpy.asarray(rng.normal(size=(90,)), "float32")}


class Server:
    """Server 0 of two, without workers: its part, the update for it, and a mirror."""

    def __init__(self, stack: ExitStack, dtype: str = "float32") -> None:
        specs, treedef, leaves = plan.describe_leaves(params_of(dtype))
        analysis = update.analyse(optax.adam(0.03), treedef, specs)
        self.plan = plan.assign_partitions(specs, 2, PARTITION_BYTES, analysis.whole_leaves)
        self.program = update.export_update(analysis, self.plan).programs[0]
        flat = [np.asarray(leaf).reshape(-1) for leaf in leaves]
        self.params = [
            np.concatenate([array[:0], *(array[b : b + n] for b, n in ranges)])
            for array, ranges in zip(flat, self.plan.pieces(0), strict=True)
        ]
        self.update = update.ServerUpdate(self.program, keep_before=True)
        self.part = Part(self.update, lambda: self.params)
        self.done: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.keeper = Keeper(
            "job", Keeps(0, 5, TOKEN), "127.0.0.1:0", PARTITION_BYTES, TCP, self.failed.put
        )
        stack.callback(self.keeper.close)
        self.copier = Copier("job", 5, TCP, lambda *told: self.done.put(told))
        stack.callback(self.copier.close)
        # Models without an update, of which there are no copies, have the other numbers.
        self.keeper.add(1, EMPTY, b"")
        self.copy = self.keeper.add(FLOW, self.share, self.program)
        self.rng = np.random.default_rng(8)

    @property
    def share(self) -> Plan:
        return part_plan(self.plan, 0)

    def connect(self) -> "Server":
        self.copier.connect(self.keeper.address, TOKEN, 10)
        self.copier.add(1, EMPTY)
        self.copier.add(FLOW, self.share)
        assert FLOW in self.copier
        assert 1 not in self.copier
        return self

    def begin(self) -> "Server":
        self.update.initialise(self.params)
        self.part.step = 0
        self.copier.begin(FLOW, 0, self.part.parameters())
        assert self.done.get(timeout=20) == (FLOW, 0, "")
        return self

    def step(self) -> list[np.ndarray]:
        """One step; returns what it was before."""
        before = [array.copy() for array in self.part.at(self.part.step)]
        # In the type in which 16-bit gradients are summed.
        mean = [self.rng.normal(size=a.size).astype(np.float32) for a in self.params]
        self.copier.step(FLOW, self.part.step, [array.view(np.uint8) for array in mean])
        self.update.step(mean, self.params)
        self.part.step += 1
        told = self.done.get(timeout=20)
        assert told == (FLOW, self.part.step, ""), told
        return before


@contextmanager
def server(dtype: str = "float32") -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack, dtype)


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_has_the_bits_of_the_last_two_steps(dtype: str) -> None:
    with server(dtype) as made:
        made.connect().begin()
        assert made.copy.steps() == [0]
        assert_same_bits(made.copy.at(0), made.part.at(0))
        for step in range(1, 4):
            before = made.step()
            for part in (made.part, made.copy):
                assert part.steps() == [step - 1, step]
                assert_same_bits(part.at(step - 1), before)
            assert_same_bits(made.copy.at(step), made.part.at(step))
            assert made.copier.is_alike(FLOW, made.part.parameters())
        made.params[0][0] += 1
        assert not made.copier.is_alike(FLOW, made.part.parameters())


def test_a_copy_that_was_restored_goes_on_where_it_was() -> None:
    with server() as made:
        made.update.initialise(made.params)
        made.connect().copier.go_on(FLOW, 41)  # once the mirror has it
        for view, array in zip(made.copy.parameters(), made.part.parameters(), strict=True):
            view[:] = array
        parts = iter([array.copy() for array in made.part.state()])
        made.copy.load_state(lambda part, view: np.copyto(view, next(parts)))
        assert made.done.empty()
        made.keeper.go_on(FLOW, 41)
        assert made.done.get(timeout=20) == (FLOW, 41, "")
        made.part.step = 41
        assert made.copy.steps() == [41]
        before = made.step()
        assert made.copy.steps() == [41, 42]
        assert_same_bits(made.copy.at(41), before)
        assert_same_bits(made.copy.at(42), made.part.at(42))


def test_a_frozen_copy_stays_what_it_is() -> None:
    with server() as made:
        made.connect().begin().step()
        made.keeper.freeze()
        kept = [array.copy() for array in made.copy.at(1)]
        mean = [np.ones(a.size, np.float32).view(np.uint8) for a in made.params]
        made.copier.step(FLOW, 1, mean)
        with pytest.raises(queue.Empty):
            made.done.get(timeout=0.3)
        assert made.copy.steps() == [0, 1]
        assert_same_bits(made.copy.at(1), kept)


def test_a_mirror_that_is_gone_is_told_with_every_step() -> None:
    with server() as made:
        made.connect().begin()
        made.keeper.close()
        mean = [np.ones(a.size, np.float32).view(np.uint8) for a in made.params]
        made.copier.step(FLOW, 0, mean)
        flow, step, problem = made.done.get(timeout=20)
        assert (flow, step) == (FLOW, 1)
        assert problem


def test_who_waits_for_its_mirror_may_be_told_to_give_up() -> None:
    """It is tried again and again at an address where nobody is."""
    copier = Copier("job", 5, TCP, lambda *_: None)
    timer = threading.Timer(0.2, copier.cancel)
    timer.start()
    began = time.monotonic()
    with pytest.raises(JaxRdmaError, match="the job has ended"):
        copier.connect(free_address(), TOKEN, 60)
    assert time.monotonic() - began < 10
    timer.join()
    copier.close()


def test_who_has_not_the_token_is_not_let_in() -> None:
    with server() as made, pytest.raises(JaxRdmaError, match="not admitted"):
        made.copier.connect(made.keeper.address, b"x" * _native.TOKEN_BYTES, 10)


def test_a_copy_that_cannot_make_a_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as made:
        made.connect().begin()

        def fail(*_: object) -> None:
            raise ValueError("no memory")

        monkeypatch.setattr(made.keeper._updates[FLOW], "step", fail)
        mean = [np.ones(a.size, np.float32).view(np.uint8) for a in made.params]
        made.copier.step(FLOW, 0, mean)
        assert made.failed.get(timeout=20) == "ValueError: no memory"
