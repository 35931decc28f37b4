"""Evaluates a run's policy on the benchmarks of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from envs.workflow import Task
from srpo_jax.evaluation import BenchmarkResult, EpisodeCost, macro
from srpo_jax.rollout.rollout import UNDECIDED, EpisodePlan, EpisodeResult, episode_cost
from srpo_jax.run.build import EvaluationParts
from srpo_jax.run.progress import RunProgress
from srpo_jax.run.shared_rollout import run_shared


class TrainingFailed(RuntimeError):
    """A run or evaluation that cannot go on; one clear line. The last checkpoint is kept."""

    exit_code = 1


def evaluate(
    parts: EvaluationParts,
    progress: RunProgress | None = None,
    keep: Callable[[str, Sequence[EpisodeResult]], object] = lambda name, episodes: None,
) -> dict[str, BenchmarkResult]:
    """Runs every benchmark of the recipe.

    Args:
        parts: What evaluates. Request keys depend on the evaluation's seed alone.
        progress: Shows the episodes as they end.
        keep: Gets the name and the episodes of each benchmark as soon as they are done.

    Returns:
        Verdicts and costs of each benchmark, by its name.

    Raises:
        TrainingFailed: No episode of any benchmark was graded (the first one's cause is said), or a
            server failed more than rollout.max_failed_fraction of a benchmark.
    """
    config = parts.recipe.evaluation
    progress = progress or RunProgress(0, 0, None)
    results: dict[str, BenchmarkResult] = {}
    ungraded: list[EpisodeResult] = []  # the first one
    for index, (name, tasks) in enumerate(parts.benchmarks.items()):
        chosen = tasks[: config.tasks] if config.tasks else tasks
        plans = [
            EpisodePlan(task, (config.seed, 1, index), slot, sample)
            for slot, task in enumerate(chosen)
            for sample in range(config.samples)
        ]
        with progress.phase(f"evaluate {name}", len(plans)) as advance:
            episodes = run_shared(
                parts.rollout, parts.processes, plans, parts.eval_sampling, lambda _: advance()
            )
        keep(name, episodes)
        if parts.recipe.rollout.remote:  # what a server fails says nothing about the model
            check_failures(episodes, parts.recipe.rollout.max_failed_fraction)
        results[name] = benchmark_result(chosen, episodes, config.samples)
        ungraded = ungraded or [r for r in episodes if r.failure is not None][:1]
    if results and not any(result.graded for result in results.values()):
        raise TrainingFailed(
            f"evaluation: none of {sum(r.correct.size for r in results.values())} episodes was "
            f"graded; the first, {_why(ungraded[0])}"
        )
    return results


def benchmark_result(
    tasks: Sequence[Task], episodes: Sequence[EpisodeResult], samples: int
) -> BenchmarkResult:
    """Verdicts and costs, each [tasks, samples].

    An episode that failed or whose grade is undecided counts as wrong, and apart.

    Args:
        tasks: The benchmark's.
        episodes: Those of the first task, then those of the second, and so on.
        samples: Episodes of each task.
    """
    correct = np.array([bool(r.episode and r.episode.correct) for r in episodes])
    costs = [_cost(r) for r in episodes]
    return BenchmarkResult(
        correct=correct.reshape(len(tasks), samples),
        costs=[costs[i : i + samples] for i in range(0, len(costs), samples)],
        failed=sum(r.failed for r in episodes),
        undecided=sum(r.failure == UNDECIDED for r in episodes),
    )


def _cost(result: EpisodeResult) -> EpisodeCost:
    cost = episode_cost(result.team)
    return EpisodeCost(
        tokens=int(cost["tokens"]),
        calls=int(cost["calls"]),
        tools=int(cost["tools"]),
        events=sum(call.kind == "event" and bool(call.outputs) for call in result.team.calls),
        seconds=result.seconds,
    )


def evaluation_metrics(results: Mapping[str, BenchmarkResult]) -> dict[str, float]:
    """The figures of an evaluation as metrics of its step."""
    metrics: dict[str, float] = {}
    for name, result in results.items():
        metrics |= {
            f"eval/{name}/avg": result.avg,
            f"eval/{name}/pass": result.passed,
            f"eval/{name}/failed": float(result.failed),
            f"eval/{name}/undecided": float(result.undecided),
            f"eval/{name}/tokens": result.cost.c_tok,
        }
    metrics["eval/macro/avg"] = macro([r.avg for r in results.values()])
    metrics["eval/macro/pass"] = macro([r.passed for r in results.values()])
    return metrics


def check_failures(results: Sequence[EpisodeResult], limit: float) -> None:
    """Bounds the share of episodes that failed.

    Those whose grade is undecided are none of them: what they say is about the grader.

    Args:
        results: All episodes of a step or a benchmark.
        limit: The share that may fail, from 0 to 1.

    Raises:
        TrainingFailed: More did.
    """
    failed = [r for r in results if r.failed]
    if len(failed) > limit * len(results):
        raise TrainingFailed(
            f"{len(failed)} of {len(results)} episodes failed (rollout.max_failed_fraction is "
            f"{limit:g}); the first, {_why(failed[0])}"
        )


def _why(result: EpisodeResult) -> str:
    return f"{result.plan.id}: {result.failure}: {result.detail}"
