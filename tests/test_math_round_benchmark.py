"""The Math round benchmark: which part a delay is counted in, its table, last line and bad input.

The model is tiny, and transformers is replaced by made-up figures.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import harness, math_round
from benchmarks.math_round import Speed
from benchmarks.peer_environments import PeerError
from benchmarks.round_times import PARTS, measure_round, run_round
from launch.cli import exit_code
from srpo_jax.run.build import build_parts
from tests.run_cases import GROUP, TASKS_PER_STEP, noisy_reward, tiny_recipe

DELAY = 0.05  # seconds
SLOTS = 4 * 8  # of the tests' four devices


def slow_reward(task, outcome) -> float:
    time.sleep(DELAY)
    return 0.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_recipe(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def parts(recipe):
    parts = build_parts(recipe, reward=noisy_reward)
    run_round(parts, 0)
    return parts


@pytest.mark.parametrize("part", PARTS)
def test_a_delay_is_counted_where_it_is(parts, monkeypatch, part):
    """Each delayed call adds its DELAY to its part and to no other."""
    calls = []

    def delayed(function):
        def call(*args, **kwargs):
            calls.append(1)
            time.sleep(DELAY)
            return function(*args, **kwargs)

        return call

    rounds = [measure_round(parts, 1)]
    if part == "host":
        monkeypatch.setattr(parts.tokenizer, "decode", delayed(parts.tokenizer.decode))
    elif part == "grading":
        monkeypatch.setattr(parts.rollout, "_reward", slow_reward)
        calls.append(1)  # the last reward: the engine's work may hide those before it
    else:
        program = getattr(parts.engine, f"_{part}")
        slow_program = delayed(program)
        slow_program._cache_size = program._cache_size
        monkeypatch.setattr(parts.engine, f"_{part}", slow_program)
    slow = measure_round(parts, 1)
    added = DELAY * len(calls)
    assert calls and slow.seconds[part] >= added
    assert sum(slow.shares.values()) == pytest.approx(1)
    # The least of several: what else the machine does makes a part longer, never shorter.
    delayed_rounds = [slow, *(measure_round(parts, 1) for _ in range(2))]
    monkeypatch.undo()
    rounds += [measure_round(parts, 1) for _ in range(2)]
    for other in set(PARTS) - {part}:
        least, fast = (min(r.seconds[other] for r in some) for some in (delayed_rounds, rounds))
        assert least < fast + added / 2


def test_a_round_is_a_step_of_training(parts):
    measured = measure_round(parts, 2)
    members = [m for r in measured.results for m in r.team.members.values()]
    assert len(measured.results) == TASKS_PER_STEP * GROUP
    assert sorted(r.prompt_ids for r in measured.requests) == sorted(m.prompt_ids for m in members)
    assert measured.counts["decode_tokens"] == sum(len(m.response_ids) for m in members)
    assert measured.counts["prompt_tokens"] == sum(len(m.prompt_ids) for m in members)
    again = run_round(parts, 2)  # the same texts, no longer watched
    assert [r.outcome.response for r in again] == [r.outcome.response for r in measured.results]
    assert not {"submit", "step"} & vars(parts.engine).keys()


def test_the_batch_draws_the_texts_of_the_round(parts):
    measured = measure_round(parts, 1)
    members = [m for r in measured.results for m in r.team.members.values()]
    before = parts.engine.stats["prefill_tokens"]
    speed = math_round.engine_speed(parts, measured.requests, 2)
    assert len(speed.tokens_per_second) == 2
    assert sorted(speed.lengths) == sorted(len(m.response_ids) for m in members)
    drawn = parts.engine.run(measured.requests)
    assert sorted(tuple(d.ids) for d in drawn) == sorted(tuple(m.response_ids) for m in members)
    assert [len(d.ids) for d in drawn] == list(speed.lengths)
    # The run above finds its prompts stored, those before it did not.
    assert parts.engine.stats["prefill_tokens"] - before == 2 * measured.counts["prefill_tokens"]


def test_the_last_line(recipe, monkeypatch, capsys):
    monkeypatch.setattr(math_round, "round_recipe", lambda *asked: recipe)
    monkeypatch.setattr(harness, "peer_python", lambda name, say: Path(name))
    monkeypatch.setattr(
        math_round, "transformers_speed", lambda *work: Speed([40.0, 10.0, 20.0], [1000, 1001])
    )
    assert math_round.main(["--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert list(last) == [
        "host_share", "prefill_share", "decode_share", "grading_share",
        "tok_s", "tok_s_transformers", "ratio",
    ]  # fmt: skip
    assert sum(value for name, value in last.items() if "share" in name) == pytest.approx(1)
    assert last["tok_s_transformers"] == 20 and last["ratio"] == pytest.approx(last["tok_s"] / 20)
    assert f"{SLOTS} slots; 6 episodes, 0 of them failed" in printed
    assert "NOT ALIKE" in printed


def test_alike():
    """Means 10 and 14 with standard errors 0.6 and 0.8: that of the difference is 1."""
    first = Speed([1.0], [10 - 6] * 50 + [10 + 6] * 50)
    assert first.mean_length == (10, pytest.approx(0.6))
    second = Speed([1.0], [14 - 8] * 50 + [14 + 8] * 50)
    assert "10.0 ± 0.6; " in math_round.length_line(first, second)
    assert math_round.length_line(first, second).endswith("14.0 ± 0.8, NOT ALIKE")
    nearer = Speed([1.0], [n - 2 for n in second.lengths])
    assert math_round.length_line(first, nearer).endswith("12.0 ± 0.8, alike")


@pytest.mark.parametrize("body, said", [("exit 3", "ended with code 3"), ("echo 7", "last line")])
def test_a_peer_that_fails(tmp_path, parts, body, said):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\n{body}\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match=said):
        math_round.transformers_speed(program, parts, [SimpleNamespace(prompt_ids=[1, 2])], [3], 1)


def test_what_the_peer_is_asked(tmp_path, parts):
    """The program gets the requests in their order, and its figures come back."""
    program = tmp_path / "python"
    answer = json.dumps({"tokens_per_second": [5.0, 6.0], "lengths": [3, 4]})
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\necho '{answer}'\n")
    program.chmod(0o755)
    requests = [SimpleNamespace(prompt_ids=ids) for ids in ([9, 8, 7], [1])]
    found = math_round.transformers_speed(program, parts, requests, [6, 2], 2)
    assert found == Speed([5.0, 6.0], [3, 4])
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["prompts"] == [[9, 8, 7], [1]] and asked["repeats"] == 2
    assert asked["lengths"] == [6, 2] and asked["most"] == parts.train_sampling.response_tokens
    assert (asked["temperature"], asked["rows"]) == (1.0, SLOTS)


def test_the_log_probs_and_lengths_of_the_peer():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.peers import torch_math_round as peer

    scores = torch.tensor([[[0.0, 1.0], [2.0, 2.0]], [[3.0, 0.0], [-1.0, 1.0]]])  # [steps, rows, V]
    found = peer.log_probs(tuple(scores), torch.tensor([[1, 0], [0, 1]]))
    expected = [
        [-math.log1p(math.exp(-1)), -math.log1p(math.exp(-3))],
        [-math.log(2), -math.log1p(math.exp(-2))],
    ]
    assert found.tolist() == [pytest.approx(row) for row in expected]
    tokens, mask = peer.left_padded([[5, 6, 7], [8]], 2)
    assert tokens.tolist() == [[5, 6, 7], [2, 2, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    responses = [[4, 5, 6], [4, 2, 2], [3, 2, 4], [5, 6, 2]]
    assert [peer.length(ids, [2, 3]) for ids in responses] == [3, 2, 1, 3]


def test_the_batches_of_the_peer():
    """Two batches of two rows and one; each runs to its longest, and stops only where asked to."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.peers import torch_math_round as peer

    asked = []

    def generate(tokens, *, max_new_tokens, **rest):
        asked.append((tokens.tolist(), max_new_tokens, model.generation_config.eos_token_id))
        drawn = torch.full((len(tokens), max_new_tokens), 2)  # a stop id at once
        scores = tuple(torch.zeros(max_new_tokens, len(tokens), 5))
        return SimpleNamespace(sequences=torch.cat([tokens, drawn], 1), scores=scores)

    model = SimpleNamespace(generate=generate, generation_config=SimpleNamespace())
    work = {"prompts": [[1, 3], [1], [4]], "rows": 2, "stop_ids": [2], "temperature": 1.0}
    assert peer.generate(model, work, [3, 4, 2], stops=False) == [3, 4, 2]
    assert peer.generate(model, work, [6, 6, 6], stops=True) == [1, 1, 1]
    assert asked == [
        ([[1, 3], [2, 1]], 4, None), ([[4]], 2, None), ([[1, 3], [2, 1]], 6, [2]), ([[4]], 6, [2]),
    ]  # fmt: skip


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        math_round.main(["--model", str(tmp_path / "none")])
    assert exit_code(caught.value) == 2
    assert str(caught.value).endswith(f"python -m launch.prepare_data smollm2 {tmp_path}/none")


@pytest.mark.parametrize("argv", [["--slots", "0"], ["--tasks", "some"], ["--repeat", "-1"]])
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        math_round.main(argv)
    said = capsys.readouterr().err
    assert (
        caught.value.code == 2 and said.startswith("error: argument --") and said.count("\n") == 1
    )


def test_the_recipe_is_of_64_requests(tmp_path):
    (tmp_path / "config.json").touch()
    recipe = math_round.round_recipe(str(tmp_path), 4, 32)
    args = recipe.workflow.args
    assert (args["rounds"], args["verifier"], args["aggregator"]) == (1, True, False)
    calls = args["solvers"] + 1  # and the verifier
    assert recipe.rollout.tasks_per_step * recipe.rollout.group_size * calls == 64
    assert (recipe.rollout.slots, recipe.model.dtype, recipe.model.path) == (
        32, "float32", str(tmp_path),
    )  # fmt: skip
