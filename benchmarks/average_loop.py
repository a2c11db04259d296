"""One member of a benchmark cluster: averages arrays in a jitted loop, whenever the driver says so.

Started by `against_gloo.py`, never by hand. The member connects to the driver and answers each of its lines, first
`{"do": "prepare", ...}`, then `run`, then `check`, by a line with the seconds it took, or with what went wrong.

Both ways run the same program shape: one `jax.jit` holding one loop whose trip count is an argument, the array being
the loop's carry. What differs is the exchange in its body, and how the result proves that no exchange was skipped:

- Gloo: `psum` without the division that a mean needs (to its favour: that would be one more pass over the memory).
  Each exchange doubles the array, exactly, so the result names the number of exchanges.
- jaxrdma: `average_gradients`. One element grows in each turn, by an amount that differs between the workers, and
  the state counts the steps.
"""

import argparse
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrdma

WARM_UP = 2  # Exchanges before the clock starts: they bring the members into step, too.
TINY = 2.0**-120  # Gloo's start value: it doubles up to 200 times and must stay a normal number.


class Exchange(Protocol):
    """A way of averaging. The three calls follow each other; only `run` is on the clock."""

    def prepare(self, elements: int) -> None:
        """Makes the array, compiles, and runs `WARM_UP` exchanges."""
        ...

    def run(self, iterations: int) -> None:
        """Runs that many exchanges in one program, to the end."""
        ...

    def check(self, iterations: int) -> None:
        """Raises if any element of the result, or the number of exchanges, is wrong."""
        ...


def pattern(elements: int) -> np.ndarray:
    """Small whole numbers: sums and means of them are exact, and a shifted piece shows."""
    return (1 + np.arange(elements) % 7).astype(np.float32)


def require_equal(got: Any, expected: np.ndarray, what: str) -> None:
    """Raises with the first differing element, if there is one."""
    differing = np.flatnonzero(np.asarray(got) != expected)
    if differing.size:
        first = int(differing[0])
        raise AssertionError(
            f"{what}: {differing.size} of {expected.size} elements are wrong; element {first}"
            f" is {np.asarray(got)[first]}, expected {expected[first]}"
        )


class GlooExchange:
    """JAX's own collectives between two processes of one CPU device each."""

    def __init__(self, index: int, coordinator: str) -> None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, num_processes=2, process_id=index)
        self._index = index
        mesh = Mesh(np.array(jax.devices()), ("replica",))
        spec = PartitionSpec("replica")
        self._sharding = NamedSharding(mesh, spec)

        def turn(i: jax.Array, array: jax.Array) -> jax.Array:
            del i
            return lax.psum(array, "replica")

        def loop(array: jax.Array, iterations: jax.Array) -> jax.Array:
            return lax.fori_loop(0, iterations, turn, array)

        self._loop = jax.jit(
            jax.shard_map(
                loop, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
            ),
            donate_argnums=0,
        )

    def prepare(self, elements: int) -> None:
        self._values = pattern(elements)
        array = jax.make_array_from_process_local_data(
            self._sharding, self._values * np.float32(TINY * (self._index + 1))
        )
        self._array = jax.block_until_ready(self._loop(array, np.int32(WARM_UP)))

    def run(self, iterations: int) -> None:
        self._array = jax.block_until_ready(self._loop(self._array, np.int32(iterations)))

    def check(self, iterations: int) -> None:
        # The first exchange adds 1 and 2 times the pattern; each later one adds two equal arrays.
        growth = np.float32(3 * TINY * 2.0 ** (WARM_UP + iterations - 1))
        require_equal(self._array.addressable_data(0), self._values * growth, "gloo psum")


class JaxrdmaExchange:
    """`jaxrdma.average_gradients` over one session; one flow per size."""

    def __init__(self, session: jaxrdma.Session) -> None:
        self._session = session
        # By number of elements: the program, and the state after its last use.
        self._flows: dict[int, tuple[Callable[..., Any], Any]] = {}

    def _make_flow(self, elements: int) -> tuple[Callable[..., Any], Any]:
        average = jaxrdma.average_gradients(self._session)
        growth = np.float32(self._session.index + 1)

        def turn(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            array, state = carry
            # optax types trees as its own aliases; ours is one array.
            updates: Any = array.at[i % elements].add(growth)
            mean: Any
            mean, state = average.update(updates, state)
            return mean, state

        def loop(array: jax.Array, state: Any, iterations: jax.Array) -> tuple[jax.Array, Any]:
            return lax.fori_loop(0, iterations, turn, (array, state))

        state = average.init(jnp.zeros(elements, jnp.float32))
        return jax.jit(loop, donate_argnums=(0, 1)), state

    def prepare(self, elements: int) -> None:
        if elements not in self._flows:
            self._flows[elements] = self._make_flow(elements)
        self._values = pattern(elements)
        self._array = jnp.asarray(self._values * np.float32(self._session.index + 1))
        self.run(WARM_UP)
        self._first_step = int(self._flows[elements][1].step)

    def run(self, iterations: int) -> None:
        loop, state = self._flows[self._array.size]
        self._array, state = jax.block_until_ready(loop(self._array, state, np.int32(iterations)))
        self._flows[self._array.size] = loop, state

    def check(self, iterations: int) -> None:
        elements = self._array.size
        mean = np.float32((self._session.num_workers + 1) / 2)  # of index + 1 over the workers
        turns = np.zeros(elements, np.float32)
        for loop_length in (WARM_UP, iterations):
            turns += np.bincount(np.arange(loop_length) % elements, minlength=elements)
        require_equal(self._array, (self._values + turns) * mean, "jaxrdma average")
        steps = int(self._flows[elements][1].step) - self._first_step
        if steps != iterations:
            raise AssertionError(f"the state counts {steps} steps, expected {iterations}")


def obey(exchange: Exchange, order: dict[str, Any]) -> dict[str, object]:
    """Carries out one line of the driver."""
    match order["do"]:
        case "prepare":
            exchange.prepare(order["bytes"] // 4)
        case "run":
            began = time.perf_counter()
            exchange.run(order["iterations"])
            return {"seconds": time.perf_counter() - began}
        case "check":
            exchange.check(order["iterations"])
        case other:
            raise ValueError(f"unknown order {other!r}")
    return {}


def serve(exchange: Exchange, driver: str, name: str) -> None:
    """Answers the driver's lines until it closes the connection."""
    host, port = driver.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        connection.makefile("rw", encoding="utf-8") as lines,
    ):
        connection.settimeout(None)
        print(json.dumps({"member": name}), file=lines, flush=True)
        for line in lines:
            try:
                answer = obey(exchange, json.loads(line))
            except Exception as error:  # the driver shows it; the loop goes on until it hangs up
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=lines, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--driver", required=True, help="host:port of against_gloo.py")
    parser.add_argument("--name", required=True, help="the cluster that this process belongs to")
    parser.add_argument("--gloo-index", type=int, help="this process's index; without it, jaxrdma")
    parser.add_argument("--gloo-coordinator", help="host:port for jax.distributed")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.gloo_index is not None:
            exchange: Exchange = GlooExchange(options.gloo_index, options.gloo_coordinator)
            stack.callback(jax.distributed.shutdown)
        else:
            session = stack.enter_context(jaxrdma.connect())
            exchange = JaxrdmaExchange(session)
        serve(exchange, options.driver, options.name)


if __name__ == "__main__":
    main()
