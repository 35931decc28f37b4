"""Which form of attention suits a platform: over whole sequences, and over the engine's KV cache.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, H head width.
"""

from __future__ import annotations

import functools

import chex
import jax
from jax.sharding import Mesh

from models.attention.cache import CacheAttention
from models.attention.forms import ATTENTION_FORMS, AUTO, CACHE_FORMS
from models.attention.mesh import Attention

FALLBACK = "blocked"


def causal_attention(
    q_BTNH: jax.Array, k_BTKvH: jax.Array, v_BTKvH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention inside segments: position t sees s <= t with the same segment id.

    The form is that of the default backend, on one device; ``attention_on`` chooses it for a mesh.

    Args:
        q_BTNH: [B, T, N, H] floating.
        k_BTKvH: [B, T, Kv, H]; N is a multiple of Kv.
        v_BTKvH: [B, T, Kv, H].
        segment_ids_BT: [B, T] int.

    Returns:
        [B, T, N, H] in the dtype of q.
    """
    chex.assert_rank([q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT], [4, 4, 4, 2])
    attend = _form(AUTO, jax.default_backend(), None)
    return attend(q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)


def attention_on(mesh: Mesh, name: str = AUTO) -> Attention:
    """``causal_attention`` for arguments that are sharded over ``mesh``.

    Args:
        mesh: With the axes data, fsdp and tensor.
        name: ``auto`` takes the form of the mesh's platform (splash on TPU, Triton on GPU, blocked
            on CPU), and the blocked form for arguments that it cannot run (on GPU: head width,
            dtype; on TPU: float64); a key of ``ATTENTION_FORMS`` insists.

    Raises:
        ValueError: On an unknown name, or a form of another platform.
    """
    platform = mesh.devices.flat[0].platform
    if name != AUTO and name not in ATTENTION_FORMS:
        known = ", ".join((AUTO, *ATTENTION_FORMS))
        raise ValueError(f"attention {name!r} is not one of {known}")
    home = platform if name == AUTO else ATTENTION_FORMS[name].platform or platform
    if home != platform:
        raise ValueError(f"attention {name!r} runs on {home}, the mesh is on {platform}")
    return _form(name, platform, mesh)


def _form(name: str, platform: str, mesh: Mesh | None) -> Attention:
    if name != AUTO:
        return ATTENTION_FORMS[name].build(mesh)
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    own = [form for form, entry in ATTENTION_FORMS.items() if entry.platform == platform]
    if not own:
        return ATTENTION_FORMS[FALLBACK].build(mesh)
    return functools.partial(_own_or_fallback, own[0], mesh)


def _own_or_fallback(name, mesh, q, k, v, segment_ids):
    able = ATTENTION_FORMS[name].takes(q.shape, k.shape[2], q.dtype)
    return _form(name if able else FALLBACK, "", mesh)(q, k, v, segment_ids)


def cache_attention_on(platform: str) -> CacheAttention:
    """The attention over the engine's KV cache on "cpu", "tpu" or "gpu" devices."""
    return CACHE_FORMS.get(platform, CACHE_FORMS["cpu"])()
