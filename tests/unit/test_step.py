"""What the calls of a step refuse when a program is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrdma.control import LeafSpec
from jaxrdma.step import make_calls

LEAVES = [LeafSpec("params['w']", (4,), "float32")]
STEP = jnp.zeros((), jnp.int32)
SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()


def traced(specs: Any, axes: tuple[str, ...] = ("data",), **options: Any) -> None:
    """One exchange inside shard_map, its parameters and gradients split as `specs` say."""
    calls = make_calls(1, 0, LEAVES, average=False)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)
    run = jax.shard_map(
        lambda params, grads: calls.exchange(STEP, (params,), (grads,)),
        mesh=mesh,
        in_specs=specs,
        out_specs=WHOLE,
        **options,
    )
    jax.eval_shape(jax.jit(run), jnp.zeros(4), jnp.zeros(4))


def test_gradients_that_are_alike_are_taken() -> None:
    traced((WHOLE, WHOLE))
    traced((WHOLE, SPLIT), check_vma=False)  # who switches the check off answers for it


@pytest.mark.parametrize("specs", [(WHOLE, SPLIT), (SPLIT, WHOLE)])
def test_gradients_or_parameters_that_differ_are_refused_with_the_cure(specs: Any) -> None:
    with pytest.raises(TypeError, match=r"differ between the devices of axis 'data'.*pmean"):
        traced(specs)


def test_a_mesh_that_is_in_part_the_compilers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"leaves the mesh axes 'model' to the compiler"):
        traced((WHOLE, WHOLE), ("data", "model"), axis_names={"data"})
