"""An engine behind an HTTP server that speaks the OpenAI completions protocol (vLLM, SGLang, ours).

Token ids go out and token ids and log-probs come back; text never takes part. Every sampling
setting is sent with its value, neutral ones too, because servers otherwise fill in those of the
checkpoint's ``generation_config.json``. Two settings belong to the server: it must return token ids
(vLLM 0.10.2 or later: ``return_token_ids``), and its log-probs must be those of the distribution
sampled from (vLLM: ``--logprobs-mode processed_logprobs``, unless the temperature is 1 and neither
top_p nor top_k cuts).
"""

from __future__ import annotations

import collections
import http.client
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.workflow import EpisodeFailed
from srpo_jax.engine.requests import Completion, Request
from srpo_jax.engine.stop_strings import names_special
from srpo_jax.recipe.server_url import split_server_url

STEP_SECONDS = 0.005  # the longest that step waits: the rollout's other work goes on between steps
CONNECT_SECONDS = 10.0
BACKOFF_CAP = 30.0  # seconds
MAX_ANSWER = 64 << 20  # bytes
_NO_PROBABILITY = -9999.0  # vLLM's stand-in for minus infinity, which JSON cannot say


class RemoteEngineError(EpisodeFailed):
    """One request, or the first check of a server, failed.

    ``cause``: remote_url (no such address), remote_unreachable (connection errors, 429 and 5xx
    until the last try), remote_timeout, remote_refused (another 4xx), remote_model (the server has
    no such model), remote_answer (an answer that cannot be trained on), remote_stale,
    remote_weights, remote_cancelled.
    """

    exit_code = 2


class StalePolicy(RemoteEngineError):
    """The server sampled with another version of the weights than was asked for."""

    def __init__(self, url: str, expected: int, found: int | None):
        said = "no policy version" if found is None else f"policy version {found}"
        super().__init__("remote_stale", f"{url}: answered with {said}, expected {expected}")


class _Transient(Exception):
    """A failure before any token was received: the request may be sent again."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


@dataclass(kw_only=True)
class _Exchange:
    """One request to the server, over as many tries as it takes."""

    retries: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    socket: socket.socket | None = None


@dataclass
class _Call(_Exchange):
    """One generation."""

    uid: int
    request: Request
    version: int | None
    taken: bool = False


class RemoteEngine:
    """The engine protocol of the rollout over HTTP: ``submit``, ``step``, ``cancel``, ``idle``.

    ``url`` is a base such as ``http://127.0.0.1:8000``, with or without ``/v1``; ``model`` the name
    that the server knows. ``version`` is the policy version that every answer must name, None
    accepts any and servers that report none (completions then hold the reported one, or 0); it can
    be set between batches, and holds for what is submitted from then on. ``timeout`` seconds bound
    one try from sending to the last byte; ``retries`` more tries follow connection errors, 429 and
    5xx, after ``backoff``, 2 ``backoff``, 4 ``backoff``, ... seconds or what the server's
    Retry-After says, 30 at most. An answer that has begun is never asked for again. ``stop_ids``
    end a response beside those that the server knows; stop strings with the text of one of
    ``special_tokens`` are looked for in the text with special tokens. ``api_key`` is sent as a
    bearer token.

    Nothing is sent before ``check`` or ``submit``. The environment's proxies are not asked.
    Raises RemoteEngineError for a URL that is none.
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
                "want timeout > 0, retries >= 0 and max_concurrent >= 1, got "
                f"{timeout}, {retries} and {max_concurrent}"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = split_server_url(self.url)
        except ValueError as error:
            raise RemoteEngineError("remote_url", str(error)) from None
        self._host, self._port = parts.hostname or "", parts.port  # it has a host
        self._https, self._path = parts.scheme == "https", parts.path
        self.model, self.version, self.slots = model, version, max_concurrent
        self.stats: collections.Counter[str] = collections.Counter()
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._stop_ids = [int(i) for i in stop_ids]
        self._special_tokens = special_tokens
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._uids = 0
        self._calls: dict[int, _Call] = {}
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[_Call, Completion | Exception]] = (
            queue.SimpleQueue()
        )
        self._threads = 0

    def check(self) -> None:
        """Asks GET /v1/models whether the server has the model, at the expected version.

        Raises RemoteEngineError or StalePolicy.
        """
        answer = self._exchange("GET", "/v1/models", None, _Exchange())
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

    def submit(self, request: Request) -> int:
        """Queues a request and returns its uid. Raises ValueError for settings that make no sense;
        what the server refuses comes back from ``step``."""
        if not request.prompt_ids or request.max_tokens < 1:
            raise ValueError(
                f"want a prompt and max_tokens >= 1, got {len(request.prompt_ids)} prompt ids and "
                f"max_tokens {request.max_tokens}"
            )
        if request.top_logps:
            raise ValueError("top_logps cannot be had from a remote engine: it names texts, no ids")
        call = _Call(self._uids, request, self.version)
        self._uids += 1
        self._calls[call.uid] = call
        if self._threads < min(self.slots, len(self._calls)):
            self._threads += 1
            threading.Thread(target=self._work, name="remote-engine", daemon=True).start()
        self._waiting.put(call)
        return call.uid

    @property
    def idle(self) -> bool:
        return not self._calls

    @property
    def queued(self) -> set[int]:
        """Requests that none of the threads has taken yet, by uid."""
        return {uid for uid, call in self._calls.items() if not call.taken}

    def cancel(self, uid: int) -> None:
        """Drops a request and closes its connection, at which servers stop generating."""
        call = self._calls.pop(uid, None)
        if call is not None:
            call.stop.set()
            _shut(call.socket)

    def compile_count(self) -> int:
        """0: nothing is compiled here."""
        return 0

    def step(self) -> list[tuple[int, Completion | RemoteEngineError]]:
        """What finished, after at most STEP_SECONDS: a completion, or why that request has none."""
        if self.idle:
            return []
        ended = []
        try:
            ended.append(self._finished.get(timeout=STEP_SECONDS))
            while True:
                ended.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        results = []
        for call, result in ended:
            if self._calls.pop(call.uid, None) is None:
                continue  # cancelled
            self.stats["retries"] += call.retries
            if isinstance(result, Completion):
                self.stats["decode_tokens"] += len(result.ids)
                self.stats["prompt_tokens"] += len(call.request.prompt_ids)
            elif not isinstance(result, RemoteEngineError):
                raise result  # a defect of this module, not of the server
            else:
                self.stats[result.cause] += 1
            results.append((call.uid, result))
        return results

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits all, waits until all are done, and returns the completions in their order.

        Raises the first failure, once the other requests have ended.
        """
        order = [self.submit(request) for request in requests]
        results: dict[int, Completion | RemoteEngineError] = {}
        while not self.idle:
            results.update(self.step())
        completions = []
        for uid in order:
            result = results[uid]
            if isinstance(result, RemoteEngineError):
                raise result
            completions.append(result)
        return completions

    def close(self) -> None:
        """Cancels what runs and ends the threads."""
        for uid in list(self._calls):
            self.cancel(uid)
        for _ in range(self._threads):
            self._waiting.put(None)
        self._threads = 0

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.taken = True
            result: Completion | Exception
            try:
                body = json.dumps(self._body(call.request)).encode()
                answer = self._exchange("POST", "/v1/completions", body, call)
                result = parse_answer(answer, call.request, call.version, self.url)
            except Exception as error:  # handed to step, which tells failures from defects
                result = error
            self._finished.put((call, result))

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

    def _exchange(self, method: str, path: str, body: bytes | None, call: _Exchange) -> Any:
        """The JSON of a 200 answer, after as many tries as it takes and is allowed."""
        wait, failure = 0.0, ""
        for attempt in range(self._retries + 1):
            if attempt:
                call.retries = attempt
                wait = max(wait, self._backoff * 2 ** (attempt - 1))
                call.stop.wait(min(wait, BACKOFF_CAP))
            if call.stop.is_set():
                raise RemoteEngineError("remote_cancelled", f"{self.url}: cancelled")
            try:
                return self._try(method, path, body, call)
            except _Transient as error:
                wait, failure = error.wait, str(error)
        raise RemoteEngineError(
            "remote_unreachable", f"{self.url}: {failure} ({self._retries + 1} tries)"
        )

    def _try(self, method: str, path: str, body: bytes | None, call: _Exchange) -> Any:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(CONNECT_SECONDS, self._timeout))
        deadline = time.monotonic() + self._timeout
        late = RemoteEngineError(
            "remote_timeout", f"{self.url}: no whole answer within {self._timeout:g} s"
        )
        try:
            try:
                connection.connect()
            except OSError as error:
                raise _Transient(f"cannot connect: {_reason(error)}") from None
            call.socket = sock = connection.sock
            if call.stop.is_set():
                raise RemoteEngineError("remote_cancelled", f"{self.url}: cancelled")
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection.request(method, self._path + path, body, self._headers)
                response = connection.getresponse()
            except TimeoutError:
                raise late from None
            except (OSError, http.client.HTTPException) as error:
                raise _Transient(f"connection lost: {_reason(error)}") from None
            status = response.status
            try:
                text = _read(response, sock, deadline)
            except TimeoutError:
                raise late from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                if status == 200:
                    raise self._bad_answer(f"broke off: {_reason(error)}") from None
                raise _Transient(f"status {status}") from None
        finally:
            call.socket = None
            connection.close()
        if status == 429 or status >= 500:
            raise _Transient(f"status {status}: {_message(text)}", _retry_after(response))
        if status != 200:
            said = _message(text)
            unknown = status == 404 and "model" in said.lower()
            raise RemoteEngineError(
                "remote_model" if unknown else "remote_refused",
                f"{self.url}: model {self.model!r}: status {status}: {said}",
            )
        try:
            return json.loads(text)
        except ValueError:
            raise self._bad_answer("is no JSON") from None

    def _bad_answer(self, what: str) -> RemoteEngineError:
        return RemoteEngineError("remote_answer", f"{self.url}: the answer {what}")


def parse_answer(answer: Any, request: Request, version: int | None, url: str) -> Completion:
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


def _read(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> bytes:
    """The whole body. Raises TimeoutError past the deadline, ValueError past MAX_ANSWER."""
    text = bytearray()
    while response.length != 0 and not response.isclosed():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = response.read1(1 << 16)
        if not piece:
            break
        text += piece
        if len(text) > MAX_ANSWER:
            raise ValueError(f"more than {MAX_ANSWER >> 20} MiB")
    if response.length:
        raise http.client.IncompleteRead(bytes(text), response.length)
    return bytes(text)


def _shut(sock: socket.socket | None) -> None:
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__} {error}".rstrip()


def _retry_after(response: http.client.HTTPResponse) -> float:
    try:
        return max(float(response.getheader("Retry-After", "0")), 0.0)
    except ValueError:  # a date
        return 0.0


def _message(text: bytes) -> str:
    """The one line that an error answer says, in OpenAI's shape or any other."""
    said: Any = text.decode("utf-8", "replace")
    try:
        found = json.loads(said)
        error = found.get("error", found)
        said = error if isinstance(error, str) else error.get("message", error.get("detail", said))
    except (ValueError, AttributeError):
        pass
    return " ".join(str(said).split())[:300]
