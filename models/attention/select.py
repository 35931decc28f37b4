"""Which form of attention suits a platform: over whole sequences, and over the engine's cache.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, H head width.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.attention.cache import PLAIN, CacheAttention
from models.attention.mesh import Attention, over_mesh
from models.attention.sequence import blocked_attention, plain_attention
from models.attention.sequence_gpu import gpu_attention, gpu_supported
from models.attention.sequence_tpu import splash_attention

ATTENTION_FORMS = ("auto", "plain", "blocked", "splash", "triton")


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
    forms: dict[str, Attention] = {
        "plain": plain_attention,
        "blocked": functools.partial(over_mesh, blocked_attention, mesh),
        "splash": functools.partial(splash_attention, mesh=mesh),
        "triton": functools.partial(gpu_attention, mesh=mesh),
    }
    return forms[name]


def _kernel_or_blocked(name, mesh, q, k, v, segment_ids):
    if name == "splash":
        able = q.dtype in (jnp.bfloat16, jnp.float32)
    else:
        able = gpu_supported(q.shape, k.shape[2], q.dtype) is None
    return _form(name if able else "blocked", "", mesh)(q, k, v, segment_ids)


def cache_attention_on(platform: str) -> CacheAttention:
    """The attention for "cpu", "tpu" or "gpu" devices."""
    if platform == "tpu":
        from models.attention.cache_tpu import tpu_cache_attention

        return tpu_cache_attention()
    if platform == "gpu":
        from models.attention.cache_gpu import gpu_cache_attention

        return gpu_cache_attention()
    return PLAIN
