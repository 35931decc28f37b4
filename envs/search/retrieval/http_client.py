"""A retriever behind HTTP servers that speak ``POST /retrieve``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import httpx

from envs.http_client import HTTPClient, HTTPFailure, RetryPolicy
from envs.search.retrieval.base import Passage, RetrievalError
from envs.text_files import parse_json, short
from envs.tool_threads import QUEUEING

LONGEST_WAIT = 4.0  # seconds between two tries


class HTTPRetriever:
    """Asks one of several equal servers, in turn; a retry goes to the next one.

    Connection errors, time-outs, 429 and 5xx answers are retried. Anything else that is not a
    result, and the last failure, raise RetrievalError. The environment's proxies are not asked: the
    servers are the user's own.

    Args:
        addresses: Bases such as ``http://127.0.0.1:8000`` or whole ``.../retrieve`` URLs.
        form: What the servers take: ``queries`` (a batch in one request) or ``query`` (one request
            per query, sent side by side).
        timeout: Seconds of one try.
        tries: How many requests a search may take.
        backoff: Seconds before the second try; they double, up to LONGEST_WAIT.
        connections: Requests at once; those that wait for one are no time of their tool.
        api_key: Sent as a bearer token.

    Raises:
        ValueError: For an address that is none and a value out of its range.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        form: Literal["queries", "query"] = "queries",
        timeout: float = 10.0,
        tries: int = 4,
        backoff: float = 0.5,
        connections: int = 128,
        api_key: str | None = None,
    ):
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses must be a list of server addresses, got {addresses!r}")
        for address in addresses:
            try:
                known = httpx.URL(address).scheme in ("http", "https")
            except httpx.InvalidURL:
                known = False
            if not known:
                raise ValueError(f"address {address!r} is no URL such as http://127.0.0.1:8000")
        if form not in ("queries", "query"):
            raise ValueError(f"form must be 'queries' or 'query', got {form!r}")
        if tries < 1:
            raise ValueError(f"tries must be at least 1, got {tries}")
        urls = [
            address.rstrip("/").removesuffix("/retrieve") + "/retrieve" for address in addresses
        ]
        self._urls = itertools.cycle(urls)
        self._form = form
        policy = RetryPolicy(tries, backoff, LONGEST_WAIT, idempotent=True)
        self._http = HTTPClient(
            policy, timeout=timeout, connections=connections,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )  # fmt: skip

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """The passages of each query.

        Args:
            queries: Any number of texts.
            topk: The most passages of a query.

        Returns:
            One list per query, in the queries' order, best first.

        Raises:
            RetrievalError: Where the servers fail after all retries.
        """
        if not queries:
            return []
        if self._form == "queries":
            return await self._ask({"queries": list(queries)}, topk, len(queries))
        answers = await asyncio.gather(*(self._ask({"query": query}, topk, 1) for query in queries))
        return [answer[0] for answer in answers]

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def _ask(self, query: dict[str, Any], topk: int, count: int) -> list[list[Passage]]:
        body = {**query, "topk": topk, "return_scores": True}
        with contextlib.ExitStack() as queueing:
            queueing.enter_context(QUEUEING.get(contextlib.nullcontext)())
            try:
                url, content = await self._http.post(self._urls, body, queueing.close)
            except HTTPFailure as error:
                raise RetrievalError(f"{error.url}: {error}") from None
        try:
            return parse_result(parse_json(content.decode("utf-8", "replace")), count)
        except ValueError as error:
            raise RetrievalError(f"{url}: {error}") from None


def parse_result(answer: Any, count: int) -> list[list[Passage]]:
    """The passages of an answer ``{"result": [[..], ..]}``.

    Args:
        answer: Parsed JSON. An entry is a document, or ``{"document": .., "score": ..}``.
        count: How many lists it must hold.

    Raises:
        ValueError: For anything else.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or not all(isinstance(entries, list) for entries in result):
        raise ValueError('the answer holds no {"result": [[..], ..]}')
    if len(result) != count:
        raise ValueError(f"{len(result)} results for {count} queries")
    return [[_passage(entry) for entry in entries] for entries in result]


def _passage(entry: Any) -> Passage:
    scored = isinstance(entry, dict) and "document" in entry
    document = entry["document"] if scored else entry
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise ValueError('a document of the answer has no text under "contents"')
    contents = document["contents"]
    score = (entry.get("score") if scored else None) or 0.0
    try:
        score = float(score) if isinstance(score, int | float) else None
    except OverflowError:
        score = None
    if score is None:
        raise ValueError(f"a score of the answer is no number: {short(entry['score'])}")
    return Passage(str(document.get("id", contents)), contents, score)
