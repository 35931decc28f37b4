"""Large parameters from their files into their shards, a piece at a time.

What goes to the devices is what the file holds, in its dtype and its layout; they cast and
transpose it, on all their cores, into a parameter that is there already and stays where it is. So
beside the shards no more is ever in memory than two pieces of PIECE bytes a device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoint_files import StoredTensor

PIECE = 64 * 2**20  # bytes of the parameter on one device


def stream_parameter(
    stored: Sequence[StoredTensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
    *,
    stacked: bool,
    transposed: bool,
    piece: int = PIECE,
) -> jax.Array:
    """A parameter of two axes, or a stack of such.

    Args:
        stored: The tensors of the layers, in their order, or the only one.
        shape: Of the parameter, such as [L, D, F].
        dtype: Of the parameter.
        sharding: Where it lies; the axis of layers is not split.
        stacked: Whether its first axis is that of layers.
        transposed: Whether the files hold the other two axes in the other order.
        piece: Most bytes of the parameter on a device that are filled at once.
    """
    mesh, spec = sharding.mesh, [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    assert isinstance(mesh, Mesh)
    rows, columns = (-1, -2) if transposed else (-2, -1)  # the file's axes, in the parameter
    local = sharding.shard_shape(shape)
    width = local[columns] * dtype.itemsize
    count = max(1, min(local[rows], piece // width))  # rows of the file in one piece
    file_spec = P(spec[rows], spec[columns])
    shards = shape[rows] // local[rows]
    raw_sharding = NamedSharding(mesh, file_spec)
    fill = _filler(mesh, P(*spec), file_spec, stacked, transposed)
    out = jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    for layer, tensor in enumerate(stored):
        values = tensor.open()
        for start in range(0, local[rows], count):
            # The last piece overlaps the one before it rather than having a shape of its own.
            start = min(start, local[rows] - count)

            def read(index: Any, values: np.ndarray = values, start: int = start) -> np.ndarray:
                shard = (index[0].start or 0) // count
                first = shard * local[rows] + start
                return values[first : first + count, index[1]]

            raw = jax.make_array_from_callback((shards * count, shape[columns]), raw_sharding, read)
            out = jax.block_until_ready(fill(out, raw, layer, start))
    return out


@functools.lru_cache
def _filler(mesh: Mesh, spec: P, file_spec: P, stacked: bool, transposed: bool) -> Any:
    def fill(out, raw, layer, start):
        values = (raw.T if transposed else raw).astype(out.dtype)
        at = (0, start) if transposed else (start, 0)
        if stacked:
            values, at = values[None], (layer, *at)
        return jax.lax.dynamic_update_slice(out, values, at)

    mapped = jax.shard_map(fill, mesh=mesh, in_specs=(spec, file_spec, P(), P()), out_specs=spec)
    return jax.jit(mapped, donate_argnums=0)
