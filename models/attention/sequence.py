"""Causal attention over whole sequences behind one signature, in the form that suits a platform.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, G = N / Kv query heads of one key
head, H head width. Scores and softmax are float32 (float64 stays float64); grouped-query heads are
never repeated in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.attention.sequence_gpu import gpu_attention, gpu_supported
from models.attention.sequence_tpu import over_mesh, splash_attention

MASKED = -1e30
ATTENTION_FORMS = ("auto", "plain", "blocked", "splash", "triton")

# (q [B, T, N, H], k and v [B, T, Kv, H], segment ids [B, T]) -> [B, T, N, H]
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Splits the query heads [..., N, H] by the key head that they read: [..., Kv, G, H]."""
    *lead, n, h = q.shape
    return q.reshape(*lead, num_kv_heads, n // num_kv_heads, h)


def causal_attention(
    q_BTNH: jax.Array, k_BTKvH: jax.Array, v_BTKvH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention inside segments: position t sees s <= t with the same segment id.

    q [B, T, N, H], k and v [B, T, Kv, H], segment ids [B, T] int. Returns [B, T, N, H] in the dtype
    of q. The form is that of the default backend, on one device; ``attention_on`` chooses it for a
    mesh.
    """
    chex.assert_rank([q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT], [4, 4, 4, 2])
    return _form("auto", jax.default_backend(), None)(q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)


def attention_on(mesh: Mesh, name: str = "auto") -> Attention:
    """``causal_attention`` for arguments that are sharded over ``mesh``.

    ``name``: ``auto`` takes the splash kernel on TPU, the Triton kernel on GPU and the blocked form
    on CPU; ``plain``, ``blocked``, ``splash`` and ``triton`` insist. A kernel that cannot take the
    arguments (``auto`` on GPU: head width, dtype; on TPU: float64) is replaced by the blocked form.
    Raises ValueError for an unknown name or a kernel of another platform.
    """
    platform = mesh.devices.flat[0].platform
    if name not in ATTENTION_FORMS:
        raise ValueError(f"attention {name!r} is not one of {', '.join(ATTENTION_FORMS)}")
    home = {"splash": "tpu", "triton": "gpu"}.get(name, platform)
    if home != platform:
        raise ValueError(f"attention {name!r} runs on {home}, the mesh is on {platform}")
    return _form(name, platform, mesh)


def _form(name: str, platform: str, mesh: Mesh | None) -> Attention:
    if name == "auto":
        name = {"tpu": "splash", "gpu": "triton", "cuda": "triton", "rocm": "triton"}.get(
            platform, "blocked"
        )
        if name != "blocked":
            return functools.partial(_kernel_or_blocked, name, mesh)
    return {
        "plain": plain_attention,
        "blocked": functools.partial(over_mesh, blocked_attention, mesh),
        "splash": functools.partial(splash_attention, mesh=mesh),
        "triton": functools.partial(gpu_attention, mesh=mesh),
    }[name]


def _kernel_or_blocked(name, mesh, q, k, v, segment_ids):
    if name == "splash":
        able = q.dtype in (jnp.bfloat16, jnp.float32)
    else:
        able = gpu_supported(q.shape, k.shape[2], q.dtype) is None
    return _form(name if able else "blocked", "", mesh)(q, k, v, segment_ids)


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
    """``causal_attention`` one sequence, key head and block of queries at a time.

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
