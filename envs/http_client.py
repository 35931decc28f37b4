"""Requests to HTTP servers of the user's own, with one retry policy, for tools and remote engines.

Connection errors, 429 and 5xx are retried with exponential backoff, or after what the server's
Retry-After says. Nothing that a server says in place of an answer is ever part of a prompt: it is
an ``HTTPFailure``, for a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import httpx

CONNECT_SECONDS = 10.0
MAX_ANSWER = 64 << 20  # bytes
MAX_MESSAGE = 300  # characters of what a server says in an error


@dataclass(frozen=True)
class RetryPolicy:
    """Which failures are tried again, and when.

    Attributes:
        tries: At most so many requests, 1 or more.
        backoff: Seconds before the second try; they double from try to try.
        longest_wait: The most seconds between two tries, whatever the server asks for.
        idempotent: Whether the server may do the work twice: then time-outs and answers that break
            off are retried too.
    """

    tries: int
    backoff: float = 0.5
    longest_wait: float = 30.0
    idempotent: bool = False

    def wait(self, retry: int, retry_after: float) -> float:
        """Seconds before a retry (numbered from 1), where a server asks for ``retry_after``."""
        return min(max(retry_after, self.backoff * 2 ** (retry - 1)), self.longest_wait)


class HTTPFailure(Exception):
    """A request without a usable answer, after as many tries as the policy allows; one line.

    Attributes:
        cause: "unreachable" (connection errors, 429 and 5xx), "timeout", "refused" (another
            status), "answer" (one that breaks off or is too long) or "url" (no such address).
        url: What was asked last.
        status: Of the answer; None without one.
    """

    def __init__(
        self,
        cause: Literal["unreachable", "timeout", "refused", "answer", "url"],
        url: str,
        detail: str,
        *,
        status: int | None = None,
        retry_after: float = 0.0,
    ):
        super().__init__(detail)
        self.cause, self.url, self.status, self.retry_after = cause, url, status, retry_after


class Answer(NamedTuple):
    """The body of a 200 answer, and who gave it."""

    url: str
    content: bytes


@dataclass(frozen=True)
class _Pool:
    """The connections of one event loop, which they do not outlive."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    places: asyncio.Semaphore


class HTTPClient:
    """Asks servers within a retry policy. The environment's proxies are not asked, and redirects
    are refusals.

    Args:
        policy: What is tried again.
        timeout: Seconds of one try, from connecting to the last byte.
        connections: Requests at once; more wait for their turn, which ``timeout`` does not count.
        headers: Sent with every request.
        keep_alive: Whether a connection serves several requests. Without, none is lost to a server
            that closes it just then.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        timeout: float,
        connections: int,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = True,
    ):
        self.retries = 0  # sent so far
        self._policy, self._timeout, self._connections = policy, timeout, connections
        self._headers = {
            "Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {}),
        }  # fmt: skip
        self._keep_alive = keep_alive
        self._pool: _Pool | None = None

    async def post(
        self, urls: Iterator[str], body: Any, started: Callable[[], object] = lambda: None
    ) -> Answer:
        """POSTs ``body`` as JSON.

        Args:
            urls: The next one is asked at every try.
            body: What ``json.dumps`` takes.
            started: Called when a connection is free for it.

        Raises:
            HTTPFailure: Where there is no such answer.
        """
        return await self._request("POST", urls, json.dumps(body).encode(), started)

    async def get(self, urls: Iterator[str]) -> Answer:
        """A GET, as ``post``."""
        return await self._request("GET", urls, None, lambda: None)

    async def close(self) -> None:
        """Closes the connections of the running loop; those of an earlier one ended with it."""
        pool, self._pool = self._pool, None
        if pool is not None and pool.loop is asyncio.get_running_loop():
            await pool.client.aclose()

    def _connect(self) -> _Pool:
        loop = asyncio.get_running_loop()
        if self._pool is None or self._pool.loop is not loop:
            client = httpx.AsyncClient(
                headers=self._headers, trust_env=False, follow_redirects=False,
                timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, self._timeout)),
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=self._connections if self._keep_alive else 0,
                ),
            )  # fmt: skip
            self._pool = _Pool(loop, client, asyncio.Semaphore(self._connections))
        return self._pool

    async def _request(
        self, method: str, urls: Iterator[str], body: bytes | None, started: Callable[[], object]
    ) -> Answer:
        pool, policy = self._connect(), self._policy
        async with pool.places:
            started()
            for attempt in range(1, policy.tries + 1):
                url = next(urls)
                try:
                    return Answer(url, await self._try(pool.client, method, url, body))
                except HTTPFailure as error:
                    if not self._is_passing(error):
                        raise
                    if attempt == policy.tries:
                        raise HTTPFailure(
                            error.cause, error.url, f"{error} ({_tries(attempt)})",
                            status=error.status,
                        ) from None  # fmt: skip
                    self.retries += 1
                    await asyncio.sleep(policy.wait(attempt, error.retry_after))
        raise AssertionError("a policy has at least one try")

    def _is_passing(self, error: HTTPFailure) -> bool:
        """Whether another try may succeed and is allowed."""
        if error.cause in ("timeout", "answer"):
            return self._policy.idempotent
        return error.cause == "unreachable"

    async def _try(
        self, client: httpx.AsyncClient, method: str, url: str, body: bytes | None
    ) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    request = client.build_request(method, url, content=body)
                    response = await client.send(request, stream=True)
                except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                    raise HTTPFailure("url", url, str(error)) from None
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    detail = f"cannot connect: {_reason(error)}"
                    raise HTTPFailure("unreachable", url, detail) from None
                except httpx.RequestError as error:
                    detail = f"connection lost: {_reason(error)}"
                    raise HTTPFailure("unreachable", url, detail) from None
                async with contextlib.aclosing(response):
                    return await _body(response, url)
        except TimeoutError:
            detail = f"no whole answer within {self._timeout:g} s"
            raise HTTPFailure("timeout", url, detail) from None


async def _body(response: httpx.Response, url: str) -> bytes:
    """The body of a 200 answer. Raises HTTPFailure for any other and for one that breaks off."""
    status = response.status_code
    content = bytearray()
    try:
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > MAX_ANSWER and status == 200:
                raise HTTPFailure("answer", url, f"the answer has more than {MAX_ANSWER >> 20} MiB")
            if len(content) > MAX_ANSWER:
                break
    except httpx.RequestError as error:
        if status == 200:
            raise HTTPFailure("answer", url, f"the answer broke off: {_reason(error)}") from None
    if status == 200:
        return bytes(content)
    said = _message(bytes(content))
    raise HTTPFailure(
        "unreachable" if status == 429 or status >= 500 else "refused", url,
        f"status {status}: {said}" if said else f"status {status}",
        status=status, retry_after=_retry_after(response.headers.get("Retry-After", "0")),
    )  # fmt: skip


def _tries(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"


def _reason(error: BaseException) -> str:
    """Why a connection failed, in the operating system's words where it has some."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one for each address of a host
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.strerror:
            theirs = isinstance(cause, ssl.SSLError | socket.gaierror)  # numbers of their own
            return cause.strerror if theirs or not cause.errno else os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__} {error}".rstrip()


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header: a number, or a date; 0 for anything else."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return seconds if seconds > 0 else 0.0


def _message(content: bytes) -> str:
    """The one line that an error answer says, in OpenAI's shape or any other."""
    said: Any = content.decode("utf-8", "replace")
    try:
        found = json.loads(said)
        error = found.get("error", found)
        said = error if isinstance(error, str) else error.get("message", error.get("detail", said))
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(said).split())[:MAX_MESSAGE]
