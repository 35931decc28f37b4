"""A small engine behind the completion server, and clients of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import jax.numpy as jnp
import numpy as np
import pytest

from models.convert import load_hf
from models.qwen import split_params
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Engine, Request, request_key
from srpo_jax.engine.remote import RemoteEngine
from srpo_jax.engine.server import CompletionServer, EngineFailed

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny_team"
VERSION = 5


def engine_of(folder, tokenizer, **options):
    """An engine of a checkpoint in float32."""
    model, config = load_hf(folder, dtype=jnp.float32)
    options = {"slots": 4, "cache_tokens": 128, "burst": 4, "version": VERSION} | options
    return Engine(
        config, *split_params(model), vocab_size=tokenizer.vocab_size, stop_ids=tokenizer.stop_ids,
        tokenizer=tokenizer, **options,
    )  # fmt: skip


def tiny_engine(tokenizer):
    return engine_of(TINY, tokenizer)


@contextmanager
def serving(engine, tokenizer, **options):
    """A server that runs; it has ended afterwards, by itself if its engine broke."""
    server = CompletionServer(engine, tokenizer, "tiny", **options)

    def run():
        with suppress(EngineFailed):
            server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def remote_of(url, **options):
    options = {"model": "tiny", "version": VERSION, "timeout": 60.0, "backoff": 0.01} | options
    return RemoteEngine(url, **options)


def new_request(number=0, **options):
    ids = np.random.default_rng(number).integers(20, 500, 5 + number).tolist()
    options = {"max_tokens": 10} | options
    return Request(ids, request_key(7, 0, number), **options)


def ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    data = json.dumps(body) if isinstance(body, dict) else body
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def connected(server):
    """A socket to the server."""
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


# Fixtures: a module takes them by naming them, ``tokenizer = server_cases.tokenizer``.


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer(TINY)


@pytest.fixture(scope="module")
def server(tokenizer):
    """A running server of the tiny team's checkpoint."""
    with serving(tiny_engine(tokenizer), tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def local(tokenizer):
    """The engine of that server, but here."""
    return tiny_engine(tokenizer)
