"""The engine behind HTTP: the OpenAI completions protocol, with token ids and policy versions.

    POST /v1/completions   GET /v1/models   GET /health

A text prompt is encoded as it stands: strings of control tokens in it stay text, no chat template
is applied. Beside OpenAI's fields: ``prompt`` may be token ids, ``top_k``, ``return_token_ids``
(adds ``token_ids`` and ``prompt_token_ids``), ``include_stop_str_in_output``,
``skip_special_tokens`` and ``stop_token_ids`` as in vLLM, and ``srpo_key`` (two 32-bit numbers, the
engine's own request key) instead of ``seed``. A stop string that contains the text of a special
token is looked for in the text with special tokens. Fields that would change the sampling and are
not supported are refused unless neutral.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

import numpy as np

from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Completion, Engine, Request
from srpo_jax.engine.requests import TOP_LOGPS
from srpo_jax.engine.stop_strings import text_before
from srpo_jax.recipe.errors import nearest

MAX_BODY = 8 << 20  # bytes: a million token ids
MAX_MESSAGE = 500  # characters of an error, which may quote the request
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings of a request, and characters of one
MAX_REQUESTS = 1024  # in the engine at once; one more is answered with 429
DEFAULT_MAX_TOKENS = 16  # OpenAI's
_LAST_SECONDS = 1.0  # that a server still answers when its engine has failed
_POLL_SECONDS = 0.1  # between looks at whether a waiting client has left

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,),
}  # fmt: skip
_KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids",
    "seed", "srpo_key", "logprobs", "return_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "user",
}  # fmt: skip


class BadRequest(ValueError):
    """A request that cannot be served: one line, the HTTP status and OpenAI's error code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class _Ticket:
    request: Request
    done: threading.Event = field(default_factory=threading.Event)
    result: Completion | Exception | None = None
    dropped: bool = False


class EnginePump:
    """One thread that owns an engine and steps it while requests of any thread wait."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._running: dict[int, _Ticket] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._stopping = False
        self.failure: Exception | None = None
        self.broken = threading.Event()  # set with the failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> _Ticket:
        """Queues a request; its ticket's event is set when the result is there.

        Raises BadRequest, 429 when too many are queued.
        """
        with self._lock:
            if self._count >= MAX_REQUESTS:
                raise BadRequest(f"{MAX_REQUESTS} requests are running, try again later", 429)
            self._count += 1
        ticket = _Ticket(request)
        self._inbox.put(ticket)
        return ticket

    def drop(self, ticket: _Ticket) -> None:
        """Cancels a request whose client has left."""
        ticket.dropped = True
        self._inbox.put(None)

    def stop(self) -> None:
        """Ends the thread after its present burst; what still waits fails."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take()
                for uid, ticket in list(self._running.items()):
                    if ticket.dropped:
                        self._engine.cancel(uid)
                        self._end(self._running.pop(uid), None)
                for uid, completion in self._engine.step():
                    self._end(self._running.pop(uid), completion)
        except Exception as error:  # every waiting client must hear of it, and /health
            self.failure = error
            self.broken.set()
        failure = self.failure or RuntimeError("the server is stopping")
        for ticket in self._running.values():
            self._end(ticket, failure)
        while not self._stopping or not self._inbox.empty():
            late = self._inbox.get()
            if late is not None:
                self._end(late, failure)

    def _take(self) -> None:
        """Moves what came in to the engine; waits for it while there is nothing to do."""
        wait = self._engine.idle
        while wait or not self._inbox.empty():
            ticket, wait = self._inbox.get(), False
            if ticket is None:
                continue
            try:
                self._running[self._engine.submit(ticket.request)] = ticket
            except ValueError as error:
                self._end(ticket, BadRequest(str(error)))

    def _end(self, ticket: _Ticket, result: Completion | Exception | None) -> None:
        with self._lock:
            self._count -= 1
        ticket.result = result
        ticket.done.set()


class EngineFailed(RuntimeError):
    """An engine that cannot take its steps; one line."""

    exit_code = 1

    def __init__(self, what: str, error: Exception | None):
        lines = str(error).strip().splitlines()
        super().__init__(f"{what}: {lines[0] if lines else type(error).__name__}")


def listen(host: str, port: int) -> socket.socket:
    """A socket at which clients wait until a server serves it. Raises OSError or UnicodeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


class CompletionServer(ThreadingHTTPServer):
    """Serves one engine under the model name ``name`` at ``listener`` (None: any free port of this
    machine's own address); ``run`` or ``serve_forever`` runs it.

    ``server_close`` also ends the engine's thread.
    """

    daemon_threads = True

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        name: str,
        listener: socket.socket | None = None,
    ):
        listener = listener or listen("127.0.0.1", 0)
        address = listener.getsockname()
        super().__init__(address, _Handler, bind_and_activate=False)
        self._host, self._port = address[:2]
        self.socket.close()  # the base class's own
        self.socket = listener
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.pump = EnginePump(engine)

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def run(self) -> NoReturn:
        """Serves until the engine breaks, and tells clients so for a moment.

        Raises EngineFailed.
        """
        thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)
        thread.start()
        try:
            self.pump.broken.wait()
            time.sleep(_LAST_SECONDS)
        finally:
            self.shutdown()
            thread.join()
        raise EngineFailed("the engine has failed", self.pump.failure)

    def server_close(self) -> None:
        super().server_close()
        self.pump.stop()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave in the middle are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a request to come in
    server: CompletionServer

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/health":
            failure = server.pump.failure
            if failure is None:
                self._send(200, {"status": "ok"})
            else:
                self._send_error(500, f"the engine has failed: {failure}")
        elif self.path == "/v1/models":
            entry = {
                "id": server.name, "object": "model", "created": 0, "owned_by": "srpo_jax",
                "max_model_len": server.engine.cache_tokens,
                "policy_version": server.engine.version,
            }  # fmt: skip
            self._send(200, {"object": "list", "data": [entry]})
        else:
            self._unknown_path()

    def do_POST(self) -> None:
        if self.path != "/v1/completions":
            self.close_connection = True  # its body is not read
            self._unknown_path()
            return
        try:
            answer = self._complete(self._body())
        except BadRequest as error:
            self._send_error(error.status, str(error), error.code)
        except ConnectionError:
            self.close_connection = True
        except RuntimeError as error:  # the engine's
            self._send_error(500, str(error))
        else:
            self._send(200, answer)

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]+", length):
            self.close_connection = True
            raise BadRequest("want a Content-Length", 411)
        if len(length) > 18 or int(length) > MAX_BODY:
            self.close_connection = True
            raise BadRequest(f"the body has {length} bytes, at most {MAX_BODY} are read", 413)
        try:
            body = json.loads(self.rfile.read(int(length)), parse_constant=_no_constant)
        except RecursionError:
            raise BadRequest("the body must be a JSON object: nested too deeply") from None
        except ValueError as error:
            raise BadRequest(f"the body must be a JSON object: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return body

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        server = self.server
        tokenizer = server.tokenizer
        model = body.get("model", server.name)
        if not isinstance(model, str):
            raise BadRequest('"model" must be a name')
        if model != server.name:
            raise BadRequest(
                f"no model {model!r} here, it is {server.name!r}", 404, "model_not_found"
            )
        request = parse_request(body, tokenizer)
        ticket = server.pump.submit(request)
        while not ticket.done.wait(_POLL_SECONDS):
            if self._client_left():
                server.pump.drop(ticket)
                raise ConnectionError
        done = ticket.result
        if isinstance(done, BadRequest):
            raise done
        if not isinstance(done, Completion):
            raise RuntimeError(f"no completion: {done}")
        if not np.isfinite(done.logps).all():
            raise RuntimeError("the model gives log-probs that are not finite")
        cuts = () if body.get("include_stop_str_in_output") else request.stop_strings
        special = body.get("skip_special_tokens") is False
        text = text_before(done.ids, cuts, tokenizer, special=special)
        choice: dict[str, Any] = {
            "index": 0, "text": text, "finish_reason": done.stop_reason, "logprobs": None,
        }  # fmt: skip
        if body.get("logprobs") is not None:
            choice["logprobs"] = _logprobs(done, tokenizer)
        if body.get("return_token_ids"):
            choice |= {"token_ids": done.ids, "prompt_token_ids": list(request.prompt_ids)}
        prompt, response = len(request.prompt_ids), len(done.ids)
        return {
            "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
            "created": int(time.time()), "model": server.name, "choices": [choice],
            "usage": {
                "prompt_tokens": prompt, "completion_tokens": response,
                "total_tokens": prompt + response,
            },
            "policy_version": done.version,
        }  # fmt: skip

    def _client_left(self) -> bool:
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _unknown_path(self) -> None:
        self._send_error(
            404, f"no {self.path} here: POST /v1/completions, GET /v1/models, GET /health"
        )

    def _send_error(self, status: int, message: str, code: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        message = " ".join(message[:MAX_MESSAGE].split())
        error = {"message": message, "type": kind, "param": None, "code": code}
        self._send(status, {"error": error})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses, in the same shape."""
        self.close_connection = True
        self._send_error(int(code), message or "bad request")

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def parse_request(body: dict[str, Any], tokenizer: ChatTokenizer) -> Request:
    """The engine's request of a body of /v1/completions. Raises BadRequest."""
    for name, value in body.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise BadRequest(f'"{name}": only {json.dumps(_NEUTRAL[name][0])} is supported')
        elif name not in _KNOWN:
            raise BadRequest(f'no field "{name[:64]}", {nearest(name[:64], _KNOWN)}')
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = tokenizer.encode_text(prompt)
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise BadRequest('"prompt" must be one string or one list of token ids')
    if not prompt:
        raise BadRequest('"prompt" is empty')
    top_k = _integer(body, "top_k", 0, -1, 2**31 - 1)
    key = body.get("srpo_key")
    if key is None:
        seed = _integer(body, "seed", None, -(2**63), 2**64 - 1)
        seed = secrets.randbits(64) if seed is None else seed
        key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    elif not isinstance(key, list) or len(key) != 2 or not all(map(_is_uint32, key)):
        raise BadRequest('"srpo_key" must be two whole numbers from 0 to 4294967295')
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise BadRequest('"stop" must be a string or a list of strings, none empty')
    if len(stop) > MAX_STOPS or any(len(s) > MAX_STOP for s in stop):
        raise BadRequest(
            f'"stop" can have at most {MAX_STOPS} strings of at most {MAX_STOP} characters'
        )
    stop_ids = body.get("stop_token_ids") or []
    whole = isinstance(stop_ids, list) and all(type(i) is int for i in stop_ids)
    if not whole or not set(stop_ids) <= set(tokenizer.stop_ids):
        raise BadRequest(f'"stop_token_ids" can only be of {list(tokenizer.stop_ids)}')
    for name in ("return_token_ids", "include_stop_str_in_output", "skip_special_tokens"):
        if body.get(name) not in (None, True, False):
            raise BadRequest(f'"{name}" must be true or false')
    return Request(
        prompt_ids=prompt,
        key=(key[0], key[1]),
        max_tokens=_integer(body, "max_tokens", DEFAULT_MAX_TOKENS, 1, 2**31 - 1),
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 1e-6, 1.0),
        top_k=max(top_k, 0),
        stop_strings=tuple(stop),
        top_logps=_integer(body, "logprobs", 0, 0, TOP_LOGPS),
    )


def _logprobs(done: Completion, tokenizer: ChatTokenizer) -> dict[str, Any]:
    tops = None
    if done.top_ids is not None and done.top_logps is not None:
        tops = [
            {tokenizer.decode([i]): logp for i, logp in zip(*step, strict=True)}
            for step in zip(done.top_ids.tolist(), done.top_logps.tolist(), strict=True)
        ]
    return {
        "tokens": [tokenizer.decode([i]) for i in done.ids],
        "token_logprobs": done.logps.tolist(),
        "top_logprobs": tops,
    }


def _integer(body: dict[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f'"{name}" must be a whole number from {low} to {high}')
    return value


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadRequest(f'"{name}" must be a number from {low:g} to {high:g}')
    return float(value)


def _is_uint32(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
