"""The engine's mesh and how its weights and state lie on it.

The axes are (replica, tensor). A replica is a whole engine with slots and pages of its own; its
heads, the MLP's inner width and the vocabulary are split over ``tensor``. Key heads that ``tensor``
does not divide are copied, so that every device has the keys of its own query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import ModelConfig

REPLICA, TENSOR = "replica", "tensor"

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # [in, out]: out is split
_ROWS = ("o_proj", "down_proj")  # [in, out]: in is split, the products are summed


class Weights(NamedTuple):
    """Decode-time layout: per-layer modules, no slicing of stacks; embedding and head [V, D]."""

    embedding: jax.Array
    layers: tuple[Any, ...]
    norm: Any
    untied: jax.Array | None  # the head, unless it is the embedding

    @property
    def head(self) -> jax.Array:
        return self.embedding if self.untied is None else self.untied


def engine_mesh(
    devices: Sequence[jax.Device] | None = None, *, replicas: int = 1, tensor: int = 1
) -> Mesh:
    """A (replica, tensor) mesh.

    Args:
        devices: Those of each replica in turn, of one process (None: the first of this one's).
        replicas: How many engines; -1: as many as there are devices for.
        tensor: Devices of each (tensor parallelism).

    Raises:
        ValueError: Where the sizes do not make the devices, or those of a replica belong to several
            processes.
    """
    devices = list(jax.local_devices()[:1] if devices is None else devices)
    made = len(devices) // tensor if replicas == -1 else replicas
    if made * tensor != len(devices):
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ValueError(
            f"replicas {replicas} x tensor {tensor} does not make {len(devices)} devices; replicas "
            f"-1 takes the rest where tensor is one of {', '.join(map(str, divisors))}"
        )
    grid = np.asarray(devices).reshape(made, tensor)
    if any(len({device.process_index for device in replica}) > 1 for replica in grid):
        raise ValueError("a replica lives inside one process, its devices belong to several")
    return Mesh(grid, (REPLICA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def check_tensor(config: ModelConfig, tensor: int) -> None:
    """Checks that a model's heads and inner width can be split over ``tensor`` devices.

    Raises:
        ValueError: Names the nearest number that divides both.
    """
    both = math.gcd(config.num_heads, config.intermediate_size)
    if both % tensor:
        fits = [n for n in range(1, both + 1) if both % n == 0]
        nearest = min(fits, key=lambda n: (abs(n - tensor), n))
        raise ValueError(
            f"tensor {tensor} does not divide the model's {config.num_heads} query heads and its "
            f"inner width {config.intermediate_size}; the nearest that does is {nearest}"
        )


def fewest_devices(config: ModelConfig, devices: int, size: int, limit: float) -> int:
    """The fewest devices that hold a model's weights; a divisor of ``devices``.

    Args:
        config: The model's.
        devices: How many there are.
        size: Bytes of the weights.
        limit: Bytes of them that each device can take.

    Returns:
        That number, or the most that can share the model where even they have too little memory.
    """
    most = math.gcd(math.gcd(config.num_heads, config.intermediate_size), devices)
    sizes = [n for n in range(1, most + 1) if most % n == 0]
    return next((n for n in sizes if size / n <= limit), most)


def key_head_copies(config: ModelConfig, tensor: int) -> int:
    """How many copies of every key head ``tensor`` devices hold: the fewest that they share evenly.
    ``tensor`` divides the query heads."""
    group = config.num_heads // config.num_kv_heads
    return next(
        n for n in range(1, group + 1) if group % n == 0 and n * config.num_kv_heads % tensor == 0
    )


def tensor_axis(names: Sequence[str]) -> int | None:
    """The axis of a layer's array that is split over ``tensor``: 0, the last (-1) or None.

    Args:
        names: The path of the array in the model; that of its module is one of them.
    """
    if any(name in _COLUMNS for name in names):
        return -1
    return 0 if any(name in _ROWS for name in names) else None


def weight_specs(weights: Weights) -> Weights:
    """The PartitionSpec of every array of ``weights``, as a pytree of their structure."""

    def one(path, leaf):
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
        vocabulary = names[0] in ("embedding", "untied")
        axis = 0 if vocabulary else tensor_axis(names)
        if axis is None:
            return P()
        return P(*(TENSOR if n == axis % leaf.ndim else None for n in range(leaf.ndim)))

    return jax.tree_util.tree_map_with_path(one, weights)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """NamedShardings of a pytree of PartitionSpecs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
