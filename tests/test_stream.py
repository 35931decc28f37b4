"""Large parameters filled in pieces, against numpy's cast and transpose of the whole."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.checkpoint_files import StoredTensor
from models.convert import load_hf
from models.qwen import split_params
from models.stream import stream_parameter
from srpo_jax.learner.sharding import make_mesh
from tests.make_golden import GOLDEN


def stored_tensors(folder, count, shape, dtype):
    values = np.random.default_rng(0).normal(size=(count, *shape)).astype(dtype)
    path = folder / "tensors"
    path.write_bytes(b"head" + values.tobytes())
    size = values[0].nbytes
    return values, [
        StoredTensor(str(i), path, np.dtype(dtype), shape, 4 + i * size) for i in range(count)
    ]


@pytest.mark.multidevice
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize(
    "sizes, spec", [((1, 1, 1), (None, None)), ((1, 4, 1), ("fsdp", None)),
                    ((1, 2, 2), ("fsdp", "tensor")),
                    ((2, 1, 2), ("tensor", None))],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1, 300, 10**9])
def test_a_parameter_is_what_numpy_makes_of_its_files(
    tmp_path, transposed, layers, sizes, spec, piece
):
    file_shape = (28, 20)
    values, stored = stored_tensors(tmp_path, layers or 1, file_shape, ml_dtypes.bfloat16)
    expected = (values.swapaxes(1, 2) if transposed else values).astype(np.float32)
    expected = expected if layers else expected[0]
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * bool(layers), *spec))
    found = stream_parameter(
        stored, expected.shape, np.dtype(np.float32), sharding,
        stacked=bool(layers), transposed=transposed, piece=piece,
    )  # fmt: skip
    assert found.dtype == np.float32 and found.sharding.is_equivalent_to(sharding, found.ndim)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen2_untied"])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_checkpoint_loads_the_same_in_pieces(name, on_mesh):
    mesh = make_mesh(1, 2, 2) if on_mesh else None
    whole, streamed = (
        split_params(load_hf(GOLDEN / name, dtype=np.float32, mesh=mesh, stream_above=limit)[0])[1]
        for limit in (10**9, 0)
    )
    assert jax.tree.structure(whole) == jax.tree.structure(streamed)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(streamed), strict=True):
        np.testing.assert_array_equal(a, b)
