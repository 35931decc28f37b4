"""The engine behind HTTP, by the OpenAI completions protocol with token ids and policy versions.

POST /v1/completions   GET /v1/models   GET /health
"""

from __future__ import annotations

import asyncio
import socket

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.http_server import HEALTH, OPEN, Access, HTTPServer, http_app, listen, read_body, url_of
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Completion, Engine, Request
from srpo_jax.engine.async_engine import EngineClosed, EngineFull, EngineThread
from srpo_jax.engine.completions_api import (
    MAX_BODY_BYTES,
    CompletionRequest,
    ModelList,
    RefusedRequest,
    ServedModel,
    completion_answer,
    engine_request,
    error_content,
    parse_body,
)

MAX_REQUESTS = 1024  # in the engine at once; one more is answered with 429
RETRY_SECONDS = 1  # after which its client may come again
LAST_SECONDS = 1.0  # that a server still answers when its engine has failed
_POLL_SECONDS = 0.05  # between looks at whether it has


class EngineFailed(RuntimeError):
    """An engine that cannot take its steps; one line."""

    exit_code = 1

    def __init__(self, what: str, error: Exception | None):
        lines = str(error).strip().splitlines()
        super().__init__(f"{what}: {lines[0] if lines else type(error).__name__}")


class CompletionServer:
    """Serves one engine; ``run`` runs it, ``stop`` ends it from another thread.

    Args:
        engine: The engine, which belongs to the server while it runs.
        tokenizer: That of its model.
        name: What the model is called.
        listener: Where clients wait; None: any free port of this machine's own address.
        access: Who may ask.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        name: str,
        listener: socket.socket | None = None,
        access: Access = OPEN,
    ):
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self._listener = listener or listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._driver = EngineThread(engine, max_requests=MAX_REQUESTS)
        self._running: set[asyncio.Future[list[Completion]]] = set()
        routes = [
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route(HEALTH, self._health, methods=["GET"]),
        ]
        self._http = HTTPServer(http_app(routes, _refuse, access), _refuse, self._cancel)

    def run(self) -> None:
        """Serves until ``stop`` or a signal, or until clients have been told that the engine broke.

        Raises:
            EngineFailed: The engine broke.
        """
        asyncio.run(self._serve())
        if self._driver.failure is not None:
            raise EngineFailed("the engine has failed", self._driver.failure)

    def stop(self) -> None:
        """Ends ``run`` soon; requests that still wait are answered with 503."""
        self._http.should_exit = True

    async def _serve(self) -> None:
        async with self._driver:
            watch = asyncio.create_task(self._stop_when_broken())
            try:
                await self._http.serve(sockets=[self._listener])
            finally:
                watch.cancel()

    async def _stop_when_broken(self) -> None:
        while not self._driver.broken.is_set():
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(LAST_SECONDS)
        self.stop()

    def _cancel(self) -> None:
        for generation in self._running:
            generation.cancel()

    # ---- routes: long texts are read and written in threads, so that others are answered meanwhile

    async def _health(self, _: HTTPRequest) -> Response:
        if (failure := self._driver.failure) is not None:
            raise RefusedRequest(f"the engine has failed: {failure}", 500)
        return JSONResponse({"status": "ok"})

    async def _models(self, _: HTTPRequest) -> Response:
        model = ServedModel(
            id=self.name,
            max_model_len=self.engine.cache_tokens,
            policy_version=self.engine.version,
        )
        return JSONResponse(ModelList(data=[model]).model_dump())

    async def _complete(self, http: HTTPRequest) -> Response:
        data = await read_body(http, MAX_BODY_BYTES)
        body, request = await run_in_threadpool(self._read, data)
        done = await self._generate(request, http)
        answer = await run_in_threadpool(self._write, body, request, done)
        return Response(answer, media_type="application/json")

    def _read(self, data: bytes) -> tuple[CompletionRequest, Request]:
        body = parse_body(data)
        if body.model not in (None, self.name):
            raise RefusedRequest(
                f"no model {body.model!r} here, it is {self.name!r}", 404, "model_not_found"
            )
        return body, engine_request(body, self.tokenizer, self.engine.cache_tokens)

    def _write(self, body: CompletionRequest, request: Request, done: Completion) -> str:
        answer = completion_answer(body, request, done, self.tokenizer, self.name)
        return answer.model_dump_json(exclude_unset=True)

    async def _generate(self, request: Request, http: HTTPRequest) -> Completion:
        """The engine's completion, for as long as the client waits for it."""
        generation = asyncio.ensure_future(self._driver.generate([request]))
        self._running.add(generation)
        left = asyncio.ensure_future(http.receive())  # after the body: the client has left
        try:
            await asyncio.wait((generation, left), return_when=asyncio.FIRST_COMPLETED)
            if not generation.done():
                raise ClientDisconnect
            return generation.result()[0]
        except EngineFull as error:
            raise HTTPException(429, str(error), {"Retry-After": str(RETRY_SECONDS)}) from None
        except (asyncio.CancelledError, EngineClosed):
            raise RefusedRequest("no completion: the server is stopping", 503) from None
        except ClientDisconnect:
            raise
        except Exception as error:
            if isinstance(error, ValueError) and error is not self._driver.failure:
                raise RefusedRequest(str(error)) from None
            raise RefusedRequest(f"no completion: {error}", 500) from None
        finally:
            generation.cancel()
            left.cancel()
            self._running.discard(generation)


def _refuse(error: HTTPException) -> Response:
    return Response(
        error_content(error), error.status_code, error.headers, media_type="application/json"
    )
