"""A worker that trains a model of one layer on all its devices. Usage: several_devices.py OUT_PREFIX STEPS WAY.

WAY: mesh (jit over sharded batches), shard_map, donate (as mesh, with a donated state), halves (push, then pull),
average (average_gradients), models (no mesh: a model of its own on every device, all at the same time).
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrdma

ROWS = 16  # of the batch, for each device
RATE = 0.05


def batch(worker: int, devices: int) -> tuple[Any, Any]:
    """What one worker trains on."""
    inputs = np.random.default_rng(worker).normal(size=(ROWS * devices, 32)).astype(np.float32)
    return inputs, inputs[:, :4] * 2 - 1


def start() -> dict[str, Any]:
    """The parameters at step 0."""
    return {"w": jnp.zeros((32, 4)), "b": jnp.zeros(4)}


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)


def train_together(session: jaxrdma.Session, steps: int, way: str) -> Any:
    """One model on a mesh of all devices."""
    mesh = Mesh(jax.devices(), ("data",))
    split, everywhere = PartitionSpec("data"), PartitionSpec()
    data = jax.device_put(batch(session.index, mesh.size), NamedSharding(mesh, split))
    state: Any
    if way == "average":
        update = optax.chain(jaxrdma.average_gradients(session), optax.sgd(RATE))
        params = jax.device_put(start(), NamedSharding(mesh, everywhere))
        state = params, jax.device_put(update.init(params), NamedSharding(mesh, everywhere))
    else:
        state = session.init(start(), update=optax.sgd(RATE), mesh=mesh)

    def body(state: Any, inputs: Any, targets: Any) -> Any:
        params = state[0] if way == "average" else state.params
        grads = jax.grad(loss)(params, inputs, targets)
        if way in ("shard_map", "average"):
            grads = jax.lax.pmean(grads, "data")
        if way == "halves":
            return jaxrdma.pull(jaxrdma.push(state, grads))
        if way == "average":
            updates, rest = update.update(grads, state[1], params)
            return optax.apply_updates(params, updates), rest
        return jaxrdma.ps_step(state, grads)

    if way in ("shard_map", "average"):
        body = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(everywhere, split, split),
            out_specs=everywhere,
            check_vma=False,  # or JAX itself sums the gradient of what is replicated
        )
    step = jax.jit(body, donate_argnums=0 if way == "donate" else ())
    for _ in range(steps):
        # XLA's devices on a CPU lock each other up where many steps are begun ahead, also without jaxrdma.
        state = jax.block_until_ready(step(state, *data))
    if way == "average":
        return state[0]
    assert int(state.step) == steps
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == mesh.size
        parts = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((part == parts[0]).all() for part in parts)
    return state.params


def train_apart(session: jaxrdma.Session, steps: int) -> Any:
    """A model on every device."""
    devices = jax.devices()
    inputs, targets = batch(session.index, len(devices))
    data = [jax.device_put((inputs, targets), device) for device in devices]
    states = [
        session.init(jax.device_put(start(), device), update=optax.sgd(RATE)) for device in devices
    ]

    @jax.jit
    def step(state: Any, inputs: Any, targets: Any) -> Any:
        return jaxrdma.ps_step(state, jax.grad(loss)(state.params, inputs, targets))

    for _ in range(steps):
        states = [step(state, *each) for state, each in zip(states, data, strict=True)]
    results = [jax.tree.map(np.asarray, state.params) for state in states]
    for other in results[1:]:
        for name, value in other.items():
            np.testing.assert_array_equal(value, results[0][name])
    return results[0]


def main() -> None:
    """Train, say how long it took, and write the parameters."""
    out, steps, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with jaxrdma.connect() as session:
        begin = time.perf_counter()
        train = (
            train_apart(session, steps) if way == "models" else train_together(session, steps, way)
        )
        print(f"{steps} steps in {time.perf_counter() - begin:.2f} s", flush=True)
        np.savez(f"{out}-{session.index}.npz", **{k: np.asarray(v) for k, v in train.items()})


if __name__ == "__main__":
    main()
