"""Requests of all kinds to the retrieval server, its limits, and the command that starts it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from envs.http_server import Access, HTTPServer, listen, url_of
from envs.search.retrieval import server
from envs.search.retrieval.base import Passage, RetrievalError
from envs.search.retrieval.bm25 import BM25Retriever
from launch import serve, serve_retriever
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_retriever
from srpo_jax.recipe.sections import RetrieverConfig

ROOT = Path(__file__).resolve().parent.parent
ANIMALS = ["a cat purrs", "a dog plays", "a bird flies", "a fish swims"]
APP = server.create_app(BM25Retriever([Passage(str(i), text) for i, text in enumerate(ANIMALS)]))


def post(body: bytes | dict | list, app=APP) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/retrieve", content=content)

    return asyncio.run(send())


def counts(body: bytes | dict) -> list[int]:
    answer = post(body)
    assert answer.status_code == 200, answer.text
    return [len(passages) for passages in answer.json()["result"]]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"queries": ["", "  ", "zebra", "cat"]}, [0, 0, 0, 1]),
        ({"queries": []}, []),
        ({"query": "a", "topk": 1000}, [4]),  # more than there are
        ({"query": "a", "topk": 1}, [1]),
        ({"query": "a", "topk": None}, [3]),
        ({"query": 'cat AND +dog -fish (bird)^2 ~a*? \\ : " [x TO y]'}, [3]),
        ({"query": "cat\x00dog \U0001f600"}, [2]),
        ({"query": "cat " * 50_000}, [1]),  # 200,000 characters
        ({"queries": ["cat"] * 1000}, [1] * 1000),
        (b'\xef\xbb\xbf{"query": "cat"}', [1]),
        (b'{"query": "cat", "unknown": {"deep": [[1]]}}', [1]),
    ],
)
def test_an_odd_request_gets_lists_of_the_right_count(body, want):
    assert counts(body) == want


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"query": "a", "topk": 0}, 400, "topk"),
        ({"query": "a", "topk": 1001}, 400, "topk"),
        ({"query": "a", "topk": "3"}, 400, "topk"),
        ({"query": "a", "topk": 3.0}, 400, "topk"),
        (b'{"query": "a", "topk": NaN}', 400, "topk"),
        (b"{", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b'{"query": "caf\xe9"}', 400, "utf-8"),
        ('{"query": "a"}'.encode("utf-16"), 400, "utf-8"),
        (b"[" * 100_000, 400, "nested too deep"),
        (b'{"query": "a", "x": ' + b'{"a":' * 100_000, 400, "nested too deep"),
        (b'{"query": "a", "topk": ' + b"9" * 5000 + b"}", 400, "thousands of digits"),
        (b'{"query": "\\ud800"}', 400, "surrogate"),
        ({"queries": ["a", None]}, 400, "list of strings"),
        ({"queries": [["a"]]}, 400, "list of strings"),
        # Past a limit: the third took 7.9 GB.
        ({"query": "x" * 5_000_000}, 413, "must have at most 4,194,304 bytes"),
        ({"queries": ["a"] * 4097}, 413, "4,097 queries, at most 4,096 are taken"),
        ({"queries": ["a"] * 20_000, "topk": 1000}, 413, "20,000 queries"),
        ({"queries": ["a"] * 51, "topk": 1000}, 413, "51 queries with topk 1,000, at most 50,000"),
    ],
)
def test_a_request_past_a_limit_is_refused_with_its_reason(body, status, reason):
    answer = post(body)
    assert answer.status_code == status and reason in answer.json()["error"]


def test_an_answer_of_long_passages_is_refused(monkeypatch):
    monkeypatch.setattr(server, "MAX_ANSWER_CHARACTERS", 60)
    app = server.create_app(BM25Retriever([Passage(str(i), "cat " * 10) for i in range(3)]))
    assert post({"query": "cat", "topk": 1}, app).status_code == 200
    answer = post({"query": "cat", "topk": 2}, app)
    assert answer.status_code == 413 and "an answer of 80 characters" in answer.json()["error"]


def test_a_body_is_not_read_past_the_limit():
    """A body without an end, in parts of one MiB."""
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 2**20

    async def parts():
        body = endless()
        scope = {"type": "http", "method": "POST", "path": "/retrieve"}
        scope["headers"] = [(b"host", b"localhost")]
        answers = []

        async def receive():
            return {"type": "http.request", "body": await anext(body), "more_body": True}

        async def send(message):
            answers.append(message)

        await APP(scope, receive, send)
        return answers[0]["status"]

    assert asyncio.run(parts()) == 413 and sent == 5


# ---- the command ---------------------------------------------------------------------------------


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "launch.serve_retriever", *args]


def test_the_command_serves_is_quiet_on_disconnects_and_ends_on_a_signal(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "a", "contents": "cat"}) + "\n")
    process = subprocess.Popen(
        command(str(path), "--port", "0"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        announced = process.stdout.readline()
        assert announced.startswith("1 passages, POST http://127.0.0.1:"), process.stderr.read()
        url = announced.split()[-1]
        port = int(url.split(":")[2].split("/")[0])

        request = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        for sent in (request % 1000 + b"{", request % 16 + b'{"query": "cat"}'):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(sent)
                # Closing at once, with a reset.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert httpx.post(url, json={"query": "cat"}, trust_env=False).json() == {
            "result": [[{"id": "a", "contents": "cat"}]]
        }

        # The port is taken: nothing is announced, not even before a corpus that is not there.
        second = subprocess.run(
            command(str(tmp_path / "none.jsonl"), "--port", str(port)),
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert second.returncode == 2 and second.stdout == ""
        assert f"cannot listen on 127.0.0.1:{port}: " in second.stderr
        assert second.stderr.count("\n") == 1

        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=20)
        assert (process.returncode, out, error) == (0, "", "")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--port", "-1"], "--port must be from 0 to 65535, got -1"),
        (["--port", "x"], "--port"),
        (["--host", "no host"], "cannot listen on no host:"),
        (["--host", "a" * 70], "cannot listen on aaa"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1:"),  # not of this machine
    ],
)
def test_an_address_that_cannot_be_served_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        serve_retriever.main(["factbook", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_the_two_servers_have_ports_of_their_own(capsys):
    """By their help, which names the defaults."""
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    help_of_serve = capsys.readouterr().out
    assert str(serve_retriever.DEFAULT_PORT) not in help_of_serve and "8000" in help_of_serve


def test_the_recipes_retriever_sends_the_token_that_a_server_asks_for(monkeypatch):
    app = server.create_app(
        BM25Retriever([Passage(str(i), text) for i, text in enumerate(ANIMALS)]),
        Access(token="s3cret"),
    )
    listener = listen("127.0.0.1", 0)
    http = HTTPServer(app, server.refuse)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    settings = {"kind": "http", "urls": [url_of(listener)], "retries": 0}

    def found(config):
        return asyncio.run(build_retriever(config).search(["cat"], 1))[0][0].contents

    try:
        keyed = RetrieverConfig(**settings, api_key_env="TINY_TOKEN")
        monkeypatch.setenv("TINY_TOKEN", "s3cret")
        assert found(keyed) == "a cat purrs"
        with pytest.raises(RetrievalError, match="status 401"):
            found(RetrieverConfig(**settings))
        monkeypatch.setenv("TINY_TOKEN", "two words")
        with pytest.raises(RecipeError, match=r"^retriever\.api_key_env: TINY_TOKEN must hold"):
            found(keyed)
        monkeypatch.delenv("TINY_TOKEN")
        with pytest.raises(RecipeError, match=r"^retriever\.api_key_env: TINY_TOKEN is not set"):
            found(keyed)
    finally:
        http.should_exit = True
        thread.join(10)
    with pytest.raises(ValidationError, match="asks no server"):
        RetrieverConfig(corpus="factbook", api_key_env="TINY_TOKEN")
