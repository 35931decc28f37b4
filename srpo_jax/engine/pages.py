"""The pages of the KV cache: who holds them, which prompts they store, and which are evicted.

Prefix sharing: prompts are stored as a tree of pages. A node's key is its parent and the ids of its
own page, so requests with a common prefix hold the same pages, and a page is computed once. Pages
that nobody holds stay until they are needed; the least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

UNUSED = 0  # the page that rows without a place of their own write to


@dataclass(eq=False)
class PageNode:
    """A stored page of a prompt; ``holders`` counts the requests that read it."""

    page: int
    ids: tuple[int, ...]
    parent: PageNode | None
    holders: int = 0
    children: dict[tuple[int, ...], PageNode] = field(default_factory=dict)


class PageStore:
    """A page is free, taken (for a request's own tokens) or stored (for a prompt).

    Args:
        count: Pages, of which page UNUSED is left out.
        size: Tokens of a page.
        kept: The most pages that store prompts which nobody holds (None: all that are free).
        sharing: Without, every request has the pages of its prompt to itself.
    """

    def __init__(self, count: int, size: int, kept: int | None = None, sharing: bool = True):
        self.size = size
        self._sharing = sharing
        self._kept = count if kept is None else kept
        self._free = list(range(count - 1, UNUSED, -1))
        self._roots: dict[tuple[int, ...], PageNode] = {}
        # Stored pages that nobody holds, by page, least recently used first. A request holds the
        # whole path to its last page, so a node becomes idle and is evicted after its children.
        self._idle: OrderedDict[int, PageNode] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be had: the free ones, and stored ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def stored(self) -> int:
        """Stored pages that nobody holds."""
        return len(self._idle)

    def lookup(self, ids: Sequence[int]) -> list[PageNode]:
        """The stored pages of the longest stored prefix of a prompt, in order."""
        found: list[PageNode] = []
        children = self._roots
        for key in self._split(ids):
            if key not in children:
                break
            found.append(children[key])
            children = found[-1].children
        return found

    def fits(self, ids: Sequence[int], own: int) -> bool:
        """Whether a prompt can be held and ``own`` pages taken."""
        stored = self.lookup(ids)
        new = -(-len(ids) // self.size) - len(stored)
        return new + own + sum(node.holders == 0 for node in stored) <= self.available

    def hold(self, ids: Sequence[int]) -> tuple[list[PageNode], int]:
        """Holds the pages of a whole prompt, which ``fits``.

        Returns:
            Its nodes in order, and how many of the first were stored; the caller fills the others.
        """
        nodes = self.lookup(ids)
        stored = len(nodes)
        for node in nodes:
            node.holders += 1
            self._idle.pop(node.page, None)
        for key in self._split(ids)[stored:]:
            parent = nodes[-1] if nodes else None
            node = PageNode(self.take(1)[0], key, parent, holders=1)
            if self._sharing:
                self._siblings(parent)[key] = node
            nodes.append(node)
        return nodes, stored

    def release(self, nodes: Sequence[PageNode]) -> None:
        """Ends a request's hold on the pages of its prompt."""
        for node in reversed(nodes):
            node.holders -= 1
            if not self._sharing:
                self._free.append(node.page)
            elif node.holders == 0:
                self._idle[node.page] = node
        while len(self._idle) > self._kept:
            self._evict()

    def take(self, count: int) -> list[int]:
        """Takes pages for a request's own tokens; evicts what nobody holds where none are free."""
        while len(self._free) < count:
            self._evict()
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages that were taken."""
        self._free.extend(pages)

    def clear(self) -> None:
        """Forgets every stored prompt; none may be held."""
        while self._idle:
            self._evict()

    def _split(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + self.size]) for i in range(0, len(ids), self.size)]

    def _siblings(self, parent: PageNode | None) -> dict[tuple[int, ...], PageNode]:
        return self._roots if parent is None else parent.children

    def _evict(self) -> None:
        page, node = self._idle.popitem(last=False)
        del self._siblings(node.parent)[node.ids]
        self._free.append(page)
