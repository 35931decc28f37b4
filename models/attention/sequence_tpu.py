"""``causal_attention`` as the splash kernel of Pallas for TPU, on one device or sharded.

Axes: B sequences, T tokens, N query heads, Kv key/value heads, H head width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.attention.mesh import PADDING_SEGMENT, over_mesh

LANES = 128  # the kernel's blocks are multiples of it
LONGEST_BLOCK = 512
CHECKPOINT_NAME = "attention"


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKvH: jax.Array,
    v_BTKvH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention inside segments: position t sees s <= t with the same segment id.

    Any T and H: T is padded to whole blocks, and key heads are shared by their query heads inside
    the kernel. Differentiable in q, k and v once (the kernel has its own backward pass). Output and
    log-sum-exp carry the checkpoint name ``CHECKPOINT_NAME``. Source:
    jax.experimental.pallas.ops.tpu.splash_attention.

    Args:
        q_BTNH: [B, T, N, H] bfloat16 or float32.
        k_BTKvH: [B, T, Kv, H].
        v_BTKvH: [B, T, Kv, H].
        segment_ids_BT: [B, T] int, not negative.
        mesh: Needed where the arguments are sharded, for a kernel is opaque to the partitioner; see
            ``over_mesh``.
        interpret: Runs the kernel on any backend, slowly.

    Returns:
        [B, T, N, H] in the dtype of q.

    Raises:
        ValueError: On other dtypes.
    """
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"splash attention takes bfloat16 or float32, not {q_BTNH.dtype}")
    local = functools.partial(_local_attention, interpret=interpret)
    return over_mesh(local, mesh, q_BTNH, k_BTKvH, v_BTKvH, segment_ids_BT)


def block_length(T: int) -> int:
    """The block for T tokens: the fewest equal blocks of at most 512, rounded up to 128.

    T padded to whole blocks then grows by less than 128 a block, where blocks of 512 alone would
    compute 640 tokens as 1024.
    """
    blocks = -(-T // LONGEST_BLOCK)
    return -(-T // (blocks * LANES)) * LANES


def _local_attention(q, k, v, segment_ids, *, interpret):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    _, T, N, H = q.shape
    block = block_length(T)
    pad = -T % block
    segments = jnp.pad(
        segment_ids.astype(jnp.int32), ((0, 0), (0, pad)), constant_values=PADDING_SEGMENT
    )

    def heads_first(x):  # [B, T, heads, H] -> [B, heads, T + pad, H]
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, pad), (0, 0)))

    # The kernel does not scale; one rounding, from float32.
    q = (q.astype(jnp.float32) * H**-0.5).astype(q.dtype)
    kernel = _kernel(N, T + pad, block, interpret)

    def one_sequence(q_NTH, k_KvTH, v_KvTH, segments_T):
        ids = splash_attention_kernel.SegmentIds(q=segments_T, kv=segments_T)
        return kernel(q_NTH, k_KvTH, v_KvTH, ids)

    out = jax.vmap(one_sequence)(heads_first(q), heads_first(k), heads_first(v), segments)
    return jnp.swapaxes(out[:, :, :T], 1, 2)


@functools.lru_cache(maxsize=64)
def _kernel(num_heads: int, T: int, block: int, interpret: bool):
    """The kernel of N heads over T tokens; its tables are NumPy, so that no trace owns them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            masks.MultiHeadMask([masks.CausalMask((T, T))] * num_heads),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            residual_checkpoint_name=CHECKPOINT_NAME,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
