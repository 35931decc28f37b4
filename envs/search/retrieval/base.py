"""What a retriever is: queries in, ranked passages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol


class RetrievalError(Exception):
    """A search that failed after all retries: it ends the episode, and no policy reads it."""


@dataclass(frozen=True)
class Passage:
    """One passage: ``contents`` is a quoted title line, then the body."""

    id: str
    contents: str
    score: float = 0.0


class Retriever(Protocol):
    """What a search workflow asks."""

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Searches for every query.

        Args:
            queries: Any number of texts.
            topk: The most passages of one.

        Returns:
            One list per query, in the queries' order, best passage first.

        Raises:
            RetrievalError: Where it fails after all retries.
        """
        ...


def merge(results: Iterable[Sequence[Passage]], limit: int | None = None) -> tuple[Passage, ...]:
    """The passages of several queries as one list: every query's best, then every second best, ...

    Args:
        results: The passages of each query, best first.
        limit: How many to keep (None: all). A passage found twice counts once, in its first place.
    """
    merged: dict[str, Passage] = {}
    for rank in zip_longest(*results):
        for passage in rank:
            if passage is not None:
                merged.setdefault(passage.id, passage)
    return tuple(merged.values())[:limit]
