"""The exactness benchmark: margins by hand, differences of made-up runs, a whole tiny run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import engine_exactness as exactness
from models.qwen import split_params
from srpo_jax.engine import Completion, Request, request_key
from tests.learner_cases import tiny_model


@pytest.fixture(scope="module")
def model():
    qwen = tiny_model(max_position=exactness.MAX_TOKENS)
    return exactness.Model(qwen.config, *split_params(qwen), qwen.config.vocab_size)


@pytest.mark.parametrize(
    "uniform, tokens, expected",
    [
        (0.38, (0, 1), 0.02),
        (0.45, (1, 0), 0.05),
        (0.45, (1, 2), 0.05),
        (0.38, (0, 2), 0.12),  # near the edge of one, far from the other
        (0.2, (1, 2), 0.3),  # neither is what the distribution says
        (0.45, (1,), 0.0),
        (0.1, (2,), 0.4),
    ],
)
def test_margin_is_the_distance_to_the_farther_interval(uniform, tokens, expected):
    logps = np.log([0.4, 0.1, 0.5])  # edges at 0, 0.4, 0.5 and 1
    assert exactness.margin(logps, uniform, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("tokens, expected", [((2, 0), 0.25), ((0, 1), 1.75)])
def test_margin_of_greedy_is_from_the_best(tokens, expected):
    assert exactness.margin(np.array([-1.5, -3.0, -1.25]), None, tokens) == expected


def test_bits_are_counted():
    one = Completion([4, 5], np.array([-1, -3], np.float32), "length", 0)
    assert exactness.differing_bits(one, one) == 0
    other = Completion([4, 6], np.array([-2, -3], np.float32), "length", 0)
    assert exactness.differing_bits(one, other) == 2 + 8  # 5 ^ 6, and the exponents of -1 and -2
    shorter = Completion([4], np.array([-1], np.float32), "stop", 0)
    assert exactness.differing_bits(one, shorter) == exactness.differing_bits(shorter, one) == 64


def test_gaps_by_hand(monkeypatch):
    """Three sampled members and a greedy request that is in no event."""
    logps = np.log(np.array([[0.4, 0.1, 0.5]] * 2, np.float32))
    monkeypatch.setattr(exactness, "sequence_logps", lambda model, r, ids: logps[: len(ids)])
    monkeypatch.setattr(exactness, "uniforms", lambda r, count: np.array([0.2, 0.7])[:count])
    requests = [Request([1], request_key(i), 2, float(i < 3)) for i in range(4)]
    off = [[0.1, -0.3], [0.1, 0.0], [0.2, -0.4], [0.6]]
    ids = [[0, 2], [0, 2], [0, 1], [2]]
    done = [
        Completion(i, (logps[range(len(i)), i] + np.float32(o)).astype(np.float32), "length", 0)
        for i, o in zip(ids, off, strict=True)
    ]
    gap = exactness.gap_of(None, requests, done)
    np.testing.assert_allclose(gap.tokens, np.abs(np.concatenate(off)), rtol=1e-5)
    np.testing.assert_allclose(gap.events, [0.3 / 3**0.5], rtol=1e-5)
    np.testing.assert_allclose(gap.draws, [0, 0, 0, 0, 0, 0.2], atol=1e-6)


def test_difference_stops_at_the_first_other_token(model):
    request = Request([1, 2, 3], request_key(0), 8)
    one = Completion([4, 5, 6], np.array([-1, -2, -3], np.float32), "length", 0)
    logps = np.array([-1, -2.5, -30], np.float32)
    same = replace(one, logps=logps)
    assert exactness.difference(model, [request], [one], [same])[:2] == (27.0, 0)
    other = replace(one, ids=[4, 5, 7], logps=logps)
    found = exactness.difference(model, [request], [one], [other])
    assert found[:2] == (0.5, 1) and 0 < found.margin < 1


@pytest.mark.slow
def test_a_whole_run(model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, 9 + 70 * (i % 2)).tolist() for i in range(6)]
    requests = [
        Request(prompt, request_key(1, i), 6, temperature=float(i != 2))
        for i, prompt in enumerate(prompts)
    ]
    report, found = exactness.measure_exactness(model, requests, say=lambda line: None)
    runs, against, line = report.renderables
    assert runs.row_count == 5 and against.row_count == 2 and line.startswith("0 bits")
    assert list(found) == [
        "logp_difference", "differing_tokens", "largest_margin", "order_bits_differing",
        "gap_float32", "gap_bfloat16",
    ]  # fmt: skip
    assert found["order_bits_differing"] == found["differing_tokens"] == 0
    assert found["largest_margin"] == 0
    assert found["logp_difference"] < 1e-5 and found["gap_float32"] < 1e-5
    assert 1e-4 < found["gap_bfloat16"] < 0.5
    assert json.loads(json.dumps(found)) == found


def test_draws_are_those_of_the_forward_pass(model):
    requests = [Request([1, 2, 3, i], request_key(4, i), 12) for i in range(4)]
    done = model.engine(slots=4).run(requests)
    assert exactness.gap_of(model, requests, done).draws.max() < 1e-5
    others = [replace(r, key=request_key(5)) for r in requests]
    assert exactness.gap_of(model, others, done).draws.max() > 0.1


def test_other_orders_compute_their_prompts_anew(model):
    prompts = [[*range(i, 30 + 9 * i)] for i in range(4)]
    requests = [Request(prompt, request_key(6, i), 4) for i, prompt in enumerate(prompts)]
    engine = model.engine(slots=4)
    expected = engine.run(requests)
    before = engine.stats["prefill_tokens"]
    assert exactness.order_bits(model, engine, requests, expected) == 0
    assert engine.stats["prefill_tokens"] > 2 * before
    spoilt = replace(expected[0], ids=[expected[0].ids[0] ^ 1, *expected[0].ids[1:]])
    assert exactness.order_bits(model, engine, requests, [spoilt, *expected[1:]]) == 3
