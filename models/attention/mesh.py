"""Attention on every device's own part of its arguments, and what its kernels share."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

PADDING_SEGMENT = -1  # of the positions added to fill the last block; no caller uses it

# (q [B, T, N, H], k and v [B, T, Kv, H], segment ids [B, T]) -> [B, T, N, H]
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def over_mesh(
    attention: Attention,
    mesh: jax.sharding.Mesh | None,
    q_BTNH: jax.Array,
    k_BTKvH: jax.Array,
    v_BTKvH: jax.Array,
    segment_ids_BT: jax.Array,
) -> jax.Array:
    """Runs ``attention`` on every device's own part of the arguments (data and tensor parallel).

    B is split over (data, fsdp) and the heads over tensor, each where the axes divide it (heads:
    where tensor divides Kv), and else replicated.

    Args:
        attention: For the arguments of one device.
        mesh: With the axes data, fsdp and tensor; None: one device.
        q_BTNH: [B, T, N, H].
        k_BTKvH: [B, T, Kv, H].
        v_BTKvH: [B, T, Kv, H].
        segment_ids_BT: [B, T] int.
    """
    if mesh is None or mesh.size == 1:
        return attention(q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)
    size = mesh.shape
    rows = ("data", "fsdp") if q_BTNH.shape[0] % (size["data"] * size["fsdp"]) == 0 else None
    heads = "tensor" if k_BTKvH.shape[2] % size["tensor"] == 0 else None
    spec = P(rows, None, heads, None)
    # Kernels say nothing of how their outputs vary over the mesh, so that check is off.
    return jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(spec, spec, spec, P(rows, None)),
        out_specs=spec,
        check_vma=False,
    )(q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)
