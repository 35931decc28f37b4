"""The retrieval server: ``POST /retrieve`` over any retriever, as Search-R1 and Dr. MAS speak it.

    {"queries": ["..", ..], "topk": 3, "return_scores": true}      or one "query": ".."
    -> {"result": [[{"document": {"id": .., "contents": ..}, "score": ..}, ..], ..]}

Without ``return_scores`` the inner lists hold the documents themselves.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.http_server import OPEN, Access, check_nesting, http_app, read_body
from envs.search.retrieval.base import Passage, RetrievalError, Retriever
from envs.text_files import parse_json

DEFAULT_TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 4096  # a whole rollout batch in one request
MAX_PASSAGES = 50_000  # queries times topk
MAX_BODY_BYTES = 4 << 20
MAX_ANSWER_CHARACTERS = 64 << 20


def create_app(retriever: Retriever, access: Access = OPEN) -> Starlette:
    """The application; a refused request is answered with ``{"error": ..}``.

    Status 400: the body is no request. 413: it is past a limit of this module, so that no request
    takes more memory than a few times ``MAX_ANSWER_CHARACTERS``. 503: the search failed. 401 and
    403: ``access`` does not allow it.

    Args:
        retriever: What searches.
        access: Who may ask.
    """

    async def retrieve(request: Request) -> Response:
        data = await read_body(request, MAX_BODY_BYTES)
        try:
            queries, topk, scored = await run_in_threadpool(_parsed, data)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        try:
            found = await retriever.search(queries, topk)
        except RetrievalError as error:
            raise HTTPException(503, str(error)) from None
        return await run_in_threadpool(lambda: JSONResponse({"result": _result(found, scored)}))

    return http_app([Route("/retrieve", retrieve, methods=["POST"])], refuse, access)


def refuse(error: HTTPException) -> JSONResponse:
    """The answer to a request that failed."""
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def _too_large(what: str) -> HTTPException:
    return HTTPException(413, what)


def _parsed(data: bytes) -> tuple[list[str], int, bool]:
    check_nesting(data)
    body = parse_json(data.decode("utf-8-sig"))
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
    if len(queries) > MAX_QUERIES:
        raise _too_large(f"{len(queries):,} queries, at most {MAX_QUERIES:,} are taken at once")
    if len(queries) * topk > MAX_PASSAGES:
        raise _too_large(
            f"{len(queries):,} queries with topk {topk:,}, at most {MAX_PASSAGES:,} passages are "
            "answered at once"
        )
    return queries, topk, scored


def _result(found: list[list[Passage]], scored: bool) -> list[list[dict[str, Any]]]:
    characters = sum(len(passage.contents) for one in found for passage in one)
    if characters > MAX_ANSWER_CHARACTERS:
        raise _too_large(
            f"an answer of {characters:,} characters, at most {MAX_ANSWER_CHARACTERS:,} are given "
            "at once"
        )
    return [[_entry(passage, scored) for passage in one] for one in found]


def _entry(passage: Passage, scored: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scored else document
