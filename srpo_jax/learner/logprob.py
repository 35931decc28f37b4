"""Log-probs of the generated tokens, and their gradient, in chunks: never a [T, V] array.

The definition is the sampler's: log_softmax(logits / temperature) over the real vocabulary (ids at
or past the tokenizer's length are masked), computed in at least float32. Only positions that carry
loss are multiplied with the vocabulary projection, and only as many chunks run as they fill.

On a mesh the vocabulary is split over all devices: a chunk's hidden states are gathered, every
device multiplies them with its own columns, and the head's gradient is complete where it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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

    Attributes:
        vocab_size: The tokenizer's length.
        temperature: The logits' divisor.
        chunk: Tokens at a time on each device; None: by the platform and the vocabulary.
        with_entropy: Whether entropies are computed (else they are 0).
        mesh: What the hidden states [B, T, D] are sharded over, B over (data, fsdp); None: one
            device.
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
    """Log-probs (and entropies) of the masked tokens. Not differentiable: see ``token_gradients``.

    Args:
        hidden_BTD: [B, T, D] floating; ``hidden[t]`` predicts token t + 1.
        tokens_BT: [B, T] int. The first token of a sequence has none before it and scores 0.
        mask_BT: [B, T] bool or int, the tokens to score.
        head: The vocabulary projection, [V, D] or [D, V].
        vocab_axis: The vocabulary's axis of ``head``, 0 or 1.
        how: What is computed, and where.

    Raises:
        AssertionError: From chex, on a wrong shape.
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
    """The gradient of ``sum(w_logp * logp + w_entropy * entropy)``, beside the scores.

    One pass: the weights are known before it, so no logit is computed twice.

    Args:
        hidden_BTD: As in ``token_scores``, and so the arguments not named here.
        w_logp_BT: [B, T] floating, the weight of each log-prob.
        w_entropy_BT: [B, T] floating, the weight of each entropy.

    Returns:
        (scores, d_hidden [B, T, D] in the dtype of ``hidden``, d_head in the layout and dtype of
        ``head``).
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
        devices=ONE_DEVICE if mesh is None else MESH,
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


class Collectives(NamedTuple):
    """What the devices that compute a chunk tell each other. Each has C of the chunk's tokens and
    V columns of the vocabulary, n V of them in all."""

    shards: Callable[[], Any]  # n
    shard: Callable[[], Any]  # which of them is this device's
    most: Callable[[jax.Array], jax.Array]  # the largest of the devices' numbers of chunks
    gather: Callable[[jax.Array], jax.Array]  # [C, ...] -> [n C, ...], the tokens of all
    own: Callable[[jax.Array, int], jax.Array]  # [n C], C -> [C], this device's tokens
    max: Callable[[jax.Array], jax.Array]  # over the parts of the vocabulary
    sum: Callable[[jax.Array], jax.Array]  # over the parts of the vocabulary
    scatter_sum: Callable[[jax.Array], jax.Array]  # [n C, D] -> [C, D], summed over these parts


def _same(x: jax.Array) -> jax.Array:
    return x


ONE_DEVICE = Collectives(
    shards=lambda: 1,
    shard=lambda: 0,
    most=_same,
    gather=_same,
    own=lambda x, size: x,
    max=_same,
    sum=_same,
    scatter_sum=_same,
)
MESH = Collectives(
    shards=lambda: jax.lax.axis_size(ALL),
    shard=lambda: jax.lax.axis_index(ALL),
    most=lambda chunks: jax.lax.pmax(chunks, ROWS),
    gather=lambda x: jax.lax.all_gather(x, ROWS, tiled=True),
    own=lambda x, size: jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(ROWS) * size, size),
    max=lambda x: jax.lax.pmax(x, ALL),
    sum=lambda x: jax.lax.psum(x, ALL),
    scatter_sum=lambda x: jax.lax.psum(jax.lax.psum_scatter(x, ROWS, tiled=True), "tensor"),
)


class _Softmax(NamedTuple):
    """A chunk's tokens [c] against this device's columns of the vocabulary [V]."""

    logp: jax.Array  # [c] of the tokens themselves
    entropy: jax.Array  # [c]
    log_p: jax.Array  # [c, V]
    p: jax.Array  # [c, V]
    column: jax.Array  # [c] int, that of the token; another device has it where not in [0, V)


def _forward_chunk(hidden, tokens, head, vocab_axis, how, devices) -> _Softmax:
    """Softmax over the vocabulary of hidden states [c, D], and the log-probs of ``tokens`` [c]."""
    dtype, V = jnp.promote_types(hidden.dtype, jnp.float32), head.shape[vocab_axis]
    first_id = devices.shard() * V
    contract = (((1,), (1 - vocab_axis,)), ((), ()))
    logits = jax.lax.dot_general(hidden, head, contract, preferred_element_type=dtype)
    logits = logits / jnp.asarray(how.temperature, dtype)
    if how.vocab_size < V * devices.shards():
        logits = jnp.where(first_id + jnp.arange(V) < how.vocab_size, logits, MASKED_LOGIT)
    maximum = devices.max(logits.max(-1))
    log_z = maximum + jnp.log(devices.sum(jnp.exp(logits - maximum[:, None]).sum(-1)))
    column = tokens - first_id
    chosen = jnp.take_along_axis(logits, jnp.clip(column, 0, V - 1)[:, None], -1)[:, 0]
    logp = devices.sum(jnp.where((column >= 0) & (column < V), chosen, 0)) - log_z
    log_p = logits - log_z[:, None]
    p = jnp.exp(log_p)
    entropy = jnp.zeros_like(logp)
    if how.with_entropy:
        entropy = -devices.sum(jnp.sum(p * jnp.where(p > 0, log_p, 0), -1))
    return _Softmax(logp, entropy, log_p, p, column)


def _logit_gradient(softmax: _Softmax, w_logp, w_entropy, how) -> jax.Array:
    """[c, V]: d sum(w_logp * logp + w_entropy * entropy) / d logits, weights [c]."""
    one_hot = softmax.column[:, None] == jnp.arange(softmax.p.shape[1])
    d_logits = w_logp[:, None] * (one_hot - softmax.p)
    if how.with_entropy:
        log_p = jnp.where(softmax.p > 0, softmax.log_p, 0)
        d_logits -= w_entropy[:, None] * softmax.p * (log_p + softmax.entropy[:, None])
    return d_logits / jnp.asarray(how.temperature, d_logits.dtype)


def _add_head_gradient(d_head, d_logits, hidden, vocab_axis, block) -> jax.Array:
    """``d_head`` plus the product of d_logits [c, V] and hidden [c, D], in the head's layout, one
    block of the vocabulary at a time."""
    V = d_head.shape[vocab_axis]

    def add_block(j, d_head):
        start = jnp.minimum(j * block, V - block)  # the last block overlaps the one before
        part = jax.lax.dynamic_slice_in_dim(d_logits, start, block, 1)
        if V % block:
            part = jnp.where(start + jnp.arange(block) >= j * block, part, 0)
        left, right = (part, hidden) if vocab_axis == 0 else (hidden, part)
        new = jax.lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=d_head.dtype
        )
        new += jax.lax.dynamic_slice_in_dim(d_head, start, block, vocab_axis)
        return jax.lax.dynamic_update_slice_in_dim(d_head, new, start, vocab_axis)

    return jax.lax.fori_loop(0, -(-V // block), add_block, d_head)


class _Results(NamedTuple):
    """Of the scored tokens, packed to the front and padded to whole chunks."""

    logp: jax.Array  # [N]
    entropy: jax.Array  # [N]
    d_hidden: jax.Array  # [N, D], of the hidden states that scored them; [0, D] without gradient
    d_head: jax.Array  # as the head; [0, 0] without gradient


def _one_device(
    hidden, tokens, mask, w_logp, w_entropy, head, *,
    vocab_axis, how, block, with_gradient, devices,
):  # fmt: skip
    """``_run`` on the shards of one device: sequences [b, T, D] and columns [D, V / devices]."""
    b, T, D = hidden.shape
    N, C, block = b * T, min(how.chunk, b * T), min(block, head.shape[vocab_axis])
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    hidden_of, token_of = hidden.reshape(N, D), tokens.reshape(N)
    mask = mask.astype(bool).at[:, 0].set(False).reshape(N)
    places = jnp.argsort(~mask, stable=True)  # the masked tokens' places come first, in order
    places = jnp.pad(places, (0, -N % C))
    count = mask.sum()
    chunks = devices.most(-(-count // C))  # all devices compute a chunk together

    def one_chunk(i, results):
        place = jax.lax.dynamic_slice_in_dim(places, i * C, C)
        real = i * C + jnp.arange(C) < count
        # The rest of the last chunk holds other positions, whose NaN a weight of 0 would keep.
        h = devices.gather(jnp.where(real[:, None], hidden_of[place - 1], 0))
        softmax = _forward_chunk(h, devices.gather(token_of[place]), head, vocab_axis, how, devices)

        def put(all, new):
            return jax.lax.dynamic_update_slice_in_dim(all, new, i * C, 0)

        def weight(w):
            return devices.gather(jnp.where(real, w.reshape(N)[place], 0).astype(dtype))

        results = results._replace(
            logp=put(results.logp, devices.own(softmax.logp, C)),
            entropy=put(results.entropy, devices.own(softmax.entropy, C)),
        )
        if not with_gradient:
            return results
        of_entropy = weight(w_entropy) if how.with_entropy else None
        d_logits = _logit_gradient(softmax, weight(w_logp), of_entropy, how)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = devices.scatter_sum(
            jax.lax.dot_general(
                d_logits, head, (((1,), (vocab_axis,)), ((), ())), preferred_element_type=dtype
            )
        )
        return results._replace(
            d_hidden=put(results.d_hidden, d_hidden.astype(hidden.dtype)),
            d_head=_add_head_gradient(results.d_head, d_logits, h, vocab_axis, block),
        )

    padded = len(places)
    results = _Results(
        jnp.zeros(padded, dtype),
        jnp.zeros(padded, dtype),
        jnp.zeros((padded if with_gradient else 0, D), hidden.dtype),
        jnp.zeros(head.shape if with_gradient else (0, 0), dtype),
    )
    results = jax.lax.fori_loop(0, chunks, one_chunk, results)
    rank = jnp.cumsum(mask) - 1  # of a masked token among them

    def spread(x):
        return jnp.where(mask, x[rank], 0).reshape(b, T)

    d_hidden = hidden
    if with_gradient:  # the hidden state before a masked token is what scored it
        after, rank_after = jnp.roll(mask, -1), jnp.roll(rank, -1)
        d_hidden = jnp.where(after[:, None], results.d_hidden[rank_after], 0).reshape(b, T, D)
    return TokenScores(spread(results.logp), spread(results.entropy)), d_hidden, results.d_head
