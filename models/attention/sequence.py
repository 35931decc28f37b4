"""Causal attention over whole sequences in plain JAX: the reference, and one block at a time.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, G = N / Kv query heads of one key
head, H head width. Scores and softmax are float32 (float64 stays float64); grouped-query heads are
never repeated in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Splits the query heads [..., N, H] by the key head that they read: [..., Kv, G, H]."""
    *lead, n, h = q.shape
    return q.reshape(*lead, num_kv_heads, n // num_kv_heads, h)


def plain_attention(
    q_BTNH: jax.Array, k_BTKvH: jax.Array, v_BTKvH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """The reference of ``causal_attention``: materialises the scores [B, Kv, N/Kv, T, T]."""
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


def blocked_attention(
    q_BTNH: jax.Array,
    k_BTKvH: jax.Array,
    v_BTKvH: jax.Array,
    segment_ids_BT: jax.Array,
    block: int = 128,
) -> jax.Array:
    """``causal_attention``, one sequence, key head and block of ``block`` queries at a time.

    Only keys up to a block's end are touched, the backward pass recomputes the weights, and scores
    exist for [N/Kv, block, T] at once. On CPU its plain matrix products run several times faster
    than the batched ones of ``plain_attention``.
    """  # fmt: skip
    B, T, N, H = q_BTNH.shape
    Kv = k_BTKvH.shape[2]
    G = N // Kv
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    position = jnp.arange(T)

    def one_head(args):
        q_GTH, k_TH, v_TH, segment_T = args
        outputs = []
        for start in range(0, T, block):
            end = min(start + block, T)
            q = q_GTH[:, start:end].reshape(-1, H)
            scores = jnp.matmul(q, k_TH[:end].T, preferred_element_type=dtype) * (H**-0.5)
            visible = segment_T[start:end, None] == segment_T[None, :end]
            visible &= position[start:end, None] >= position[None, :end]
            scores = jnp.where(visible, scores.reshape(G, end - start, end), MASKED)
            weights = jax.nn.softmax(scores, axis=-1).astype(v_TH.dtype)
            outputs.append((weights.reshape(-1, end) @ v_TH[:end]).reshape(G, -1, H))
        return jnp.concatenate(outputs, axis=1)

    def heads_first(x):  # [B, T, Kv, ...] -> [B * Kv, ...]
        return jnp.moveaxis(x, 2, 1).reshape(B * Kv, *x.shape[1:2], *x.shape[3:])

    q = jnp.moveaxis(_grouped(q_BTNH, Kv), 1, 3).reshape(B * Kv, G, T, H)
    segments = jnp.repeat(segment_ids_BT, Kv, axis=0)
    out = jax.lax.map(
        jax.checkpoint(one_head), (q, heads_first(k_BTKvH), heads_first(v_BTKvH), segments)
    )
    return jnp.moveaxis(out.reshape(B, Kv, G, T, H), 3, 1).reshape(B, T, N, H)
