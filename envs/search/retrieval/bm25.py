"""BM25 in this process, over the bm25s library."""

from __future__ import annotations

import asyncio
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.search.retrieval.base import Passage

_WORD = re.compile(r"\d[\d.,]*\d|\w+")


def words(text: str) -> list[str]:
    """The terms of a text, lower-cased: numbers such as 1,284,000, runs of letters and digits.

    Accents are composed with their letters first (NFC): apart, they would end a word.
    """
    return _WORD.findall(unicodedata.normalize("NFC", text).lower())


class BM25Retriever:
    """Lucene's BM25 over passages, with equal scores in the passages' order.

    A query whose words the corpus does not hold finds nothing. Raises ValueError for an empty
    corpus.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75):
        # Not at the top: importing bm25s loads jax and runs an operation of it, after which
        # jax.distributed.initialize() fails.
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # its own default is DEBUG
        if not passages:
            raise ValueError("BM25 needs at least one passage, the corpus is empty")
        self._passages = passages
        self._vocabulary: dict[str, int] = {"": 0}
        ids = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words(p.contents)]
            for p in passages
        ]
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        self._index.index((ids, self._vocabulary), show_progress=False)

    def scores(self, query: str) -> np.ndarray:
        """The score of every passage for a query, float32 [number of passages]."""
        known = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        return self._index.get_scores_from_ids(known)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The best passages of every query, in a thread: a large corpus takes a while."""
        return await asyncio.to_thread(lambda: [self._best(query, topk) for query in queries])

    def _best(self, query: str, topk: int) -> list[Passage]:
        scores = self.scores(query)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > topk:
            last = np.partition(scores[hits], -topk)[-topk]
            hits = hits[scores[hits] >= last]
        ranked = hits[np.argsort(-scores[hits], kind="stable")][:topk]
        return [replace(self._passages[i], score=float(scores[i])) for i in ranked]
