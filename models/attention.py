"""Attention behind one signature each for whole sequences and for one decode step.

Axes: B sequences (or slots), T query tokens, C cache positions, N query heads, Kv key/value heads,
H head width. Scores and softmax are float32 (float64 stays float64); grouped-query heads are never
repeated in memory.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

MASKED = -1e30


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Splits the query heads [..., N, H] by the key/value head that they read: [..., Kv, N/Kv, H]."""
    *lead, n, h = q.shape
    return q.reshape(*lead, num_kv_heads, n // num_kv_heads, h)


def causal_attention(
    q_BTNH: jax.Array, k_BTKvH: jax.Array, v_BTKvH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention inside segments: position t sees s <= t with the same segment id.

    Materialises the scores [B, Kv, N/Kv, T, T]. Returns [B, T, N, H] in the dtype of q.
    """
    chex.assert_rank([q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT], [4, 4, 4, 2])
    B, T, N, H = q_BTNH.shape
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q = _grouped(q_BTNH, k_BTKvH.shape[2])
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_BTKvH, preferred_element_type=dtype)
    scores = scores * (H**-0.5)
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    visible = same & jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKvH.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BTKvH).reshape(B, T, N, H)


def cache_attention(
    q_BNH: jax.Array, k_BCKvH: jax.Array, v_BCKvH: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    """One query a slot over its cache: positions < length are visible. Returns [B, N, H]."""
    chex.assert_rank([q_BNH, k_BCKvH, v_BCKvH, lengths_B], [3, 4, 4, 1])
    B, N, H = q_BNH.shape
    C = k_BCKvH.shape[1]
    dtype = jnp.promote_types(q_BNH.dtype, jnp.float32)
    q = _grouped(q_BNH, k_BCKvH.shape[2])
    scores = jnp.einsum("bkgh,bskh->bkgs", q, k_BCKvH, preferred_element_type=dtype)
    scores = scores * (H**-0.5)
    visible = jnp.arange(C)[None, :] < lengths_B[:, None]
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BCKvH.dtype)
    return jnp.einsum("bkgs,bskh->bkgh", weights, v_BCKvH).reshape(B, N, H)
