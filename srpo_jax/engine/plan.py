"""The arguments of the device programs as plain arrays, built on the host from what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.attention.cache import GROUP, Work
from srpo_jax.engine.pages import UNUSED, PageNode
from srpo_jax.engine.programs import Prefill

ITEMS = 32  # of a chunk


@dataclass(frozen=True)
class Shapes:
    """The fixed sizes of an engine's programs.

    Attributes:
        slots: Requests decoded at once on a replica, the rows of a decode step.
        page: Tokens of a page.
        lanes: Rows that read a shared page together.
        cache_tokens: The most tokens of a request.
    """

    slots: int
    page: int
    lanes: int
    cache_tokens: int

    @property
    def row_pages(self) -> int:
        """Pages of one row: its prompt's and its own, each rounded up, in whole groups."""
        return _up(self.cache_tokens // self.page + 2, GROUP)

    @property
    def request_pages(self) -> int:
        """The most that one request holds: its prompt's and its own are both rounded up."""
        return pages_of(self.cache_tokens, self.page) + 1

    @property
    def items(self) -> int:
        """Work items (a page and up to ``lanes`` rows that read it) of a chunk."""
        return min(ITEMS, _up(self.slots, 8))

    @property
    def chunks(self) -> int:
        """The most chunks of a decode step."""
        return -(-self.slots * self.row_pages // self.items) + 1  # own items fill whole ones


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pages_of(tokens: int, page: int) -> int:
    """Pages of ``page`` tokens that hold so many."""
    return -(-tokens // page)


@dataclass(frozen=True)
class RowPages:
    """What one slot attends to in a burst: its prompt's nodes, and its own pages so far."""

    prompt: Sequence[PageNode]
    own: Sequence[int]


def decode_work(rows: Mapping[int, RowPages], shapes: Shapes) -> Work:
    """The work items of a burst: a page that several rows read makes one for every ``lanes`` of
    them.

    Args:
        rows: What each running slot attends to. A row's own pages come in order, and so do those
            of its prompt.
        shapes: The sizes of the arrays.
    """
    slots = np.fromiter(rows, np.int32, len(rows))
    prompts = np.array([len(row.prompt) for row in rows.values()], np.int32)
    owns = np.array([len(row.own) for row in rows.values()], np.int32)
    lanes, size = shapes.lanes, shapes.chunks * shapes.items
    page = np.full(size, UNUSED, np.int32)
    readers = np.full((size, lanes), shapes.slots, np.int32)
    base, own = np.zeros(size, np.int32), np.zeros(size, bool)
    parts = np.full((shapes.slots, shapes.row_pages), -1, np.int32)

    count = int(owns.sum())
    slot, place = np.repeat(slots, owns), _counts(owns)
    page[:count] = [page for row in rows.values() for page in row.own]
    readers[:count, 0] = slot
    base[:count] = -place * shapes.page
    own[:count] = True
    parts[slot, np.repeat(prompts, owns) + place] = np.arange(count) * lanes
    owned = -(-count // shapes.items)

    # Every page of a prompt with its rows together, in the order in which the pages first come.
    pages = np.array([node.page for row in rows.values() for node in row.prompt], np.int32)
    tokens = np.full(len(pages), shapes.page, np.int32)  # but for the last page of a prompt
    tokens[np.cumsum(prompts)[prompts > 0] - 1] = [
        len(row.prompt[-1].ids) for row in rows.values() if row.prompt
    ]
    first = np.zeros(pages.max(initial=0) + 1, np.int32)
    first[pages[::-1]] = np.arange(len(pages))[::-1]
    order = np.argsort(first[pages], kind="stable")
    pages, tokens = pages[order], tokens[order]
    slot, place = np.repeat(slots, prompts)[order], _counts(prompts)[order]
    begins = np.flatnonzero(np.diff(pages, prepend=-1))
    sharing = np.diff(begins, append=len(pages))
    among, groups = _counts(sharing), -(-sharing // lanes)
    item = owned * shapes.items + np.repeat(np.cumsum(groups) - groups, sharing) + among // lanes
    page[item], base[item] = pages, tokens
    readers[item, among % lanes] = slot
    parts[slot, place] = item * lanes + among % lanes

    used = owned * shapes.items + int(groups.sum())
    longest = int((prompts + owns).max(initial=0))
    shape = (shapes.chunks, shapes.items)
    return Work(
        page=page.reshape(shape),
        rows=readers.reshape(*shape, lanes),
        base=base.reshape(shape),
        own=own.reshape(shape),
        parts=parts,
        chunks=np.array([-(-used // shapes.items)], np.int32),
        owned=np.array([owned], np.int32),
        groups=np.array([-(-longest // GROUP)], np.int32),
    )


def _counts(lengths: np.ndarray) -> np.ndarray:
    """0 to n - 1 for every n of ``lengths``, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def plan_prefill(nodes: Sequence[PageNode], count: int, shapes: Shapes) -> Prefill:
    """``nodes`` as the arguments of a prefill of ``count`` pages, the rest of them unused."""
    tokens = np.zeros((count, shapes.page), np.int32)
    page = np.full(count, UNUSED, np.int32)
    context = np.full((count, shapes.row_pages), UNUSED, np.int32)
    depth = np.zeros(count, np.int32)
    for i, node in enumerate(nodes):
        tokens[i, : len(node.ids)] = node.ids
        page[i] = node.page
        path = []
        at: PageNode | None = node
        while at is not None:
            path.append(at.page)
            at = at.parent
        context[i, : len(path)] = path[::-1]
        depth[i] = len(path)
    return Prefill(tokens, page, context, depth)
