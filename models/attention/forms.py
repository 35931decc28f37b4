"""The forms of attention over whole sequences, by name, and what each platform takes.

Loads no jax, so that a recipe's names are checked without it: a form's module is imported when the
form is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from models.attention.cache import CacheAttention
    from models.attention.mesh import Attention


def _anything(q_shape: Sequence[int], kv_heads: int, dtype: Any) -> bool:
    return True


@dataclass(frozen=True)
class AttentionForm:
    """One way to compute causal attention inside segments.

    Attributes:
        build: The attention for arguments that are sharded over a mesh (None: one device).
        platform: The only one that it runs on, as jax names it; None: any.
        takes: (shape of q [B, T, N, H], Kv, dtype) -> whether it can run them. Where it cannot,
            ``auto`` falls back to the blocked form.
    """

    build: Callable[[Mesh | None], Attention]
    platform: str | None = None
    takes: Callable[[Sequence[int], int, Any], bool] = _anything


def _plain(mesh: Mesh | None) -> Attention:
    from models.attention.sequence import plain_attention

    return plain_attention


def _blocked(mesh: Mesh | None) -> Attention:
    from models.attention.mesh import over_mesh
    from models.attention.sequence import blocked_attention

    return functools.partial(over_mesh, blocked_attention, mesh)


def _splash(mesh: Mesh | None) -> Attention:
    from models.attention.sequence_tpu import splash_attention

    return functools.partial(splash_attention, mesh=mesh)


def _splash_takes(q_shape: Sequence[int], kv_heads: int, dtype: Any) -> bool:
    return str(dtype) in ("bfloat16", "float32")


def _triton(mesh: Mesh | None) -> Attention:
    from models.attention.sequence_gpu import gpu_attention

    return functools.partial(gpu_attention, mesh=mesh)


def _triton_takes(q_shape: Sequence[int], kv_heads: int, dtype: Any) -> bool:
    from models.attention.sequence_gpu import gpu_supported

    return gpu_supported(tuple(q_shape), kv_heads, dtype) is None


AUTO = "auto"  # the first form of the mesh's own platform, else the blocked one
ATTENTION_FORMS: dict[str, AttentionForm] = {
    "plain": AttentionForm(_plain),
    "blocked": AttentionForm(_blocked),
    "splash": AttentionForm(_splash, "tpu", _splash_takes),
    "triton": AttentionForm(_triton, "gpu", _triton_takes),
}


def _plain_cache() -> CacheAttention:
    from models.attention.cache import PLAIN

    return PLAIN


def _tpu_cache() -> CacheAttention:
    from models.attention.cache_tpu import tpu_cache_attention

    return tpu_cache_attention()


def _gpu_cache() -> CacheAttention:
    from models.attention.cache_gpu import gpu_cache_attention

    return gpu_cache_attention()


# The engine's attention over a KV cache, by platform; others take that of "cpu".
CACHE_FORMS: dict[str, Callable[[], CacheAttention]] = {
    "cpu": _plain_cache,
    "tpu": _tpu_cache,
    "gpu": _gpu_cache,
}
