"""The loop on a tiny model: what a run leaves behind, its parts, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from envs.workflow import Cut, Outcome, Prompt, Score, Task
from models.convert import load_hf
from models.qwen import split_params
from srpo_jax import trainer
from srpo_jax.events import split_complete
from srpo_jax.learner.batch import build_batch
from srpo_jax.learner.learner import Learner
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run import build as run_parts
from srpo_jax.run.build import build_evaluation_parts
from srpo_jax.run.evaluate import TrainingFailed, evaluate
from srpo_jax.run.logs import episode_steps, read_episodes, read_metrics
from srpo_jax.run.minibatches import apply_truncation, split_minibatches
from srpo_jax.run.step_metrics import row_metrics
from srpo_jax.run.stopping import Stopped, StopRequest
from tests.learner_cases import advantages_of, bit_equal, events_of, host, one_device
from tests.run_cases import (
    EVAL_EPISODES,
    GROUP,
    TASKS_PER_STEP,
    left_behind,
    noisy_reward,
    tiny_recipe,
)

EPISODES = GROUP * TASKS_PER_STEP

pytestmark = pytest.mark.usefixtures("one_device_here")


def run(recipe, **parts) -> int:
    return trainer.run(recipe, console=Console(quiet=True), **parts)


def params_of(folder):
    return split_params(load_hf(folder)[0])[1]


# ---- parts of a step -----------------------------------------------------------------------------


def cut_event(event, *cut):
    members = tuple(
        replace(m, stop_reason="length" if m.index in cut else "stop") for m in event.members
    )
    return replace(event, members=members)


def test_truncation_policies():
    whole, half, malformed = (cut_event(e) for e in events_of((2, 3, 2)))
    half = cut_event(half, 0, 2)
    malformed = replace(
        malformed, members=tuple(replace(m, well_formed=False) for m in malformed.members)
    )
    events = [whole, half, malformed]
    assert apply_truncation(events, "keep") == events

    kept, penalised, same = apply_truncation(events, "penalise")
    assert kept is whole and same is malformed
    assert [m.well_formed for m in penalised.members] == [False, True, False]
    assert [m.response_ids for m in penalised.members] == [m.response_ids for m in half.members]

    complete, dropped = split_complete(apply_truncation(events, "drop_event"))
    assert complete == [whole, malformed]
    assert [(e.id, e.expected, len(e.members)) for e in dropped] == [(half.id, 3, 1)]
    assert len(half.members) == 3  # the records handed in are not changed


def rows_of(batch):
    """The (event size, tokens) of every event of a batch, from its rows alone."""
    T = batch.tokens.shape[2]
    tokens, segments = batch.tokens.reshape(-1, T), batch.segment_ids.reshape(-1, T)
    for e in range(batch.num_events):
        rows = np.flatnonzero(batch.row_event == e)
        assert len(rows) == batch.event_size[e]  # no event is split
        yield tuple(tuple(tokens[r][segments[r] == 1].tolist()) for r in rows)


@pytest.mark.parametrize("updates", [1, 2, 3, 6])
def test_minibatches_hold_every_event_once_and_whole(tmp_path, updates):
    recipe = tiny_recipe(tmp_path, f"learner.updates_per_batch={updates}")
    events = events_of((3, 1, 2, 1, 4, 2, 2), seed=4)
    advantages = advantages_of(events)
    batches = split_minibatches(recipe, 5, events, advantages)
    assert len(batches) == updates
    assert max(b.num_events for b in batches) - min(b.num_events for b in batches) <= 1
    found = [rows for batch in batches for rows in rows_of(batch)]
    given = [tuple((*m.prompt_ids, *m.response_ids) for m in e.members) for e in events]
    assert sorted(found) == sorted(given) and len(set(given)) == 7
    by_rows = dict(zip(given, advantages, strict=True))
    for batch in batches:
        for e, rows in enumerate(rows_of(batch)):
            assert batch.event_advantage[e] == pytest.approx(by_rows[rows][0])

    def order(step, seed=3):
        own = recipe.model_copy(update={"seed": seed})
        made = split_minibatches(own, step, events, advantages)
        return [rows for batch in made for rows in rows_of(batch)]

    assert order(5) == found
    if updates > 1:
        assert len({tuple(order(step, seed)) for step in range(3) for seed in (3, 4)}) > 3


def test_fewer_events_than_updates_and_none(tmp_path):
    recipe = tiny_recipe(tmp_path, "learner.updates_per_batch=4")
    events = events_of((2, 1))
    batches = split_minibatches(recipe, 0, events, advantages_of(events))
    assert [b.num_events for b in batches] == [1, 1]
    assert split_minibatches(recipe, 0, [], []) == []


def test_dropped_rows_are_counted_under_their_reason():
    events = events_of((2, 3, 2))
    cut = [events[0], cut_event(events[1], 0), events[2]]
    complete, _ = split_complete(apply_truncation(cut, "drop_event"))
    team = SimpleNamespace(
        members={i: None for i in range(8)},
        calls=[SimpleNamespace(kind="draft", outputs=(1,)), SimpleNamespace(kind="event")],
    )
    ended = SimpleNamespace(episode=SimpleNamespace(events=cut), team=team)
    failed = SimpleNamespace(episode=None, team=SimpleNamespace(members={0: None, 1: None}))
    batch = build_batch(
        complete, [np.zeros(2), np.ones(2)], micro_batch_rows=4, max_tokens=64,
        skip_zero_advantage=True,
    )  # fmt: skip
    figures = row_metrics([ended, failed], complete, [batch])
    assert {name: n for name, n in figures.items() if name.startswith("rows/")} == {
        "rows/sampled": 10, "rows/trained": 2, "rows/zero_advantage": 2, "rows/incomplete": 3,
        "rows/draft": 1, "rows/failed": 2,
    }  # fmt: skip


# ---- whole runs ----------------------------------------------------------------------------------

KEYS = {
    "reward/mean", "reward/correct", "episodes/total", "episodes/failed", "events/complete",
    "events/complete_rate", "events/mean_k", "events/k_1", "events/k_2", "response/length",
    "policy/entropy", "policy/sampler_gap", "invalid/solver", "invalid/verifier",
    "truncated/solver", "cost/tokens", "cost/calls", "cost/tools", "info/rounds",
    "advantage/zero_advantage_fraction", "update/loss", "update/ratio_mean", "update/ratio_min",
    "update/ratio_max", "update/clip_fraction", "update/approx_kl", "update/grad_norm",
    "update/grad_norm_cv", "update/skipped", "time/rollout", "time/update", "compiles",
}  # fmt: skip


def test_three_steps_of_the_math_workflow_end_to_end(tmp_path):
    recipe = tiny_recipe(tmp_path, "model.param_dtype=float32")
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    folder = tmp_path / "run"

    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row.keys() >= KEYS, KEYS - row.keys()
        # One value has no variation; the rest are numbers.
        expected = {"update/grad_norm_cv"} if row["step"] == 1 else set()
        assert {name for name, value in row.items() if value is None} == expected
        assert row["update/lr"] == np.float32(recipe.optimizer.lr)  # after a warm-up of one update
        assert row["episodes/total"] == EPISODES and row["episodes/failed"] == 0
        assert row["events/k_2"] == EPISODES  # one proposal by two solvers in each episode
        assert row["events/complete_rate"] == 1.0 and row["update/skipped"] == 0
        assert row["policy/sampler_gap"] < 1e-4 and row["update/grad_norm"] > 0
        assert 0 < row["reward/mean"] < 1
        assert row["rows/sampled"] == row["rows/trained"] + row["rows/zero_advantage"]
        assert row["rows/zero_advantage"] < row["rows/sampled"] >= 2 * EPISODES
        assert any(name.startswith("update/ratio_k2_p") for name in row)
    evaluated = [row["step"] for row in rows if "eval/sums/avg" in row]
    assert evaluated == [0, 2, 3]  # every second step and the last
    for row in rows:
        if row["step"] in evaluated:
            assert 0 <= row["eval/sums/avg"] <= row["eval/sums/pass"] <= 1
            assert row["eval/macro/avg"] == row["eval/sums/avg"] and row["eval/sums/failed"] == 0
            assert row["eval/sums/tokens"] > 0
    assert rows[2]["compiles"] >= rows[1]["compiles"] > 0

    assert episode_steps(folder) == [1, 2, 3]
    episodes = list(read_episodes(folder, 2))
    assert len(episodes) == EPISODES and len({e["id"] for e in episodes}) == EPISODES
    for episode in episodes:
        first = episode["events"][0]
        assert (first["type"], first["expected"], len(first["members"])) == ("solve", 2, 2)
        assert isinstance(first["advantage"], float)
        assert (
            episode["reward"] == noisy_reward(None, Outcome(episode["outcome"]["response"])).reward
        )

    assert json.loads((folder / "done.json").read_text()) == {"step": 3}
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "3"]
    trained, start = params_of(folder / "model"), params_of(tmp_path / "checkpoint")
    assert jax.tree.map(np.shape, trained) == jax.tree.map(np.shape, start)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), trained, start)
    assert all(0 < x < 1 for x in jax.tree.leaves(moved))

    parts = run_parts.build_parts(recipe, reward=noisy_reward)
    checkpoints = trainer.Checkpoints(folder / "checkpoints", 2)
    state, meta = checkpoints.load(3, parts.learner.state)
    checkpoints.close()
    assert bit_equal(state.params, trained)
    assert int(state.updates) == 3 * recipe.learner.updates_per_batch
    assert meta["best_score"] == max(row["eval/macro/avg"] for row in rows[1:] if row["step"] != 1)

    # Finished already: the same command changes nothing.
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    assert read_metrics(folder) == rows and bit_equal(params_of(folder / "model"), trained)
    with pytest.raises(RecipeError, match=r"another recipe \(optimizer\.lr is 0\.01"):
        run(tiny_recipe(tmp_path, "optimizer.lr=0.02"), reward=noisy_reward)
    with pytest.raises(RecipeError, match="already holds a run"):
        run(tiny_recipe(tmp_path, "trainer.resume=false"), reward=noisy_reward)


@dataclass(frozen=True)
class Notes:
    problem: str
    drafts: tuple[str, ...] = ()


class ThreeVoices:
    """A user's team: three drafts at once, then one closing word; it scores itself."""

    roles = ("voice_1", "voice_2", "voice_3", "closer")

    def __init__(self):
        self.seen: list[str] = []

    def prompt(self, role, state):
        return Prompt(role, (state.problem, *(Cut(text) for text in state.drafts)))

    async def run(self, task, team):
        state = Notes(task.prompt)
        drafts = await team.act("draft", state, roles=self.roles[:3], render=self.prompt)
        state = replace(state, drafts=tuple(d.text for d in drafts))
        (end,) = await team.act("close", state, roles=["closer"], render=self.prompt)
        self.seen.append(task.id)
        return Outcome(end.text, replace(state, drafts=(end.text,)), Score(0.25, False))


def test_a_users_workflow_and_reward_are_passed_in_python(tmp_path):
    recipe = tiny_recipe(
        tmp_path, "trainer.steps=1", "evaluation.every=1", "learner.updates_per_batch=1"
    )
    workflow, asked = ThreeVoices(), []
    before = params_of(tmp_path / "checkpoint")
    assert run(recipe, workflow=workflow) == trainer.DONE
    row = read_metrics(tmp_path / "run")[-1]
    assert row["reward/mean"] == 0.25 and row["events/mean_k"] == 2.0
    assert (row["events/k_3"], row["events/k_1"]) == (EPISODES, EPISODES)
    assert row["advantage/zero_advantage_fraction"] == 1.0 and row["update/skipped"] == 1
    assert row["update/grad_norm"] is None and row["update/lr"] is None
    assert len(workflow.seen) == EPISODES + 2 * EVAL_EPISODES

    def reward(task, outcome):
        asked.append((type(task), outcome.response))
        return replace(noisy_reward(task, outcome), correct=True)

    other = tiny_recipe(
        tmp_path, "trainer.steps=1", "evaluation.every=0", f"trainer.out={tmp_path / 'other'}"
    )
    assert run(other, workflow=workflow, reward=reward) == trainer.DONE
    (row,) = read_metrics(tmp_path / "other")
    assert len(asked) == EPISODES and {kind for kind, _ in asked} == {Task}
    assert row["reward/correct"] == 1.0
    assert row["reward/mean"] == pytest.approx(
        np.mean([noisy_reward(None, Outcome(text)).reward for _, text in asked])
    )
    assert not bit_equal(params_of(tmp_path / "other" / "model"), before)


def test_evaluation_alone_uses_the_built_in_grader(tmp_path):
    (name, result), *more = evaluate(build_evaluation_parts(tiny_recipe(tmp_path))).items()
    assert (name, more) == ("sums", [])
    assert result.correct.shape == (2, 2) and result.failed == 0
    assert not (tmp_path / "run").exists()


def test_public_case_s10_a_step_without_complete_events_moves_nothing_and_is_counted(tmp_path):
    """One token never ends a random output: every event of the step is dropped."""
    recipe = tiny_recipe(
        tmp_path, "rollout.truncated=drop_event", "evaluation.every=0", "trainer.steps=2",
        "rollout.response_tokens=1",
    )  # fmt: skip
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    for row in read_metrics(tmp_path / "run"):
        assert row["events/complete"] == 0 and row["events/complete_rate"] == 0
        assert row["update/skipped"] == 1
        assert row["truncated/solver"] == 1 and row["response/length"] == 1
        assert row["update/grad_norm"] is None
    start = params_of(tmp_path / "checkpoint")
    assert bit_equal(params_of(tmp_path / "run" / "model"), start)


# ---- how a run ends ------------------------------------------------------------------------------


def test_too_many_failed_episodes_end_the_run_and_it_can_go_on(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, "evaluation.every=0")
    calls, closed, close = [], [], trainer.Checkpoints.close
    monkeypatch.setattr(
        trainer.Checkpoints, "close", lambda self: (close(self), closed.append(self))
    )

    def broken(task, outcome):
        calls.append(1)
        if len(calls) > 2 * EPISODES:
            raise RuntimeError("the reward server is gone")
        return noisy_reward(task, outcome)

    with pytest.raises(TrainingFailed) as caught:
        run(recipe, reward=broken)
    message = str(caught.value)
    assert message.startswith("6 of 6 episodes failed (rollout.max_failed_fraction is 0.5)")
    assert "RuntimeError: the reward server is gone" in message and "\n" not in message
    assert len(closed) == 2  # "latest" and "best": what was being saved is whole
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_steps_without_any_advantage_move_nothing_and_the_gate_waits_for_one_with(
    tmp_path, monkeypatch
):
    """Rewards differ in step 2 alone. Momentum and decay would move the parameters in step 3, and
    a gate on step 1, where nothing is computed, would prove nothing."""
    recipe = tiny_recipe(
        tmp_path,
        "evaluation.every=0",
        "advantage.invalid_penalty=0.0",
        "optimizer.weight_decay=0.1",
    )
    asked, gated, weights = [], [], []

    def reward(task, outcome):
        asked.append(1)
        return noisy_reward(task, outcome) if (len(asked) - 1) // EPISODES == 1 else 0.0

    check_gate, sync = Learner.check_gate, run_parts.Parts.sync
    monkeypatch.setattr(
        Learner, "check_gate",
        lambda self, batch: (gated.append((len(asked), batch.num_tokens)), check_gate(self, batch)),
    )  # fmt: skip
    monkeypatch.setattr(
        run_parts.Parts, "sync",
        lambda self: (weights.append(host(self.learner.params)), sync(self)),
    )  # fmt: skip
    assert run(recipe, reward=reward) == trainer.DONE
    rows = read_metrics(tmp_path / "run")
    assert [row["update/skipped"] for row in (rows[0], rows[2])] == [2, 2]
    assert rows[1]["update/skipped"] < 2
    assert [row["update/lr"] for row in rows] == [None, np.float32(0.01), np.float32(0.01)]
    assert [row["update/grad_norm"] is None for row in rows] == [True, False, True]
    assert [row["update/clip_fraction"] for row in (rows[0], rows[2])] == [0, 0]
    assert rows[0]["update/ratio_mean"] is None and rows[0]["policy/sampler_gap"] is None
    assert not bit_equal(weights[0], weights[1]) and bit_equal(weights[1], weights[2])
    ((episodes, tokens),) = gated
    assert episodes == 2 * EPISODES and tokens > 0


def test_a_failed_episode_is_dropped_and_counted(tmp_path):
    recipe = tiny_recipe(tmp_path, "evaluation.every=0", "trainer.steps=1")
    calls = []

    def flaky(task, outcome):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("lost")
        return noisy_reward(task, outcome)

    assert run(recipe, reward=flaky) == trainer.DONE
    (row,) = read_metrics(tmp_path / "run")
    assert row["episodes/failed"] == 1 and row["episodes/failed_KeyError"] == 1
    assert row["events/k_2"] == EPISODES - 1
    parts = ("trained", "zero_advantage", "incomplete", "draft", "failed")
    assert row["rows/sampled"] == sum(row[f"rows/{part}"] for part in parts)
    assert row["rows/failed"] == row["rows/sampled"] / EPISODES > 0
    failures = [e["failure"] for e in read_episodes(tmp_path / "run", 1)]
    assert sorted(filter(None, failures)) == ["KeyError"]


def test_a_call_longer_than_the_model_was_made_for_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path, "rollout.prompt_tokens=100000")
    with pytest.raises(RecipeError, match=r"response_tokens is 1000\d\d, but"):
        run(recipe)


def test_a_cache_too_small_for_one_call_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path, "rollout.cache_tokens=64")
    with pytest.raises(
        RecipeError, match="rollout: a cache of 64 tokens is too small: one request of 102"
    ):
        run(recipe)


def test_a_kernel_of_another_platform_is_refused(tmp_path):
    message = "learner.attention: attention 'splash' runs on tpu, the mesh is on cpu"
    with pytest.raises(RecipeError, match=message):
        run(tiny_recipe(tmp_path, "learner.attention=splash"))


def test_decoding_in_bfloat16_shows_its_gap_and_is_corrected_by_event(tmp_path):
    options = ("evaluation.every=0", "trainer.steps=1", "objective.sampler_cap=1.5")
    gaps = {}
    for dtype in ("float32", "bfloat16"):
        recipe = tiny_recipe(
            tmp_path, *options, f"rollout.dtype={dtype}", f"trainer.out={tmp_path / dtype}"
        )
        assert run(recipe, reward=noisy_reward) == trainer.DONE
        (row,) = read_metrics(tmp_path / dtype)
        gaps[dtype] = row["policy/sampler_gap"]
    assert gaps["float32"] < 1e-5 < 1e-4 < gaps["bfloat16"] < 0.1
    assert row["update/sampler_weight"] != 1.0 and 0 <= row["update/sampler_truncated"] < 1


def test_non_finite_gradients_end_the_run_past_their_limit(tmp_path):
    recipe = tiny_recipe(tmp_path, "learner.max_nonfinite=1")
    parts = SimpleNamespace(recipe=recipe, nonfinite=0, dropping=0)

    def report(norm, nonfinite_events=0):
        return {"grad_norm": np.float32(norm), "nonfinite_events": nonfinite_events}

    def count(*reports):
        run_parts.Parts.count_nonfinite(parts, reports)

    bad, dropped, good = report("nan"), report(1, nonfinite_events=2), report(1)
    count(bad, dropped, bad, good, dropped, good, bad)  # never two of a kind in a row
    with pytest.raises(run_parts.NonFiniteGradients, match="2 updates in a row had gradients that"):
        count(report("inf"))
    count(good, dropped)
    with pytest.raises(
        run_parts.NonFiniteGradients,
        match="2 updates in a row dropped events whose log-probs are not finite, the last 2",
    ):
        count(dropped)


TO_STEP_2 = EVAL_EPISODES + 2 * EPISODES  # rewards until the end of the second step's rollout


UNTIL_ASKED = "trainer.checkpoint_every=0"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What a run of three steps leaves that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_parts, "make_mesh", lambda **_: one_device())
        assert run(tiny_recipe(folder, UNTIL_ASKED), reward=noisy_reward) == trainer.DONE
    return left_behind(folder / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "moment, rewards, logged, kept",
    [
        ("first evaluation", 2, None, []),
        ("first rollout", EVAL_EPISODES + 2, [0], []),
        ("evaluation", TO_STEP_2 + 2, [0, 1], ["1", "2"]),
        ("rollout", TO_STEP_2 + EVAL_EPISODES + 2, [0, 1, 2], ["1", "2"]),
    ],
)
def test_a_signal_abandons_what_samples_and_saves_the_last_complete_step(
    tmp_path, straight, moment, rewards, logged, kept, number
):
    """Step 2 is saved though it is not due; resumed, the run equals the straight one."""
    recipe = tiny_recipe(tmp_path, UNTIL_ASKED)
    folder, calls, text = tmp_path / "run", [], io.StringIO()

    def stopping(task, outcome):
        calls.append(1)
        if len(calls) == rewards:
            os.kill(os.getpid(), number)
        return noisy_reward(task, outcome)

    handler = signal.getsignal(number)
    code = trainer.run(recipe, reward=stopping, console=Console(file=text, width=200))
    assert code == trainer.STOPPED
    assert signal.getsignal(number) is handler  # a caller's own handler is back
    complete = len(kept)
    assert f"stopped after step {complete} of 3; the same command resumes\n" in text.getvalue()
    if logged is None:
        assert not (folder / "metrics.jsonl").exists()
    else:
        assert [row["step"] for row in read_metrics(folder)] == logged
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == kept
    assert not (folder / "done.json").exists() and not (folder / "model").exists()
    if number == signal.SIGTERM:  # both end in the same folder
        assert run(recipe, reward=noisy_reward) == trainer.DONE
        assert left_behind(folder) == straight


def test_an_update_in_progress_is_finished(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, "evaluation.every=0", UNTIL_ASKED)
    update = trainer.update_step

    def interrupted(parts, step, *args):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return update(parts, step, *args)

    monkeypatch.setattr(trainer, "update_step", interrupted)
    assert run(recipe, reward=noisy_reward) == trainer.STOPPED
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]


def test_a_second_ctrl_c_in_a_callers_own_process_is_a_keyboard_interrupt():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_inside_a_running_event_loop_and_one_outside_the_main_thread(tmp_path):
    """As in a notebook's cell; there the main thread's handlers belong to others."""

    async def cell():
        return run(tiny_recipe(tmp_path, "trainer.steps=1"), reward=noisy_reward)

    assert asyncio.run(cell()) == trainer.DONE
    other = tiny_recipe(tmp_path, "trainer.steps=1", f"trainer.out={tmp_path / 'other'}")
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(other, reward=noisy_reward)))
    thread.start()
    thread.join()
    assert codes == [trainer.DONE]
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "other")


def test_a_run_of_no_steps_evaluates_and_exports(tmp_path):
    recipe = tiny_recipe(tmp_path, "trainer.steps=0")
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    (row,) = read_metrics(tmp_path / "run")
    assert row["step"] == 0 and "eval/macro/avg" in row
    assert bit_equal(params_of(tmp_path / "run" / "model"), params_of(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("wanted", "expected", "norm"),
    [(None, "bfloat16", "float32"), ("float32", "float32", "float32"), ("float16",) * 3],
)
def test_the_model_is_exported_in_the_checkpoints_own_dtypes(tmp_path, wanted, expected, norm):
    """Most tensors of the checkpoint are bfloat16, one is not; trained is in float32."""
    recipe = tiny_recipe(
        tmp_path, "trainer.steps=0", "evaluation.every=0", f"model.export_dtype={wanted or 'null'}"
    )
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = {name: a.astype("bfloat16") for name, a in load_file(path).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float32")
    save_file(tensors, path)
    assert run(recipe, reward=noisy_reward) == trainer.DONE
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    dtypes = {name: str(a.dtype) for name, a in exported.items()}
    assert dtypes.pop("model.norm.weight") == norm and set(dtypes.values()) == {expected}


def test_rows_never_exceed_the_prompt_and_response_limits(tmp_path):
    recipe = tiny_recipe(tmp_path)
    limit = recipe.rollout.prompt_tokens + recipe.rollout.response_tokens
    events = events_of((2, 2), longest=(60, 41))
    for batch in split_minibatches(recipe, 0, events, advantages_of(events)):
        assert batch.tokens.shape[2] <= limit
    long = replace(
        events[0].members[0], prompt_ids=[0] * limit, response_ids=[0], logps=np.zeros(1)
    )
    with pytest.raises(ValueError, match=f"a row has {limit + 1} tokens, the limit is {limit}"):
        build_batch(
            [replace(events[0], members=(long,), expected=1)], [np.zeros(1)],
            micro_batch_rows=2, max_tokens=limit,
        )  # fmt: skip
