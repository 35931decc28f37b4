"""The loop: rollout -> event batch -> update(s) -> weight sync -> evaluation -> checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from rich.console import Console

from envs.workflow import Workflow
from srpo_jax.advantage import row_advantages
from srpo_jax.checkpoint import Checkpoints, write_json
from srpo_jax.config import Recipe
from srpo_jax.events import split_complete
from srpo_jax.metrics import EpisodeWriter, MetricLogger, read_metrics, write_verdicts
from srpo_jax.minibatches import apply_truncation, epoch_orders, split_minibatches
from srpo_jax.progress import RunProgress
from srpo_jax.rollout import EpisodePlan
from srpo_jax.run_evaluation import check_failures, evaluate, evaluation_metrics
from srpo_jax.run_parts import Parts, build_parts, check_run_folder
from srpo_jax.step_metrics import CV_WINDOW, rollout_metrics, row_metrics, update_metrics
from srpo_jax.transcript import episode_record

DONE, STOPPED = 0, 75


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
    check_failures(results, recipe.rollout.max_failed_fraction)
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
    return evaluation_metrics(results)


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
