"""Remote engines: the same bits as the engine behind the server, and every failure by its name."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from envs.workflow import Outcome, Prompt, Score, Task, Workflow
from srpo_jax.engine import Request
from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.engine.remote import RemoteEngineError, StalePolicy, parse_completion
from srpo_jax.rollout.rollout import EpisodePlan, Rollout, SamplingConfig
from tests import server_cases
from tests.server_cases import (
    VERSION,
    ask,
    new_request,
    remote_of,
)

tokenizer, local, server = server_cases.tokenizer, server_cases.local, server_cases.server


@pytest.fixture
def remote(server):
    return remote_of(server.url)


def each_alone(engine, requests):
    """What each request gives: a completion, or why it has none."""

    async def main():
        async with engine:
            calls = (engine.generate([request]) for request in requests)
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(main())


# ---- the same results as the engine itself -------------------------------------------------------

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 1.1, "top_p": 0.9, "top_k": 7},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_engine_behind_it(local, remote, setting):
    requests = [new_request(i, **SETTINGS[setting]) for i in range(9)]
    here, there = local.run(requests), remote.run(requests)
    assert len({tuple(c.ids) for c in here}) > 1
    for a, b in zip(here, there, strict=True):
        assert (a.ids, a.stop_reason, a.version) == (b.ids, b.stop_reason, b.version)
        assert b.logps.dtype == np.float32
        np.testing.assert_allclose(a.logps, b.logps, rtol=0, atol=1e-6)
    assert remote.stats["decode_tokens"] == sum(len(c.ids) for c in here)


def test_stop_strings_end_at_the_same_token(local, remote, tokenizer):
    plain = new_request(1, temperature=0.0)
    whole = local.run([plain])[0]
    stop = next(s for i in whole.ids[2:-2] if (s := tokenizer.decode([i])).strip())
    request = replace(plain, stop_strings=(stop,))
    a, b = local.run([request])[0], remote.run([request])[0]
    assert len(a.ids) < len(whole.ids)
    assert (a.ids, a.stop_reason) == (b.ids, b.stop_reason)
    assert b.stop_reason == "stop"


def test_a_special_token_is_a_stop_string_of_both(local, server, tokenizer):
    """At this temperature tokens are nearly uniform: one of some draws holds <|im_start|>."""
    name = "<|im_start|>"
    (start,) = [
        i for i in range(tokenizer.vocab_size) if tokenizer.decode([i], special=True) == name
    ]
    draws = (new_request(i, temperature=100.0, max_tokens=100) for i in range(200))
    plain, whole = next((r, c) for r in draws if start in (c := local.run([r])[0]).ids[2:])
    end = whole.ids.index(start) + 1
    remote = remote_of(server.url, special_tokens=tokenizer.special_tokens)
    for engine in (local, remote):
        done = engine.run([replace(plain, stop_strings=(name,))])[0]
        assert (done.ids, done.stop_reason) == (whole.ids[:end], "stop")
    a, b = plain.key
    body = {
        "prompt": list(plain.prompt_ids), "max_tokens": 100, "temperature": 100.0,
        "srpo_key": [a, b], "stop": name,
    }  # fmt: skip
    before = tokenizer.decode(whole.ids[: end - 1])
    for more, text in (
        ({}, before),
        ({"skip_special_tokens": False}, before),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, before + name),
    ):
        choice = ask(server, "POST", "/v1/completions", body | more)[1]["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_check_accepts_the_served_model_and_version(remote):
    remote.check()


def test_a_cancelled_request_leaves_the_server(server, remote):
    requests = [new_request(i, max_tokens=100, temperature=1.0) for i in range(8)]

    async def main():
        async with remote:
            calls = [asyncio.create_task(remote.generate([r])) for r in requests]
            pairs = [asyncio.create_task(remote.generate(requests[:2])) for _ in range(3)]
            while server.engine.idle:
                await asyncio.sleep(0.01)
            for call in (*calls[1:], *pairs):
                call.cancel()
            (completion,) = await calls[0]
            assert completion.ids
            await asyncio.wait({*calls, *pairs})
            assert all(call.cancelled() for call in (*calls[1:], *pairs))

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while not server.engine.idle and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.engine.idle


def test_slots_are_requests_at_once_and_a_call_hears_of_its_own():
    """Two slots: the call of three never has more than two in the server. It has started once its
    last request has, which waits for two others to end."""
    now, most, lock, heard = [], [], threading.Lock(), []

    def busy():
        with lock:
            now.append(1)
            most.append(len(now))
        time.sleep(0.05)
        with lock:
            now.pop()
        return GOOD

    async def main(engine):
        async with engine:

            async def call(name, count):
                requests = [new_request(i) for i in range(count)]
                await engine.generate(requests, lambda: heard.append(f"{name} started"))
                heard.append(f"{name} done")

            await asyncio.gather(call("one", 1), call("three", 3))

    with stub((200, busy)) as server:
        asyncio.run(main(remote_of(server.url, max_concurrent=2)))
    assert max(most) == 2 and len(most) == 4
    assert heard[0] == "one started" and heard[3] == "three done"
    assert sorted(heard[1:3]) == ["one done", "three started"]


class OneAnswer(Workflow):
    """One answer to the task's prompt."""

    async def run(self, task, team):
        (out,) = await team.act(
            "solve", task.prompt, roles=["solver"], render=lambda role, state: Prompt("", (state,))
        )
        return Outcome(out.text, score=Score(1.0, True))


def test_episodes_equal_the_local_engines_and_a_failure_is_its_own(local, remote, tokenizer):
    prompts = ["1 + 2", "word " * 200, "3 * 4"]  # the second is longer than the server's cache
    plans = [EpisodePlan(Task(f"t{i}", p, "3"), (1, 0, 0), i, 0) for i, p in enumerate(prompts)]
    config = SamplingConfig(prompt_tokens=1000, response_tokens=8, episode_seconds=20)
    there = Rollout(remote, tokenizer, OneAnswer()).run(plans, config)
    here = Rollout(EngineThread(local), tokenizer, OneAnswer()).run(plans, config)
    assert [r.failure is None for r in there] == [r.failure is None for r in here]
    assert [r.failure for r in there] == [None, "remote_refused", None]
    for a, b in zip(here[::2], there[::2], strict=True):
        (a,), (b,) = a.episode.events[0].members, b.episode.events[0].members
        assert (a.prompt_ids, a.response_ids, a.version) == (
            b.prompt_ids, b.response_ids, b.version,
        )  # fmt: skip
        np.testing.assert_allclose(a.logps, b.logps, rtol=0, atol=1e-6)


# ---- failures: each by its name, and each its own ------------------------------------------------


def test_one_bad_request_leaves_the_others_alone(local, remote):
    good = [new_request(i, temperature=0.0) for i in range(4)]
    requests = [*good[:2], new_request(2, max_tokens=1000), *good[2:]]
    *first, bad, third, fourth = each_alone(remote, requests)
    assert bad.cause == "remote_refused"
    assert "the limit is" in str(bad) and "status 400" in str(bad)
    found = [completion.ids for (completion,) in (*first, third, fourth)]
    assert found == [c.ids for c in local.run(good)]
    with pytest.raises(RemoteEngineError, match="the limit is"):
        remote.run([good[0], new_request(2, max_tokens=1000)])


def test_stale_version_names_both(server):
    engine = remote_of(server.url, version=4)
    with pytest.raises(StalePolicy, match="policy version 5, expected 4"):
        engine.check()
    with pytest.raises(StalePolicy, match="policy version 5, expected 4"):
        engine.run([new_request()])
    engine.version = None
    assert engine.run([new_request()])[0].version == VERSION


def test_unknown_model(server):
    engine = remote_of(server.url, model="other")
    with pytest.raises(RemoteEngineError, match="no model 'other', it serves: tiny"):
        engine.check()
    with pytest.raises(RemoteEngineError, match=r"remote_model.*'other'"):
        engine.run([new_request()])


def test_unreachable_port_after_all_tries():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = remote_of(f"http://127.0.0.1:{port}", retries=2)
    with pytest.raises(RemoteEngineError, match=r"remote_unreachable.*refused \(3 tries\)") as e:
        engine.run([new_request()])
    assert e.value.exit_code == 2


NO_URLS = [
    "nonsense", "127.0.0.1:8000", "ftp://host", "http://", "http://host:x", "http://host:99999",
    "http://[::1", "http://a b:80", "http://host:80?x=1", "",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_none(url):
    with pytest.raises(RemoteEngineError, match="remote_url"):
        remote_of(url)


def test_weights_cannot_be_set(remote):
    with pytest.raises(RemoteEngineError, match="cannot be given weights"):
        remote.set_weights({}, 6)


GOOD = {
    "choices": [
        {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "token_ids": [3, 4],
            "logprobs": {"token_logprobs": [-0.5, -1.25]},
        }
    ],
    "policy_version": VERSION,
}


class Stub(BaseHTTPRequestHandler):
    """Answers with what the server's ``script`` says: a list of (status, body), the last one again
    and again; a number instead of a body sleeps first."""

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        script = self.server.script
        status, body = script.pop(0) if len(script) > 1 else script[0]
        if callable(body):
            body = body()
        if isinstance(body, float):
            self.server.released.wait(body)
            body = GOOD
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(self.server.length or len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def stub(*script, length=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    server.script, server.bodies, server.length = list(script), [], length
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def test_what_is_sent():
    with stub((200, GOOD)) as server:
        engine = remote_of(server.url, stop_ids=[1, 2])
        request = Request([5, 6], (3, 1 << 31), 2, temperature=0.5, stop_strings=("END",))
        done = engine.run([request])[0]
    assert (done.ids, done.logps.tolist(), done.version) == ([3, 4], [-0.5, -1.25], VERSION)
    assert server.bodies == [
        {
            "model": "tiny", "prompt": [5, 6], "max_tokens": 2, "n": 1, "temperature": 0.5,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 3,
            "srpo_key": [3, 1 << 31], "logprobs": 0, "return_token_ids": True, "stop": ["END"],
            "include_stop_str_in_output": True, "stop_token_ids": [1, 2],
        }
    ]  # fmt: skip


def test_servers_are_told_to_keep_special_tokens_that_end_a_response():
    requests = [new_request(0, max_tokens=2, stop_strings=(s,)) for s in ("END", "x<|e|>")]
    with stub((200, GOOD), (200, GOOD)) as server:
        engine = remote_of(server.url, special_tokens={"<|e|>"})
        for request in requests:
            engine.run([request])
    assert [body.get("skip_special_tokens") for body in server.bodies] == [None, False]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_passing_failure_is_tried_again(status):
    with stub((status, {"error": "busy"}), (status, b"busy"), (200, GOOD)) as server:
        engine = remote_of(server.url, retries=2)
        assert engine.run([new_request()])[0].ids == [3, 4]
        assert len(server.bodies) == 3 and engine.stats["retries"] == 2


def test_a_lasting_failure_says_what_the_server_said():
    with stub((503, {"error": {"message": "no\nroom"}})) as server:
        with pytest.raises(RemoteEngineError, match=r"status 503: no room \(2 tries\)"):
            remote_of(server.url, retries=1).run([new_request()])
        assert len(server.bodies) == 2


def test_time_out_is_not_tried_again():
    with stub((200, 10.0)) as server:
        started = time.monotonic()
        with pytest.raises(RemoteEngineError, match=r"remote_timeout.*within 0.3 s"):
            remote_of(server.url, timeout=0.3).run([new_request()])
        assert time.monotonic() - started < 3
        assert len(server.bodies) == 1


@pytest.mark.parametrize("request_", [new_request(max_tokens=0), new_request(top_logps=1)])
def test_settings_that_make_no_sense_are_not_sent(request_):
    with stub((200, GOOD)) as server:
        with pytest.raises(ValueError, match="must"):
            remote_of(server.url).run([request_])
        assert not server.bodies


def test_a_defect_here_ends_the_rollout(tokenizer, monkeypatch):
    """What is no failure of the server is no episode's either."""
    monkeypatch.setattr("srpo_jax.engine.remote.parse_completion", lambda *_: 1 / 0)
    plan = EpisodePlan(Task("t", "1 + 2", "3"), (1, 0, 0), 0, 0)
    config = SamplingConfig(prompt_tokens=1000, response_tokens=8)
    with stub((200, GOOD)) as server, pytest.raises(ZeroDivisionError):
        Rollout(remote_of(server.url), tokenizer, OneAnswer()).run([plan], config)


def test_a_refusal_is_not_tried_again():
    with stub((400, {"error": {"message": "bad top_p"}})) as server:
        with pytest.raises(RemoteEngineError, match=r"remote_refused.*400: bad top_p"):
            remote_of(server.url).run([new_request()])
        assert len(server.bodies) == 1


def changed(**changes):
    answer = json.loads(json.dumps(GOOD))
    answer["choices"][0] |= changes
    return answer


@pytest.mark.parametrize(
    "answer, said",
    [
        (b"<html>", "is no JSON"),
        ([], "no single choice"),
        ({"choices": [], "policy_version": VERSION}, "no single choice"),
        (changed(token_ids=None), "no token ids"),
        (changed(token_ids=[]), "no token ids"),
        (changed(token_ids=["a", 1]), "no whole numbers"),
        (changed(token_ids=[1] * 11), "11 tokens, at most 10"),
        (changed(logprobs=None), "no log-probs"),
        (changed(logprobs={"token_logprobs": [-1.0]}), "2 token ids and 1 log-probs"),
        (changed(logprobs={"token_logprobs": [-1.0, float("nan")]}), "nan at token 1"),
        (changed(logprobs={"token_logprobs": [None, -1.0]}), "None at token 0"),
        (changed(logprobs={"token_logprobs": [-9999.0, -1.0]}), "-9999.0 at token 0"),
        (changed(prompt_token_ids=[1]), "another prompt"),
        (changed(finish_reason="abort"), "'abort'"),
    ],
)
def test_an_answer_that_cannot_be_trained_on(answer, said):
    with stub((200, answer)) as server:
        with pytest.raises(RemoteEngineError, match=f"remote_answer.*{said}"):
            remote_of(server.url).run([new_request()])
        assert len(server.bodies) == 1  # never sampled twice


def test_an_answer_that_breaks_off_is_not_asked_for_again():
    with stub((200, GOOD), length=10_000) as server:
        with pytest.raises(RemoteEngineError, match=r"remote_answer.*broke off"):
            remote_of(server.url).run([new_request()])
        assert len(server.bodies) == 1


def test_a_server_without_versions_needs_version_none():
    answer = {"choices": GOOD["choices"]}
    with pytest.raises(StalePolicy, match="no policy version, expected 5"):
        parse_completion(answer, new_request(), VERSION, "url")
    assert parse_completion(answer, new_request(), None, "url").version == 0
