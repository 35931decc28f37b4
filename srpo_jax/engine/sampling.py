"""Drawing one token a row, with its log-prob under the distribution that the learner scores.

A row's draw depends on its own key, its own position and its own logits alone. Logits are [V, B]:
on CPU the product with the vocabulary runs half again as fast in that order, and the sums over
the vocabulary below take B numbers at a time. Under shard_map, ``axis`` is the mapped axis over
which the vocabulary is split: V is then a device's share, of whole blocks, and every device draws
the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # ids per block of the two-level search
EXCLUDED_LOGIT = -1e30  # of ids that are never drawn: their probability is 0


def row_uniforms(keys_B2: jax.Array, counts_B: jax.Array) -> jax.Array:
    """One uniform random number of each row.

    Args:
        keys_B2: uint32, threefry key data of the requests.
        counts_B: int32, tokens that each has drawn.

    Returns:
        float32 [B] in [0, 1).
    """
    chex.assert_shape(keys_B2, (None, 2))

    def one(key, count):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), count))

    return jax.vmap(one)(keys_B2, counts_B)


def token_logits(
    hidden_BD: jax.Array,
    head_VD: jax.Array,
    temperature_B: jax.Array,
    vocab_size: int,
    axis: str | None = None,
) -> jax.Array:
    """The logits of the next token, divided by the temperature.

    Args:
        hidden_BD: After the last norm.
        head_VD: The output projection, transposed; a device's share of it under ``axis``.
        temperature_B: Positive.
        vocab_size: Ids from here on are masked.
        axis: The mapped axis over which the vocabulary is split.

    Returns:
        [V, B] in at least float32.
    """
    dtype = jnp.promote_types(hidden_BD.dtype, jnp.float32)
    logits = jax.lax.dot_general(
        head_VD, hidden_BD, (((1,), (1,)), ((), ())), preferred_element_type=dtype
    )
    logits = logits / temperature_B.astype(dtype)
    V = logits.shape[0]
    if axis is not None or vocab_size < V:
        ids = _first(axis, V) + jnp.arange(V)
        logits = jnp.where(ids[:, None] < vocab_size, logits, EXCLUDED_LOGIT)
    return logits


def _first(axis: str | None, size: int) -> jax.Array | int:
    """Where this device's share begins, of equal ones of ``size``."""
    return 0 if axis is None else jax.lax.axis_index(axis) * size


def _together(x: jax.Array, axis: str | None, dimension: int) -> jax.Array:
    """The shares of all devices along a dimension, in order."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=dimension, tiled=True)


def inverse_cdf(
    blocks_NCB: jax.Array, masses_NB: jax.Array, uniforms_B: jax.Array, axis: str | None = None
) -> jax.Array:
    """Draws by inverting the cumulative sums: first the block, then the id in it. That takes two
    short scans, not V random numbers. An id of probability 0 is never drawn.

    Args:
        blocks_NCB: Unnormalised probabilities of N blocks of C ids.
        masses_NB: Their sums over each block.
        uniforms_B: In [0, 1).
        axis: The mapped axis over which the vocabulary is split.

    Returns:
        Ids [B] int32.
    """
    masses = _together(masses_NB.T, axis, 1)
    block_ends = jnp.cumsum(masses, axis=-1)
    target = uniforms_B[:, None] * block_ends[:, -1:]
    block = _first_past(target, block_ends, masses)
    inside = _block_of(blocks_NCB, block, axis)
    before = jnp.where(
        block > 0, jnp.take_along_axis(block_ends, block[:, None] - 1, axis=1)[:, 0], 0
    )
    index = _first_past(target - before[:, None], jnp.cumsum(inside, axis=-1), inside)
    return (block * blocks_NCB.shape[1] + index).astype(jnp.int32)


def _block_of(blocks_NCB: jax.Array, block_B: jax.Array, axis: str | None) -> jax.Array:
    """One block of each row: [B, C]."""
    N, _, B = blocks_NCB.shape
    if axis is None:
        return blocks_NCB[block_B, :, jnp.arange(B)]
    at = block_B - _first(axis, N)
    mine = blocks_NCB[jnp.clip(at, 0, N - 1), :, jnp.arange(B)]
    return jax.lax.psum(jnp.where(((at >= 0) & (at < N))[:, None], mine, 0), axis)


def _first_past(target_B1: jax.Array, ends_BN: jax.Array, masses_BN: jax.Array) -> jax.Array:
    """The first index of positive mass whose cumulative sum exceeds the target.

    A parallel scan rounds neighbouring sums differently, so the sums may grow where the mass is 0,
    and the target may reach the very end: the last positive index then.
    """
    positive = masses_BN > 0
    past = positive & (ends_BN > target_B1)
    last = jnp.where(positive, jnp.arange(masses_BN.shape[-1]), 0).max(-1)
    return jnp.where(past.any(-1), jnp.argmax(past, axis=-1), last)


def least_kept(
    weights_NCB: jax.Array,
    total_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
    axis: str | None = None,
) -> jax.Array:
    """The least weight of each row that top-p and top-k keep.

    A token stays while the mass strictly before it, in descending order, is below top_p of the
    whole, and fewer than top_k tokens are; at least one stays, and all that equal the last one.
    Found by bisection: a sort of the whole vocabulary takes longer than the rest of a decode step.
    Costs nothing where no row cuts.

    Args:
        weights_NCB: Probabilities divided by the largest of their row.
        total_B: Their sums.
        top_p_B: 1 keeps all.
        top_k_B: 0 keeps all.
        axis: The mapped axis over which the vocabulary is split.

    Returns:
        [B]; 0 where all are kept.
    """

    def above(values, least_B):
        return _devices_sum(jnp.where(weights_NCB > least_B, values, 0).sum(1).sum(0), axis)

    def by_mass():
        wanted = top_p_B * total_B
        least = _least(lambda x: above(weights_NCB, x) < wanted, total_B)
        return jnp.where(top_p_B < 1, least, 0)

    def by_count():
        least = _least(lambda x: above(1.0, x) < top_k_B, total_B)
        return jnp.where(top_k_B > 0, least, 0)

    none = lambda: jnp.zeros_like(total_B)  # noqa: E731
    return jnp.maximum(
        jax.lax.cond((top_p_B < 1).any(), by_mass, none),
        jax.lax.cond((top_k_B > 0).any(), by_count, none),
    )


def _least(fits: Callable[[jax.Array], jax.Array], like_B: jax.Array) -> jax.Array:
    """The least number in (0, 1] of each row that ``fits``, 1 where none below it does; what fits
    has no gaps. The bit patterns of positive floats are in the order of the numbers: halving them
    finds it exactly, at any magnitude."""
    dtype = like_B.dtype
    one = np.ones((), dtype).view(f"i{dtype.itemsize}")

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) // 2
        fit = fits(jax.lax.bitcast_convert_type(middle, dtype))
        return jnp.where(fit, low, middle), jnp.where(fit, middle, high)

    ends = jnp.zeros(like_B.shape, one.dtype), jnp.full(like_B.shape, one)
    high = jax.lax.fori_loop(0, int(one).bit_length(), halve, ends)[1]
    return jax.lax.bitcast_convert_type(high, dtype)


def _devices_sum(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


def draw(
    logits_VB: jax.Array,
    uniforms_B: jax.Array,
    greedy_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token of each row.

    Args:
        logits_VB: Scaled by the temperature and masked.
        uniforms_B: In [0, 1).
        greedy_B: Rows that take the best id.
        top_p_B: Mass that is drawn from (evaluation only); 1 is all.
        top_k_B: Ids that are drawn from (evaluation only); 0 is all.
        axis: The mapped axis over which the vocabulary is split.

    Returns:
        Tokens [B] int32, their log-probs under the whole distribution (top_p and top_k left out),
        and the log of its partition sum, both [B] in at least float32.
    """
    chex.assert_rank([logits_VB, uniforms_B, greedy_B, top_p_B, top_k_B], [2, 1, 1, 1, 1])
    V, B = logits_VB.shape
    padded = jnp.pad(logits_VB, ((0, -V % BLOCK), (0, 0)), constant_values=EXCLUDED_LOGIT)
    blocks = padded.reshape(-1, BLOCK, B)
    block_maxima = _together(blocks.max(1), axis, 0)
    maximum = block_maxima.max(0)
    weights = jnp.exp(blocks - maximum)
    masses = weights.sum(1)
    total = _devices_sum(masses.sum(0), axis)
    log_z = maximum + jnp.log(total)

    def cut():
        weights = jnp.exp(blocks - maximum)  # again: what a branch takes is written to memory
        least = least_kept(weights, total, top_p_B, top_k_B, axis)
        # As a logit: those compare alike everywhere, two compilations of exp may differ in a bit.
        lowest = jnp.where(weights >= least, blocks, jnp.inf).min((0, 1))
        lowest = jnp.where(least > 0, lowest, -jnp.inf)
        left = jnp.where(blocks >= lowest, weights, 0).sum(1)
        # The bits of rows that cut nothing are those of a batch without cuts.
        return lowest, jnp.where(least > 0, left, masses)

    cuts = ((top_p_B < 1) | (top_k_B > 0)).any()
    lowest, masses = jax.lax.cond(cuts, cut, lambda: (jnp.full_like(total, -jnp.inf), masses))
    sampled = inverse_cdf(jnp.where(blocks >= lowest, weights, 0), masses, uniforms_B, axis)
    best_block = jnp.argmax(block_maxima, axis=0)
    best = best_block * BLOCK + jnp.argmax(_block_of(blocks, best_block, axis), axis=-1)
    tokens = jnp.where(greedy_B, best.astype(jnp.int32), sampled)
    logits = jnp.take_along_axis(
        _block_of(blocks, tokens // BLOCK, axis), (tokens % BLOCK)[:, None], axis=1
    )[:, 0]
    return tokens, logits - log_z, log_z


def best_ids(
    logits_VB: jax.Array, count: int, axis: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The ``count`` largest logits of each row and their ids, [B, count], largest first."""
    logits, ids = jax.lax.top_k(logits_VB.T, count)
    if axis is None:
        return logits, ids
    ids = _together(ids + _first(axis, logits_VB.shape[0]), axis, 1)
    logits, at = jax.lax.top_k(_together(logits, axis, 1), count)
    return logits, jnp.take_along_axis(ids, at, axis=1)
