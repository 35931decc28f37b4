"""The retrieval server: ``POST /retrieve`` over any retriever, as Search-R1 and Dr. MAS speak it.

    {"queries": ["..", ..], "topk": 3, "return_scores": true}      or one "query": ".."
    -> {"result": [[{"document": {"id": .., "contents": ..}, "score": ..}, ..], ..]}

Without ``return_scores`` the inner lists hold the documents themselves.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from envs.search.retrieval.base import Passage, RetrievalError, Retriever

DEFAULT_TOPK = 3
MAX_TOPK = 1000


def create_app(retriever: Retriever) -> Starlette:
    """The application; a bad request is answered with status 400 and ``{"error": ..}``."""

    async def retrieve(request: Request) -> JSONResponse:
        try:
            queries, topk, scored = _parsed(await request.json())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        try:
            found = await retriever.search(queries, topk)
        except RetrievalError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        return JSONResponse({"result": [[_entry(p, scored) for p in one] for one in found]})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def _parsed(body: Any) -> tuple[list[str], int, bool]:
    if not isinstance(body, dict) or ("query" in body) == ("queries" in body):
        raise ValueError('want a JSON object with either "query" or "queries"')
    queries = [body["query"]] if "query" in body else body["queries"]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError('"query" must be a string, "queries" a list of strings')
    topk = DEFAULT_TOPK if body.get("topk") is None else body["topk"]
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f'"topk" must be a whole number from 1 to {MAX_TOPK}')
    scored = body.get("return_scores", False)
    if not isinstance(scored, bool):
        raise ValueError('"return_scores" must be true or false')
    return queries, topk, scored


def _entry(passage: Passage, scored: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scored else document
