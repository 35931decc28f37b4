"""What the HTTP servers share: who may ask, what is read of a body, clients that do not go on."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs import http_server
from envs.http_server import (
    MAX_NESTING,
    OPEN,
    Access,
    HTTPServer,
    check_nesting,
    http_app,
    listen,
    read_body,
    url_of,
)
from launch import serve_retriever

LIMIT = 100_000  # bytes of a body


def refuse(error):
    return JSONResponse({"refused": error.detail}, error.status_code, error.headers)


def an_app(access=OPEN):
    """Says how long a body is, or fails."""

    async def size(request):
        return JSONResponse(len(await read_body(request, LIMIT)))

    async def fail(request):
        raise ZeroDivisionError

    async def long(request):
        return Response(b"x" * (64 << 20))

    routes = [
        Route("/size", size, methods=["POST"]),
        Route("/health", size, methods=["GET"]),
        Route("/fail", fail),
        Route("/long", long),
    ]
    return http_app(routes, refuse, access)


def ask(method="POST", path="/size", headers=(), app=None, content=b""):
    async def send():
        transport = httpx.ASGITransport(app=app or an_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:80") as client:
            return await client.request(method, path, headers=dict(headers), content=content)

    return asyncio.run(send())


@contextmanager
def running(app):
    """The address of an application that runs."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    server = HTTPServer(app, refuse)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield address
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def address():
    with running(an_app()) as address:
        yield address


def exchange(address, *sent):
    """Status and content of the answer to raw bytes."""
    with socket.create_connection(address, timeout=20) as client:
        for part in sent:
            client.sendall(part)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return answer.status, json.loads(answer.read())


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1", "10.1.2.3:80", "[::1]:80", "node7",
     "Node7:80"],
)  # fmt: skip
def test_a_host_header_of_this_server_is_answered(host):
    app = an_app(Access(frozenset({"node7"})))
    assert ask(headers={"Host": host}, app=app).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "node7.evil.example", "", "[::1", "1.2.3", "localhost evil"],
)  # fmt: skip
def test_any_other_host_header_is_refused(host):
    """A page whose name was made to resolve to this machine sends its own name."""
    answer = ask(headers={"Host": host}, app=an_app(Access(frozenset({"node7"}))))
    assert answer.status_code == 403
    assert answer.json()["refused"].startswith("the Host header must name this server, got")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:80", 200),
        ("https://LOCALHOST:80", 200),
        ("http://localhost:81", 403),
        ("http://localhost", 403),
        ("http://evil.example", 403),
        ("http://localhost:80.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_a_page_of_another_origin_is_refused(origin, status):
    answer = ask(headers={"Host": "localhost:80", "Origin": origin})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer secret", 200),
        ("bearer  secret", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer s\xe9cret".encode("latin-1"), 401),
    ],
)
def test_a_token_must_be_the_servers(given, status):
    app = an_app(Access(token="secret"))
    headers = {} if given is None else {"Authorization": given}
    answer = ask(headers=headers, app=app)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer" and "secret" not in answer.text
    assert ask("GET", "/health", headers=headers, app=app).status_code == 200


def test_a_refusal_comes_before_the_path_is_looked_up():
    assert ask("GET", "/none", app=an_app(Access(token="x"))).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/none", 404), ("PUT", "/size", 405)]
)
def test_an_unknown_path_names_those_that_there_are(method, path, status):
    answer = ask(method, path)
    assert answer.status_code == status
    assert answer.json()["refused"].startswith(f"no {method} {path} here: POST /size, GET /health")


def test_a_defect_has_the_shape_of_an_error():
    answer = ask("GET", "/fail")
    assert answer.status_code == 500 and "defect" in answer.json()["refused"]


# ---- the command's options -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["node7:8000", "http://node7", "*", "", "a b"])
def test_a_host_that_no_client_can_send_is_one_line(capsys, name):
    with pytest.raises(SystemExit) as stop:
        serve_retriever.main(["factbook", "--allow-host", "node7", "--allow-host", name])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert f"--allow-host must be a name without scheme and port, got {name!r}" in error


@pytest.mark.parametrize("token", [None, "", "a b", "a\n", "pässword"])
def test_a_token_that_cannot_be_sent_is_one_line(monkeypatch, capsys, token):
    monkeypatch.delenv("THE_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("THE_TOKEN", token)
    with pytest.raises(SystemExit) as stop:
        serve_retriever.main(["factbook", "--port", "0", "--token-env", "THE_TOKEN"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "the variable THE_TOKEN must hold a token" in error
    assert not token or token not in error


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--token-env", "THE_TOKEN"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
    ],
)
def test_an_open_server_says_so_when_it_starts(monkeypatch, capsys, options, warned):
    class Started(Exception):
        pass

    def start(server, sockets):
        raise Started

    monkeypatch.setenv("THE_TOKEN", "secret")
    monkeypatch.setattr(HTTPServer, "run", start)
    with pytest.raises(Started):
        serve_retriever.main(["factbook", "--port", "0", *options])
    error = capsys.readouterr().err
    assert error.startswith("warning: whoever reaches 0.0.0.0:") == warned
    assert error.count("\n") == warned


# ---- bodies --------------------------------------------------------------------------------------

HEAD = b"POST /size HTTP/1.1\r\nHost: localhost\r\n"


def chunks(*sizes):
    parts = [b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts)


def test_a_body_of_no_announced_length_is_read_to_the_limit(address):
    end = b"0\r\n\r\n"
    assert exchange(address, chunks(1000, 2000), end) == (200, 3000)
    assert exchange(address, chunks(LIMIT - 1, 1), end) == (200, LIMIT)
    assert exchange(address, chunks(LIMIT, 1), end)[0] == 413


@pytest.mark.parametrize("length", [LIMIT + 1, 10**19])
def test_a_body_announced_too_long_is_refused_unread(address, length):
    status, answer = exchange(address, HEAD + b"Content-Length: %d\r\n\r\n" % length)
    assert status == 413 and "must have at most 100,000 bytes" in answer["refused"]


def test_a_client_that_sends_all_of_its_body_reads_why_it_was_refused(address):
    """And the connection goes on."""
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        client.sendall(HEAD + b"Content-Length: 2\r\n\r\nab")
        said = b""
        while not said.endswith(b"\r\n\r\n2"):
            said += client.recv(1 << 16)
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", said)] == [413, 200]


def test_a_body_without_an_end_is_read_no_longer_than_a_moment(address, monkeypatch):
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.3)
    started, sent = time.monotonic(), 0
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(chunks())
        with pytest.raises(OSError):
            while time.monotonic() < started + 10:
                client.sendall(b"1000\r\n%s\r\n" % (b"x" * 4096))
                sent += 1
                time.sleep(0.001)
    assert time.monotonic() - started < 5 and sent > 20


def test_a_body_that_does_not_come_is_408(address, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    status, answer = exchange(address, HEAD + b"Content-Length: 10\r\n\r\nabc")
    assert status == 408 and "within 0.2 s" in answer["refused"]


@pytest.mark.parametrize("sent", [b"", b"POST /size HT", HEAD + b"X-Long: "])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch, sent):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    with running(an_app()) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(sent)
        client.settimeout(0.05)
        for _ in range(100):
            try:
                assert client.recv(1) == b""
            except TimeoutError:
                client.sendall(sent[-1:])  # one byte after another
            except ConnectionError:
                break
            else:
                break
        else:
            raise AssertionError("the connection is still open")


def test_an_answers_body_does_not_wait_for_the_acknowledgement_of_its_head(monkeypatch):
    found = []

    class Protocol(http_server._Protocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(http_server, "_Protocol", Protocol)
    with running(an_app()) as address:
        assert exchange(address, HEAD + b"Content-Length: 0\r\n\r\n") == (200, 0)
    assert found and all(found)


def test_a_client_that_reads_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    with running(an_app()) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(2.5)
        read = 0
        with pytest.raises(ConnectionError):
            while part := client.recv(1 << 20):
                read += len(part)
            raise ConnectionError  # closed rather than reset
        assert read < 64 << 20


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"POST /size HTTP/1.1\r\n\r\n",  # no Host
        HEAD + b"Host: localhost\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"X: " + b"x" * 100_000,
        chunks() + b"zz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
def test_what_is_no_http_has_the_shape_of_an_error(address, capfd, sent):
    assert exchange(address, sent) == (
        400, {"refused": "the request must be HTTP/1.1, got no such"},
    )  # fmt: skip
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * MAX_NESTING + "]" * MAX_NESTING, False),
        ("[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1), True),
        ('{"a":' * (MAX_NESTING + 1), True),
        ('[{"a":' * (MAX_NESTING // 2) + "[", True),
        ("[" + "[]," * 5000 + "[]]", False),
        ('"' + "[" * 5000 + '"', False),
        (r'["\"' + "[" * 5000 + r'\\", 1]', False),
        (r'["\\", ' + "[" * 5000, True),
        ('"' + "[" * 5000, False),  # no JSON: the parser says so
    ],
)
def test_nesting_is_counted_outside_of_strings(text, deep):
    if deep:
        with pytest.raises(ValueError, match="nested too deeply"):
            check_nesting(text.encode())
    else:
        check_nesting(text.encode())


def test_a_server_leaves_the_logging_of_its_process_alone():
    """uvicorn's own set-up closes every handler that there is."""
    closed = []
    handler = logging.StreamHandler()
    handler.close = lambda: closed.append(handler)
    HTTPServer(an_app(), refuse)
    assert not closed


def test_an_address_is_written_as_clients_write_it():
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        listener = listen("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"
