"""What a retriever is: queries in, ranked passages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol


class RetrievalError(Exception):
    """A search that failed for good. It ends the episode; it never becomes text for a policy."""


@dataclass(frozen=True)
class Passage:
    """One passage: ``contents`` is a quoted title line, then the body."""

    id: str
    contents: str
    score: float = 0.0


class Retriever(Protocol):
    """``search`` gives one list per query, in the queries' order: at most ``topk`` passages, best
    first. Raises RetrievalError when it fails for good."""

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]: ...


def merge(results: Iterable[Sequence[Passage]], limit: int | None = None) -> tuple[Passage, ...]:
    """The passages of several queries as one list: every query's best, then every second best, ...

    A passage found twice keeps its first place; ``limit`` keeps the first ones only.
    """
    merged: dict[str, Passage] = {}
    for rank in zip_longest(*results):
        for passage in rank:
            if passage is not None:
                merged.setdefault(passage.id, passage)
    return tuple(merged.values())[:limit]
