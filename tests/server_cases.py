"""A small engine behind the completion server, and clients of it."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from models.convert import load_hf
from models.qwen import split_params
from srpo_jax.engine import Engine, Request, request_key
from srpo_jax.engine.remote import RemoteEngine
from srpo_jax.engine.server import CompletionServer

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny_team"
VERSION = 5


def tiny_engine(tokenizer):
    model, config = load_hf(TINY, dtype=jnp.float32)
    return Engine(
        config, *split_params(model), vocab_size=tokenizer.vocab_size, stop_ids=tokenizer.stop_ids,
        slots=4, cache_tokens=128, burst=4, tokenizer=tokenizer, version=VERSION,
    )  # fmt: skip


@contextmanager
def serving(engine, tokenizer):
    server = CompletionServer(engine, tokenizer, "tiny")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
        assert not thread.is_alive()


def remote_of(url, **options):
    options = {"model": "tiny", "version": VERSION, "timeout": 20.0, "backoff": 0.01} | options
    return RemoteEngine(url, **options)


def new_request(number=0, **options):
    ids = np.random.default_rng(number).integers(20, 500, 5 + number).tolist()
    options = {"max_tokens": 10} | options
    return Request(ids, request_key(7, 0, number), **options)


def ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer
