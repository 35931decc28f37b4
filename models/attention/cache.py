"""Attention over a paged KV cache: one query a row while decoding, pages of queries in prefill.

A page holds the keys and values of P consecutive tokens in every layer. Decoding is cut into items:
one page and up to R rows that all attend to it, so a page of a shared prefix is read once for all
requests. Each item gives partial sums of an online softmax (running maximum and sum, as in flash
attention); ``combine`` adds up a row's own in the order of its pages. A row's bits depend on its
own pages alone: never on the chunk, the lane or the company in which they were computed.

Axes: B rows (slots), I items of a chunk, R rows of an item, J pages of a row, P tokens of a page,
S pages of a prefill, N query heads, Kv key heads, G = N / Kv, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

MASKED = -1e30
GROUP = 8  # pages of a row whose partial sums are added up at a time


class Pages(NamedTuple):
    """One layer's KV cache: keys [pages, Kv, H, P], so that scores need no transposition, and
    values [pages, Kv, P, H]."""

    k: jax.Array
    v: jax.Array


# The host builds them as numpy arrays, the programs take them as their arguments.
HostOrDevice = jax.Array | np.ndarray


class Work(NamedTuple):
    """What a decode step attends to; item ``i`` of chunk ``c`` is number ``c * I + i``.

    Attributes:
        page: [C, I] int32, the page of each item.
        rows: [C, I, R] int32, the rows that attend to it; B where there is none.
        base: [C, I] int32, how many of the page's tokens are visible; where ``own`` is True, the
            count of the only row's own tokens is added to it.
        own: [C, I] bool.
        parts: [B, J] int32, item number * R + lane of a row's pages in order; -1 for none.
        chunks: [1] int32, chunks that hold items.
        owned: [1] int32, how many of these come first whose items are all own ones; the others
            hold none.
        groups: [1] int32, groups of GROUP pages that some row needs.
    """

    page: HostOrDevice
    rows: HostOrDevice
    base: HostOrDevice
    own: HostOrDevice
    parts: HostOrDevice
    chunks: HostOrDevice
    owned: HostOrDevice
    groups: HostOrDevice


class Partial(NamedTuple):
    """Online softmax over one page for each item and lane: maximum score and sum of exponentials
    [C, I, Kv, R, G], weighted values [C, I, Kv, R, G, H], in at least float32."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


class CacheAttention(NamedTuple):
    """The attention of one kind of device. ``PLAIN`` is the reference and runs on any.

    Attributes:
        page: Tokens of a page.
        lanes: R, rows of an item.
        workspace: (work, Kv, G, H) -> what ``decode`` writes to from layer to layer: a pytree whose
            leaves have Kv as axis 2, or nothing; ValueError for shapes that it does not take.
        decode: As ``decode_attention``.
        prefill: As ``prefill_attention``.
    """

    page: int
    lanes: int
    workspace: Callable[[Work, int, int, int], Any]
    decode: Callable[..., tuple[jax.Array, Pages, Any]]
    prefill: Callable[..., tuple[jax.Array, Pages]]


def new_pages(count: int, page: int, kv_heads: int, head_dim: int, dtype) -> Pages:
    """One layer's empty KV cache of ``count`` pages of ``page`` tokens."""
    return Pages(
        jnp.zeros((count, kv_heads, head_dim, page), dtype),
        jnp.zeros((count, kv_heads, page, head_dim), dtype),
    )


def new_partial(work: Work, kv_heads: int, groups: int, head_dim: int) -> Partial:
    """The workspace of a step's partial sums, to be carried from layer to layer."""
    chunks, items, lanes = work.rows.shape
    shape = (chunks, items, kv_heads, lanes, groups)
    return Partial(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def write_tokens(
    cache: Pages, k_BKvH: jax.Array, v_BKvH: jax.Array, page_B: jax.Array, offset_B: jax.Array
) -> Pages:
    """Stores one token a row at its page and offset."""
    return Pages(
        cache.k.at[page_B, :, :, offset_B].set(k_BKvH),
        cache.v.at[page_B, :, offset_B].set(v_BKvH),
    )


def write_pages(cache: Pages, k_SPKvH: jax.Array, v_SPKvH: jax.Array, page_S: jax.Array) -> Pages:
    """Stores whole pages."""
    return Pages(
        cache.k.at[page_S].set(jnp.transpose(k_SPKvH, (0, 2, 3, 1))),
        cache.v.at[page_S].set(jnp.transpose(v_SPKvH, (0, 2, 1, 3))),
    )


def decode_attention(
    q_BNH: jax.Array,
    k_BKvH: jax.Array,
    v_BKvH: jax.Array,
    cache: Pages,
    work: Work,
    own_B: jax.Array,
    page_B: jax.Array,
    partial: Partial,
) -> tuple[jax.Array, Pages, Partial]:
    """One decode step of a layer: stores each row's new token and attends to the row's pages.

    Args:
        q_BNH: [B, N, H] floating.
        k_BKvH: [B, Kv, H], the new token's key.
        v_BKvH: [B, Kv, H], its value.
        cache: The layer's pages.
        work: What the step attends to.
        own_B: [B] int32, the row's own tokens, the new one the last of them.
        page_B: [B] int32, the page of the row's only item with 0 < own + base <= P, where the new
            token goes, or UNUSED (0).
        partial: The workspace.

    Returns:
        ([B, N, H] in the dtype of q, the cache, the workspace).
    """
    cache = write_tokens(cache, k_BKvH, v_BKvH, page_B, (own_B - 1) % cache.v.shape[2])
    out, partial = cache_attention(q_BNH, cache, work, own_B, partial)
    return out, cache, partial


def prefill_attention(
    q_SPNH: jax.Array,
    k_SPKvH: jax.Array,
    v_SPKvH: jax.Array,
    cache: Pages,
    page_S: jax.Array,
    context_SJ: jax.Array,
    depth_S: jax.Array,
) -> tuple[jax.Array, Pages]:
    """Prefill of a layer: stores whole pages of keys and values, and attends causally.

    Args:
        q_SPNH: [S, P, N, H] floating.
        k_SPKvH: [S, P, Kv, H].
        v_SPKvH: [S, P, Kv, H].
        cache: The layer's pages.
        page_S: [S] int32, where each page goes.
        context_SJ: As in ``page_attention``.
        depth_S: As in ``page_attention``.

    Returns:
        ([S, P, N, H] in the dtype of q, the cache).
    """
    cache = write_pages(cache, k_SPKvH, v_SPKvH, page_S)
    return page_attention(q_SPNH, cache, context_SJ, depth_S), cache


def cache_attention(
    q_BNH: jax.Array, cache: Pages, work: Work, own_B: jax.Array, partial: Partial
) -> tuple[jax.Array, Partial]:
    """One query a row over the row's pages. A row without pages gives 0.

    Args:
        q_BNH: [B, N, H] floating.
        cache: The layer's pages.
        work: What the step attends to.
        own_B: [B] int32, tokens in a row's own pages, the new one among them.
        partial: The workspace.

    Returns:
        ([B, N, H] in the dtype of q, the workspace).
    """
    chex.assert_rank([q_BNH, cache.k, work.rows, own_B], [3, 4, 3, 1])
    B, N, H = q_BNH.shape
    Kv, P = cache.v.shape[1:3]
    G = N // Kv
    items, R = work.rows.shape[1:]
    acc_dtype = jnp.promote_types(q_BNH.dtype, jnp.float32)
    q = jnp.pad(q_BNH * H**-0.5, ((0, 1), (0, 0), (0, 0))).reshape(B + 1, Kv, G, H)

    def chunk(c, partial, lanes):
        page, rows = work.page[c], work.rows[c, :, :lanes]
        queries = q[rows].transpose(0, 2, 1, 3, 4).reshape(items, Kv, lanes * G, H)
        scores = jnp.einsum(
            "ikrh,ikhp->ikrp", queries, cache.k[page], preferred_element_type=acc_dtype
        )
        own = jnp.take(own_B, rows[:, 0], mode="clip")
        visible = jnp.arange(P) < (work.base[c] + jnp.where(work.own[c], own, 0))[:, None]
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        maximum = scores.max(-1)
        weights = jnp.where(visible[:, None, None], jnp.exp(scores - maximum[..., None]), 0)
        values = jnp.einsum(
            "ikrp,ikph->ikrh",
            weights.astype(q.dtype),
            cache.v[page],
            preferred_element_type=acc_dtype,
        )

        def put(sums, x):
            x = x.astype(sums.dtype).reshape(1, items, Kv, lanes, G, *x.shape[3:])
            return jax.lax.dynamic_update_slice(sums, x, (c,) + (0,) * (x.ndim - 1))

        return Partial(
            put(partial.maximum, maximum),
            put(partial.total, weights.sum(-1)),
            put(partial.values, values),
        )

    # How many rows share a product can change a row's bits: own pages have one, others R places.
    owned, chunks = work.owned[0], work.chunks[0]
    partial = jax.lax.fori_loop(0, owned, functools.partial(chunk, lanes=1), partial)
    partial = jax.lax.fori_loop(owned, chunks, functools.partial(chunk, lanes=R), partial)
    return combine(partial, work, (B, Kv, G, H)).reshape(B, N, H).astype(q_BNH.dtype), partial


def combine(partial: Partial, work: Work, shape: tuple[int, int, int, int]) -> jax.Array:
    """The rows' softmax-weighted values [B, Kv, G, H] from the partial sums of their pages."""
    B, Kv, G, H = shape
    R = work.rows.shape[2]
    sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), partial)

    def group(g, carry):
        parts = jax.lax.dynamic_slice_in_dim(work.parts, g * GROUP, GROUP, 1)
        item, lane = jnp.maximum(parts, 0) // R, jnp.maximum(parts, 0) % R
        maximum, total, values = (x[item, :, lane] for x in sums)  # [B, GROUP, Kv, G, ...]
        there = (parts >= 0)[..., None, None]
        maximum = jnp.where(there, maximum, MASKED)
        old_maximum, old_total, old_values = carry
        new = jnp.maximum(old_maximum, maximum.max(1))
        scale = jnp.where(there, jnp.exp(maximum - new[:, None]), 0)
        kept = jnp.exp(old_maximum - new)
        return (
            new,
            old_total * kept + (total * scale).sum(1),
            old_values * kept[..., None] + (values * scale[..., None]).sum(1),
        )

    dtype = partial.values.dtype
    start = (
        jnp.full((B, Kv, G), MASKED, dtype),
        jnp.zeros((B, Kv, G), dtype),
        jnp.zeros((B, Kv, G, H), dtype),
    )
    _, total, values = jax.lax.fori_loop(0, work.groups[0], group, start)
    return values / jnp.maximum(total, 1e-30)[..., None]


def page_attention(
    q_SPNH: jax.Array, cache: Pages, context_SJ: jax.Array, depth_S: jax.Array
) -> jax.Array:
    """Causal attention of whole pages of queries, whose own keys are in the cache already.

    Args:
        q_SPNH: [S, P, N, H] floating.
        cache: The layer's pages.
        context_SJ: [S, J] int32; the first ``depth_S[s]`` of a row are the sequence's pages up to
            and including page s itself, all but the last of them full.
        depth_S: [S] int32; 0 marks a page that is not used, whose result is 0.

    Returns:
        [S, P, N, H] in the dtype of q.
    """
    chex.assert_rank([q_SPNH, cache.k, context_SJ, depth_S], [4, 4, 2, 1])
    _, P, N, H = q_SPNH.shape
    Kv = cache.k.shape[1]
    G = N // Kv
    acc_dtype = jnp.promote_types(q_SPNH.dtype, jnp.float32)

    def one(args):
        q_PNH, context_J, depth = args
        q = (q_PNH * H**-0.5).reshape(P, Kv, G, H).transpose(1, 2, 0, 3).reshape(Kv, G * P, H)
        row = jnp.tile(jnp.arange(P), G)[:, None]

        def page(j, carry):
            k, v = cache.k[context_J[j]], cache.v[context_J[j]]
            scores = jnp.einsum("krh,khp->krp", q, k, preferred_element_type=acc_dtype)
            visible = j * P + jnp.arange(P) <= row + (depth - 1) * P
            scores = jnp.where(visible, scores, MASKED)
            maximum, total, values = carry
            new = jnp.maximum(maximum, scores.max(-1))
            weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
            added = jnp.einsum(
                "krp,kph->krh", weights.astype(v.dtype), v, preferred_element_type=acc_dtype
            )
            return (
                new,
                total * kept + weights.sum(-1),
                values * kept[..., None] + added,
            )

        start = (
            jnp.full((Kv, G * P), MASKED, acc_dtype),
            jnp.zeros((Kv, G * P), acc_dtype),
            jnp.zeros((Kv, G * P, H), acc_dtype),
        )
        _, total, values = jax.lax.fori_loop(0, depth, page, start)
        out = values / jnp.maximum(total, 1e-30)[..., None]
        return out.reshape(Kv, G, P, H).transpose(2, 0, 1, 3).reshape(P, N, H).astype(q_PNH.dtype)

    return jax.lax.map(one, (q_SPNH, context_SJ, depth_S))


PLAIN = CacheAttention(
    page=64, lanes=4, workspace=new_partial, decode=decode_attention, prefill=prefill_attention
)
