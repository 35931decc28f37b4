"""Which mesh axes each parameter is split over.

Meshes have the axes (data, fsdp, tensor). Heads and the MLP's inner width go over ``tensor``, the
other matrix axis over ``fsdp``; an axis that does not divide stays whole. Sequences go over (data,
fsdp): a layer's kernels are gathered over fsdp when it runs.
"""

from __future__ import annotations

from typing import Any

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
    """Which mesh axes a parameter is split over, whether or not they divide it.

    Args:
        path: Such as ("layers", "q_proj", "kernel").
        shape: Of the parameter; leading axes of a stack stay whole.
    """
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

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: param_sharding(mesh, _names(path), leaf.shape), params
    )


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    names = (str(getattr(k, "key", getattr(k, "name", k))) for k in path)
    return tuple(name for name in names if name != "value")


class Placement:
    """The sharding constraints of a forward pass and its gradient (data and tensor parallel).

    Without them the partitioner replicates activations, or sums the gradients of whole kernels on
    every device.

    Args:
        mesh: With the axes data, fsdp and tensor.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def _constrain(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def rows(self, x: jax.Array) -> jax.Array:
        """Activations [B, ...]: B over (data, fsdp)."""
        return self._constrain(x, ("data", "fsdp"))

    def gather(self, layer: Any, dtype: Any) -> Any:
        """One layer's module with kernels in ``dtype``, whole over fsdp.

        Their gradients go back reduce-scattered, in ``dtype``: half the traffic of float32 where it
        is bfloat16.
        """

        def one(path, leaf):
            names = _names(path)
            if names[-1] != "kernel":
                return leaf
            own = param_sharding(self.mesh, names, leaf.shape)
            whole = NamedSharding(
                self.mesh, PartitionSpec(*(None if a == "fsdp" else a for a in own.spec))
            )
            return _gather(leaf, dtype, whole, own)

        return jax.tree_util.tree_map_with_path(one, layer)

    def embed(self, table_VD: jax.Array, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
        """Embeddings, looked up where the table lies: one all-to-all, and no gather of the table.

        Args:
            table_VD: [V, D] floating.
            tokens_BT: [B, T] int.
            dtype: Of the result.

        Returns:
            [B, T, D].
        """
        B, D = tokens_BT.shape[0], table_VD.shape[1]
        width = "fsdp" if D % self.mesh.shape["fsdp"] == 0 else None
        data = "data" if B % self.mesh.shape["data"] == 0 else None
        x = table_VD[self._constrain(tokens_BT, data)].astype(dtype)
        return self.rows(self._constrain(x, data, None, width))


def _gather(kernel: jax.Array, dtype: Any, whole: NamedSharding, own: NamedSharding) -> jax.Array:
    @jax.custom_vjp
    def gather(kernel):
        return jax.lax.with_sharding_constraint(kernel.astype(dtype), whole)

    def back(_, cotangent):
        cotangent = jax.lax.with_sharding_constraint(cotangent, own)
        return (cotangent.astype(kernel.dtype),)

    gather.defvjp(lambda kernel: (gather(kernel), None), back)
    return gather(kernel)
