"""The one HTTP client: what is tried again and when, time limits, connections, what is said."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envs import http_client
from envs.http_client import HTTPClient, HTTPFailure, RetryPolicy

ONCE = RetryPolicy(1)


class Handler(BaseHTTPRequestHandler):
    """Answers with the server's ``script`` of (status, headers, body), the last one for ever.

    A body may be a function that makes it, at once or in pieces.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        server.requests.append((self.client_address, dict(self.headers)))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        script = server.script
        status, headers, body = script.pop(0) if len(script) > 1 else script[0]
        if callable(body):
            body = body()
        self.send_response(status)
        pieces = [body] if isinstance(body, bytes) else body
        if "Content-Length" not in headers:
            headers = headers | {"Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            for piece in pieces:
                self.wfile.write(piece)

    do_GET = do_POST

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(*script):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.script, server.requests = list(script), []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def ask(*urls, policy=ONCE, times=1, method="post", **options):
    """The bodies of so many answers, one after the other."""

    async def main():
        client = HTTPClient(policy, **{"timeout": 5.0, "connections": 4} | options)
        try:
            found = []
            for _ in range(times):
                body = ({"a": 1},) if method == "post" else ()
                answer = await getattr(client, method)(itertools.cycle(urls), *body)
                found.append(answer.content)
            return found
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.fixture
def waits(monkeypatch):
    """The seconds between tries, none of which passes."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("envs.http_client.asyncio.sleep", sleep)
    return waits


# ---- what is tried again, and when ---------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 599])
def test_a_passing_status_is_tried_again(status, waits):
    with serving((status, {}, b""), (status, {}, b""), (200, {}, b"yes")) as server:
        assert ask(server.url, policy=RetryPolicy(3, 0.5)) == [b"yes"]
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("status", [302, 400, 401, 404, 418])
def test_any_other_is_a_refusal(status, waits):
    with serving((status, {"Location": "/"}, b'{"error": "no"}')) as server:
        with pytest.raises(HTTPFailure, match=f"^status {status}: no$") as caught:
            ask(server.url, policy=RetryPolicy(3, idempotent=True))
        assert len(server.requests) == 1
    assert (caught.value.cause, caught.value.status, waits) == ("refused", status, [])


@pytest.mark.parametrize(
    "asked, wait",
    [("3", 3.0), ("0.1", 0.5), ("999", 30.0), ("inf", 30.0), ("nan", 0.5), ("-1", 0.5),
     ("soon", 0.5), ("", 0.5), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.5)],
)  # fmt: skip
def test_retry_after_is_honoured_within_bounds(asked, wait, waits):
    with serving((503, {"Retry-After": asked}, b""), (200, {}, b"")) as server:
        ask(server.url, policy=RetryPolicy(2, 0.5))
    assert waits == [wait]


def test_retry_after_can_be_a_date(waits):
    date = email.utils.formatdate(time.time() + 20, usegmt=True)
    with serving((503, {"Retry-After": date}, b""), (200, {}, b"")) as server:
        ask(server.url, policy=RetryPolicy(2, 0.5))
    assert waits[0] == pytest.approx(20, abs=3)


def test_the_last_failure_is_told_with_the_number_of_tries(waits):
    with serving((503, {}, b""), (500, {}, b"two\nlines")) as server:
        with pytest.raises(HTTPFailure, match=r"^status 500: two lines \(2 tries\)$") as caught:
            ask(server.url, policy=RetryPolicy(2))
    assert (caught.value.cause, caught.value.url) == ("unreachable", server.url)
    with pytest.raises(HTTPFailure, match=r"^cannot connect: Connection refused \(1 try\)$"):
        ask(server.url)


def test_every_try_takes_the_next_url(waits):
    with serving((503, {}, b"")) as busy, serving((200, {}, b"yes")) as free:
        assert ask(busy.url, free.url, policy=RetryPolicy(2), times=2) == [b"yes"] * 2
    assert (len(busy.requests), len(free.requests)) == (2, 2)


@pytest.mark.parametrize("idempotent", [False, True])
def test_work_that_has_begun_is_asked_for_again_only_where_it_may_be_done_twice(idempotent, waits):
    policy = RetryPolicy(2, idempotent=idempotent)
    cut = (200, {"Content-Length": "9", "Connection": "close"}, b"half")

    def slow():
        time.sleep(0.5)
        return b"late"

    for first, cause, said in (
        (cut, "answer", "the answer broke off"),
        ((200, {}, slow), "timeout", "no whole answer within 0.2 s"),
    ):
        with serving(first, (200, {}, b"yes")) as server:
            if idempotent:
                assert ask(server.url, policy=policy, timeout=0.2) == [b"yes"]
            else:
                with pytest.raises(HTTPFailure, match=said) as caught:
                    ask(server.url, policy=policy, timeout=0.2)
                assert caught.value.cause == cause and len(server.requests) == 1


def test_an_answer_that_trickles_is_bounded_as_a_whole():
    """Every byte comes in time, the whole does not."""

    def trickle():
        for _ in range(100):
            time.sleep(0.05)
            yield b"x"

    with serving((200, {"Content-Length": "100"}, trickle)) as server:
        started = time.monotonic()
        with pytest.raises(HTTPFailure, match=r"within 0.3 s"):
            ask(server.url, timeout=0.3)
        assert time.monotonic() - started < 2


def test_an_answer_of_any_length_is_not_read(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_ANSWER", 1 << 20)
    with serving((200, {}, b"x" * (3 << 20))) as server:
        with pytest.raises(HTTPFailure, match="the answer has more than 1 MiB"):
            ask(server.url)
    with serving((404, {}, b"x" * (3 << 20))) as server:
        with pytest.raises(HTTPFailure, match=r"status 404: x{300}$"):
            ask(server.url)


@pytest.mark.parametrize("url", ["http://", "nonsense", "ftp://host/", "http://a..b:80/"])
def test_an_address_that_is_none(url, waits):
    with pytest.raises(HTTPFailure):
        ask(url)


# ---- connections ---------------------------------------------------------------------------------


def test_more_requests_than_connections_wait_and_their_limit_does_not():
    """Nine of 0.2 s over three connections: the last ones wait 0.4 s, the limit is 0.5 s."""
    now, most, started, lock = [], [], [], threading.Lock()

    def busy():
        with lock:
            now.append(1)
            most.append(len(now))
        time.sleep(0.2)
        with lock:
            now.pop()
        return b"yes"

    async def main(url):
        client = HTTPClient(ONCE, timeout=0.5, connections=3)
        begun = time.perf_counter()
        found = await asyncio.gather(
            *(
                client.post(
                    itertools.repeat(url), 1, lambda: started.append(time.perf_counter() - begun)
                )
                for _ in range(9)
            )
        )
        await client.close()
        return found

    with serving((200, {}, busy)) as server:
        assert [a.content for a in asyncio.run(main(server.url))] == [b"yes"] * 9
    assert max(most) == 3
    assert started[2] < 0.1 < 0.15 < started[3] and started[5] < started[6]


@pytest.mark.parametrize("keep_alive, connections", [(True, 1), (False, 3)])
def test_connections_serve_several_requests_only_if_they_are_to(keep_alive, connections):
    with serving((200, {}, b"")) as server:
        ask(server.url, times=3, keep_alive=keep_alive)
    assert len({address for address, _ in server.requests}) == connections


def test_one_client_serves_one_loop_after_the_other():
    client = HTTPClient(ONCE, timeout=5.0, connections=1)
    with serving((200, {}, b"yes")) as server:
        for _ in range(2):
            found = asyncio.run(client.get(itertools.repeat(server.url)))
            assert found == (server.url, b"yes")
        asyncio.run(client.close())  # of a loop that has ended: nothing to close


def test_headers_and_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with serving((200, {}, b"")) as server:
        ask(server.url, headers={"Authorization": "Bearer sesame"})
        ((_, headers),) = server.requests
    sent = {name.lower(): value for name, value in headers.items()}
    assert sent["authorization"] == "Bearer sesame"
    assert sent["content-type"] == "application/json" and sent["accept-encoding"] == "identity"


# ---- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, said",
    [
        (b'{"error": {"message": "bad\\n top_p"}}', "bad top_p"),
        (b'{"error": "bad"}', "bad"),
        (b'{"detail": "bad"}', "bad"),
        (b'{"object": "error", "message": "bad"}', "bad"),
        (b"<html>bad</html>", "<html>bad</html>"),
        (b'"bad"', '"bad"'),
        (b"[" * 100_000, "[" * 300),
        (b"\xff" * 400, "\ufffd" * 300),
    ],
)
def test_the_line_of_an_error_answer(content, said):
    assert http_client._message(content) == said


def test_the_reason_of_a_failed_connection():
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)")
    outer = RuntimeError("All connection attempts failed")
    outer.__cause__ = ExceptionGroup("attempts", [refused, OSError("other")])
    assert http_client._reason(outer) == "Connection refused"
    assert http_client._reason(ssl.SSLError(1, "bad certificate")) == "bad certificate"
    assert http_client._reason(ValueError("what")) == "ValueError what"
