"""The completion server: OpenAI's protocol, and every bad request by its reason."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.http_server import Access
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Completion, Request
from srpo_jax.engine import server as completion_server
from srpo_jax.engine.completions_api import (
    MAX_BODY_BYTES,
    MAX_MESSAGE_CHARACTERS,
    MAX_TOKEN_BYTES,
    engine_request,
    parse_body,
)
from tests import server_cases
from tests.server_cases import (
    VERSION,
    ask,
    connected,
    new_request,
    serving,
    tiny_engine,
)

tokenizer, server, local = server_cases.tokenizer, server_cases.server, server_cases.local


def test_text_prompts_and_usage(server, local, tokenizer):
    text = "Compute 2 + 3"
    status, answer = ask(
        server, "POST", "/v1/completions",
        {"prompt": text, "max_tokens": 6, "temperature": 0, "logprobs": 2, "model": "tiny"},
    )  # fmt: skip
    ids = tokenizer.encode_text(text)
    want = local.run([Request(ids, (0, 0), 6, temperature=0.0)])[0]
    choice = answer["choices"][0]
    assert status == 200 and choice["text"] == tokenizer.decode(want.ids)
    assert "token_ids" not in choice
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(want.logps.tolist(), abs=1e-6)
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(want.ids))


def test_a_seed_fixes_the_draw(server):
    def draw(seed):
        body = {"prompt": [30, 31], "max_tokens": 12, "seed": seed, "return_token_ids": True}
        return ask(server, "POST", "/v1/completions", body)[1]["choices"][0]["token_ids"]

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(4)}) > 1


def test_models_and_health(server):
    assert ask(server, "GET", "/health") == (200, {"status": "ok"})
    status, answer = ask(server, "GET", "/v1/models")
    entry = answer["data"][0]
    assert (status, entry["id"], entry["policy_version"]) == (200, "tiny", VERSION)


@pytest.mark.parametrize(
    "body, said",
    [
        (b"{", "must be a JSON object"),
        (b'{"prompt": [1], "temperature": NaN}', "must be a JSON object"),
        ({}, '"prompt" must be'),
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": [True]}, '"prompt" must be'),
        ({"prompt": [5000]}, "5000"),
        ({"prompt": [1], "max_tokens": 0}, '"max_tokens" must be'),
        ({"prompt": [1] * 120}, "the limit is"),
        ({"prompt": [1], "temperature": -1}, '"temperature" must be'),
        ({"prompt": [1], "top_p": 0}, '"top_p" must be'),
        ({"prompt": [1], "top_k": 1.5}, '"top_k" must be'),
        ({"prompt": [1], "n": 2}, '"n": only 1'),
        ({"prompt": [1], "stream": True}, '"stream": only false'),
        ({"prompt": [1], "stop": [""]}, '"stop" must be'),
        ({"prompt": [1], "stop": ["x"] * 65}, '"stop" can have at most 64'),
        ({"prompt": [1], "stop": "x" * 1025}, "at most 1024 characters"),
        ({"prompt": [1], "skip_special_tokens": 3}, '"skip_special_tokens" must be'),
        ({"prompt": [1], "stop_token_ids": [9]}, '"stop_token_ids" can only'),
        ({"prompt": [1], "srpo_key": [1]}, '"srpo_key" must be'),
        ({"prompt": [1], "temprature": 0}, "did you mean `temperature`"),
    ],
)
def test_bad_requests_are_400_in_one_line(server, body, said):
    status, answer = ask(server, "POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert said in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_other_refusals(server):
    assert ask(server, "POST", "/v1/chat", {})[0] == 404
    assert ask(server, "GET", "/")[0] == 404
    status, answer = ask(server, "POST", "/v1/completions", {"prompt": [1], "model": "x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    size = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    assert ask(server, "POST", "/v1/completions", None, size)[0] == 413


def test_an_engine_that_breaks_is_said_to_all(tokenizer):
    class Broken:
        idle, version, cache_tokens = True, 0, 8

        def submit(self, request):
            self.idle = False
            return 0

        def step(self):
            raise RuntimeError("out of memory")

    with serving(Broken(), tokenizer) as server:
        for _ in range(2):
            status, answer = ask(server, "POST", "/v1/completions", {"prompt": [1]})
            assert status == 500 and "out of memory" in answer["error"]["message"]
        assert ask(server, "GET", "/health")[0] == 500


BODY = {"prompt": [30, 31], "max_tokens": 6, "seed": 3, "return_token_ids": True}
DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff\xfe"}', "utf-8"),
        (b"\x1f\x8b\x08\x00", "utf-8"),
        (b"prompt=1&max_tokens=2", "must be a JSON object"),
        (b'{"prompt": [1], "max_tokens": ' + b"9" * 5000 + b"}", "must be a JSON object"),
        (b'{"prompt": [1], "temperature": 1e400}', '"temperature" must be'),
        ({"prompt": [1], "temperature": 1e-40}, "temperature must be 0 or at least"),
        ({"prompt": [1], "temperature": "1"}, '"temperature" must be'),
        ({"prompt": [1], "max_tokens": -5}, '"max_tokens" must be'),
        ({"prompt": [1], "max_tokens": 2**31 - 1}, "the limit is"),
        ({"prompt": [1], "top_p": 1.5}, '"top_p" must be'),
        ({"prompt": [1], "n": 10**9}, '"n": only 1'),
        ({"prompt": [1, -7]}, "prompt id -7"),
        ({"prompt": [2**70]}, str(2**70)),
        ({"prompt": [1], "logprobs": 10**9}, '"logprobs" must be'),
        ({"prompt": [1], "seed": 2**70}, '"seed" must be'),
        ({"prompt": [1], "model": json.loads(DEEP)}, '"model" must be a name'),
        ({"prompt": [1], "stop_token_ids": json.loads(DEEP)}, '"stop_token_ids" can only'),
        ({"prompt": [1], "stop": json.loads(DEEP)}, '"stop" must be'),
        ({"prompt": [1], "stop": ["x"] * 100_000}, '"stop" can have at most'),
        ({"prompt": [1], "y" * 1_000_000: 1}, 'no field "yyyy'),
    ],
    ids=str,
)
def test_a_hostile_request_is_400_and_the_engine_goes_on(server, body, said):
    before = ask(server, "POST", "/v1/completions", BODY)[1]["choices"]
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = ask(server, "POST", "/v1/completions", body, headers)
    assert status == 400 and said in answer["error"]["message"]
    assert len(answer["error"]["message"]) <= MAX_MESSAGE_CHARACTERS
    assert ask(server, "POST", "/v1/completions", BODY)[1]["choices"] == before


@pytest.mark.parametrize(
    "length, status",
    [(str(MAX_BODY_BYTES + 1), 413), ("9" * 5000, 400), ("-1", 400), ("1e3", 400), ("\u0663", 400)],
)
def test_a_body_of_no_sensible_length(server, length, status):
    with connected(server) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {length}\r\n\r\n"
        client.sendall(head.encode())
        assert client.makefile("rb").readline().split()[1] == str(status).encode()


@pytest.mark.parametrize("family", ["ids", "a", " ", "<|", "1", "\n", "é", "<|im_start|>"])
def test_four_times_the_request_takes_about_four_times_as_long(tokenizer, family):
    """Merging the bytes of one long word takes n log n; a quadratic reader would take 16 times."""

    def seconds(size):
        prompt = [5] * size if family == "ids" else (family * size)[:size]
        body, best = json.dumps({"prompt": prompt}).encode(), float("inf")
        for _ in range(5):
            started = time.thread_time()
            engine_request(parse_body(body), tokenizer, 4096)
            best = min(best, time.thread_time() - started)
        return best

    # Measured again where it is too long: a busy machine passes, a quadratic reader stays.
    pairs = ((seconds(65_536), seconds(16_384)) for _ in range(5))
    assert any(long < max(2e-3, 8 * short) for long, short in pairs)


def test_log_probs_that_are_no_numbers_are_no_answer(tokenizer):
    engine = tiny_engine(tokenizer)
    engine._weights = jax.tree.map(lambda a: a * jnp.nan, engine._weights)
    with serving(engine, tokenizer) as server:
        status, answer = ask(server, "POST", "/v1/completions", BODY)
    assert status == 500 and "not finite" in answer["error"]["message"]


# ---- limits, and who may ask ---------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server, monkeypatch):
    most = 128 * MAX_TOKEN_BYTES
    texts = []
    encode = ChatTokenizer.encode_text

    def encode_text(tokenizer, text):
        texts.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(ChatTokenizer, "encode_text", encode_text)
    for text in ("é" * (most // 2), "é" * (most // 2) + "a"):
        status, answer = ask(server, "POST", "/v1/completions", {"prompt": text})
        assert status == 400
    assert answer["error"]["message"] == (
        '"prompt" must have at most 32,768 bytes (128 tokens of 256), got 32,769'
    )
    assert texts == ["é" * (most // 2)]


def test_no_token_is_longer_than_the_bound_takes(tokenizer):
    ids = range(tokenizer.vocab_size)
    assert max(len(tokenizer.decode([i], special=True).encode()) for i in ids) <= MAX_TOKEN_BYTES


def test_a_body_in_chunks_is_read(server):
    def parts(data):
        return (data[at : at + 10] for at in range(0, len(data), 10))

    want = ask(server, "POST", "/v1/completions", BODY)[1]["choices"]
    status, answer = ask(server, "POST", "/v1/completions", parts(json.dumps(BODY).encode()))
    assert (status, answer["choices"]) == (200, want)
    long = (b" " * (1 << 20) for _ in range(9))
    status, answer = ask(server, "POST", "/v1/completions", long)
    assert status == 413 and "at most 8,388,608 bytes" in answer["error"]["message"]


def test_half_of_a_surrogate_pair_is_quoted_in_ascii(server):
    status, answer = ask(server, "POST", "/v1/completions", b'{"prompt": [1], "\\ud800": 1}')
    assert status == 400 and 'no field "\ud800"' in answer["error"]["message"]
    body = b'{"prompt": "\\ud800", "max_tokens": 1}'
    assert ask(server, "POST", "/v1/completions", body)[0] == 200  # as the replacement character


def test_unknown_methods_and_what_is_no_http_are_errors_in_openais_shape(server):
    status, answer = ask(server, "PUT", "/v1/completions", {})
    assert status == 405 and answer["error"]["type"] == "invalid_request_error"
    assert "POST /v1/completions, GET /v1/models, GET /health" in answer["error"]["message"]
    status, answer = ask(server, "GET", "/health", headers={"Content-Length": "x"})
    assert status == 400 and "HTTP/1.1" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"Authorization": "Bearer sesame", "Host": "node7"}, 200),
    ],
)
def test_a_stranger_is_refused_in_openais_shape(tokenizer, headers, status):
    access = Access(frozenset({"node7"}), "sesame")
    with serving(Stuck(), tokenizer, access=access) as server:
        found, answer = ask(server, "GET", "/v1/models", headers=headers)
    assert found == status
    if status != 200:
        assert answer["error"]["type"] == "invalid_request_error"


# ---- many clients, and clients that leave --------------------------------------------------------


class Stuck:
    """An engine whose requests end when they are ``released`` or cancelled."""

    version, cache_tokens, slots = VERSION, 128, 4

    def __init__(self):
        self.running, self.cancelled, self.released = {}, [], threading.Event()

    @property
    def idle(self):
        return not self.running

    @property
    def queued(self):
        return set()

    def submit(self, request):
        uid = len(self.running) + len(self.cancelled)
        self.running[uid] = request
        return uid

    def cancel(self, uid):
        del self.running[uid]
        self.cancelled.append(uid)

    def step(self):
        if not self.released.wait(0.01):
            return []
        done = [(uid, Completion([5], np.zeros(1, np.float32), "stop", 1)) for uid in self.running]
        self.running.clear()
        return done


def in_threads(calls):
    """The results of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_64_clients_at_once_get_what_each_alone_would(server, local):
    requests = [new_request(i, temperature=1.0, max_tokens=6) for i in range(64)]
    bodies = [
        {
            "prompt": list(request.prompt_ids), "srpo_key": list(request.key), "max_tokens": 6,
            "return_token_ids": True,
        }
        for request in requests
    ]  # fmt: skip
    calls = [partial(ask, server, "POST", "/v1/completions", body) for body in bodies]
    found = [answer["choices"][0]["token_ids"] for _, answer in in_threads(calls)]
    assert found == [done.ids for done in local.run(requests)]


def test_one_request_too_many_is_told_when_to_come_again(tokenizer, monkeypatch):
    monkeypatch.setattr(completion_server, "MAX_REQUESTS", 2)
    engine = Stuck()
    with serving(engine, tokenizer) as server, ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(ask, server, "POST", "/v1/completions", {"prompt": [1]}) for _ in range(2)
        ]
        until(lambda: len(engine.running) == 2)
        with connected(server) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            client.sendall(f'{head}{15}\r\n\r\n{{"prompt": [1]}}'.encode())
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert "at most 2" in json.loads(answer.read())["error"]["message"]
        engine.released.set()
        assert [future.result()[0] for future in running] == [200, 200]
        assert ask(server, "POST", "/v1/completions", {"prompt": [1]})[0] == 200


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_frees_its_slot_at_once(tokenizer, capfd, reset):
    engine = Stuck()
    with serving(engine, tokenizer) as server:
        with connected(server) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"
            client.sendall(f'{head}{{"prompt": [1]}}'.encode())
            until(lambda: engine.running)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left = time.monotonic()
        until(lambda: engine.cancelled)
        assert time.monotonic() - left < 1 and not engine.running
        assert ask(server, "GET", "/health")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_server_that_stops_says_so_to_those_who_wait(tokenizer, capfd):
    engine = Stuck()
    with serving(engine, tokenizer) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, "POST", "/v1/completions", {"prompt": [1]})
        until(lambda: engine.running)
        server.stop()
        status, answer = waiting.result()
    assert status == 503 and "the server is stopping" in answer["error"]["message"]
    assert engine.idle and capfd.readouterr().err == ""


def test_others_are_answered_while_a_long_text_is_encoded(tokenizer, monkeypatch):
    encoding, encoded = threading.Event(), threading.Event()

    def encode_text(self, text):
        encoding.set()
        assert encoded.wait(10)
        return [1]

    monkeypatch.setattr(ChatTokenizer, "encode_text", encode_text)
    engine = Stuck()
    engine.released.set()
    with serving(engine, tokenizer) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, server, "POST", "/v1/completions", {"prompt": "long"})
        assert encoding.wait(10)
        assert ask(server, "GET", "/health")[0] == 200
        assert ask(server, "POST", "/v1/completions", {"prompt": [1]})[0] == 200
        assert not slow.done()
        encoded.set()
        assert slow.result()[0] == 200
