"""A worker that trains a leaf of gigabytes, and compares every element of it with float64 NumPy.

Usage: large.py BYTES DTYPE STOP. Once all is compared it waits for the file STOP: the peaks of memory are read then.

What an element holds is drawn from its index by a hash, so that a range that is cut short, comes twice, or lies in
another place has other values almost everywhere. That is seen in every step around the places where 31 and 32 bits end,
and in all elements after the last one.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrdma

STEPS = 3
RATE = 0.5  # exact in every type
PIECE = 1 << 22  # elements compared at one time
WINDOW = 64  # elements before and after a place that is looked at in every step
SAMPLES = 32  # such places that are drawn
AFTER = 1000  # elements of a leaf that comes after the large one

# So many bits are drawn that all parameters are exact in the type; a value is below 2**whole.
BITS = {"float32": (20, 8), "bfloat16": (5, 3), "float16": (8, 5)}
# Of Murmur's finalizer, and what tells steps apart.
FIRST, SECOND, STEP = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B1


def made(begin: int, elements: int, dtype: str, draw: Any) -> Any:
    """By JAX: what elements from `begin` on hold, of draw 0 for parameters and 1 + step for gradients.

    In 32 bits, which is what JAX has without x64: the index itself goes round at 2**32.
    """
    u32 = jnp.uint32
    bits = jax.lax.iota(u32, elements) + u32(begin % 2**32) + u32(draw) * u32(STEP)
    bits = (bits ^ (bits >> 16)) * u32(FIRST)
    bits = (bits ^ (bits >> 13)) * u32(SECOND)
    count, whole = BITS[dtype]
    return ((bits >> (32 - count)).astype(jnp.float32) * 2.0 ** (whole - count)).astype(dtype)


def expected(begin: int, end: int, dtype: str, steps: int) -> np.ndarray:
    """By NumPy, in 64 bits: elements `begin` to `end` of the parameters after so many steps."""

    def drawn(draw: int) -> np.ndarray:
        low = np.uint64(2**32 - 1)
        bits = (np.arange(begin, end, dtype=np.uint64) + np.uint64(draw * STEP)) & low
        bits = ((bits ^ (bits >> np.uint64(16))) * np.uint64(FIRST)) & low
        bits = ((bits ^ (bits >> np.uint64(13))) * np.uint64(SECOND)) & low
        count, whole = BITS[dtype]
        return (bits >> np.uint64(32 - count)).astype(np.float64) * 2.0 ** (whole - count)

    return drawn(0) - RATE * sum((drawn(1 + step) for step in range(steps)), np.float64(0))


def windows(elements: int, item: int) -> list[tuple[int, int]]:
    """What is looked at in every step: around the ends of 31 and 32 bits, in bytes and in elements, and elsewhere."""
    ends = [0, 2**31 // item, 2**32 // item, 2**31, 2**32, elements]
    drawn = np.random.default_rng(1).integers(0, elements, SAMPLES).tolist()
    return [
        (max(0, at - WINDOW), min(elements, at + WINDOW))
        for at in (*ends, *drawn)
        if at <= elements
    ]


def compare(got: Any, begin: int, dtype: str, steps: int, what: str) -> None:
    """`got` are the elements from `begin` on, after so many steps."""
    right = expected(begin, begin + len(got), dtype, steps)
    wrong = np.flatnonzero(np.asarray(got, np.float64) != right)
    if len(wrong):
        at = int(wrong[0])
        raise AssertionError(
            f"{what}, after {steps} steps: {len(wrong)} of {len(got)} elements from {begin} on differ, the first is "
            f"element {begin + at}: {float(got[at])}, expected {float(right[at])}"
        )


def main() -> None:
    """Train, and compare."""
    size, dtype, stop = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    item = jnp.dtype(dtype).itemsize
    elements = size // item
    places = windows(elements, item)

    @jax.jit
    def looked_at(params: Any) -> tuple[Any, list[Any]]:
        """Copies: an array that NumPy looks into could not be donated."""
        whole = params["large"]
        return params["then"].copy(), [jax.lax.slice(whole, (b,), (e,)) for b, e in places]

    def look(params: Any, steps: int) -> None:
        then, found = looked_at(params)
        for (begin, _), values in zip(places, found, strict=True):
            compare(np.asarray(values), begin, dtype, steps, "the large leaf")
        compare(np.asarray(then), elements, dtype, steps, "the leaf after it")

    def leaves(draw: Any) -> Any:
        return {
            "large": made(0, elements, dtype, draw),
            "then": made(elements, AFTER, dtype, draw),
        }

    def step(state: Any) -> Any:
        return jaxrdma.ps_step(state, leaves(state.step + 1))

    with jaxrdma.connect() as session:
        begin = time.monotonic()
        state = session.init(jax.jit(leaves)(0), update=optax.sgd(RATE))
        print(f"begun in {time.monotonic() - begin:.1f} s", flush=True)
        look(state.params, 0)
        compiled = jax.jit(step, donate_argnums=0).lower(state).compile()
        for number in range(STEPS):
            begin = time.monotonic()
            state = jax.block_until_ready(compiled(state))
            print(f"step {number} in {time.monotonic() - begin:.1f} s", flush=True)
            look(state.params, number + 1)
        whole = np.asarray(state.params["large"])
        for at in range(0, elements, PIECE):
            compare(whole[at : at + PIECE], at, dtype, STEPS, "the large leaf")
        pushed = STEPS * (elements + AFTER) * item
        stats = session.stats()
        assert stats.bytes_pushed >= pushed, (stats.bytes_pushed, pushed)
        print(f"{elements} elements compared", flush=True)
        while not stop.exists():  # a file has no completion to wait for
            time.sleep(0.02)


if __name__ == "__main__":
    main()
