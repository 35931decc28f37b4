"""The loop: rollout -> event batch -> update(s) -> weight sync -> evaluation -> checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from envs.workflow import Task, Workflow
from srpo_jax.advantage import row_advantages
from srpo_jax.batch import EventBatch, ShapeMemory, build_batch
from srpo_jax.checkpoint import Checkpoints, write_json
from srpo_jax.config import Recipe
from srpo_jax.evaluation import BenchmarkResult, EpisodeCost, macro
from srpo_jax.events import Event, split_complete
from srpo_jax.metrics import EpisodeWriter, MetricLogger, read_metrics, write_verdicts
from srpo_jax.progress import RunProgress
from srpo_jax.rollout import EpisodePlan, EpisodeResult
from srpo_jax.run_parts import Parts, build_parts, check_run_folder
from srpo_jax.step_metrics import CV_WINDOW, rollout_metrics, row_metrics, update_metrics
from srpo_jax.transcript import episode_record

DONE, STOPPED = 0, 75


class TrainingFailed(RuntimeError):
    """A run or evaluation that cannot go on; one clear line. The last checkpoint is kept."""

    exit_code = 1


def run(
    recipe: Recipe,
    workflow: Workflow | None = None,
    reward: Callable[..., Any] | None = None,
    console: Console | None = None,
) -> int:
    """Trains what ``recipe`` says, or resumes where its folder stopped.

    Returns 0 when the target step is reached, 75 when the run was asked to stop before it.
    """
    folder = recipe.run_dir
    check_run_folder(recipe)
    parts = build_parts(recipe, workflow=workflow, reward=reward)
    checkpoints = Checkpoints(folder / "checkpoints", recipe.trainer.keep)
    best = Checkpoints(folder / "best", 1)
    logger, writer = MetricLogger(folder), EpisodeWriter(folder)
    (folder / "recipe.yaml").write_text(recipe.dump())

    start, best_score = checkpoints.latest or 0, -np.inf
    logger.truncate_to(start if checkpoints.latest is not None else -1)
    writer.truncate_to(start)
    if start:
        state, meta = checkpoints.load(start, parts.learner.state)
        parts.learner.state, best_score = state, meta["best_score"]
        parts.grad_norms = past_grad_norms(folder)
        parts.sync()

    done = start
    with (
        closing(checkpoints),  # a checkpoint on its way is finished, however the run ends
        closing(best),
        closing(logger),
        _StopRequest() as stop,
        RunProgress(recipe.trainer.steps, start, console) as progress,
    ):
        every = recipe.evaluation.every
        if start == 0 and every:
            logger.log(0, _evaluate_and_keep(parts, 0, progress))
        for step in range(start, recipe.trainer.steps):
            metrics = train_step(parts, step, writer, progress)
            done = step + 1
            if every and (done % every == 0 or done == recipe.trainer.steps):
                metrics |= _evaluate_and_keep(parts, done, progress)
            logger.log(done, metrics)
            progress.step(done, metrics)
            score = metrics.get("eval/macro/avg", -np.inf)
            meta = {"best_score": max(best_score, score)}
            if score > best_score:
                best_score = score
                best.save(done, parts.learner.state, meta)
            last = done == recipe.trainer.steps or stop.requested
            if last or (
                recipe.trainer.checkpoint_every and done % recipe.trainer.checkpoint_every == 0
            ):
                checkpoints.save(done, parts.learner.state, meta)
            if stop.requested:
                break
    if done < recipe.trainer.steps:
        progress.note(
            f"stopped after step {done} of {recipe.trainer.steps}; the same command resumes"
        )
        return STOPPED
    parts.export(folder / "model")
    write_json(folder / "done.json", {"step": recipe.trainer.steps})
    return DONE


def train_step(
    parts: Parts, step: int, writer: EpisodeWriter, progress: RunProgress
) -> dict[str, float]:
    """One rollout batch and its updates; leaves the engine with the new weights."""
    recipe = parts.recipe
    clock = _Clock()
    plans = [
        EpisodePlan(task, (recipe.seed, 0, step), slot, rollout)
        for slot, task in enumerate(parts.stream.step(step))
        for rollout in range(recipe.rollout.group_size)
    ]
    with progress.phase("rollout", len(plans)) as advance:
        results = parts.rollout.run(plans, parts.train_sampling, lambda _: advance())
    _check_failures(results, recipe.rollout.max_failed_fraction)
    clock.lap("rollout")

    events = [e for r in results if r.episode is not None for e in r.episode.events]
    events = apply_truncation(events, recipe.rollout.truncated)
    complete, dropped = split_complete(events)
    advantages, statistics = row_advantages(complete, recipe.advantage_config())
    batches = split_minibatches(recipe, step, complete, advantages, parts.shapes)
    metrics = rollout_metrics(results, complete, dropped) | row_metrics(results, complete, batches)
    metrics |= {f"advantage/{name}": value for name, value in statistics.items()}
    clock.lap("batch")

    parts.engine.drop()  # its memory is the learner's until the new weights come
    orders = epoch_orders(recipe, step, len(batches))
    every = recipe.learner.role_norms_every
    with progress.phase("update", sum(map(len, orders))) as advance:
        if batches and parts.needs_gate:
            parts.learner.check_gate(batches[0])
            progress.note("gate: scored the first batch twice, L_e = 0 exactly")
            parts.needs_gate = False
        reports = parts.learner.update(
            batches, orders=orders, on_step=advance, by_role=bool(every) and step % every == 0
        )
        metrics |= update_metrics(reports, parts.grad_norms)
    if reports:
        parts.grad_norms = [*parts.grad_norms, metrics["update/grad_norm"]][-CV_WINDOW:]
    parts.count_nonfinite(reports)
    parts.sync()
    clock.lap("update")
    if recipe.trainer.dump_episodes:
        by_event = {e.id: a for e, a in zip(complete, advantages, strict=True)}
        writer.write(step + 1, [episode_record(r, step + 1, by_event) for r in results])
    metrics["compiles"] = float(parts.compile_count())
    return metrics | clock.seconds


def apply_truncation(events: Sequence[Event], policy: str) -> list[Event]:
    """What happens to members that the length limit cut: keep, penalise as malformed, or drop the
    whole event (as incomplete)."""
    if policy == "keep":
        return list(events)
    changed = []
    for event in events:
        if all(m.stop_reason != "length" for m in event.members):
            changed.append(event)
        elif policy == "penalise":
            members = tuple(
                replace(m, well_formed=m.well_formed and m.stop_reason != "length")
                for m in event.members
            )
            changed.append(replace(event, members=members))
        else:
            kept = tuple(m for m in event.members if m.stop_reason != "length")
            changed.append(replace(event, members=kept))
    return changed


def split_minibatches(
    recipe: Recipe,
    step: int,
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    shapes: ShapeMemory | None = None,
) -> list[EventBatch]:
    """The step's events in ``updates_per_batch`` event-atomic parts, drawn by seed and step.

    Where the loss is the surrogate alone, events without an advantage are counted but not
    computed.
    """
    objective = recipe.objective_config()
    parts = min(recipe.learner.updates_per_batch, len(events))
    if not parts:
        return []
    order = np.random.default_rng([recipe.seed, step]).permutation(len(events))
    batches = []
    for chosen in np.array_split(order, parts):
        chosen = np.sort(chosen)
        batches.append(
            build_batch(
                [events[i] for i in chosen],
                [advantages[i] for i in chosen],
                micro_batch_rows=recipe.learner.micro_batch_rows,
                sequence_tokens=recipe.learner.sequence_tokens,
                max_tokens=recipe.rollout.prompt_tokens + recipe.rollout.response_tokens,
                skip_zero_advantage=not (objective.kl_coef or objective.entropy_coef),
                shapes=shapes,
            )
        )
    return batches


def epoch_orders(recipe: Recipe, step: int, batches: int) -> list[list[int]]:
    """The order of the mini-batches in every epoch: as they are first, then drawn by seed, step."""
    rng = np.random.default_rng([recipe.seed, step, 1])
    rest = [rng.permutation(batches).tolist() for _ in range(recipe.learner.epochs - 1)]
    return [list(range(batches)), *rest]


def evaluate(parts: Parts, progress: RunProgress | None = None) -> dict[str, BenchmarkResult]:
    """Every benchmark of the recipe, sampled with keys that depend on the evaluation seed alone.

    Raises TrainingFailed where a server fails more than rollout.max_failed_fraction of a benchmark.
    """
    config = parts.recipe.evaluation
    progress = progress or RunProgress(0, 0, None)
    results = {}
    for index, (name, tasks) in enumerate(parts.benchmarks.items()):
        chosen = tasks[: config.tasks] if config.tasks else tasks
        plans = [
            EpisodePlan(task, (config.seed, 1, index), slot, sample)
            for slot, task in enumerate(chosen)
            for sample in range(config.samples)
        ]
        with progress.phase(f"evaluate {name}", len(plans)) as advance:
            episodes = parts.rollout.run(plans, parts.eval_sampling, lambda _: advance())
        if parts.recipe.rollout.remote:  # what a server fails says nothing about the model
            _check_failures(episodes, parts.recipe.rollout.max_failed_fraction)
        results[name] = benchmark_result(chosen, episodes, config.samples)
    return results


def benchmark_result(
    tasks: Sequence[Task], episodes: Sequence[EpisodeResult], samples: int
) -> BenchmarkResult:
    """[tasks, samples] verdicts and costs; a failed episode counts as wrong, and as failed."""
    correct = np.array([bool(r.episode and r.episode.correct) for r in episodes])
    costs = [
        EpisodeCost(
            tokens=sum(len(m.response_ids) for m in r.team.members.values()),
            calls=len(r.team.members),
            tools=int(r.episode.cost["tools"]) if r.episode else 0,
            events=sum(call.kind == "event" for call in r.team.calls),
            seconds=r.seconds,
        )
        for r in episodes
    ]
    return BenchmarkResult(
        correct=correct.reshape(len(tasks), samples),
        costs=[costs[i : i + samples] for i in range(0, len(costs), samples)],
        failed=sum(r.failure is not None for r in episodes),
    )


def evaluate_recipe(
    recipe: Recipe, workflow: Workflow | None = None, reward: Callable[..., Any] | None = None
) -> dict[str, BenchmarkResult]:
    """Evaluates the recipe's model without training it."""
    parts = build_parts(recipe, workflow=workflow, reward=reward, train=False)
    with RunProgress(0, 0, None) as progress:
        return evaluate(parts, progress)


def past_grad_norms(folder: Any) -> list[float]:
    """The gradient norms of a resumed run's last steps, for the coefficient of variation."""
    try:
        rows = read_metrics(folder)
    except FileNotFoundError:
        return []
    return [row["update/grad_norm"] for row in rows if row.get("update/grad_norm") is not None][
        -CV_WINDOW:
    ]


def _evaluate_and_keep(parts: Parts, step: int, progress: RunProgress) -> dict[str, float]:
    results = evaluate(parts, progress)
    write_verdicts(parts.recipe.run_dir, step, {n: r.correct for n, r in results.items()})
    return _evaluation_metrics(results)


def _evaluation_metrics(results: Mapping[str, BenchmarkResult]) -> dict[str, float]:
    metrics = {}
    for name, result in results.items():
        metrics |= {
            f"eval/{name}/avg": result.avg,
            f"eval/{name}/pass": result.passed,
            f"eval/{name}/failed": float(result.failed),
            f"eval/{name}/tokens": result.cost.c_tok,
        }
    metrics["eval/macro/avg"] = macro([r.avg for r in results.values()])
    metrics["eval/macro/pass"] = macro([r.passed for r in results.values()])
    return metrics


def _check_failures(results: Sequence[EpisodeResult], limit: float) -> None:
    failed = [r for r in results if r.failure is not None]
    if len(failed) > limit * len(results):
        first = failed[0]
        raise TrainingFailed(
            f"{len(failed)} of {len(results)} episodes failed (rollout.max_failed_fraction is "
            f"{limit:g}); the first, {first.plan.id}: {first.failure}: {first.detail}"
        )


class _StopRequest:
    """True once SIGTERM arrived: the step in progress is finished and saved."""

    def __init__(self):
        self.requested = False
        self._previous = None

    def __enter__(self) -> _StopRequest:
        # Outside the main thread there are no handlers: the caller stops the run in its own way.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def _request(self, *_: object) -> None:
        self.requested = True

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


class _Clock:
    """Seconds of the parts of a step, as metrics."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = now - self._last
        self._last = now
