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
    qwen = tiny_model(max_position=exactness.LENGTH)
    return exactness.Model(qwen.config, *split_params(qwen), qwen.config.vocab_size)


@pytest.mark.parametrize(
    "uniform, token, expected",
    [(0.1, 0, 0.1), (0.45, 1, 0.05), (0.52, 1, 0.02), (0.99, 2, 0.01), (0.75, 2, 0.25)],
)
def test_margin_is_the_distance_to_the_nearer_edge(uniform, token, expected):
    logps = np.log([0.4, 0.1, 0.5])  # edges at 0, 0.4, 0.5 and 1
    assert exactness.margin(logps, uniform, token) == pytest.approx(expected)


def test_margin_of_greedy_is_between_the_two_best():
    assert exactness.margin(np.array([-1.5, -3.0, -1.25]), None, 2) == pytest.approx(0.25)


def test_difference_stops_at_the_first_other_token(model):
    request = Request([1, 2, 3], request_key(0), 8)
    one = Completion([4, 5, 6], np.array([-1, -2, -3], np.float32), "length", 0)
    logps = np.array([-1, -2.5, -30], np.float32)
    same = replace(one, logps=logps)
    assert exactness.difference(model, [request], [one], [same])[:2] == (27.0, 0)
    other = replace(one, ids=[4, 5, 7], logps=logps)
    found = exactness.difference(model, [request], [one], [other])
    assert found[:2] == (0.5, 1) and 0 < found.margin < 1


def test_a_whole_run(model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, 9 + 70 * (i % 2)).tolist() for i in range(6)]
    requests = [
        Request(prompt, request_key(1, i), 6, temperature=float(i != 2))
        for i, prompt in enumerate(prompts)
    ]
    table, found = exactness.measure(model, requests, say=lambda line: None)
    assert table.row_count == 10
    assert found["order_differing"] == found["differing_tokens"] == 0
    assert found["logp_difference"] < 1e-5 and found["gap_float32"] < 1e-5
    assert 1e-4 < found["gap_bfloat16"] < 0.5
    assert json.loads(json.dumps(found)) == found
