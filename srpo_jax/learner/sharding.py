"""The learner's mesh and the shardings of what lives on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from srpo_jax.recipe.errors import RecipeError

AXES = ("data", "fsdp", "tensor")


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A (data, fsdp, tensor) mesh over all devices; one size may be -1: the rest.

    Devices of one process are neighbours on it, as are those of one slice: axes to the right stay
    inside a process as far as they can, ``data`` goes over slices.

    Args:
        data: Replicas of the parameters (data parallel).
        fsdp: Parts that parameters and moments are split into, gathered layer by layer.
        tensor: Parts that heads and the MLP's width are split into (tensor parallel).
        devices: None: all of the default backend.

    Raises:
        RecipeError: When the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1:
        raise RecipeError(f"learner.mesh: one axis at most may be -1, got {sizes}")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != len(devices):
        raise RecipeError(
            f"learner.mesh: data {data} x fsdp {fsdp} x tensor {tensor} does not make "
            f"{len(devices)} devices; -1 for one of them takes the rest"
        )
    devices.sort(key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index))
    grid = np.asarray(devices).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [M, S, ...]: the sequences of each micro-batch are split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """The number of pieces that a micro-batch is split into: its row count must divide by this."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of arrays or ShapeDtypeStructs, by their shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def on_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array on a mesh. Every process has it whole and copies the parts of its own devices;
    nothing is sent between them."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
