"""A retriever behind HTTP servers that speak ``POST /retrieve``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import httpx

from envs.search.retrieval.base import Passage, RetrievalError
from envs.text_files import parse_json, short

_BACKOFF_CAP = 4.0


class HTTPRetriever:
    """Asks one of several equal servers, in turn; a retry goes to the next one.

    ``addresses`` are bases such as ``http://127.0.0.1:8000`` or whole ``.../retrieve`` URLs.
    ``form`` is what the servers take: ``queries`` (a batch in one request) or ``query`` (one
    request per query, sent side by side). Connection errors, time-outs (``timeout`` seconds a try)
    and 5xx answers are retried up to ``tries`` tries in all, after ``backoff``, 2 ``backoff``, 4
    ``backoff``, ... seconds, 4 at most. Anything else that is not a result, and the last failure,
    raise RetrievalError. The environment's proxies are not asked: the servers are the user's own.
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
        self._timeout = timeout
        self._tries = tries
        self._backoff = backoff
        self._limits = httpx.Limits(max_connections=connections)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """One list of passages per query, in the queries' order."""
        if not queries:
            return []
        if self._form == "queries":
            return await self._ask({"queries": list(queries)}, topk, len(queries))
        answers = await asyncio.gather(*(self._ask({"query": query}, topk, 1) for query in queries))
        return [answer[0] for answer in answers]

    async def close(self) -> None:
        """Closes the connection pool."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    def _pool(self) -> httpx.AsyncClient:
        """The connection pool of the running event loop: connections do not outlive their loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = httpx.AsyncClient(
                timeout=self._timeout, limits=self._limits, trust_env=False
            )
        return self._client

    async def _ask(self, query: dict[str, Any], topk: int, count: int) -> list[list[Passage]]:
        body = {**query, "topk": topk, "return_scores": True}
        failure = ""
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(min(self._backoff * 2 ** (attempt - 1), _BACKOFF_CAP))
            url = next(self._urls)
            try:
                response = await self._pool().post(url, json=body)
            except httpx.RequestError as error:
                failure = f"{url}: {type(error).__name__} {error}".rstrip()
                continue
            if response.status_code >= 500:
                failure = f"{url}: status {response.status_code}"
                continue
            if response.status_code != 200:
                raise RetrievalError(f"{url}: status {response.status_code} {response.text[:200]}")
            try:
                return parse_result(parse_json(response.text), count)
            except ValueError as error:
                raise RetrievalError(f"{url}: {error}") from None
        raise RetrievalError(f"{failure} ({self._tries} tries)")


def parse_result(answer: Any, count: int) -> list[list[Passage]]:
    """The passages of an answer ``{"result": [[..], ..]}`` with ``count`` lists.

    An entry is a document, or ``{"document": .., "score": ..}``. Raises ValueError for anything
    else.
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
