"""``causal_attention`` as the fused Triton kernel of Pallas for NVIDIA GPUs.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, G = N / Kv, H head width.

Of the fused forms that JAX ships this is the one that takes segment ids. cuDNN (through
``jax.nn.dot_product_attention``) has none: packed rows would need a mask [B, 1, T, T] as a bias,
which is read from memory in both passes. The Hopper kernel ``attention_mgpu`` has none either.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.attention.mesh import PADDING_SEGMENT, over_mesh

DTYPES = ("bfloat16", "float16", "float32")
WIDEST_HEAD = 128
# Bytes of one tile of keys. The forward pass holds about five of them (the queries, and keys and
# values twice for its two pipeline stages) of the 99 KiB or more of an Ampere or newer GPU.
TILE_BYTES = 16 * 1024
LONGEST_BLOCK = 64  # 128 spills registers at a head width of 64
BACKWARD_BLOCK = 32  # the library's own default: two float32 accumulators stay in registers


def gpu_attention(
    q_BTNH: jax.Array,
    k_BTKvH: jax.Array,
    v_BTKvH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention inside segments: position t sees s <= t with the same segment id.

    Any T: it is padded to whole blocks. Products of float32 run in TF32. Differentiable in q, k and
    v once; dk and dv are rounded to their dtype for every query head of a group before they are
    summed.

    Not yet run on a GPU. Run were the interpreter on CPU (values and gradients), the lowering to
    Triton for CUDA, and the compilation of that by Triton 3.9 for compute capabilities 8.0 and 9.0,
    which fits 99 KiB of shared memory. Source: jax.experimental.pallas.ops.gpu.attention.

    Args:
        q_BTNH: [B, T, N, H] in a dtype of ``DTYPES``.
        k_BTKvH: [B, T, Kv, H] in the same.
        v_BTKvH: [B, T, Kv, H] in the same.
        segment_ids_BT: [B, T] int, not negative.
        mesh: As in ``splash_attention``.
        interpret: Runs the kernel on any backend, slowly.

    Returns:
        [B, T, N, H] in the dtype of q.

    Raises:
        ValueError: With the reason of ``gpu_supported``.
    """
    if reason := gpu_supported(q_BTNH.shape, k_BTKvH.shape[2], q_BTNH.dtype):
        raise ValueError(reason)
    local = functools.partial(_local_attention, interpret=interpret)
    return over_mesh(local, mesh, q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)


def gpu_supported(q_shape: tuple[int, ...], kv_heads: int, dtype: Any) -> str | None:
    """Why ``gpu_attention`` cannot run queries [B, T, N, H] of this dtype; None where it can."""
    *_, heads, width = q_shape
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the GPU attention kernel takes {', '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    if not 16 <= width <= WIDEST_HEAD:
        return f"the GPU attention kernel takes head widths of 16 to {WIDEST_HEAD}, not {width}"
    if heads % kv_heads:
        return f"{heads} query heads do not share {kv_heads} key heads evenly"
    return None


def block_length(head_dim: int, itemsize: int) -> int:
    """Tokens of a forward block: the power of two (32 or 64) whose tile fits ``TILE_BYTES``."""
    width = 1 << (head_dim - 1).bit_length()  # the kernel pads heads to a power of two
    return min(LONGEST_BLOCK, TILE_BYTES // (width * itemsize))


def _local_attention(q, k, v, segment_ids, *, interpret):
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    B, T, N, H = q.shape
    Kv = k.shape[2]
    block = block_length(H, q.dtype.itemsize)
    pad = -T % block  # a whole number of backward blocks too
    segments = jnp.pad(
        segment_ids.astype(jnp.int32), ((0, 0), (0, pad)), constant_values=PADDING_SEGMENT
    )
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))

    def one_query_head(q_BTKvH):
        return mha(
            q_BTKvH,
            k,
            v,
            segments,
            sm_scale=H**-0.5,
            causal=True,
            block_sizes=BlockSizes(
                block_q=block,
                block_k=block,
                block_q_dkv=BACKWARD_BLOCK,
                block_kv_dkv=BACKWARD_BLOCK,
                block_q_dq=BACKWARD_BLOCK,
                block_kv_dq=BACKWARD_BLOCK,
            ),
            interpret=interpret,
        )

    # The kernel knows no groups. Mapped over G, its grid grows an axis that k and v do not have.
    out = jax.vmap(one_query_head, in_axes=3, out_axes=3)(q.reshape(B, T + pad, Kv, N // Kv, H))
    return out.reshape(B, T + pad, N, H)[:, :T]
