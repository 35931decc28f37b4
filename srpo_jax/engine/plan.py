"""Plain arrays for the device programs, built by the host from what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.cache_attention import GROUP, Work
from srpo_jax.engine.pages import UNUSED, Node
from srpo_jax.engine.programs import Prefill

ITEMS = 32  # of a chunk


@dataclass(frozen=True)
class Shapes:
    """The fixed sizes of an engine's programs; one request has at most ``cache_tokens`` tokens.

    ``lanes`` rows read a shared page together.
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
        return min(ITEMS, _up(self.slots, 8))

    @property
    def chunks(self) -> int:
        return -(-self.slots * self.row_pages // self.items) + 1  # own items fill whole ones


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pages_of(tokens: int, page: int) -> int:
    return -(-tokens // page)


@dataclass(frozen=True)
class RowPages:
    """What one slot attends to in a burst: its prompt's nodes, and its own pages so far."""

    prompt: Sequence[Node]
    own: Sequence[int]


def decode_work(rows: Mapping[int, RowPages], shapes: Shapes) -> Work:
    """The items of a burst: a page that several rows read makes one for every ``lanes`` of them.

    A row's own pages come in order, and so do those of its prompt.
    """
    lanes = shapes.lanes
    readers: dict[int, tuple[Node, list[tuple[int, int]]]] = {}
    items: list[tuple[int, list[int], int, bool]] = []
    parts = np.full((shapes.slots, shapes.row_pages), -1, np.int32)
    longest = 0
    for slot, row in rows.items():
        for j, node in enumerate(row.prompt):
            readers.setdefault(node.page, (node, []))[1].append((slot, j))
        for b, page in enumerate(row.own):
            parts[slot, len(row.prompt) + b] = len(items) * lanes
            items.append((page, [slot], -b * shapes.page, True))
        longest = max(longest, len(row.prompt) + len(row.own))
    owned = -(-len(items) // shapes.items)
    items += [(UNUSED, [], 0, False)] * (owned * shapes.items - len(items))
    for page, (node, places) in readers.items():
        for i in range(0, len(places), lanes):
            together = places[i : i + lanes]
            for lane, (slot, j) in enumerate(together):
                parts[slot, j] = len(items) * lanes + lane
            items.append((page, [slot for slot, _ in together], len(node.ids), False))
    size = shapes.chunks * shapes.items
    page = np.full(size, UNUSED, np.int32)
    readers_of = np.full((size, lanes), shapes.slots, np.int32)
    base, own = np.zeros(size, np.int32), np.zeros(size, bool)
    for i, (at, slots, count, is_own) in enumerate(items):
        page[i], base[i], own[i] = at, count, is_own
        readers_of[i, : len(slots)] = slots
    shape = (shapes.chunks, shapes.items)
    return Work(
        page=page.reshape(shape),
        rows=readers_of.reshape(*shape, lanes),
        base=base.reshape(shape),
        own=own.reshape(shape),
        parts=parts,
        chunks=np.array([-(-len(items) // shapes.items)], np.int32),
        owned=np.array([owned], np.int32),
        groups=np.array([-(-longest // GROUP)], np.int32),
    )


def prefill_pages(nodes: Sequence[Node], count: int, shapes: Shapes) -> Prefill:
    """``nodes`` as the arguments of a prefill of ``count`` pages."""
    tokens = np.zeros((count, shapes.page), np.int32)
    page = np.full(count, UNUSED, np.int32)
    context = np.full((count, shapes.row_pages), UNUSED, np.int32)
    depth = np.zeros(count, np.int32)
    for i, node in enumerate(nodes):
        tokens[i, : len(node.ids)] = node.ids
        page[i] = node.page
        path = []
        at: Node | None = node
        while at is not None:
            path.append(at.page)
            at = at.parent
        context[i, : len(path)] = path[::-1]
        depth[i] = len(path)
    return Prefill(tokens, page, context, depth)
