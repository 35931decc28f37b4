"""The rollout loop: many episodes at once, failures that stay their own, rewards, identity."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envs.workflow import EpisodeFailed, Outcome, Score
from launch.cli import exit_code
from models.qwen import Qwen, split_params
from models.tiny import tiny_config
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Engine, request_key
from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.rollout.rollout import Rollout, SamplingConfig, count_failures
from srpo_jax.rollout.transcript import episode_transcript
from srpo_jax.rollout.user_code import UserCodeError
from srpo_jax.run.step_metrics import rollout_metrics
from srpo_jax.run.warnings import step_warnings
from tests.make_tiny_tokenizer import TINY
from tests.rollout_cases import (
    CONFIG,
    FakeEngine,
    Letters,
    State,
    TwoTurns,
    plans_of,
    render,
    run,
)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def results(engine):
    """Two tasks with three rollouts each, played on ``engine``."""
    rollout = Rollout(EngineThread(engine), Letters(), TwoTurns())
    return rollout.run(plans_of(["1+1", "2+2"], rollouts=3), CONFIG)


class TestRecords:
    def test_results_are_in_the_order_of_the_plans(self, results):
        assert [r.episode.id for r in results] == [
            "s5-t0-r0", "s5-t0-r1", "s5-t0-r2", "s5-t1-r0", "s5-t1-r1", "s5-t1-r2",
        ]  # fmt: skip
        assert [(r.episode.task, r.episode.slot, r.episode.rollout) for r in results[2:4]] == [
            ("t0", 0, 2), ("t1", 1, 0),
        ]  # fmt: skip
        assert all(r.failure is None and r.seconds > 0 for r in results)

    def test_an_evaluation_episode_says_so(self):
        (plan,) = plans_of(["x"], key=(1, 1, 7))
        assert plan.id == "e7-t0-r0"

    def test_events(self, results):
        episode = results[4].episode
        assert [e.id for e in episode.events] == ["s5-t1-r1/0", "s5-t1-r1/1"]
        assert [(e.type, e.turn, e.expected) for e in episode.events] == [
            ("solve", 0, 2), ("judge", 1, 1),
        ]  # fmt: skip
        assert all(e.complete and e.task == "t1" and e.reward == 0.25 for e in episode.events)
        assert [m.role for m in episode.events[0].members] == ["a", "b"]
        assert [m.uid for e in episode.events for m in e.members] == [1, 2, 3]

    def test_members_hold_what_the_engine_saw_and_drew(self, engine, results):
        by_key = {r.key: r for r in engine.requests}
        for result in results:
            plan = result.plan
            for event, call in zip(result.episode.events, (1, 2), strict=True):
                for member in event.members:
                    key = request_key(1, 0, 5, plan.slot, plan.rollout, call, member.index)
                    assert member.prompt_ids == by_key[key].prompt_ids
                    assert member.response_ids == engine.reply(by_key[key])
                    assert (member.policy, member.version) == ("policy", 3)
                    assert member.stop_reason == "stop"
                    assert member.logps.tolist() == [-0.5] * len(member.response_ids)

    def test_every_request_has_its_own_key(self, engine):
        assert len({r.key for r in engine.requests}) == len(engine.requests) == 6 * 4

    def test_outputs_reach_the_next_prompt(self, results):
        for result in results:
            outputs = ["".join(map(chr, m.response_ids)) for m in result.episode.events[0].members]
            judged = "".join(map(chr, result.episode.events[1].members[0].prompt_ids))
            assert judged == f"judge>{result.plan.task.prompt}{''.join(outputs)}="

    def test_costs_count_no_drafts_and_no_grades(self, results):
        for result in results:
            members = [m for event in result.episode.events for m in event.members]
            assert result.episode.cost == {
                "tokens": sum(len(m.response_ids) for m in members), "calls": 3.0, "tools": 0.0,
                "prompt_cuts": 0.0,
            }  # fmt: skip
            assert result.episode.info == {"seen": 1.0, "graded": 1.0}
            assert result.episode.answer == result.outcome.response

    def test_tools_and_prompt_cuts_are_counted(self):
        class Tools(TwoTurns):
            async def trouble(self, task, team):
                for _ in range(2):
                    assert await team.tool("look up", str.upper, "x") == "X"

        (result,) = run(Tools(), ["1+1"], config=replace(CONFIG, prompt_tokens=12))
        assert result.episode.cost["tools"] == 2.0
        assert result.episode.cost["prompt_cuts"] == 1.0  # judge>1+1...= with both drafts cut

    def test_the_sampling_config_reaches_the_engine(self):
        engine = FakeEngine()
        config = replace(
            CONFIG, response_tokens=5, temperature=0.3, top_p=0.9, top_k=7, stop_strings=("END",)
        )
        run(TwoTurns(), ["x"], engine=engine, config=config)
        for r in engine.requests:
            sampling = (r.max_tokens, r.temperature, r.top_p, r.top_k, r.stop_strings)
            assert sampling == (5, 0.3, 0.9, 7, ("END",))


class TwoCallsAtOnce:
    async def run(self, task, team):
        state = State(task.prompt)
        calls = [team.act(t, state, roles=["a"], render=render) for t in ("one", "two")]
        (first,), (second,) = await asyncio.gather(*calls)
        return Outcome(first.text + second.text, score=Score(1.0, True))


class TestConcurrency:
    def test_all_episodes_wait_together(self):
        """Thirty episodes, three steps: the draft, the event of two, the event of one."""
        engine = FakeEngine()
        run(TwoTurns(), ["x"] * 30, engine=engine)
        assert engine.together == [30, 60, 30]

    def test_concurrency_is_a_limit(self):
        engine = FakeEngine()
        run(TwoTurns(), ["x"] * 6, engine=engine, concurrency=1)
        assert engine.together == [1, 2, 1] * 6

    def test_a_slow_episode_holds_up_no_other(self):
        order = []

        class Slow(TwoTurns):
            async def trouble(self, task, team):
                if task.prompt == "slow":
                    await asyncio.sleep(0.3)

        prompts = ["slow", "x", "y"]
        results = run(Slow(), prompts, on_done=lambda r: order.append(r.plan.task.prompt))
        assert sorted(order) == ["slow", "x", "y"] and order[-1] == "slow"
        assert [r.plan.task.prompt for r in results] == prompts

    def test_rollouts_and_seeds_share_no_key(self):
        """Two calls at once in each of eight rollouts: sixteen draws of their own."""
        keys = []
        for seed in (0, 1):
            engine = FakeEngine()
            plans = plans_of(["x"], key=(seed, 0, 0), rollouts=8)
            Rollout(EngineThread(engine), Letters(), TwoCallsAtOnce()).run(plans, CONFIG)
            keys.append({r.key for r in engine.requests})
            assert len(engine.requests) == len(keys[-1]) == 16
        assert not keys[0] & keys[1]

    def test_two_calls_of_one_episode_at_once(self):
        engine = FakeEngine()
        (result,) = run(TwoCallsAtOnce(), ["x"], engine=engine)
        assert engine.together == [2]
        keys = {r.key for r in engine.requests}
        assert keys == {request_key(1, 0, 5, 0, 0, call, 0) for call in (0, 1)}
        assert [e.type for e in result.episode.events] == ["one", "two"]


class Troubled(TwoTurns):
    """The prompt names the trouble."""

    async def trouble(self, task, team):
        match task.prompt:
            case "fails":
                raise EpisodeFailed("retrieval", "no index")
            case "crashes":
                raise KeyError("lost")
            case "sleeps":
                await asyncio.sleep(60)
            case "times out itself":
                raise TimeoutError("a socket")
            case "slow tool":
                await team.tool("browse", asyncio.sleep, 60)
            case "waits":
                state = State("stuck")
                await team.act("wait", state, roles=["a", "b"], render=render)


class TestFailures:
    @pytest.mark.parametrize(
        "prompt, cause, detail",
        [
            ("fails", "retrieval", "no index"),
            ("crashes", "KeyError", "test_rollout.py:"),
            ("sleeps", "episode_timeout", "more than 0.4 s"),
            ("waits", "episode_timeout", "more than 0.4 s"),
            ("times out itself", "TimeoutError", "a socket"),
            ("slow tool", "tool_timeout", "browse took more than 0.1 s"),
            ("a prompt much longer than its budget of 64 tokens, all of it fixed", "prompt_budget",
             "the limit is 64"),
        ],
    )  # fmt: skip
    def test_one_is_dropped_and_the_others_finish(self, prompt, cause, detail):
        engine = FakeEngine()
        config = replace(CONFIG, episode_seconds=0.4, tool_seconds=0.1)
        bad, *good = run(Troubled(), [prompt, "x", "y"], engine=engine, config=config)
        assert (bad.failure, bad.episode, bad.outcome) == (cause, None, None)
        assert detail in bad.detail
        clean = run(TwoTurns(), ["-", "x", "y"])[1:]
        assert [r.outcome.response for r in good] == [r.outcome.response for r in clean]
        assert engine.idle

    def test_what_it_cost_is_recorded(self):
        """The event of two and its draft were sampled before the failure."""
        (result,) = run(Troubled(), ["fails"])
        record = episode_transcript(result, 1, {})
        assert (record["failure"], record["detail"]) == ("retrieval", "no index")
        assert (record["reward"], record["outcome"]) == (None, None)
        assert record["cost"]["calls"] == 2.0 and record["cost"]["tokens"] > 0
        json.dumps(record)

    def test_counts_by_cause(self):
        config = replace(CONFIG, episode_seconds=0.3)
        prompts = ["fails", "x", "fails", "crashes", "sleeps", "y"]
        counted = count_failures(run(Troubled(), prompts, config=config))
        assert counted == {"retrieval": 2, "KeyError": 1, "episode_timeout": 1}

    def test_a_dropped_episode_frees_all_its_slots(self):
        engine = FakeEngine()
        config = replace(CONFIG, episode_seconds=0.2)
        run(Troubled(), ["waits", "x"], engine=engine, config=config)
        assert len(engine.cancelled) == 2 and engine.idle

    def test_a_prompt_too_long_for_the_engine(self):
        """The call's first request was in already: it is taken back."""

        class Uneven(TwoTurns):
            roles = ("a", "b", "judge", "b" * 40)

            async def trouble(self, task, team):
                state = State("stuck")
                await team.act("uneven", state, roles=["a", "b" * 40], render=render)

        engine = FakeEngine(limit=30)
        (result,) = run(Uneven(), ["x"], engine=engine)
        assert (result.failure, result.detail) == ("prompt_budget", "prompt has 47 tokens")
        assert engine.idle and len(engine.cancelled) == 1

    def test_a_tool_that_blocks_for_long_holds_up_no_run(self):
        release = threading.Event()

        class Blocking(TwoTurns):
            async def trouble(self, task, team):
                if task.prompt == "blocks":
                    await team.tool("wait", release.wait, 10)

        started = time.perf_counter()
        try:
            config = replace(CONFIG, tool_seconds=0.1)
            bad, good = run(Blocking(), ["blocks", "x"], config=config)
            assert time.perf_counter() - started < 5
        finally:
            release.set()
        assert bad.failure == "tool_timeout" and good.failure is None

    def test_blocking_tools_do_not_queue_for_each_other(self):
        class Meet(TwoTurns):
            def __init__(self):
                self.barrier = threading.Barrier(24)

            async def trouble(self, task, team):
                await team.tool("meet", self.barrier.wait, 10)

        assert not count_failures(run(Meet(), ["x"] * 24))

    @pytest.mark.parametrize("kind", [RuntimeError, ValueError])
    def test_an_engine_that_breaks_ends_the_run(self, kind):
        class Broken(FakeEngine):
            def step(self):
                if len(self.requests) > 6:
                    raise kind("the device is gone")
                return super().step()

        with pytest.raises(RuntimeError, match="the device is gone"):
            run(TwoTurns(), ["x"] * 4, engine=Broken())

    def test_an_error_of_the_caller_ends_the_run(self):
        engine = FakeEngine()

        def full(result):
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space"):
            run(Troubled(), ["x", "waits"], engine=engine, on_done=full)
        assert engine.idle


class Scored(TwoTurns):
    async def run(self, task, team):
        return replace(await super().run(task, team), score=Score(0.5, True))


async def slow_reward(task, outcome):
    await asyncio.sleep(0)
    return float(task.answer == "4")


class TestRewards:
    @pytest.mark.parametrize(
        "reward, expected, correct",
        [
            (lambda task, outcome: 1.0, 1.0, True),
            (lambda task, outcome: np.float32(1.0), 1.0, True),
            (lambda task, outcome: np.bool_(True), 1.0, True),
            (lambda task, outcome: True, 1.0, True),
            (lambda task, outcome: False, 0.0, False),
            (lambda task, outcome: 0, 0.0, False),
            (lambda task, outcome: Score(0.75, True), 0.75, True),
            (slow_reward, 1.0, True),
        ],
    )
    def test_the_recipes_reward_comes_first(self, reward, expected, correct):
        (result,) = run(Scored(), ["x"], reward=reward)
        assert (result.episode.reward, result.episode.correct) == (expected, correct)
        assert all(event.reward == expected for event in result.episode.events)
        assert result.episode.cost["tools"] == 0.0

    def test_a_reward_sees_the_task_and_the_outcome(self):
        def reward(task, outcome):
            return Score(len(task.prompt + outcome.response), correct=False)

        (result,) = run(TwoTurns(), ["x"], reward=reward)
        assert result.episode.reward == 1 + len(result.outcome.response)

    @pytest.mark.parametrize("value", [10.0, -1, 0.75, 1.1])
    def test_a_bare_number_other_than_0_and_1_does_not_say_what_is_correct(self, value):
        def reward(task, outcome):
            return value if task.prompt == "right" else 0

        engine = FakeEngine()
        said = (
            rf"reward \(.*test_rollout.py:\d+\) returned {value:g}: a bare reward is 0 or 1; "
            rf"for any other say what is correct: Score\({value:g}, correct=...\)"
        )
        with pytest.raises(UserCodeError, match=said) as caught:
            run(TwoTurns(), ["wrong", "right"], engine=engine, reward=reward)
        assert exit_code(caught.value) == 2 and engine.idle

    def test_scores_of_any_scale_say_what_is_correct(self):
        def reward(task, outcome):
            return Score(10.0, True) if task.prompt == "right" else Score(-1.0, False)

        results = run(TwoTurns(), ["right", "wrong", "right"], reward=reward)
        assert [r.episode.reward for r in results] == [10.0, -1.0, 10.0]
        assert [r.episode.correct for r in results] == [True, False, True]

    def test_the_outcomes_own_score_is_next(self):
        (result,) = run(Scored(), ["x"])
        assert (result.episode.reward, result.episode.correct) == (0.5, True)

    def test_the_workflows_reward_is_last(self):
        (result,) = run(TwoTurns(), ["x"])
        assert (result.episode.reward, result.episode.correct) == (0.25, False)

    def test_an_episode_whose_grade_is_undecided_is_dropped_apart_from_failures(self):
        def reward(task, outcome):
            return Score(0.0, False, error="time limit") if task.prompt == "hard" else 1

        results = run(TwoTurns(), ["x", "hard", "y"], reward=reward)
        assert [r.failure for r in results] == [None, "undecided", None]
        hard = results[1]
        assert (hard.episode, hard.detail, hard.failed) == (None, "time limit", False)
        assert hard.outcome.response and not count_failures(results)
        metrics = rollout_metrics(results, [], [])
        assert metrics["episodes/grade_errors"] == 1 and metrics["episodes/failed"] == 0
        assert metrics["reward/mean"] == 1.0  # over the scored ones
        said = step_warnings(results, [], [], None, None)["undecided"]
        assert said.startswith("1 of 3 episodes are left out")
        assert "(s5-t1-r0: time limit)" in said

    def test_a_reward_that_raises_drops_the_episode(self):
        def reward(task, outcome):
            return 1 / (task.prompt != "bad")

        bad, good = run(TwoTurns(), ["bad", "x"], reward=reward)
        assert bad.failure == "ZeroDivisionError" and good.episode.reward == 1.0

    def test_a_reward_that_is_too_slow_drops_the_episode(self):
        async def reward(task, outcome):
            await asyncio.sleep(60)

        (result,) = run(TwoTurns(), ["x"], reward=reward, config=replace(CONFIG, tool_seconds=0.1))
        assert (result.failure, result.detail) == ("tool_timeout", "reward took more than 0.1 s")


def test_sampled_ids_are_never_encoded_again():
    """Token in, token out (case S20): ids that decode to a text of other ids stay as drawn."""
    tokenizer = ChatTokenizer(TINY)
    rng = np.random.default_rng(0)
    drawn = []

    class Random(FakeEngine):
        def reply(self, request):
            drawn.append(rng.integers(0, tokenizer.vocab_size, 6).tolist())
            return drawn[-1]

    rollout = Rollout(EngineThread(Random(limit=1000)), tokenizer, TwoTurns())
    results = rollout.run(plans_of(["x"] * 20), replace(CONFIG, prompt_tokens=1000))
    rows = [
        list(member.response_ids)
        for result in results
        for event in result.episode.events
        for member in event.members
    ]
    assert len(rows) == 60 and all(row in drawn for row in rows)
    assert len({tuple(row) for row in rows}) == 60
    changed = [tokenizer.encode_text(tokenizer.decode(row)) != row for row in rows]
    assert sum(changed) > 30


@pytest.fixture(scope="module")
def rollouts():
    """A tiny model's engine, and what makes a Rollout on it."""
    tokenizer = ChatTokenizer(TINY)
    config = replace(
        tiny_config(tokenizer.vocab_size + 7), hidden_size=32, intermediate_size=48,
        num_layers=2, head_dim=8,
    )  # fmt: skip
    model = Qwen(config, rngs=nnx.Rngs(0))
    engine = Engine(
        config, *split_params(model), vocab_size=tokenizer.vocab_size,
        stop_ids=tokenizer.stop_ids, slots=4, cache_tokens=106, burst=4, dtype=jnp.float32,
        tokenizer=tokenizer,
    )  # fmt: skip

    def make(workflow, **options):
        return Rollout(EngineThread(engine), tokenizer, workflow, **options)

    return engine, make


class TestWithAModel:
    """The same loop on the engine itself."""

    CONFIG = SamplingConfig(prompt_tokens=96, response_tokens=10, temperature=0.9)

    PROMPTS = ("the sum of 1 and 1", "search", "the answer is in the box " * 2)

    def played(self, results):
        return {
            r.plan.id: [
                (m.prompt_ids, tuple(m.response_ids), m.logps.tobytes(), m.stop_reason)
                for _, m in sorted(r.team.members.items())
            ]
            for r in results
            if r.failure is None
        }

    def test_the_same_plans_give_the_same_bits(self, rollouts):
        engine, make = rollouts
        plans = plans_of(self.PROMPTS, rollouts=3)
        first = self.played(make(TwoTurns()).run(plans, self.CONFIG))
        assert len(first) == 9
        assert len({row[1] for rows in first.values() for row in rows}) == 9 * 4
        assert self.played(make(TwoTurns()).run(plans, self.CONFIG)) == first
        assert self.played(make(TwoTurns(), concurrency=1).run(plans, self.CONFIG)) == first
        assert self.played(make(TwoTurns(), concurrency=4).run(plans[::-1], self.CONFIG)) == first
        other = self.played(
            make(TwoTurns()).run(plans_of(self.PROMPTS, (1, 0, 6), rollouts=3), self.CONFIG)
        )
        assert not {row[1] for rows in other.values() for row in rows} & {
            row[1] for rows in first.values() for row in rows
        }
        assert engine.idle

    def test_dropped_episodes_leave_no_trace(self, rollouts):
        """Some episodes give up in the middle of a call; the others' bits stay, slots are free."""
        engine, make = rollouts

        class GivesUp(TwoTurns):
            async def trouble(self, task, team):
                if task.prompt == "search":
                    async with asyncio.timeout(0):
                        await team.act("late", State("x"), roles=["a", "b"], render=render)

        plans = plans_of(self.PROMPTS, rollouts=3)
        expected = self.played(make(TwoTurns()).run(plans, self.CONFIG))
        results = make(GivesUp()).run(plans, self.CONFIG)
        assert count_failures(results) == {"TimeoutError": 3}
        left = self.played(results)
        assert len(left) == 6 and all(expected[key] == rows for key, rows in left.items())
        assert engine.idle
        steps = engine.stats["decode_steps"]
        make(TwoTurns()).run(plans[:1], replace(self.CONFIG, response_tokens=2))
        assert engine.stats["decode_steps"] == steps + 6  # two a call: no slot was left running
