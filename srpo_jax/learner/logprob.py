"""Log-probs of the generated tokens, and their gradient, in chunks: never a [T, V] array.

The definition is the sampler's: log_softmax(logits / temperature) over the real vocabulary (ids at
or past the tokenizer's length are masked), computed in at least float32. Only positions that carry
loss are multiplied with the vocabulary projection, and only as many chunks run as they fill.

On a mesh the vocabulary is split over all devices: a chunk's hidden states are gathered, every
device multiplies them with its own columns, and the head's gradient is complete where it is made.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

MASKED_LOGIT = -1e30
ROWS = ("data", "fsdp")
ALL = ("data", "fsdp", "tensor")
CPU_BLOCK_BYTES = 2**23


class Vocabulary(NamedTuple):
    """How log-probs are computed.

    vocab_size    the tokenizer's length
    temperature   the logits' divisor
    chunk         tokens at a time on each device; None: by the platform and the vocabulary
    with_entropy  whether entropies are computed (else they are 0)
    mesh          what the hidden states [B, T, D] are sharded over, B over (data, fsdp); None: one
                  device
    """

    vocab_size: int
    temperature: float = 1.0
    chunk: int | None = None
    with_entropy: bool = False
    mesh: Mesh | None = None


class TokenScores(NamedTuple):
    """[B, T], at least float32: entry t scores ``tokens[t]`` given those before it; 0 where the
    mask is False."""

    logp: jax.Array
    entropy: jax.Array


def token_scores(
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    head: jax.Array,
    vocab_axis: int,
    how: Vocabulary,
) -> TokenScores:
    """Log-probs (and entropies) of the masked tokens; ``hidden[t]`` predicts token t+1.

    ``head`` is [V, D] with ``vocab_axis`` 0 or [D, V] with 1. The first token of a sequence has
    none before it and scores 0. Not differentiable: see ``token_gradients``.
    """
    no_weight = jnp.zeros(tokens_BT.shape, jnp.promote_types(hidden_BTD.dtype, jnp.float32))
    scores, *_ = _run(
        hidden_BTD, tokens_BT, mask_BT, no_weight, no_weight, head, vocab_axis, how, False
    )
    return scores


def token_gradients(
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    w_logp_BT: jax.Array,
    w_entropy_BT: jax.Array,
    head: jax.Array,
    vocab_axis: int,
    how: Vocabulary,
) -> tuple[TokenScores, jax.Array, jax.Array]:
    """(scores, d_hidden, d_head): the gradient of ``sum(w_logp * logp + w_entropy * entropy)``.

    Arguments as in ``token_scores``, the weights [B, T] float. ``d_hidden`` has the dtype of
    ``hidden``, ``d_head`` the layout and dtype of ``head``. One pass: the weights are known before
    it, so no logit is computed twice.
    """
    return _run(
        hidden_BTD, tokens_BT, mask_BT, w_logp_BT, w_entropy_BT, head, vocab_axis, how, True
    )


def chunk_tokens(vocab: int, platform: str) -> int:
    """Tokens of a chunk on each device: a power of two up to 1024 with at most 32 MiB of float32
    logits on CPU, 512 MiB on accelerators; at least 128, since smaller chunks spend their time on
    reading and writing the head's gradient."""
    budget = 2**25 if platform == "cpu" else 2**29
    chunk = 128
    while chunk < 1024 and 2 * chunk * vocab * 4 <= budget:
        chunk *= 2
    return chunk


def _run(hidden, tokens, mask, w_logp, w_entropy, head, vocab_axis, how, with_gradient):
    chex.assert_rank([hidden, tokens, mask, head], [3, 2, 2, 2])
    chex.assert_equal_shape([tokens, mask, w_logp, w_entropy])
    mesh = how.mesh if how.mesh is not None and how.mesh.size > 1 else None
    V = head.shape[vocab_axis]
    platform = jax.default_backend() if how.mesh is None else how.mesh.devices.flat[0].platform
    local = functools.partial(
        _one_device,
        vocab_axis=vocab_axis,
        how=how._replace(chunk=how.chunk or chunk_tokens(V, platform)),
        # XLA's CPU compiler makes a product whole before it adds it, so the head's gradient is
        # added in blocks of the vocabulary there; accelerators add in place.
        block=max(1, CPU_BLOCK_BYTES // (4 * hidden.shape[-1])) if platform == "cpu" else V,
        with_gradient=with_gradient,
        distributed=mesh is not None,
    )
    args = (hidden, tokens, mask, w_logp, w_entropy)
    weights = head.astype(hidden.dtype)
    if mesh is None:
        scores, d_hidden, d_head = local(*args, weights)
    else:
        # Rows of zeros make the vocabulary divisible; their ids are past the tokenizer's.
        pad = [(0, 0), (0, 0)]
        pad[vocab_axis] = (0, -V % mesh.size)
        rows = PartitionSpec(ROWS)
        columns = PartitionSpec(*(ALL if axis == vocab_axis else None for axis in (0, 1)))
        scores, d_hidden, d_head = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows,) * 5 + (columns,),
            out_specs=(rows, rows, columns),
            check_vma=False,
        )(*args, jnp.pad(weights, pad))
        if with_gradient:
            d_head = jax.lax.slice_in_dim(d_head, 0, V, axis=vocab_axis)
    return scores, d_hidden, d_head.astype(head.dtype)


def _one_device(
    hidden,
    tokens,
    mask,
    w_logp,
    w_entropy,
    head,
    *,
    vocab_axis,
    how,
    block,
    with_gradient,
    distributed,
):
    """``_run`` on the shards of one device: sequences [b, T, D] and columns [D, V / devices]."""
    b, T, D = hidden.shape
    N, C, V = b * T, min(how.chunk, b * T), head.shape[vocab_axis]
    block = min(block, V)
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    first_id = jax.lax.axis_index(ALL) * V if distributed else 0
    ids = first_id + jnp.arange(V)
    hidden_of, token_of = hidden.reshape(N, D), tokens.reshape(N)
    mask = mask.astype(bool).at[:, 0].set(False).reshape(N)
    places = jnp.argsort(~mask, stable=True)  # the masked tokens' places come first, in order
    places = jnp.pad(places, (0, -N % C))
    count = mask.sum()
    chunks = -(-count // C)
    if distributed:  # a chunk is computed by all devices together
        chunks = jax.lax.pmax(chunks, ROWS)

    def to_hidden(x, weights):  # over the vocabulary
        return jax.lax.dot_general(
            x, weights, (((1,), (vocab_axis,)), ((), ())), preferred_element_type=dtype
        )

    def from_all(x):
        return jax.lax.all_gather(x, ROWS, tiled=True) if distributed else x

    def total(x):
        return jax.lax.psum(x, ALL) if distributed else x

    def mine(x):
        if not distributed:
            return x
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(ROWS) * C, C)

    def one_chunk(i, carry):
        logp_of, entropy_of, d_hidden_of, d_head = carry
        place = jax.lax.dynamic_slice_in_dim(places, i * C, C)
        real = i * C + jnp.arange(C) < count
        # The rest of the last chunk holds other positions, whose NaN a weight of 0 would keep.
        h = from_all(jnp.where(real[:, None], hidden_of[place - 1], 0))
        target = from_all(token_of[place])
        contract = (((1,), (1 - vocab_axis,)), ((), ()))
        logits = jax.lax.dot_general(h, head, contract, preferred_element_type=dtype)
        logits = logits / jnp.asarray(how.temperature, dtype)
        if how.vocab_size < (V if not distributed else V * jax.lax.axis_size(ALL)):
            logits = jnp.where(ids < how.vocab_size, logits, MASKED_LOGIT)
        highest = logits.max(-1)
        highest = jax.lax.pmax(highest, ALL) if distributed else highest
        log_z = highest + jnp.log(total(jnp.exp(logits - highest[:, None]).sum(-1)))
        slot = target - first_id
        chosen = jnp.take_along_axis(logits, jnp.clip(slot, 0, V - 1)[:, None], -1)[:, 0]
        logp = total(jnp.where((slot >= 0) & (slot < V), chosen, 0)) - log_z
        log_p = logits - log_z[:, None]
        p = jnp.exp(log_p)
        entropy = jnp.zeros_like(logp)
        if how.with_entropy:
            entropy = -total(jnp.sum(p * jnp.where(p > 0, log_p, 0), -1))
        logp_of = jax.lax.dynamic_update_slice_in_dim(logp_of, mine(logp), i * C, 0)
        entropy_of = jax.lax.dynamic_update_slice_in_dim(entropy_of, mine(entropy), i * C, 0)
        if not with_gradient:
            return logp_of, entropy_of, d_hidden_of, d_head

        def weight(w):
            return from_all(jnp.where(real, w.reshape(N)[place], 0).astype(dtype))[:, None]

        d_logits = weight(w_logp) * ((slot[:, None] == jnp.arange(V)) - p)
        if how.with_entropy:
            d_logits -= weight(w_entropy) * p * (jnp.where(p > 0, log_p, 0) + entropy[:, None])
        d_logits = (d_logits / jnp.asarray(how.temperature, dtype)).astype(hidden.dtype)
        d_hidden = to_hidden(d_logits, head)
        if distributed:
            d_hidden = jax.lax.psum_scatter(d_hidden, ROWS, tiled=True)
            d_hidden = jax.lax.psum(d_hidden, "tensor")
        d_hidden_of = jax.lax.dynamic_update_slice_in_dim(
            d_hidden_of, d_hidden.astype(hidden.dtype), i * C, 0
        )

        def add_block(j, d_head):
            start = jnp.minimum(j * block, V - block)  # the last block overlaps the one before
            part = jax.lax.dynamic_slice_in_dim(d_logits, start, block, 1)
            if V % block:
                part = jnp.where(start + jnp.arange(block) >= j * block, part, 0)
            left, right = (part, h) if vocab_axis == 0 else (h, part)
            new = jax.lax.dot_general(
                left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype
            )
            new += jax.lax.dynamic_slice_in_dim(d_head, start, block, vocab_axis)
            return jax.lax.dynamic_update_slice_in_dim(d_head, new, start, vocab_axis)

        d_head = jax.lax.fori_loop(0, -(-V // block), add_block, d_head)
        return logp_of, entropy_of, d_hidden_of, d_head

    padded = len(places)
    carry = (
        jnp.zeros(padded, dtype),
        jnp.zeros(padded, dtype),
        jnp.zeros((padded if with_gradient else 0, D), hidden.dtype),
        jnp.zeros(head.shape if with_gradient else (0, 0), dtype),
    )
    logp_of, entropy_of, d_hidden_of, d_head = jax.lax.fori_loop(0, chunks, one_chunk, carry)

    rank = jnp.cumsum(mask) - 1  # of a masked token among them

    def spread(x):
        return jnp.where(mask, x[rank], 0).reshape(b, T)

    d_hidden = hidden
    if with_gradient:  # the hidden state before a masked token is what scored it
        after, rank_after = jnp.roll(mask, -1), jnp.roll(rank, -1)
        d_hidden = jnp.where(after[:, None], d_hidden_of[rank_after], 0).reshape(b, T, D)
    return TokenScores(spread(logp_of), spread(entropy_of)), d_hidden, d_head
