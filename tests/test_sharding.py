"""Meshes and which axes parameters are split over."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from models.partition import param_sharding, param_spec, tree_shardings
from models.qwen import split_params
from srpo_jax.learner.sharding import batch_sharding, batch_shards, make_mesh, replicated
from srpo_jax.recipe.errors import RecipeError
from tests.learner_cases import tiny_model

pytestmark = pytest.mark.multidevice


def mesh_of(*sizes):
    return make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])


def test_a_rest_axis_takes_the_remaining_devices():
    assert dict(make_mesh().shape) == {"data": 4, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(1, -1, 2).shape) == {"data": 1, "fsdp": 2, "tensor": 2}
    mesh = make_mesh(2, 1, 2)
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh.devices.ravel().tolist() == jax.devices()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((1, 1, 1), "learner.mesh: data 1 x fsdp 1 x tensor 1 does not make 4 devices"),
        ((3, -1, 1), "learner.mesh: data 3 x fsdp -1 x tensor 1 does not make 4 devices"),
        ((8, -1, 1), "learner.mesh: data 8 x fsdp -1 x tensor 1 does not make 4 devices"),
        ((-1, -1, 1), "learner.mesh: one axis at most may be -1"),
    ],
)
def test_sizes_that_do_not_make_the_devices_are_refused(sizes, says):
    with pytest.raises(RecipeError) as caught:
        make_mesh(*sizes)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_rows_are_split_over_data_and_fsdp_together():
    mesh = mesh_of(2, 2, 1)
    assert batch_shards(mesh) == 4 and batch_shards(mesh_of(2, 1, 2)) == 2
    rows = jax.device_put(np.zeros((5, 8, 3)), batch_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(5, 2, 3)}
    assert sorted(s.index[1].start for s in rows.addressable_shards) == [0, 2, 4, 6]
    assert replicated(mesh).is_fully_replicated


def test_specs_of_the_parameters():
    spec = PartitionSpec
    assert param_spec(("layers", "q_proj", "kernel"), (2, 32, 32)) == spec(None, "fsdp", "tensor")
    assert param_spec(("layers", "o_proj", "kernel"), (2, 32, 32)) == spec(None, "tensor", "fsdp")
    assert param_spec(("layers", "down_proj", "kernel"), (2, 48, 32)) == spec(
        None, "tensor", "fsdp"
    )
    assert param_spec(("layers", "q_proj", "bias"), (2, 32)) == spec(None, "tensor")
    assert param_spec(("embed", "embedding"), (64, 32)) == spec("tensor", "fsdp")
    assert param_spec(("lm_head", "kernel"), (32, 64)) == spec("fsdp", "tensor")
    assert param_spec(("layers", "input_norm", "scale"), (2, 32)) == spec(None, None)


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = mesh_of(1, 2, 2)

    def axes(*shape):
        return tuple(param_sharding(mesh, ("layers", "q_proj", "kernel"), shape).spec)

    assert axes(3, 32, 48) == (None, "fsdp", "tensor")
    assert axes(3, 33, 48) == (None, None, "tensor")
    assert axes(3, 32, 49) == (None, "fsdp", None)
    odd = jax.device_put(np.zeros((33, 49)), param_sharding(mesh, ("embed", "embedding"), (33, 49)))
    assert odd.is_fully_replicated


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"qkv_bias": True}])
def test_every_parameter_of_a_model_has_a_sharding_that_fits(changes):
    _, params = split_params(tiny_model(**changes))
    shardings = tree_shardings(mesh_of(1, 2, 2), params)
    assert jax.tree.structure(shardings) == jax.tree.structure(params)
    placed = jax.device_put(params, shardings)
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        whole = leaf.is_fully_replicated
        assert whole == (path[-1].key == "scale"), path
    kernel = placed["layers"]["gate_proj"]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 16, 24)}
