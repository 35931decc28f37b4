"""Drawing one token a row, with its log-prob under the distribution that the learner scores.

A row's draw depends on its own key, its own position and its own logits alone.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

BLOCK = 128  # ids per block of the two-level inverse CDF


def row_uniforms(keys_B2: jax.Array, counts_B: jax.Array) -> jax.Array:
    """One uniform in [0, 1) for each row from its request's key and how many tokens it has drawn.

    keys [B, 2] uint32 (threefry key data), counts [B] int32 -> [B] float32.
    """
    chex.assert_shape(keys_B2, (None, 2))

    def one(key, count):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), count))

    return jax.vmap(one)(keys_B2, counts_B)


def inverse_cdf(probs_BV: jax.Array, uniforms_B: jax.Array) -> jax.Array:
    """Ids [B] int32 drawn from unnormalised probabilities [B, V] by inverting their sums.

    First the block of 128 ids, then the id in it: two short scans, not V random numbers. An id
    of probability 0 is never drawn.
    """
    B, V = probs_BV.shape
    blocks = jnp.pad(probs_BV, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
    masses = blocks.sum(-1)
    block_ends = jnp.cumsum(masses, axis=-1)
    target = uniforms_B[:, None] * block_ends[:, -1:]
    block = _first_past(target, block_ends, masses)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    before = jnp.where(
        block > 0, jnp.take_along_axis(block_ends, block[:, None] - 1, axis=1)[:, 0], 0
    )
    index = _first_past(target - before[:, None], jnp.cumsum(inside, axis=-1), inside)
    return (block * BLOCK + index).astype(jnp.int32)


def _first_past(target_B1: jax.Array, ends_BN: jax.Array, masses_BN: jax.Array) -> jax.Array:
    """The first index of positive mass whose running sum exceeds the target.

    A parallel scan rounds neighbouring sums differently, so the sums may grow where the mass is 0,
    and the target may reach the very end: the last positive index then.
    """
    positive = masses_BN > 0
    past = positive & (ends_BN > target_B1)
    last = jnp.where(positive, jnp.arange(masses_BN.shape[-1]), 0).max(-1)
    return jnp.where(past.any(-1), jnp.argmax(past, axis=-1), last)


def truncate(probs_BV: jax.Array, top_p_B: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """Zeroes what top-p and top-k leave out (evaluation only; top_k 0 and top_p 1 keep all).

    A token stays while the mass strictly before it, in falling order, is below top_p; at least one
    stays. Ties go to the lower id.
    """
    order = jnp.argsort(-probs_BV, axis=-1, stable=True)
    ranked = jnp.take_along_axis(probs_BV, order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    rank = jnp.arange(probs_BV.shape[-1])
    keep = (before < top_p_B[:, None]) | (top_p_B[:, None] >= 1.0)
    keep &= (rank < top_k_B[:, None]) | (top_k_B[:, None] <= 0)
    keep = keep.at[:, 0].set(True)
    kept = jnp.zeros_like(keep).at[jnp.arange(keep.shape[0])[:, None], order].set(keep)
    return jnp.where(kept, probs_BV, 0.0)


def draw(
    logits_BV: jax.Array,
    uniforms_B: jax.Array,
    greedy_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
    *,
    truncated: bool,
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B] int32 and log-probs [B] float32 from logits that are already scaled and masked.

    The log-prob is that of the whole distribution, also where sampling was truncated. ``truncated``
    is static: training never pays for the sort.
    """
    chex.assert_rank([logits_BV, uniforms_B, greedy_B, top_p_B, top_k_B], [2, 1, 1, 1, 1])
    log_z = jax.nn.logsumexp(logits_BV, axis=-1)
    probs = jnp.exp(logits_BV - log_z[:, None])
    if truncated:
        probs = truncate(probs, top_p_B, top_k_B)
    sampled = inverse_cdf(probs, uniforms_B)
    tokens = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), sampled)
    chosen = jnp.take_along_axis(logits_BV, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - log_z
