"""Many workers in one process, a thread and a session each; or one of many. Usage: many.py WORKERS STEPS [INDEX].

Threads are spread over all devices: XLA has at most 32 programs of a device under way, and all here wait for each
other.
Worker w's gradient at step s is a vector of w + s; the servers only form the mean.
"""

import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrdma

SIZE = 3000


def train(index: int, workers: int, steps: int, seconds: list[float]) -> None:
    """One worker, which checks every mean."""
    devices = jax.devices()
    here = jax.default_device(devices[index % len(devices)])
    with here, jaxrdma.connect(index=index, num_workers=workers) as session:
        average = jaxrdma.average_gradients(session)
        state: Any = average.init(jnp.zeros(SIZE))
        step = jax.jit(average.update)
        begin = time.perf_counter()
        for number in range(steps):
            mean, state = step(jnp.full(SIZE, float(index + number)), state)
            # Sums of a few thousand are exact in float32, their quotients right to the last bit.
            expected = np.float32((workers - 1) / 2 + number)
            np.testing.assert_allclose(np.asarray(mean), expected, rtol=2e-7)
        seconds.append(time.perf_counter() - begin)


def main() -> None:
    """All at the same time, or the one that is asked for."""
    workers, steps = int(sys.argv[1]), int(sys.argv[2])
    here = [int(index) for index in sys.argv[3:]] or range(workers)
    seconds: list[float] = []
    threads = [
        threading.Thread(target=train, args=(index, workers, steps, seconds)) for index in here
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == len(here), "a worker failed"
    print(f"{workers} workers, {max(seconds) / steps * 1e3:.2f} ms for each of {steps} steps")


if __name__ == "__main__":
    main()
