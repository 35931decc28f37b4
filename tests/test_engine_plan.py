"""The arrays of a burst, against a plain loop over its rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.engine.pages import UNUSED, PageNode
from srpo_jax.engine.plan import RowPages, Shapes, decode_work

SHAPES = Shapes(slots=20, page=4, lanes=3, cache_tokens=40)


def by_loop(rows, shapes):
    """The plain reference: own pages row by row, filled up to whole chunks, then each page of a
    prompt where it first comes, once for every ``lanes`` of its readers."""
    items, readers = [], {}
    parts = np.full((shapes.slots, shapes.row_pages), -1)
    for slot, row in rows.items():
        for b, page in enumerate(row.own):
            parts[slot, len(row.prompt) + b] = len(items) * shapes.lanes
            items.append((page, [slot], -b * shapes.page, True))
        for j, node in enumerate(row.prompt):
            readers.setdefault(node.page, (node, []))[1].append((slot, j))
    owned = -(-len(items) // shapes.items)
    items += [(UNUSED, [], 0, False)] * (owned * shapes.items - len(items))
    for page, (node, places) in readers.items():
        for i in range(0, len(places), shapes.lanes):
            together = places[i : i + shapes.lanes]
            for lane, (slot, j) in enumerate(together):
                parts[slot, j] = len(items) * shapes.lanes + lane
            items.append((page, [slot for slot, _ in together], len(node.ids), False))
    chunks = -(-len(items) // shapes.items)
    items += [(UNUSED, [], 0, False)] * (shapes.chunks * shapes.items - len(items))
    longest = max((len(row.prompt) + len(row.own) for row in rows.values()), default=0)
    lanes = [slots + [shapes.slots] * (shapes.lanes - len(slots)) for _, slots, _, _ in items]
    page, _, base, own = (list(column) for column in zip(*items, strict=True))
    return page, lanes, base, own, parts, chunks, owned, longest


@st.composite
def bursts(draw):
    """Rows in any order of slots; prompts of up to five pages that may begin alike."""
    nodes = []
    for _ in range(draw(st.integers(0, 15))):
        parent = draw(st.sampled_from([None, *nodes]))
        if parent and (len(parent.ids) < SHAPES.page or len(path_to(parent)) == 5):
            parent = None
        ids = tuple(range(draw(st.sampled_from([SHAPES.page] * 3 + [1, 2]))))
        nodes.append(PageNode(len(nodes) + 1, ids, parent))
    rows, page = {}, 100
    for slot in draw(st.permutations(range(SHAPES.slots)))[: draw(st.integers(0, SHAPES.slots))]:
        last = draw(st.sampled_from([None, *nodes]))
        own = list(range(page, page + draw(st.integers(0, 5))))
        rows[slot], page = RowPages(path_to(last), own), page + len(own)
    return rows


def path_to(node):
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


@settings(deadline=None, max_examples=200)
@given(bursts())
def test_the_arrays_are_those_of_a_loop_over_the_rows(rows):
    work = decode_work(rows, SHAPES)
    page, lanes, base, own, parts, chunks, owned, longest = by_loop(rows, SHAPES)
    np.testing.assert_array_equal(work.page.ravel(), page)
    np.testing.assert_array_equal(work.rows.reshape(-1, SHAPES.lanes), lanes)
    np.testing.assert_array_equal(work.base.ravel(), base)
    np.testing.assert_array_equal(work.own.ravel(), own)
    np.testing.assert_array_equal(work.parts, parts)
    assert (work.chunks.item(), work.owned.item()) == (chunks, owned)
    assert work.groups.item() == -(-longest // 8)
    assert {a.dtype for a in work} == {np.dtype(np.int32), np.dtype(bool)}
