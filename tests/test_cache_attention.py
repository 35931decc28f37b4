"""Attention over a paged cache against a softmax over each row's tokens in a plain list."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.cache import (
    PLAIN,
    Pages,
    cache_attention,
    new_pages,
    new_partial,
    page_attention,
    write_pages,
    write_tokens,
)
from models.attention.sequence import plain_attention
from srpo_jax.engine.pages import PageNode
from srpo_jax.engine.plan import RowPages, Shapes, decode_work

N, KV, H, P = 6, 2, 8, 4
LANES = PLAIN.lanes
SHAPES = Shapes(slots=7, page=P, lanes=LANES, cache_tokens=48)
attend = jax.jit(cache_attention)


@pytest.fixture
def cache():
    rng = np.random.default_rng(0)
    return Pages(
        jnp.asarray(rng.normal(size=(40, KV, H, P)), jnp.float32),
        jnp.asarray(rng.normal(size=(40, KV, P, H)), jnp.float32),
    )


def node(page, count=P):
    return PageNode(page, tuple(range(count)), None)


def reference(q_NH, cache, tokens):
    """``tokens``: (page, offset) of everything that the row sees."""
    out = []
    for n in range(N):
        kv = n // (N // KV)
        keys = np.array([cache.k[page, kv, :, at] for page, at in tokens], np.float64)
        values = np.array([cache.v[page, kv, at] for page, at in tokens], np.float64)
        scores = keys @ np.asarray(q_NH[n], np.float64) / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out.append(weights @ values / weights.sum())
    return np.array(out)


def rows_of(lengths, prompts, first_own=20):
    """Rows with the given prompts (page numbers and the tokens of the last page) and own tokens."""
    rows, tokens = {}, {}
    for slot, own in enumerate(lengths):
        pages, last = prompts[slot]
        nodes = [node(page) for page in pages[:-1]] + [node(page, last) for page in pages[-1:]]
        mine = [first_own + 3 * slot + i for i in range(-(-own // P))]
        rows[slot] = RowPages(nodes, mine)
        tokens[slot] = [(n.page, at) for n in nodes for at in range(len(n.ids))]
        tokens[slot] += [(mine[i // P], i % P) for i in range(own)]
    return rows, tokens


def run(cache, rows, lengths, q):
    work = decode_work(rows, SHAPES)
    own = np.zeros(SHAPES.slots, np.int32)
    own[: len(lengths)] = lengths
    workspace = new_partial(work, KV, N // KV, H)
    return np.asarray(attend(q, cache, work, own, workspace)[0]), work


def queries(seed=1):
    return jax.random.normal(jax.random.key(seed), (SHAPES.slots, N, H))


def test_rows_see_their_prompt_and_their_own_tokens(cache):
    lengths = [1, 4, 5, 9]
    prompts = [([1, 2, 3], 2), ([4], 1), ([], 0), ([5, 6], 4)]
    rows, tokens = rows_of(lengths, prompts)
    out, _ = run(cache, rows, lengths, queries())
    for slot, seen in tokens.items():
        np.testing.assert_allclose(out[slot], reference(queries()[slot], cache, seen), atol=1e-5)
    assert not out[4:].any()  # rows without pages


def test_a_shared_page_is_one_item_for_every_lanes_rows(cache):
    lengths = [1, 3, 2, 4, 1, 2, 3]
    prompts = [([1, 2], 3)] * 6 + [([1, 7], 2)]
    rows, tokens = rows_of(lengths, prompts, first_own=12)
    out, work = run(cache, rows, lengths, queries())
    for slot, seen in tokens.items():
        np.testing.assert_allclose(out[slot], reference(queries()[slot], cache, seen), atol=1e-5)
    used = work.page.ravel()[: 7 + 2 + 2 + 1]
    assert np.count_nonzero(work.page) == len(used)
    shared = -(-7 // LANES)
    assert np.count_nonzero(used == 1) == shared and np.count_nonzero(used == 2) == -(-6 // LANES)


@pytest.mark.parametrize("slot", range(7))
def test_bits_do_not_depend_on_place_or_company(cache, slot):
    """The same query and pages in every slot, alone and among rows that share its pages or not."""
    q = queries(2)
    rows, _ = rows_of([6], [([1, 2, 3], 3)])
    alone = run(cache, rows, [6], q)[0][0]
    others = [([1, 2, 3], 3), ([1, 2], 4), ([9], 1), ([1, 2, 3], 3), ([], 0), ([1, 10], 2)]
    prompts = [*others[:slot], ([1, 2, 3], 3), *others[slot:]]
    lengths = [*[2, 1, 5, 3, 1, 4][:slot], 6, *[2, 1, 5, 3, 1, 4][slot:]]
    rows, _ = rows_of(lengths, prompts)
    rows[slot] = RowPages(rows[slot].prompt, [20, 21])  # the own pages of the first run
    moved = jnp.roll(q, 1, axis=0).at[slot].set(q[0])
    for other in rows:  # nobody else's tokens lie there
        if other != slot:
            rows[other] = RowPages(rows[other].prompt, [30 + other] * len(rows[other].own))
    np.testing.assert_array_equal(run(cache, rows, lengths, moved)[0][slot], alone)


def test_more_pages_than_one_group(cache):
    lengths = [11]
    rows, tokens = rows_of(lengths, [(list(range(1, 11)), 1)])
    out, work = run(cache, rows, lengths, queries())
    assert int(work.groups[0]) == 2
    np.testing.assert_allclose(out[0], reference(queries()[0], cache, tokens[0]), atol=1e-5)


def test_tokens_are_written_where_they_belong():
    cache = new_pages(5, P, KV, H, jnp.float32)
    k, v = jax.random.normal(jax.random.key(0), (2, 3, KV, H))
    page, offset = jnp.array([4, 0, 2]), jnp.array([1, 3, 0])
    cache = write_tokens(cache, k, v, page, offset)
    for i in range(3):
        np.testing.assert_array_equal(cache.k[page[i], :, :, offset[i]], k[i])
        np.testing.assert_array_equal(cache.v[page[i], :, offset[i]], v[i])
    assert np.count_nonzero(cache.k) == k.size


def test_whole_pages_equal_plain_causal_attention():
    """Two prompts of three and two pages, and one page of a third that is stored already."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (3, 3 * P, n, H))
        for i, n in ((0, N), (1, KV), (2, KV))
    )
    expected = plain_attention(q, k, v, jnp.ones((3, 3 * P), jnp.int32))
    paths = [[7, 3, 5], [1, 2], [6, 4]]
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (0, 2)]  # (prompt, which page of it)

    def cut(x, prompt, j):
        return x[prompt, j * P : (j + 1) * P]

    cache = new_pages(9, P, KV, H, jnp.float32)
    cache = write_pages(cache, cut(k, 2, 0)[None], cut(v, 2, 0)[None], jnp.array([6]))
    pages = jnp.array([paths[i][j] for i, j in order] + [0])
    context = np.zeros((7, 4), np.int32)
    for row, (i, j) in enumerate(order):
        context[row, : j + 1] = paths[i][: j + 1]
    depth = jnp.array([j + 1 for _, j in order] + [0])
    stacked = [jnp.stack([cut(x, i, j) for i, j in order] + [cut(x, 0, 0)]) for x in (q, k, v)]
    cache = write_pages(cache, stacked[1], stacked[2], pages)
    out = jax.jit(page_attention)(stacked[0], cache, jnp.asarray(context), depth)
    for row, (i, j) in enumerate(order):
        np.testing.assert_allclose(out[row], cut(expected, i, j), atol=1e-5)
    assert not np.asarray(out[-1]).any()  # a page that is not used
