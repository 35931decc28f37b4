"""What the project's HTTP servers share: who may ask them, what they read, and how they run.

A browser on the same machine can be made to send requests to a server that only listens there, by
any page that it shows. Two headers that a page cannot forge stop it: ``Origin`` names the page's
own site (cross-site request forgery), and ``Host`` the name under which it found the server (DNS
rebinding: a name of the attacker's that resolves to this machine).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0  # for the head of a request, and for a client that reads none of its answer
BODY_SECONDS = 60.0  # for the body
UNREAD_SECONDS = 2.0  # that the body of a request already refused is read and thrown away
STOP_SECONDS = 5  # for answers that are under way when the server stops
MAX_NESTING = 1000  # arrays and objects of JSON within each other
HEALTH = "/health"  # needs no token: probes have none

Refuse = Callable[[HTTPException], Response]  # a server's own shape of an error


@dataclass(frozen=True)
class Access:
    """Who may ask a server.

    Attributes:
        hosts: Names by which clients may call it, besides ``localhost`` and literal addresses,
            which nobody can make resolve to another machine.
        token: What clients must send as ``Authorization: Bearer TOKEN``; None: nothing.
    """

    hosts: frozenset[str] = frozenset()
    token: str | None = None

    def check(self, path: str, headers: Headers) -> None:
        """Raises HTTPException (403 or 401, one line) for a request that may not be answered."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise HTTPException(
                403, f"the Host header must name this server, got {host[:100]!r} (--allow-host)"
            )
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
                raise HTTPException(
                    403, f"a browser's Origin must be this server, got {origin[:100]!r}"
                )
        if self.token is None or path == HEALTH:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not same:
            raise HTTPException(
                401, "the header Authorization must be Bearer and the server's token",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def _is_own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # half an IPv6 address
            return False
        if name == "localhost" or name in {own.lower().rstrip(".") for own in self.hosts}:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


OPEN = Access()  # to whoever reaches it, but not by way of a browser's page


def http_app(routes: Sequence[Route], refuse: Refuse, access: Access) -> Starlette:
    """An application that answers whoever has access.

    Args:
        routes: Its paths; an endpoint raises HTTPException for what it does not answer.
        refuse: Makes the answer to an exception, of unknown paths and defects as well.
        access: Who may ask.
    """
    there = ", ".join(
        f"{method} {route.path}"
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    )

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if type(error) is HTTPException and error.status_code in (404, 405):  # the router's
            what = f"no {request.method} {request.url.path} here: {there}"
            error = HTTPException(error.status_code, what, error.headers)
        return refuse(error)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # which nobody reads

    async def defect(request: Request, error: Exception) -> Response:
        return refuse(HTTPException(500, "a defect of the server, which has logged it"))

    return Starlette(
        routes=routes,
        middleware=[Middleware(_AccessControl, access, refuse)],
        exception_handlers={HTTPException: refused, ClientDisconnect: left, Exception: defect},
    )


class _AccessControl:
    """ASGI middleware that answers in the application's place where ``access`` refuses."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse):
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        try:
            self._access.check(scope["path"], Headers(scope=scope))
        except HTTPException as error:
            answer = self._refuse(error)
        await answer(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, whether its length was announced or not.

    Raises:
        HTTPException: 413 for more than ``limit`` bytes, of which no more are read; 408 when it is
            not whole within BODY_SECONDS.
        ClientDisconnect: Nobody is there to answer.
    """
    too_large = HTTPException(413, f"the body must have at most {limit:,} bytes, got more")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        late = f"the body must be there within {BODY_SECONDS:g} s"
        raise HTTPException(408, late, {"Connection": "close"}) from None
    return bytes(body)


_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_DEEPER = np.zeros(256, np.int8)
_DEEPER[list(b"[{")], _DEEPER[list(b"]}")] = 1, -1


def check_nesting(text: bytes) -> None:
    """Raises ValueError for JSON of more than MAX_NESTING levels.

    A parser that recurses has a limit by its stack, which differs among Python's versions.
    """
    if text.count(b"[") + text.count(b"{") > MAX_NESTING:
        steps = _DEEPER[np.frombuffer(_STRINGS.sub(b"", text), np.uint8)]
        if steps.cumsum(dtype=np.int32).max(initial=0) > MAX_NESTING:
            raise ValueError(f"nested too deeply, more than {MAX_NESTING} levels")


def listen(host: str, port: int) -> socket.socket:
    """A socket at which clients wait until a server serves it. Raises OSError or UnicodeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket, as clients of this machine write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HTTPServer(uvicorn.Server):
    """Runs an application; ``run(sockets=[listener])`` ends by a signal or ``should_exit``.

    Args:
        app: What ``http_app`` made.
        refuse: Makes the answer to what is no HTTP.
        on_stop: Called at the end, before requests that still run are waited for.
    """

    def __init__(self, app: Starlette, refuse: Refuse, on_stop: Callable[[], Any] | None = None):
        protocol = type("Protocol", (_Protocol,), {"refuse": staticmethod(refuse)})
        # uvicorn's log_config would close every logging handler of the process.
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", loop="asyncio",
                log_config=None, log_level="error", access_log=False, server_header=False,
                timeout_keep_alive=int(HEAD_SECONDS), timeout_graceful_shutdown=STOP_SECONDS,
            )
        )  # fmt: skip
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop:
            self._on_stop()
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """A connection whose client must go on: uvicorn itself waits for a head without an end."""

    refuse: Refuse
    _awaited: str | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # Head and body are two writes, and asyncio leaves Nagle's algorithm on for connections of a
        # listener that `socket.create_server` made: the body would wait 40 ms for the head's ACK.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._await_client()

    def handle_events(self) -> None:
        super().handle_events()
        self._await_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline:
            self._deadline.cancel()

    def _await_client(self) -> None:
        """Closes the connection unless the client does in time what is waited for now."""
        awaited, seconds = None, HEAD_SECONDS
        if self.flow.write_paused:
            awaited = "read its answer"
        elif self.conn.their_state is h11.IDLE:
            awaited = "send a head"
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            awaited, seconds = "end a refused body", UNREAD_SECONDS
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._deadline:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort) if awaited else None

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP in the server's own shape of an error."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the request has had its answer
            return
        answer = type(self).refuse(HTTPException(400, "the request must be HTTP/1.1, got no such"))
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
