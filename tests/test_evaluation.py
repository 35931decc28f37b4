"""Avg@k, Pass@k, standard errors and costs against hand-computed numbers and enumeration; what an
evaluation makes of episodes that fail."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workflow import EpisodeFailed, Score, Task
from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.evaluation import (
    BenchmarkResult,
    EpisodeCost,
    avg_at_k,
    macro,
    macro_error,
    over_seeds,
    paired_difference,
    pass_at_k,
    standard_error,
    summarise_cost,
    u_tok,
)
from srpo_jax.rollout.rollout import Rollout
from srpo_jax.run.evaluate import TrainingFailed, check_failures, evaluate, evaluation_metrics
from srpo_jax.run.processes import Processes
from tests.rollout_cases import CONFIG, FakeEngine, Letters, State, TwoTurns, render

CORRECT = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)


def test_hand_computed():
    assert avg_at_k(CORRECT) == pytest.approx((0.5 + 0 + 1) / 3)
    assert pass_at_k(CORRECT, 4) == pytest.approx(2 / 3)
    # Task 1: 1 - C(2,2)/C(4,2) = 5/6.
    assert pass_at_k(CORRECT, 2) == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert pass_at_k(CORRECT, 1) == pytest.approx(avg_at_k(CORRECT))
    assert isinstance(avg_at_k(CORRECT), float)


rows = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=3)
)


@settings(deadline=None)
@given(rows, st.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(correct, data):
    k = data.draw(st.integers(1, len(correct[0])))
    exact = np.mean([np.mean([any(c) for c in itertools.combinations(row, k)]) for row in correct])
    assert pass_at_k(correct, k) == pytest.approx(exact)


def test_pass_at_k_does_not_overflow():
    correct = np.zeros((1, 2000), dtype=bool)
    correct[0, 0] = True
    assert pass_at_k(correct, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_samples(k):
    with pytest.raises(ValueError, match="k must be from 1 to 4"):
        pass_at_k(CORRECT, k)


@pytest.mark.parametrize("correct", [np.zeros((0, 4), bool), np.ones(3, bool), [[0.5, 1.0]]])
def test_not_a_table_of_booleans(correct):
    with pytest.raises(ValueError, match="bool array"):
        avg_at_k(correct)


def test_standard_error_is_over_tasks():
    """Copies of a sample add nothing: only more tasks narrow the error."""
    per_task = CORRECT.mean(axis=1)
    # Values 0.5, 0, 1: sample standard deviation 0.5, over sqrt(3).
    assert standard_error(per_task) == pytest.approx(0.5 / math.sqrt(3))
    repeated = np.repeat(CORRECT, 10, axis=1)
    assert standard_error(repeated.mean(axis=1)) == pytest.approx(standard_error(per_task))
    assert math.isnan(standard_error([0.5]))


def test_paired_difference():
    before = np.array([[0, 1], [0, 0], [1, 1]], dtype=bool)
    after = np.array([[1, 1], [0, 1], [1, 1]], dtype=bool)
    mean, error = paired_difference(before, after)
    # Differences 0.5, 0.5, 0: mean 1/3, sample sd sqrt(1/12).
    assert mean == pytest.approx(1 / 3)
    assert error == pytest.approx(math.sqrt(1 / 12) / math.sqrt(3))
    assert paired_difference(before.mean(axis=1), after) == pytest.approx((mean, error))
    with pytest.raises(ValueError, match="not the same tasks: 3 before, 2 after"):
        paired_difference(before, after[:2])


def test_macro_is_unweighted():
    assert macro({"small": 1.0, "large": 0.5}) == 0.75
    assert macro_error([3.0, 4.0]) == 2.5


def test_over_seeds_uses_the_sample_deviation():
    mean, deviation = over_seeds([1.0, 2.0, 3.0])
    assert (mean, deviation) == (2.0, 1.0)
    mean, deviation = over_seeds([4.0])
    assert mean == 4.0 and math.isnan(deviation)


def cost(tokens: int, calls: int, events: int, seconds: float, tools: int = 0) -> EpisodeCost:
    return EpisodeCost(tokens=tokens, calls=calls, tools=tools, events=events, seconds=seconds)


def test_costs_hand_computed():
    correct = np.array([[True, False], [True, True]])
    costs = [
        [cost(10, 4, 2, 1.0, tools=1), cost(20, 4, 2, 2.0)],
        [cost(30, 2, 2, 3.0), cost(40, 6, 2, 4.0, tools=3)],
    ]
    summary = summarise_cost(correct, costs)
    assert (summary.c_tok, summary.c_call, summary.c_tool) == (25.0, 4.0, 1.0)
    assert (summary.mean_k, summary.mean_tokens, summary.proxy) == (2.0, 6.25, 12.5)
    # (0.5 + 1) correct for 15 + 35 tokens.
    assert summary.u_tok == pytest.approx(1e6 * 1.5 / 50)
    assert summary.p50 == 2.5 and summary.p95 == pytest.approx(3.85)
    with pytest.raises(ValueError, match="costs must be nested like correct"):
        summarise_cost(correct[:1], costs)


def test_u_tok_without_tokens():
    assert math.isnan(u_tok([[False]], [[0]]))


def test_a_benchmarks_figures():
    result = BenchmarkResult(CORRECT, [[cost(10, 1, 1, 1.0)] * 4] * 3, failed=2)
    assert (result.avg, result.passed) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert result.avg_error == pytest.approx(0.5 / math.sqrt(3))
    # Solved at least once: 1, 0, 1, sample sd sqrt(1/3).
    assert result.passed_error == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    assert result.cost.c_tok == 10


def test_nothing_was_measured_where_nothing_was_graded():
    wrong = np.zeros((3, 4), bool)
    costs = [[cost(10, 1, 1, 1.0)] * 4] * 3
    graded = BenchmarkResult(wrong, costs, failed=7, undecided=4)
    assert (graded.graded, graded.avg, graded.passed, graded.cost.u_tok) == (1, 0.0, 0.0, 0.0)
    none = BenchmarkResult(wrong, costs, failed=7, undecided=5)
    figures = (none.avg, none.avg_error, none.passed, none.passed_error, none.cost.u_tok)
    assert all(map(math.isnan, figures)) and none.cost.c_tok == 10
    assert math.isnan(macro([1.0, none.avg]))


class Graded(TwoTurns):
    """A draft and three outputs of two events, one tool call, then a reward by the task's prompt:
    ``right``, ``wrong``, ``undecided``, or ``fails`` (after a second tool call)."""

    async def trouble(self, task, team):
        await team.tool("look up", str.upper, "x")
        if task.prompt == "fails":
            await team.tool("look up", str.upper, "x")
            await team.draft(State("more"), roles=["a"], render=render)
            raise EpisodeFailed("retrieval", "no index")

    async def reward(self, task, outcome, team):
        error = "time limit" if task.prompt == "undecided" else None
        return await team.tool("grade", Score, float(task.prompt == "right"),
                               task.prompt == "right", error)  # fmt: skip


def evaluated(**benchmarks):
    """The results of benchmarks of the given prompts, two samples a task."""
    parts = SimpleNamespace(
        processes=Processes(),
        recipe=SimpleNamespace(
            evaluation=SimpleNamespace(tasks=None, seed=0, samples=2),
            rollout=SimpleNamespace(remote=None),
        ),
        rollout=Rollout(EngineThread(FakeEngine()), Letters(), Graded()),
        eval_sampling=CONFIG,
        benchmarks={
            name: [Task(f"t{i}", prompt, "4") for i, prompt in enumerate(prompts)]
            for name, prompts in benchmarks.items()
        },
    )
    return evaluate(parts)


def test_what_fails_or_is_undecided_counts_as_wrong_and_apart():
    results = evaluated(one=["right", "fails", "undecided", "wrong"])
    result = results["one"]
    assert result.correct.tolist() == [[True] * 2, [False] * 2, [False] * 2, [False] * 2]
    assert (result.failed, result.undecided, result.graded) == (2, 2, 4)
    metrics = evaluation_metrics(results)
    assert (metrics["eval/one/avg"], metrics["eval/macro/avg"]) == (0.25, 0.25)
    assert (metrics["eval/one/failed"], metrics["eval/one/undecided"]) == (2, 2)


def test_costs_are_those_of_events_also_of_a_failed_episode():
    result = evaluated(one=["right", "fails"])["one"]
    (ended, _), (failed, _) = result.costs
    assert (ended.calls, ended.events, ended.tools) == (3, 2, 1)  # no draft, no grade
    assert (failed.calls, failed.events, failed.tools) == (2, 1, 2)
    # Six digits or fewer an output: the request's key in letters.
    assert 0 < failed.tokens <= 12 and failed.tokens < ended.tokens <= 18


def test_a_benchmark_without_a_grade_has_no_average_and_the_macro_none():
    results = evaluated(fine=["right"], broken=["fails", "undecided"])
    metrics = evaluation_metrics(results)
    assert metrics["eval/fine/avg"] == 1.0 and metrics["eval/broken/failed"] == 2
    for name in ("broken", "macro"):
        assert math.isnan(metrics[f"eval/{name}/avg"]) and math.isnan(metrics[f"eval/{name}/pass"])


def test_an_evaluation_without_any_grade_ends_with_the_first_cause():
    said = "none of 8 episodes was graded; the first, e0-t0-r0: retrieval: no index"
    with pytest.raises(TrainingFailed, match=said) as caught:
        evaluated(one=["fails", "undecided"], two=["fails", "fails"])
    assert caught.value.exit_code == 1


def test_undecided_grades_do_not_end_a_run():
    results = [SimpleNamespace(failed=False)] * 9 + [
        SimpleNamespace(failed=True, plan=SimpleNamespace(id="s1-t0-r0"), failure="x", detail="y")
    ]
    check_failures(results, 0.1)
    with pytest.raises(TrainingFailed, match="1 of 10 episodes failed"):
        check_failures(results, 0.09)
