"""An engine behind an HTTP server that speaks the OpenAI completions protocol (vLLM, SGLang, ours).

Token ids go out and token ids and log-probs come back; text never takes part. Every sampling
setting is sent with its value, neutral ones too, because servers otherwise fill in those of the
checkpoint's ``generation_config.json``. Two settings belong to the server: it must return token ids
(vLLM 0.10.2 or later: ``return_token_ids``), and its log-probs must be those of the distribution
sampled from (vLLM: ``--logprobs-mode processed_logprobs``, unless the temperature is 1 and neither
top_p nor top_k cuts).
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import math
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from envs.http_client import HTTPClient, HTTPFailure, RetryPolicy
from envs.workflow import EpisodeFailed
from srpo_jax.engine.async_engine import run_anywhere
from srpo_jax.engine.requests import Completion, Request
from srpo_jax.engine.stop_strings import names_special
from srpo_jax.recipe.servers import split_server_url

_NO_PROBABILITY = -9999.0  # vLLM's stand-in for minus infinity, which JSON cannot say


class RemoteEngineError(EpisodeFailed):
    """One request, or the first check of a server, failed.

    ``cause``: remote_url (no such address), remote_unreachable (connection errors, 429 and 5xx
    until the last try), remote_timeout, remote_refused (another 4xx), remote_model (the server has
    no such model), remote_answer (an answer that cannot be trained on), remote_stale,
    remote_weights.
    """

    exit_code = 2


class StalePolicy(RemoteEngineError):
    """The server sampled with another version of the weights than was asked for."""

    def __init__(self, url: str, expected: int, found: int | None):
        said = "no policy version" if found is None else f"policy version {found}"
        super().__init__("remote_stale", f"{url}: answered with {said}, expected {expected}")


class RemoteEngine:
    """An ``AsyncEngine`` over HTTP. Nothing is sent before ``check`` or ``generate``, and the
    environment's proxies are not asked.

    Args:
        url: A base such as ``http://127.0.0.1:8000``, with or without ``/v1``.
        model: The name that the server knows.
        version: The policy version that every answer must name. None accepts any, and servers that
            report none (completions then hold the reported one, or 0). It can be set at any time,
            and holds for what is generated from then on.
        timeout: Seconds of one try, from sending to the last byte.
        retries: Tries after the first that follow connection errors, 429 and 5xx. An answer that
            has begun is never asked for again.
        backoff: Seconds before the first of them; they double, up to 30. A server's Retry-After
            counts where it is longer.
        max_concurrent: Requests at once, the ``slots``.
        stop_ids: Ids that end a response beside those that the server knows.
        special_tokens: Stop strings with the text of one of them are looked for in the text with
            special tokens.
        api_key: Sent as a bearer token.

    Raises:
        RemoteEngineError: For a URL that is none.
        ValueError: For a number out of its range.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        version: int | None,
        timeout: float = 600.0,
        retries: int = 3,
        backoff: float = 0.5,
        max_concurrent: int = 64,
        stop_ids: Sequence[int] = (),
        special_tokens: Collection[str] = (),
        api_key: str | None = None,
    ):
        if timeout <= 0 or retries < 0 or max_concurrent < 1:
            raise ValueError(
                "timeout must be positive, retries at least 0 and max_concurrent at least 1, got "
                f"{timeout}, {retries} and {max_concurrent}"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            split_server_url(self.url)
        except ValueError as error:
            raise RemoteEngineError("remote_url", str(error)) from None
        self.model, self.version, self.slots = model, version, max_concurrent
        self.stats: collections.Counter[str] = collections.Counter()
        self._stop_ids = [int(i) for i in stop_ids]
        self._special_tokens = special_tokens
        self._http = HTTPClient(
            RetryPolicy(retries + 1, backoff), timeout=timeout, connections=max_concurrent,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, keep_alive=False,
        )  # fmt: skip

    def check(self) -> None:
        """Asks GET /v1/models whether the server has the model, at the expected version.

        Raises:
            RemoteEngineError: Where it has not, or does not answer (StalePolicy for the version).
        """
        answer = run_anywhere(self._models())
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
            raise RemoteEngineError(
                "remote_answer", f'{self.url}/v1/models: no list of models under "data"'
            )
        models = {str(entry.get("id")): entry for entry in data}
        if self.model not in models:
            raise RemoteEngineError(
                "remote_model",
                f"{self.url}: no model {self.model!r}, it serves: {', '.join(sorted(models))}",
            )
        _check_version(self.url, self.version, models[self.model])

    def set_weights(self, params: dict, version: int) -> None:
        """Raises RemoteEngineError: the weights are the server's own."""
        raise RemoteEngineError(
            "remote_weights",
            f"{self.url}: cannot be given weights from here; load version {version} in the server, "
            "then set this engine's version",
        )

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """``generate`` from code that is no coroutine."""

        async def generate() -> list[Completion]:
            async with self:
                return await self.generate(requests)

        return run_anywhere(generate())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def generate(
        self, requests: Sequence[Request], started: Callable[[], object] = lambda: None
    ) -> list[Completion]:
        """As ``AsyncEngine.generate``; cancelled, it closes its connections, at which servers stop
        generating.

        Raises:
            ValueError: For settings that make no sense.
            RemoteEngineError: The first failure of a request; the others are cancelled.
        """
        for request in requests:
            _check_request(request)
        queued = len(requests)

        def one_started() -> None:
            nonlocal queued
            queued -= 1
            if not queued:
                started()

        tasks = [asyncio.create_task(self._one(request, one_started)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: Request, started: Callable[[], object]) -> Completion:
        version = self.version
        urls = itertools.repeat(f"{self.url}/v1/completions")
        try:
            _, content = await self._http.post(urls, self._body(request), started)
            completion = parse_completion(_parsed(content, self.url), request, version, self.url)
        except HTTPFailure as failure:
            error = self._error(failure)
            self.stats[error.cause] += 1
            raise error from None
        except RemoteEngineError as error:
            self.stats[error.cause] += 1
            raise
        finally:
            self.stats["retries"] = self._http.retries
        self.stats["decode_tokens"] += len(completion.ids)
        self.stats["prompt_tokens"] += len(request.prompt_ids)
        return completion

    async def _models(self) -> Any:
        try:
            _, content = await self._http.get(itertools.repeat(f"{self.url}/v1/models"))
        except HTTPFailure as failure:
            raise self._error(failure) from None
        finally:
            await self._http.close()
        return _parsed(content, self.url)

    def _error(self, failure: HTTPFailure) -> RemoteEngineError:
        if failure.cause != "refused":
            return RemoteEngineError(f"remote_{failure.cause}", f"{self.url}: {failure}")
        unknown = failure.status == 404 and "model" in str(failure).lower()
        return RemoteEngineError(
            "remote_model" if unknown else "remote_refused",
            f"{self.url}: model {self.model!r}: {failure}",
        )

    def _body(self, request: Request) -> dict[str, Any]:
        a, b = (int(half) for half in request.key)
        body = {
            "model": self.model,
            "prompt": [int(i) for i in request.prompt_ids],
            "max_tokens": request.max_tokens,
            "n": 1,
            "temperature": float(request.temperature),
            "top_p": float(request.top_p),
            "top_k": request.top_k if request.top_k > 0 else -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": (a | b << 32) & (2**63 - 1),  # servers take a signed 64-bit number
            "srpo_key": [a, b],
            "logprobs": 0,
            "return_token_ids": True,
        }
        if request.stop_strings:
            body |= {"stop": list(request.stop_strings), "include_stop_str_in_output": True}
            if any(names_special(s, self._special_tokens) for s in request.stop_strings):
                body["skip_special_tokens"] = False  # else servers look where they are left out
        if self._stop_ids:
            body["stop_token_ids"] = self._stop_ids
        return body


def parse_completion(answer: Any, request: Request, version: int | None, url: str) -> Completion:
    """The completion that an answer of /v1/completions holds.

    Raises StalePolicy, or RemoteEngineError (remote_answer) that names what is missing or wrong:
    what is trained on must be exactly what was sampled.
    """

    def bad(what: str) -> RemoteEngineError:
        return RemoteEngineError("remote_answer", f"{url}: the answer {what}")

    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise bad('holds no single choice under "choices"')
    found = _check_version(url, version, answer)
    choice = choices[0]
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise bad("holds no token ids (vLLM 0.10.2 or later returns them)")
    if not all(type(i) is int and i >= 0 for i in ids):
        raise bad("holds token ids that are no whole numbers")
    if len(ids) > request.max_tokens:
        raise bad(f"holds {len(ids)} tokens, at most {request.max_tokens} were asked for")
    logps = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logps, list):
        raise bad("holds no log-probs")
    if len(logps) != len(ids):
        raise bad(f"holds {len(ids)} token ids and {len(logps)} log-probs")
    for place, logp in enumerate(logps):
        number = isinstance(logp, int | float) and not isinstance(logp, bool)
        if not number or not math.isfinite(logp) or logp <= _NO_PROBABILITY:
            raise bad(f"holds the log-prob {logp} at token {place}, which is not finite")
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and prompt != list(request.prompt_ids):
        raise bad("belongs to another prompt: the server cut or changed the prompt's ids")
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise bad(f'ended for the reason {reason!r}, neither "stop" nor "length"')
    return Completion(ids, np.asarray(logps, np.float32), reason, found or 0)


def _check_version(url: str, expected: int | None, answer: dict[str, Any]) -> int | None:
    found = answer.get("policy_version")
    found = found if type(found) is int else None
    if expected is not None and found != expected:
        raise StalePolicy(url, expected, found)
    return found


def _check_request(request: Request) -> None:
    if not request.prompt_ids or request.max_tokens < 1:
        raise ValueError(
            "a request must have a prompt and max_tokens of at least 1, got "
            f"{len(request.prompt_ids)} prompt ids and max_tokens {request.max_tokens}"
        )
    if request.top_logps:
        raise ValueError("top_logps must be 0 with a remote engine: it names texts, not ids")


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RemoteEngineError("remote_answer", f"{url}: the answer is no JSON") from None
