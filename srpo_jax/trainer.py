"""The loop: rollout -> event batch -> update(s) -> weight sync -> evaluation -> checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from envs.workflow import Workflow
from srpo_jax.advantage import row_advantages
from srpo_jax.events import split_complete
from srpo_jax.learner.batch import ShapeMemory
from srpo_jax.learner.optimizer import last_rate
from srpo_jax.recipe.presets import preset_changes
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.rollout.rollout import EpisodePlan, EpisodeResult
from srpo_jax.rollout.transcript import episode_transcript
from srpo_jax.run.build import Parts, build_parts
from srpo_jax.run.checkpoint import Checkpoints
from srpo_jax.run.evaluate import check_failures, evaluate, evaluation_metrics
from srpo_jax.run.files import write_json
from srpo_jax.run.folder import check_run_folder, locked, record_run
from srpo_jax.run.logs import EpisodeWriter, MetricLogger, NoLogs, plain_row, write_verdicts
from srpo_jax.run.minibatches import apply_truncation, epoch_orders, split_minibatches
from srpo_jax.run.processes import Processes
from srpo_jax.run.progress import RunProgress
from srpo_jax.run.shared_rollout import run_shared
from srpo_jax.run.step_metrics import CV_WINDOW, rollout_metrics, row_metrics, update_metrics
from srpo_jax.run.stopping import STOPPED, Stopped, StopRequest, no_end
from srpo_jax.run.warnings import step_warnings

DONE = 0


def run(
    recipe: Recipe,
    workflow: Workflow | None = None,
    reward: Callable[..., Any] | None = None,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> int:
    """Trains a recipe, or resumes where its run folder stopped.

    Args:
        recipe: A checked recipe, see ``srpo_jax.recipe.load_recipe``.
        workflow: Stands in for the recipe's workflow.
        reward: Stands in for the recipe's reward: ``(task, outcome)`` to a Score, a bool, 0 or 1.
        console: Where progress is printed; None: standard error.
        stop: A request to stop that is entered already; None: SIGTERM and SIGINT are watched.

    Returns:
        0 when the target step is reached, 75 when the run was stopped before it.

    Raises:
        RecipeError: The recipe, its files or its run folder cannot be used.
        TrainingFailed: Too many episodes failed, or too many updates were not finite.
    """
    processes = Processes()
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest())
        console = console if processes.first else Console(quiet=True)
        progress = stack.enter_context(RunProgress(recipe.trainer.steps, 0, console))
        stack.enter_context(processes.ending_together(stop))
        if processes.first:
            stack.enter_context(locked(recipe.run_dir))
        stack.callback(setattr, stop, "on_end", no_end)
        stop.on_end = lambda: progress.note("stopped while starting; the same command resumes")
        try:
            check_run_folder(recipe)
            processes.agree("checked")  # before the first one writes there
            if (changes := preset_changes(recipe, own_workflow=workflow is not None)) is not None:
                progress.note(changes)
            parts = build_parts(
                recipe, workflow=workflow, reward=reward,
                starting=progress.starting, note=progress.note, check=stop.check,
                processes=processes,
            )  # fmt: skip
            if processes.first:
                record_run(recipe, Path(parts.tokenizer.folder))
            training = stack.enter_context(contextlib.closing(Training(parts, progress, stop)))
            training.resume()
            training.train()
            training.finish()
        except Stopped:
            with stop.finishing():
                stop.on_end()
            return STOPPED
    return DONE


class Training:
    """A run in its folder, step by step.

    Attributes:
        done: Complete steps.
        saved: The last step with a checkpoint.
        unlogged: Metrics of the last step until it is evaluated.
    """

    def __init__(self, parts: Parts, progress: RunProgress, stop: StopRequest):
        self.parts, self.progress, self.stop = parts, progress, stop
        self.recipe, self.folder = parts.recipe, parts.recipe.run_dir
        self.processes = processes = parts.processes
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", self.recipe.trainer.keep, processes
        )
        self.best = Checkpoints(self.folder / "best", 1, processes)
        self.logger: MetricLogger | NoLogs = NoLogs()
        self.writer: EpisodeWriter | NoLogs = NoLogs()
        if processes.first:
            self.logger, self.writer = MetricLogger(self.folder), EpisodeWriter(self.folder)
        self._blocked = 0.0  # seconds that saving has held up the loop since the last step's row
        self.done = self.saved = 0
        self.best_score = -np.inf
        self.unlogged: dict[str, Any] | None = None
        progress.generated = lambda: parts.engine.stats["decode_tokens"]

    def resume(self) -> None:
        """Loads the newest intact checkpoint, and truncates the logs that go beyond it."""
        if not self.checkpoints.used:
            self.logger.truncate_to(-1)
            self.writer.truncate_to(0)
        else:
            # Memory holds one train state, and no engine beside what is being read.
            self.parts.engine.drop()
            like = self.parts.learner.release()
            self.done, self.parts.learner.state, meta = self.checkpoints.load_newest(
                like, self.progress.note
            )
            self.saved = self.done
            self.best_score, self.unlogged = meta["best_score"], meta.get("unlogged")
            self.parts.shapes = ShapeMemory(**meta.get("shapes", {}))
            self.parts.grad_norms = meta.get("grad_norms", [])
            self.parts.nonfinite = meta.get("nonfinite", 0)
            self.parts.dropping = meta.get("dropping", 0)
            self.logger.truncate_to(self.done if self.unlogged is None else self.done - 1)
            self.writer.truncate_to(self.done)
            self.parts.sync()
            self.progress.resumed(self.done)
        self.stop.on_end = self.save_and_report

    def train(self) -> None:
        """Trains to the target step.

        Raises:
            Stopped: The run was asked to stop; its last complete step is saved.
        """
        steps = self.recipe.trainer.steps
        if self.done > steps:
            self.progress.note(
                f"the run is at step {self.done} already, past trainer.steps {steps}"
            )
        if self.done == 0 and self.recipe.evaluation.every:
            self.logger.log(0, self._evaluate())
        if self.unlogged is not None:  # stopped before the end of the last step's evaluation
            self._conclude(self.unlogged)
        while self.done < steps:
            self._check_together()
            self._conclude(self._step())
        self._check_together()

    def finish(self) -> None:
        """Exports the model and records that the run is done."""
        self.checkpoints.wait()
        self.progress.starting(f"writing {self.folder / 'model'}")
        self.parts.export(self.folder / "model")
        if self.processes.first:
            write_json(self.folder / "done.json", {"step": self.done})
        self.progress.note(f"wrote {self.folder / 'model'} (step {self.done})")

    def save_and_report(self) -> None:
        """Saves the last complete step unless it is saved, and reports that the run stops."""
        self.stop.on_end = no_end
        if self.done > self.saved:
            self._save()
        self.checkpoints.wait()
        self.progress.note(
            f"stopped after step {self.done} of {self.recipe.trainer.steps}; "
            "the same command resumes"
        )

    def close(self) -> None:
        """Finishes what is being saved."""
        with self.stop.finishing(), contextlib.closing(self.logger), contextlib.closing(self.best):
            self.checkpoints.close()

    def _check_together(self) -> None:
        """Raises Stopped on all processes where one was asked to stop."""
        if self.processes.count == 1:
            self.stop.check()
        elif "stop" in self.processes.agree("stop" if self.stop.requested else "go on"):
            raise Stopped("the run was asked to stop")

    def _step(self) -> dict[str, Any]:
        """One rollout batch and its updates; the engine has the new weights after it.

        Returns:
            The step's metrics.
        """
        clock, generated = _Clock(), self.progress.generated()
        waited = self.processes.waited
        results = sample_step(self.parts, self.done, self.progress)
        self._check_together()
        clock.lap("rollout")
        # Of it, what this process waited for the others; saving is that of the steps before.
        clock.seconds["time/waiting"] = self.processes.waited - waited
        clock.seconds["time/checkpoint"], self._blocked = self._blocked, 0.0
        own = self.progress.generated() - generated
        rate = sum(map(int, self.processes.agree(str(own)))) / clock.seconds["time/rollout"]
        with self.stop.finishing():
            metrics = update_step(self.parts, self.done, results, self.writer, self.progress, clock)
            row = plain_row(metrics | clock.seconds | {"time/tokens_per_second": rate})
            self.unlogged = row
            self.done += 1
        return row

    def _conclude(self, metrics: dict[str, Any]) -> None:
        """Evaluates the last step, logs it and saves it, each where its interval asks for it."""
        trainer, every = self.recipe.trainer, self.recipe.evaluation.every
        is_last = self.done == trainer.steps
        if every and (self.done % every == 0 or is_last):
            metrics = metrics | self._evaluate()
        with self.stop.finishing():
            self.logger.log(self.done, metrics)
            self.unlogged = None
            self.progress.step(self.done, metrics)
            self.checkpoints.poll()
            score = metrics.get("eval/macro/avg")
            if score is not None and score > self.best_score:
                self.best_score = score
                best = {"params": self.parts.learner.params}  # an export needs no moments
                started = time.perf_counter()
                self._one_save_at_a_time(self.checkpoints)
                self.best.save(self.done, best, {"score": score})
                self._blocked += time.perf_counter() - started
            # The first step too: a run that cannot be saved shows it at once.
            due = trainer.checkpoint_every and self.done % trainer.checkpoint_every == 0
            if self.done == 1 or is_last or due:
                self._save()

    def _evaluate(self) -> dict[str, float]:
        clock = _Clock()
        results = evaluate(self.parts, self.progress)
        self._check_together()
        clock.lap("evaluation")
        if self.processes.first:
            verdicts = {name: result.correct for name, result in results.items()}
            write_verdicts(self.folder, self.done, verdicts)
        return evaluation_metrics(results) | clock.seconds

    def _save(self) -> None:
        started = time.perf_counter()
        self._one_save_at_a_time(self.best)
        self.checkpoints.save(self.done, self.parts.learner.state, self._meta())
        self._blocked += time.perf_counter() - started
        self.saved = self.done

    def _one_save_at_a_time(self, other: Checkpoints) -> None:
        """Waits for the other kind's save: Orbax's barriers take one at a time."""
        if self.processes.count > 1:
            other.wait()

    def _meta(self) -> dict[str, Any]:
        """What a resumed run needs beside the train state to log the same figures."""
        return {
            "best_score": self.best_score,
            "unlogged": self.unlogged,
            "shapes": asdict(self.parts.shapes),
            "grad_norms": self.parts.grad_norms,
            "nonfinite": self.parts.nonfinite,
            "dropping": self.parts.dropping,
        }


def sample_step(parts: Parts, step: int, progress: RunProgress) -> list[EpisodeResult]:
    """Samples the episodes of a step.

    Args:
        parts: The run's parts.
        step: From 0.
        progress: Is told of every episode.

    Raises:
        TrainingFailed: Too many episodes failed.
    """
    recipe = parts.recipe
    plans = [
        EpisodePlan(task, (recipe.seed, 0, step), slot, rollout)
        for slot, task in enumerate(parts.stream.step(step))
        for rollout in range(recipe.rollout.group_size)
    ]
    with progress.phase("rollout", len(plans)) as advance:
        results = run_shared(
            parts.rollout, parts.processes, plans, parts.train_sampling, lambda _: advance()
        )
    check_failures(results, recipe.rollout.max_failed_fraction)
    return results


def update_step(
    parts: Parts,
    step: int,
    results: Sequence[EpisodeResult],
    writer: EpisodeWriter | NoLogs,
    progress: RunProgress,
    clock: _Clock,
) -> dict[str, float]:
    """The updates from a step's episodes.

    Args:
        parts: The run's parts; the learner's state and the engine's weights are the new ones
            after it.
        step: From 0.
        results: The step's episodes.
        writer: Gets their transcripts.
        progress: Is told of every optimiser step.
        clock: Measures batching and update.

    Returns:
        The step's metrics.
    """
    recipe = parts.recipe
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
    with progress.phase("update", sum(map(len, orders)), "optimiser steps") as advance:
        live = next((batch for batch in batches if batch.num_tokens), None)
        if live is not None and parts.needs_gate:
            parts.learner.check_gate(live)
            progress.note("gate: scored the first batch twice, L_e = 0 exactly")
            if sum(map(len, orders)) == 1 and recipe.objective_config().ratio_unit != "none":
                progress.note("one update a batch: every ratio is 1, so the clip cannot act")
            parts.needs_gate = False
        reports = parts.learner.update(
            batches, orders=orders, on_step=advance, by_role=bool(every) and step % every == 0
        )
        metrics |= update_metrics(reports, parts.grad_norms)
    metrics["update/lr"] = last_rate(
        recipe.optimizer, recipe.total_updates, int(parts.learner.state.updates)
    )
    norm = metrics["update/grad_norm"]
    if np.isfinite(norm):
        parts.grad_norms = [*parts.grad_norms, norm][-CV_WINDOW:]
    parts.count_nonfinite(reports)
    clock.lap("update")
    parts.sync()
    clock.lap("sync")
    found = step_warnings(results, complete, advantages, norm, recipe.optimizer.grad_clip)
    for kind, text in found.items():
        progress.warn(kind, text)
    if recipe.trainer.dump_episodes:
        by_event = {e.id: a for e, a in zip(complete, advantages, strict=True)}
        writer.write(step + 1, [episode_transcript(r, step + 1, by_event) for r in results])
    return metrics | {"compiles": float(parts.compile_count())}


class _Clock:
    """Seconds of the parts of a step, as metrics."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = now - self._last
        self._last = now
