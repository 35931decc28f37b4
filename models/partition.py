"""Which mesh axes each parameter is split over.

Meshes have the axes (data, fsdp, tensor). Heads and the MLP's inner width go over ``tensor``, the
other matrix axis over ``fsdp``; an axis that does not divide stays whole.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Last module name of the path -> spec of the unstacked parameter.
_COLUMN = ("fsdp", "tensor")  # [in, out], the output split over tensor
_ROW = ("tensor", "fsdp")  # [in, out], the input split over tensor
_KERNELS = {
    "q_proj": _COLUMN, "k_proj": _COLUMN, "v_proj": _COLUMN, "gate_proj": _COLUMN,
    "up_proj": _COLUMN, "lm_head": _COLUMN, "o_proj": _ROW, "down_proj": _ROW,
}  # fmt: skip


def param_spec(path: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """PartitionSpec of the parameter at ``path``, such as ("layers", "q_proj", "kernel")."""
    *_, module, leaf = path
    if leaf == "embedding":
        spec: tuple[str | None, ...] = ("tensor", "fsdp")
    elif leaf == "kernel":
        spec = _KERNELS[module]
    elif leaf == "bias":
        spec = ("tensor",)
    else:
        spec = (None,)
    return PartitionSpec(*(None,) * (len(shape) - len(spec)), *spec)


def param_sharding(mesh: Mesh, path: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of a parameter on ``mesh``: mesh axes that do not divide its size are left out."""
    spec = param_spec(path, shape)
    kept = [
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(spec, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*kept))


def tree_shardings(mesh: Mesh, params: object) -> object:
    """Shardings for a parameter pytree (arrays or ShapeDtypeStructs), by path."""

    def one(path, leaf):
        names = tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        names = tuple(n for n in names if n not in ("value",))
        return param_sharding(mesh, names, leaf.shape)

    return jax.tree_util.tree_map_with_path(one, params)
