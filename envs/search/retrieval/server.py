"""The retrieval server: ``POST /retrieve`` over any retriever, as Search-R1 and Dr. MAS speak it.

    {"queries": ["..", ..], "topk": 3, "return_scores": true}      or one "query": ".."
    -> {"result": [[{"document": {"id": .., "contents": ..}, "score": ..}, ..], ..]}

Without ``return_scores`` the inner lists hold the documents themselves.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.search.retrieval.base import Passage, RetrievalError, Retriever
from envs.text_files import parse_json

DEFAULT_TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 4096  # a whole rollout batch in one request
MAX_PASSAGES = 50_000  # queries times topk
MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_CHARACTERS = 64 * 2**20


class _TooLarge(Exception):
    """A request past a limit of this server."""


def create_app(retriever: Retriever) -> Starlette:
    """The application; a refused request is answered with ``{"error": ..}``.

    Status 400: the body is no request. 413: it is past a limit of this module, so that no request
    takes more memory than a few times ``MAX_ANSWER_CHARACTERS``. 503: the search failed.
    """

    async def retrieve(request: Request) -> Response:
        try:
            queries, topk, scored = _parsed(await _body(request))
        except _TooLarge as error:
            return _refused(413, error)
        except ValueError as error:
            return _refused(400, error)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        try:
            return JSONResponse({"result": _result(await retriever.search(queries, topk), scored)})
        except _TooLarge as error:
            return _refused(413, error)
        except RetrievalError as error:
            return _refused(503, error)

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def _refused(status: int, reason: Exception) -> JSONResponse:
    return JSONResponse({"error": str(reason)}, status_code=status)


async def _body(request: Request) -> str:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _TooLarge(f"a body of more than {MAX_BODY_BYTES:,} bytes")
        parts.append(part)
    return b"".join(parts).decode("utf-8-sig")


def _parsed(text: str) -> tuple[list[str], int, bool]:
    body = parse_json(text)
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
        raise _TooLarge(f"{len(queries):,} queries, at most {MAX_QUERIES:,} are taken at once")
    if len(queries) * topk > MAX_PASSAGES:
        raise _TooLarge(
            f"{len(queries):,} queries with topk {topk:,}, at most {MAX_PASSAGES:,} passages are "
            "answered at once"
        )
    return queries, topk, scored


def _result(found: list[list[Passage]], scored: bool) -> list[list[dict[str, Any]]]:
    characters = sum(len(passage.contents) for one in found for passage in one)
    if characters > MAX_ANSWER_CHARACTERS:
        raise _TooLarge(
            f"an answer of {characters:,} characters, at most {MAX_ANSWER_CHARACTERS:,} are given "
            "at once"
        )
    return [[_entry(passage, scored) for passage in one] for one in found]


def _entry(passage: Passage, scored: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scored else document
