"""Transcripts of scripted teams, their packing, and supervised training on them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envs.math.teacher import reply as math_teacher
from envs.math.workflow import MathWorkflow
from envs.search.teacher import invent_names
from envs.workflow import Task
from launch.warm_start import main
from models.qwen import Qwen
from models.tiny import tiny_config, train_tokenizer
from models.tokenizer import ChatTokenizer
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.warm_start import (
    encode_examples,
    pack_examples,
    train_supervised,
    transcripts,
)

TASKS = [
    Task(f"t{i}", f"{a} + {b}", str(a + b), extra={"expression": f"{a}+{b}"})
    for i, (a, b) in enumerate([(3, 4), (5, 6), (7, 8), (2, 9)])
]


def examples(poor=0.0, **changes):
    workflow = MathWorkflow(solvers=3, rounds=1, aggregator=False, prompt_style="short")
    return list(transcripts(workflow, TASKS, math_teacher, poor=poor, seed=0, **changes))


def test_transcripts_hold_each_distinct_prompt_of_a_call_once():
    found = examples()
    # Three solvers share one prompt, then one verifier: two examples a task.
    assert [e.prompt.system for e in found] == ["solver", "verifier"] * 4
    assert found[0].prompt.text() == "3+4" and found[0].response == "3+4=7 \\boxed{7}"
    assert found[1].response.endswith("<verify>approve</verify>")


def test_a_poor_teacher_errs_in_its_share_of_outputs():
    wrong = [
        e.response.count(f"boxed{{{sum(map(int, e.prompt.text().split('+')))}}}") == 0
        for e in examples(poor=1.0)
        if e.prompt.system == "solver"
    ]
    assert all(wrong)


def test_rewriting_leaves_every_fourth_episode():
    found = examples(rewrite=lambda texts, rng: [t.upper() + "!" for t in texts])
    assert [e.response.endswith("!") for e in found] == [False, False] + [True] * 6


def test_invented_names_are_one_to_one_and_leave_the_rest():
    texts = ["capital of Chad: N'Djamena", '"Chad"\ncurrency code of Chad: XAF', "no names in here"]
    new = invent_names(texts, random.Random(0))
    country = new[1].split('"')[1]
    assert country != "Chad" and new[0].startswith(f"capital of {country}: ")
    assert new[1].startswith(f'"{country}"\ncurrency code of {country}: ')
    assert not any(name in " ".join(new) for name in ("Chad", "N'Djamena", "XAF"))
    assert new[2] == texts[2]


def test_packing_keeps_pairs_whole_and_weighs_responses():
    pairs = [([1, 2, 3], [4, 5]), ([6, 7], [8]), ([9], [10, 11, 12])]
    packed = pack_examples(pairs, 8, 0.25, np.random.default_rng(0))
    found = []
    for r in range(len(packed.tokens)):
        for s in range(1, packed.segment_ids[r].max() + 1):
            here = packed.segment_ids[r] == s
            assert packed.positions[r][here].tolist() == list(range(here.sum()))
            weights = packed.weights[r][here].tolist()
            split = weights.index(1.0)
            ids = packed.tokens[r][here].tolist()
            # A pair's first token is predicted by nothing.
            assert weights[0] == 0.0 and weights[1:split] == [0.25] * (split - 1)
            found.append((ids[:split], ids[split:]))
    assert sorted(found) == sorted(pairs)
    with pytest.raises(ValueError, match="an example must have at most 8 tokens, got 9"):
        pack_examples([([1] * 5, [2] * 4)], 8, 0.1, np.random.default_rng(0))


def test_a_tiny_model_learns_its_transcripts(tmp_path):
    found = examples()
    config = tiny_config(300)
    train_tokenizer(tmp_path, [e.prompt.text() + e.response for e in found], config)
    tokenizer = ChatTokenizer(tmp_path)
    stop = tokenizer.stop_ids[-1]
    encoded = encode_examples(tokenizer, found, stop, prompt_tokens=96, response_tokens=32)
    assert all(response[-1] == stop for _, response in encoded)
    with pytest.raises(ValueError, match="a response must have at most"):
        encode_examples(tokenizer, found, stop, prompt_tokens=96, response_tokens=4)
    data = pack_examples(encoded, 128, 0.1, np.random.default_rng(0))
    losses = []
    train_supervised(
        Qwen(config, rngs=nnx.Rngs(0), dtype=jnp.float32), data, steps=60, batch_rows=4, lr=3e-3,
        seed=0, vocab_size=tokenizer.vocab_size, on_step=lambda _, loss: losses.append(loss),
    )  # fmt: skip
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--poor", "0.5"], "--poor must have 2 values, one for each recipe, got 1"),
        (["--poor", "0.5", "1.5"], "--poor must be in 0 .. 1, got 1.5"),
        (["--tokens", "1000"], "--tokens must be at least 327680 (40 steps), got 1000"),
        (["--episodes", "0", "5"], "--episodes must be positive, got 0"),
        (["--vocab", "100"], "--vocab must be at least 300"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("sys.argv", ["warm_start", str(tmp_path / "new"), *arguments])
    with pytest.raises(RecipeError, match=re.escape(says)):
        main()


def test_a_folder_that_holds_something_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    (tmp_path / "note").write_text("mine")
    monkeypatch.setattr("sys.argv", ["warm_start", str(tmp_path)])
    with pytest.raises(RecipeError, match="exists and is not an empty folder"):
        main()
