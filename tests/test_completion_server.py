"""The completion server: OpenAI's protocol, and every bad request by its reason."""

from __future__ import annotations

import json
import socket
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Request
from srpo_jax.engine.server import MAX_BODY, MAX_MESSAGE, CompletionServer, parse_request
from tests.server_cases import (
    TINY,
    VERSION,
    ask,
    serving,
    tiny_engine,
)


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer(TINY)


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(tiny_engine(tokenizer), tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def local(tokenizer):
    return tiny_engine(tokenizer)


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
    size = {"Content-Length": str(MAX_BODY + 1)}
    assert ask(server, "POST", "/v1/completions", None, size)[0] == 413


def test_an_engine_that_breaks_is_said_to_all(tokenizer):
    class Broken:
        idle, version, cache_tokens = True, 0, 8

        def submit(self, request):
            self.idle = False
            return 0

        def step(self):
            raise RuntimeError("out of memory")

    server = CompletionServer(Broken(), tokenizer, "tiny")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for _ in range(2):
        status, answer = ask(server, "POST", "/v1/completions", {"prompt": [1]})
        assert status == 500 and "out of memory" in answer["error"]["message"]
    assert ask(server, "GET", "/health")[0] == 500
    server.shutdown()
    server.server_close()


GOOD = {"prompt": [30, 31], "max_tokens": 6, "seed": 3, "return_token_ids": True}
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
    before = ask(server, "POST", "/v1/completions", GOOD)[1]["choices"]
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = ask(server, "POST", "/v1/completions", body, headers)
    assert status == 400 and said in answer["error"]["message"]
    assert len(answer["error"]["message"]) <= MAX_MESSAGE
    assert ask(server, "POST", "/v1/completions", GOOD)[1]["choices"] == before


@pytest.mark.parametrize(
    "length, status",
    [("9" * 5000, 413), (str(MAX_BODY + 1), 413), ("-1", 411), ("1e3", 411), ("\u0663", 411)],
)
def test_a_body_of_no_sensible_length(server, length, status):
    with socket.create_connection(server.server_address[:2], timeout=20) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode())
        assert client.makefile("rb").readline().split()[1] == str(status).encode()


@pytest.mark.parametrize("family", ["ids", "a", " ", "<|", "1", "\n", "é", "<|im_start|>"])
def test_four_times_the_request_takes_about_four_times_as_long(tokenizer, family):
    """Merging the bytes of one long word takes n log n; a quadratic reader would take 16 times."""

    def seconds(size):
        prompt = [5] * size if family == "ids" else (family * size)[:size]
        body, best = {"prompt": prompt}, float("inf")
        for _ in range(5):
            started = time.thread_time()
            parse_request(body, tokenizer)
            best = min(best, time.thread_time() - started)
        return best

    # Measured again where it is too long: a busy machine passes, a quadratic reader stays.
    pairs = ((seconds(65_536), seconds(16_384)) for _ in range(5))
    assert any(long < max(2e-3, 8 * short) for long, short in pairs)


def test_log_probs_that_are_no_numbers_are_no_answer(tokenizer):
    engine = tiny_engine(tokenizer)
    engine._weights = jax.tree.map(lambda a: a * jnp.nan, engine._weights)
    with serving(engine, tokenizer) as server:
        status, answer = ask(server, "POST", "/v1/completions", GOOD)
    assert status == 500 and "not finite" in answer["error"]["message"]
