"""Updates: what they depend on is found, and servers together compute the bits of one process."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrdma import averages, errors, plan, update
from jaxrdma.control import LeafSpec

STEPS = 3


def params_like(dtype: str = "float32") -> dict[str, Any]:
    """Leaves of every rank, some that are cut in pieces, an empty one, a scalar, and two of one shape."""
    rng = np.random.default_rng(0)
    shapes = {"k": (3, 3, 8, 16), "w": (30, 40), "v": (30, 40), "b": (40,), "z": (0, 3), "s": ()}
    return {
        name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in sorted(shapes.items())
    }


def gradients(params: Any) -> list[Any]:
    """For each step, in the type in which they are summed."""
    rng = np.random.default_rng(1)
    return [
        jax.tree.map(
            lambda p: np.asarray(
                rng.normal(size=p.shape), "float64" if p.dtype == jnp.float64 else "float32"
            ),
            params,
        )
        for _ in range(STEPS)
    ]


def one_process(transformation: Any, params: Any, grads: list[Any]) -> list[np.ndarray]:
    @jax.jit
    def step(params, state, grads):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transformation.init)(params)
    for one in grads:
        # Rounded outside of the step: inside, XLA may keep more bits than the type has.
        one = jax.tree.map(lambda g, p: jnp.asarray(g).astype(p.dtype), one, params)
        params, state = step(params, state, one)
    return [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)]


def pieces(made: plan.Plan, server: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [
        np.concatenate([array[:0], *(array[begin : begin + size] for begin, size in ranges)])
        for array, ranges in zip(arrays, made.pieces(server), strict=True)
    ]


def joined(made: plan.Plan, shards: list[list[np.ndarray]]) -> list[np.ndarray]:
    """What `pieces` has taken apart."""
    whole = [
        np.empty(math.prod(leaf.shape), first.dtype)
        for leaf, first in zip(made.leaves, shards[0], strict=True)
    ]
    for server, shard in enumerate(shards):
        for leaf, ranges, piece in zip(whole, made.pieces(server), shard, strict=True):
            at = 0
            for begin, size in ranges:
                leaf[begin : begin + size] = piece[at : at + size]
                at += size
    return whole


def training(
    transformation: Any,
    params: Any,
    grads: list[Any],
    servers: int,
    partition_bytes: int = 256,
    ema: float | None = None,
) -> Iterator[tuple[plan.Plan, list[update.ServerUpdate], list[np.ndarray]]]:
    """Before the first step and after each: the plan, the servers, and the parameters of all of them."""
    specs, treedef, leaves = plan.describe_leaves(params)
    analysis = update.analyse(transformation, treedef, specs, ema)
    made = plan.assign_partitions(specs, servers, partition_bytes, analysis.whole_leaves)
    programs = update.export_update(analysis, made).programs
    flat = [np.array(leaf).reshape(-1) for leaf in leaves]
    shards = [pieces(made, server, flat) for server in range(servers)]
    running = [update.ServerUpdate(program) for program in programs]
    for one, shard in zip(running, shards, strict=True):
        one.initialise(shard)
    yield made, running, joined(made, shards)
    for step in grads:
        arrays = [leaf.reshape(-1) for leaf in jax.tree.leaves(step)]
        for server in range(servers):
            running[server].step(pieces(made, server, arrays), shards[server])
        yield made, running, joined(made, shards)


def on_servers(
    transformation: Any, params: Any, grads: list[Any], servers: int, partition_bytes: int = 256
) -> list[np.ndarray]:
    *_, (_, _, params) = training(transformation, params, grads, servers, partition_bytes)
    return params


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "masked adamw": optax.adamw(SCHEDULE, mask=matrices, weight_decay=1e-1),
    "clip": optax.chain(optax.clip(0.5), optax.sgd(SCHEDULE, momentum=0.9)),
    "injected": optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=1e-2),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "partitioned": optax.partition(
        {True: optax.adam(1e-2), False: optax.sgd(1e-1, momentum=0.5)}, matrices
    ),
    "lion": optax.lion(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "averaged": averages.track_average(optax.adam(1e-2), 0.9),
    "frozen": optax.masked(optax.set_to_zero(), matrices),
}
LEAFWISE = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
    "block norm": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
}
GLOBAL = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "agc of all": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
}


def analyse(transformation: Any, params: Any = None) -> update.Analysis:
    specs, treedef, _ = plan.describe_leaves(params_like() if params is None else params)
    return update.analyse(transformation, treedef, specs)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_pieces_on_servers_give_the_bits_of_one_process(name):
    params = params_like()
    assert analyse(ELEMENTWISE[name]).kind == "elementwise"
    grads = gradients(params)
    expected = one_process(ELEMENTWISE[name], params, grads)
    assert_same_bits(on_servers(ELEMENTWISE[name], params, grads, 3), expected)


@pytest.mark.parametrize("name", LEAFWISE)
def test_whole_leaves_on_servers_give_the_bits_of_one_process(name):
    few = "bs" if name == "noise" else "kwbsz"  # random numbers take XLA long to compile
    params = {leaf: value for leaf, value in params_like().items() if leaf in few}
    analysis = analyse(LEAFWISE[name], params)
    assert (analysis.kind, analysis.whole_leaves) == ("leafwise", True)
    grads = gradients(params)
    expected = one_process(LEAFWISE[name], params, grads)
    assert_same_bits(on_servers(LEAFWISE[name], params, grads, 2), expected)


@pytest.mark.parametrize("name", GLOBAL)
def test_an_update_that_mixes_leaves_runs_on_one_server_and_is_refused_on_two(name):
    params = params_like()
    assert analyse(GLOBAL[name]).kind == "global"
    grads = gradients(params)
    expected = one_process(GLOBAL[name], params, grads)
    assert_same_bits(on_servers(GLOBAL[name], params, grads, 1), expected)
    with pytest.raises(
        errors.UpdateError,
        match=r"params\['.'\] depends on params\['.'\]|state.*depends on params\['.'\] and params",
    ) as raised:
        on_servers(GLOBAL[name], params, grads, 2)
    assert "use one server, or jaxrdma.average_gradients(session)" in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("transformation", "servers"),
    [(ELEMENTWISE["adam"], 3), (LEAFWISE["lamb"], 2), (GLOBAL["global norm"], 1)],
    ids=["elementwise", "leafwise", "global"],
)
def test_averages_of_the_parameters_follow_them(transformation, servers, dtype):
    decay = 0.75
    params = params_like(dtype)
    expected: list[np.ndarray] = []
    grads = gradients(params)
    for step, (made, running, leaves) in enumerate(
        training(transformation, params, grads, servers, ema=decay)
    ):
        wide = [leaf.astype(np.float64) for leaf in leaves]
        expected = [
            decay * old + (1 - decay) * new if step else new
            for old, new in zip(expected or wide, wide, strict=True)
        ]
        views = [
            [np.empty(made.server_elements(server, i), np.float32) for i in range(len(leaves))]
            for server in range(servers)
        ]
        for one, mine in zip(running, views, strict=True):
            one.read_averages(mine)
        for got, average in zip(joined(made, views), expected, strict=True):
            np.testing.assert_allclose(got, average, rtol=1e-5, atol=1e-6)
    # And change nothing in them.
    assert_same_bits(leaves, on_servers(transformation, params, grads, servers))


def test_an_average_that_is_none_is_refused():
    specs, treedef, _ = plan.describe_leaves(params_like())
    for decay in (0, 1, -0.5, 1.5, float("nan")):
        with pytest.raises(errors.ConfigError, match="expected a decay between 0 and 1"):
            update.analyse(optax.sgd(0.1), treedef, specs, decay)
    *_, (_, (one,), leaves) = training(optax.sgd(0.1), params_like(), [], 1)
    with pytest.raises(errors.UpdateError, match="no moving averages"):
        one.read_averages(leaves)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_gradients_of_16_bit_leaves_are_rounded_once_after_their_mean(name, dtype):
    params = params_like(dtype)
    grads = gradients(params)
    expected = one_process(ELEMENTWISE[name], params, grads)
    assert_same_bits(on_servers(ELEMENTWISE[name], params, grads, 2), expected)


def test_leaves_of_several_types_are_updated_together():
    params = {"h": params_like("bfloat16")["w"], "w": params_like()["w"]}
    grads = gradients(params)
    expected = one_process(ELEMENTWISE["adam"], params, grads)
    assert_same_bits(on_servers(ELEMENTWISE["adam"], params, grads, 2), expected)


@pytest.mark.parametrize("transformation", [ELEMENTWISE["masked adamw"], LEAFWISE["lamb"]])
def test_float64_leaves_are_updated_in_float64(transformation):
    with jax.enable_x64(True):
        params = {name: leaf for name, leaf in params_like("float64").items() if name in "bws"}
        grads = gradients(params)
        expected = one_process(transformation, params, grads)
        specs, treedef, _ = plan.describe_leaves(params)
        analysis = update.analyse(transformation, treedef, specs)
        made = plan.assign_partitions(specs, 1, 256, analysis.whole_leaves)
        program = update.export_update(analysis, made).programs[0]
    # A server follows the program, not its own configuration.
    running = update.ServerUpdate(program)
    flat = [np.array(leaf).reshape(-1) for leaf in jax.tree.leaves(params)]
    running.initialise(flat)
    for step in grads:
        running.step([leaf.reshape(-1) for leaf in jax.tree.leaves(step)], flat)
    assert_same_bits(flat, expected)


def custom(function: Any, init: Any = lambda params: ()) -> optax.GradientTransformation:
    """A transformation whose update is `function(grads, params)`."""
    return optax.GradientTransformation(
        init, lambda grads, state, params: (function(grads, params), state)
    )


def each(function: Any) -> optax.GradientTransformation:
    return custom(lambda grads, params: jax.tree.map(function, grads, params))


@pytest.mark.parametrize(
    ("kind", "transformation"),
    [
        ("elementwise", each(lambda g, p: g.reshape(-1).reshape(p.shape) * 2)),
        ("elementwise", each(lambda g, p: jnp.where(p > 0, g, jnp.full_like(g, 0.5)))),
        ("elementwise", each(jax.jit(lambda g, p: jax.nn.relu(g) + jax.checkpoint(jnp.sin)(p)))),
        ("elementwise", each(lambda g, p: g + p.sum() if p.ndim > 4 else g)),
        ("leafwise", each(lambda g, p: jnp.flip(g.reshape(-1)).reshape(p.shape))),
        ("leafwise", each(lambda g, p: g + p.sum())),
        ("leafwise", each(lambda g, p: g * jnp.arange(p.size).reshape(p.shape))),
        ("leafwise", each(lambda g, p: jnp.cumsum(g.reshape(-1)).reshape(p.shape))),
        ("leafwise", each(lambda g, p: jax.lax.cond(p.max() > 0, jnp.sin, jnp.cos, g))),
        ("leafwise", each(lambda g, p: jax.lax.scan(lambda c, _: (c * 2, None), g, None, 3)[0])),
        ("global", custom(lambda g, p: g | {"w": g["w"] + p["v"]})),
        ("global", custom(lambda g, p: g | {"w": g["w"] * p["s"]})),
        ("global", custom(lambda g, p: g | {"w": g["v"], "v": g["w"]})),
        (
            "global",
            custom(lambda g, p: g | {"w": jax.lax.cond(p["s"] > 0, jnp.sin, jnp.cos, g["w"])}),
        ),
    ],
)
def test_what_an_element_depends_on_is_found(kind, transformation):
    params = {name: leaf for name, leaf in params_like().items() if leaf.size}
    assert analyse(transformation, params).kind == kind


def test_a_state_that_mixes_leaves_only_after_a_step_is_found():
    def step(grads, state, params):
        return jax.tree.map(lambda g: g * state, grads), state + grads["s"]

    mixing = optax.GradientTransformation(lambda params: jnp.zeros(()), step)
    assert analyse(mixing).kind == "global"


def test_a_mask_sees_the_shapes_of_whole_leaves():
    """Decay only matrices, though every server sees flat pieces."""
    params = params_like()
    zeros = [jax.tree.map(np.zeros_like, one) for one in gradients(params)]
    names = sorted(params)
    after = on_servers(ELEMENTWISE["masked adamw"], params, zeros, 3)
    changed = {
        name: not np.array_equal(flat, np.asarray(params[name]).reshape(-1))
        for name, flat in zip(names, after, strict=True)
    }
    assert changed == {"b": False, "k": True, "s": False, "v": True, "w": True, "z": False}


def jitter() -> optax.GradientTransformation:
    """Adds one random number to every element: its state is a PRNG key that belongs to no leaf."""

    def step(grads, key, params=None):
        use, key = jax.random.split(key)
        return jax.tree.map(lambda g: g + jax.random.normal(use), grads), key

    return optax.GradientTransformation(lambda params: jax.random.key(1), step)


def test_every_server_draws_the_same_random_numbers():
    params = {name: leaf for name, leaf in params_like().items() if name in "bw"}
    assert analyse(jitter(), params).kind == "elementwise"
    grads = gradients(params)
    expected = one_process(jitter(), params, grads)
    assert_same_bits(on_servers(jitter(), params, grads, 3), expected)


def test_a_single_leaf_gives_the_bits_of_one_process():
    params = params_like()["w"]
    grads = gradients(params)
    expected = one_process(ELEMENTWISE["adam"], params, grads)
    assert_same_bits(on_servers(ELEMENTWISE["adam"], params, grads, 2), expected)


def test_small_leaves_that_are_treated_alike_are_packed():
    params = {"big": jnp.zeros((300, 300)), "halves": [jnp.zeros(7, "bfloat16")] * 2}
    params |= {f"small {i}": jnp.zeros((i + 1, 5)) for i in range(50)}
    params |= {f"bias {i}": jnp.zeros(i + 2) for i in range(50)}
    specs, treedef, _ = plan.describe_leaves(params)
    analysis = update.analyse(ELEMENTWISE["masked adamw"], treedef, specs)
    made = plan.assign_partitions(specs, 1, 1 << 20)
    blob = update.export_update(analysis, made).programs[0]
    program = update.ServerUpdate(blob)._program
    assert program is not None
    assert sorted(len(pack.leaves) for pack in program.packs) == [1, 2, 50, 50]
    assert len(blob) < 50_000


def test_an_empty_server_has_an_empty_program():
    params = {"w": jnp.ones(3)}
    specs, treedef, _ = plan.describe_leaves(params)
    analysis = update.analyse(ELEMENTWISE["adam"], treedef, specs)
    exported = update.export_update(analysis, plan.assign_partitions(specs, 3, 1 << 20))
    assert exported.kind == "elementwise"
    assert exported.fingerprint == analysis.fingerprint
    assert [bool(program) for program in exported.programs] == [True, False, False]
    idle = update.ServerUpdate(exported.programs[2])
    idle.initialise([np.zeros(0, "float32")])
    idle.step([np.zeros(0, "float32")], [np.zeros(0, "float32")])


def side_by_side(sizes: list[int], dtype: Any, gap: int) -> tuple[np.ndarray, ...]:
    """Views of one memory, one after the other; but before the one with the number `gap` something else lies."""
    memory = np.zeros(sum(sizes) + 3, dtype)
    begins = [sum(sizes[:i]) + 3 * (i >= gap) for i in range(len(sizes))]
    return tuple(memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leaves_that_lie_side_by_side_are_updated_as_if_apart(dtype):
    rng = np.random.default_rng(2)
    sizes = [2 + 3 * i % 7 for i in range(12)]
    params = [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]
    grads = gradients(params)
    expected = on_servers(optax.adam(0.1), params, grads, 1)

    specs, treedef, _ = plan.describe_leaves(params)
    analysis = update.analyse(optax.adam(0.1), treedef, specs)
    made = plan.assign_partitions(specs, 1, 256)
    running = update.ServerUpdate(update.export_update(analysis, made).programs[0])
    held = side_by_side(sizes, params[0].dtype, gap=5)
    means = side_by_side(sizes, "float32", gap=8)
    for view, leaf in zip(held, params, strict=True):
        view[:] = leaf
    assert [(begin, len(run)) for begin, run in update._runs(held)] == [
        (0, sum(sizes[:5])),
        (sum(sizes[:5]), sum(sizes[5:])),
    ]
    running.initialise(held)
    for step in grads:
        for view, leaf in zip(means, step, strict=True):
            view[:] = leaf
        running.step(means, held)
    assert_same_bits(list(held), expected)


def server_for(transformation: Any, elements: int) -> update.ServerUpdate:
    specs, treedef, _ = plan.describe_leaves([jnp.zeros(elements)])
    analysis = update.analyse(transformation, treedef, specs)
    made = plan.assign_partitions(specs, 1, 1 << 20)
    return update.ServerUpdate(update.export_update(analysis, made).programs[0])


@pytest.mark.parametrize("offset", [0, 1])
def test_memory_may_change_as_soon_as_a_call_has_returned(offset):
    """With momentum the first gradients become the state: they must not be kept where they came from."""
    elements = 1 << 17  # large enough for a program of several threads
    running = server_for(optax.trace(decay=1.0), elements)
    # Both an address that XLA can read in place and one that it cannot.
    grads, params = (
        update._aligned(elements + offset, np.dtype("float32"))[offset:] for _ in range(2)
    )
    params[:] = 0
    running.initialise([params])
    for step in range(1, 4):
        grads[:] = 1
        running.step([grads], [params])
        np.testing.assert_array_equal(params, step * (step + 1) / 2)
        grads[:] = 1000
        params_before = params.copy()
        params[:] = params_before


def test_parameters_that_changed_between_steps_are_what_the_next_step_begins_with():
    running = server_for(optax.sgd(1.0), 5)
    params = np.zeros(5, "float32")
    running.initialise([params])
    params[:] = 7
    running.step([np.ones(5, "float32")], [params])
    np.testing.assert_array_equal(params, 6)


def test_initialising_again_forgets_the_state():
    running = server_for(optax.trace(decay=1.0), 5)
    params, grads = np.zeros(5, "float32"), np.ones(5, "float32")
    for _ in range(2):
        params[:] = 0
        running.initialise([params])
        running.step([grads], [params])
        running.step([grads], [params])
        np.testing.assert_array_equal(params, 3)


def test_a_step_without_a_state_is_refused():
    running = server_for(optax.adam(0.1), 5)
    with pytest.raises(errors.UpdateError, match="initialise was not called"):
        running.step([np.zeros(5, "float32")], [np.zeros(5, "float32")])


@pytest.mark.parametrize(
    ("views", "text"),
    [
        ([], "is for 1 leaves, but 0 came"),
        ([np.zeros(4, "float32")], r"leaf 0 should come as float32\[5\], but came as float32\[4\]"),
        ([np.zeros(5, "float64")], r"float32\[5\], but came as float64\[5\]"),
    ],
)
def test_views_of_another_size_are_refused(views, text):
    with pytest.raises(errors.UpdateError, match=text):
        server_for(optax.adam(0.1), 5).initialise(views)


def test_a_program_that_this_jax_cannot_run_is_refused_with_both_versions():
    import msgspec

    blob = server_for(optax.adam(0.1), 5)._program
    assert blob is not None
    other = msgspec.structs.replace(blob, jax_version="0.99", step=blob.step[:100])
    with pytest.raises(
        errors.UpdateError, match=f"exported with jax 0.99 .* jax {jax.__version__}"
    ):
        update.ServerUpdate(msgspec.msgpack.encode(other))


def test_the_fingerprint_differs_where_updates_do():
    params = params_like()
    prints = [
        analyse(optax.adam(1e-3)).fingerprint,
        analyse(optax.adam(1e-2)).fingerprint,
        analyse(optax.adam(1e-3, b1=0.8)).fingerprint,
        analyse(optax.adamw(1e-3)).fingerprint,
        analyse(optax.adamw(1e-3, mask=matrices)).fingerprint,
        analyse(optax.adamw(1e-3), {"w": params["w"]}).fingerprint,
        analyse(optax.adamw(1e-3), {"w": params["b"]}).fingerprint,
        analyse(optax.sgd(optax.piecewise_constant_schedule(1.0, {5: 0.1}))).fingerprint,
        analyse(optax.sgd(optax.piecewise_constant_schedule(1.0, {6: 0.1}))).fingerprint,
        analyse(LEAFWISE["lamb"]).fingerprint,
        analyse(each(lambda g, p: g * jnp.arange(p.size).reshape(p.shape))).fingerprint,
        analyse(each(lambda g, p: g * (1 + jnp.arange(p.size).reshape(p.shape)))).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


PRINT_FINGERPRINTS = """
import jax, jax.numpy as jnp, optax
from jaxrdma import plan, update
specs, treedef, _ = plan.describe_leaves([jnp.zeros((3, 4)), jnp.zeros(4)])
noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
steps = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
relu = optax.stateless(lambda grads, _: jax.tree.map(jax.nn.relu, grads))
for one in (optax.adamw(1e-3), optax.lamb(1e-3), noise, steps, relu):
    print(update.analyse(one, treedef, specs).fingerprint)
"""


def test_the_fingerprint_tells_of_averages():
    specs, treedef, _ = plan.describe_leaves(params_like())
    decays = (None, 0.9, 0.99)
    assert len({update.analyse(optax.sgd(0.1), treedef, specs, d).fingerprint for d in decays}) == 3


def test_the_fingerprint_is_the_same_in_every_process():
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PRINT_FINGERPRINTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 5


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (optax.adam, r"got <function adam .*; call it first, e.g. optax.adam\(1e-3\)"),
        ("adam", "takes an optax.GradientTransformation, with init and update .* but got 'adam'"),
        (None, "but got None"),
        (optax.GradientTransformation, "but got <class"),
    ],
)
def test_what_is_no_transformation_is_refused(wrong, text):
    with pytest.raises(errors.UpdateError, match=text):
        analyse(wrong)


def growing(grads, state, params):
    return grads, jax.tree.map(lambda s: s.astype("float32") + 1, state)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (optax.contrib.reduce_on_plateau(), "update function failed .*'value'.*average_gradients"),
        (
            optax.GradientTransformation(lambda params: 1 / 0, lambda g, s, p: (g, s)),
            "init function failed .*ZeroDivisionError: division by zero",
        ),
        (
            optax.GradientTransformation(lambda p: {"n": jnp.zeros(2, "float16")}, growing),
            r"state\['n'\] begins as float16\[2\] and is float32\[2\] after one step",
        ),
        (
            optax.GradientTransformation(lambda p: None, lambda g, s, p: (g, jnp.zeros(()))),
            "a state of another structure",
        ),
        (custom(lambda g, p: g["w"]), "updates of another structure"),
        (
            custom(lambda g, p: g | {"s": g["b"]}),
            r"change params\['s'\] from shape \[\] to \[40\]",
        ),
        (each(lambda g, p: [jax.debug.print("{}", g), g][1]), "side effects"),
    ],
)
def test_an_update_that_cannot_run_on_a_server_is_refused_with_the_reason(wrong, text):
    with pytest.raises(errors.UpdateError, match=text):
        analyse(wrong)


def test_an_update_that_calls_python_is_refused():
    def call(g, p):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(g.shape, g.dtype), g)

    with pytest.raises(errors.UpdateError, match="average_gradients"):
        on_servers(each(call), params_like(), [], 1)


def test_whole_leaves_must_be_planned_so():
    params = params_like()
    specs, treedef, _ = plan.describe_leaves(params)
    analysis = update.analyse(LEAFWISE["lamb"], treedef, specs)
    with pytest.raises(errors.UpdateError, match="whole_leaves=True"):
        update.export_update(analysis, plan.assign_partitions(specs, 2, 1 << 20))


def test_a_state_array_knows_where_it_belongs():
    program = server_for(optax.adam(0.1), 5)._program
    assert program is not None
    assert [(entry.path, entry.pack, entry.shape, entry.dtype) for entry in program.state] == [
        ("state[0].count", -1, [], "int32"),
        ("state[0].mu[0]", 0, [5], "float32"),
        ("state[0].nu[0]", 0, [5], "float32"),
    ]


def on_changing_servers(
    transformation: Any, params: Any, grads: list[Any], counts: list[int]
) -> list[np.ndarray]:
    """Each step on another number of servers, which get parameters and state from those before."""
    specs, treedef, leaves = plan.describe_leaves(params)
    analysis = update.analyse(transformation, treedef, specs)
    flat = [np.array(leaf).reshape(-1) for leaf in leaves]
    state: dict[tuple[int, int], np.ndarray] = {}  # of every array, all bytes
    for number, (servers, step) in enumerate(zip(counts, grads, strict=True)):
        made = plan.assign_partitions(specs, servers, 256 + 128 * number, analysis.whole_leaves)
        programs = update.export_update(analysis, made).programs
        arrays = [leaf.reshape(-1) for leaf in jax.tree.leaves(step)]
        old, state = state, {}
        shards = [pieces(made, server, flat) for server in range(servers)]
        for server, (program, shard) in enumerate(zip(programs, shards, strict=True)):
            one = update.ServerUpdate(program)

            def places(part: update.StatePart, made=made, server=server) -> list[tuple[int, int]]:
                return made.pieces(server)[part.leaf] if part.along else [(0, part.elements)]

            def fill(part: update.StatePart, into: np.ndarray, old=old, places=places) -> None:
                whole = old[part.leaf, part.slot]
                item = into.size // max(1, part.elements)
                cut = [whole[b * item : (b + n) * item] for b, n in places(part)]
                into[:] = np.concatenate([whole[:0], *cut])

            if number == 0:
                one.initialise(shard)
            else:
                one.load_state(fill)
            one.step(pieces(made, server, arrays), shard)
            for part, array in zip(one.state_parts(), one.state(), strict=True):
                item = array.size // max(1, part.elements)
                size = flat[part.leaf].size if part.along else part.elements
                whole = state.setdefault((part.leaf, part.slot), np.zeros(size * item, np.uint8))
                at = 0
                for begin, count in places(part):
                    whole[begin * item : (begin + count) * item] = array[at : at + count * item]
                    at += count * item
        flat = joined(made, shards)
    return flat


@pytest.mark.parametrize("name", ["injected", "averaged", "adafactor", "finite"])
def test_a_state_goes_on_bit_for_bit_on_another_number_of_servers(name):
    transformation = {**ELEMENTWISE, **LEAFWISE, **GLOBAL}[name]
    params = {leaf: value for leaf, value in params_like().items() if leaf in "wbs"}
    grads = gradients(params)
    counts = [1, 1, 1] if name in GLOBAL else [2, 3, 1]
    expected = one_process(transformation, params, grads)
    assert_same_bits(on_changing_servers(transformation, params, grads, counts), expected)


def test_looking_at_the_state_does_not_disturb_it():
    server = server_for(optax.adam(0.1), 5)
    params, grads = [np.ones(5, np.float32)], [np.ones(5, np.float32)]
    with pytest.raises(errors.UpdateError, match="no state to save"):
        server.state()
    server.initialise(params)
    assert [part.slot for part in server.state_parts()] == [0, 0, 1]
    for step in (1, 2, 3):
        server.step(grads, params)
        count, mu, _ = (array.copy() for array in server.state())
        assert count.view(np.int32) == [step]
        np.testing.assert_allclose(mu.view(np.float32), 1 - 0.9**step, rtol=1e-6)


def test_many_leaves_are_analysed_and_exported_in_time():
    leaves = [LeafSpec(f"params[{i}]", (i % 20 + 1, 300), "float32") for i in range(300)]
    treedef = jax.tree.structure([0] * len(leaves))
    analysis = update.analyse(optax.adam(1e-3), treedef, leaves)
    programs = update.export_update(analysis, plan.assign_partitions(leaves, 2, 1 << 20)).programs
    assert all(len(program) < 100_000 for program in programs)
    assert math.prod(leaves[0].shape) == 300
