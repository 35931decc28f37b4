"""An evaluation on its own: a recipe that needs no training keys, and a folder for what it finds.

The folder holds ``evaluation.json`` (the figures), ``episodes/`` and ``evaluations/`` (verdicts) as
a run's folder does, and the recipe and fingerprints of files that they belong to.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.built_in import TASK_SETS, WORKFLOWS
from srpo_jax.evaluation import BenchmarkResult, macro, macro_error
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import (
    AdvantageSection,
    ObjectiveSection,
    OptimizerConfig,
    Recipe,
    TasksConfig,
    TaskSet,
    TrainerConfig,
    parse_recipe,
)
from srpo_jax.run.files import write_json
from srpo_jax.run.folder import RECIPE, RunFolderBusy, locked, record_run
from srpo_jax.run.logs import EpisodeWriter, write_verdicts
from srpo_jax.run.processes import Processes
from srpo_jax.run.progress import RunProgress
from srpo_jax.run.stopping import StopRequest

RESULTS = "evaluation.json"
GENERATED_SIZE = 64  # tasks of a generated set where no size is asked for
LONGEST = 2048  # prompt and response tokens together where no recipe says them

# Keys that a recipe must have for training and that say nothing about an evaluation.
_TRAINING: dict[str, dict[str, Any]] = {
    "tasks": {"train": {"name": "arithmetic", "size": 1}},
    "rollout": {"tasks_per_step": 1, "group_size": 1},
    "optimizer": {"lr": 1e-6},
    "learner": {"micro_batch_rows": 1},
    "trainer": {"steps": 0},
}


def evaluation_recipe(
    content: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "recipe",
    folder: Path | None = None,
    out: str | None = None,
) -> Recipe:
    """Checks a recipe for an evaluation.

    Keys of training may be missing, and all of them get one value, so that two recipes which differ
    in nothing else are the same evaluation.

    Args:
        content: The recipe's sections, as a file holds them.
        overrides: Changes, ``key.path=value``.
        where: What messages call the recipe.
        folder: Where paths of the recipe are looked up first.
        out: The evaluation's folder; None: runs/NAME_eval.

    Raises:
        RecipeError: A key is wrong, or no benchmark is named; one line.
    """
    filled = dict(content)
    for section, keys in _TRAINING.items():
        if filled.get(section) is None:
            filled[section] = keys
        elif isinstance(filled[section], dict):
            filled[section] = keys | filled[section]
    recipe = parse_recipe(filled, overrides, where=where, folder=folder)
    if not recipe.tasks.eval:
        raise RecipeError(f"{where}: tasks.eval names no benchmark")
    return recipe.model_copy(
        update={
            "tasks": TasksConfig(
                train=TaskSet.model_validate(_TRAINING["tasks"]["train"]), eval=recipe.tasks.eval
            ),
            "objective": ObjectiveSection(),
            "advantage": AdvantageSection(),
            "optimizer": OptimizerConfig.model_validate(_TRAINING["optimizer"]),
            "trainer": TrainerConfig(steps=0, out=out or f"runs/{recipe.name}_eval"),
            "evaluation": recipe.evaluation.model_copy(update={"every": 0}),
        }
    )


def model_content(
    model: str, tasks: Sequence[str], workflow: str, samples: int, max_position: int
) -> dict[str, Any]:
    """The content of a recipe that evaluates a model without one.

    Args:
        model: Its folder or hub name.
        tasks: Benchmarks, each NAME or FILE with an optional ``:size``.
        workflow: A built-in one's name, or ``FILE.py:NAME``.
        samples: Episodes of each task.
        max_position: The model's. A call is as long as this and LONGEST allow, a quarter of it the
            response.

    Raises:
        RecipeError: Two tasks have one name.
    """
    benchmarks: dict[str, dict[str, Any]] = {}
    for text in tasks:
        spec, colon, size = text.rpartition(":")
        if not colon or not (size.isascii() and size.isdecimal()):
            spec, size = text, ""
        is_path = spec.endswith((".jsonl", ".parquet")) or ".py:" in spec
        name = Path(spec.partition(".py:")[0]).stem if is_path else spec
        if name in benchmarks:
            raise RecipeError(f"--tasks: two of them are named {name}")
        known = is_path or spec in TASK_SETS
        benchmarks[name] = {
            "path" if is_path else "name": spec,
            "size": int(size) if size else None if known else GENERATED_SIZE,
        }
    longest = min(max_position, LONGEST)
    content: dict[str, Any] = {
        "name": "-".join(re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", model)[-2:]) or "model",
        "model": {"path": model},
        "workflow": {"path" if ".py:" in workflow else "name": workflow},
        "tasks": {"eval": benchmarks},
        "rollout": {
            "prompt_tokens": longest - longest // 4,
            "response_tokens": longest // 4,
            "slots": 32,
        },
        "evaluation": {"samples": samples},
    }
    if workflow in WORKFLOWS and WORKFLOWS[workflow].retriever:
        content["retriever"] = {"corpus": "factbook"}
    return content


def check_folder(recipe: Recipe) -> None:
    """Checks that the evaluation's folder is free or holds the same evaluation.

    Raises:
        RecipeError: It holds something else, or the evaluation of something else.
    """
    folder = recipe.run_dir
    if os.path.lexists(folder) and not folder.is_dir():
        raise RecipeError(f"{folder}: a folder is due here, for the evaluation; give another --out")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / RESULTS).is_file():
        raise RecipeError(f"{folder}: holds something that is no evaluation; give another --out")
    if (folder / RECIPE).exists() and (change := recipe.first_difference(folder / RECIPE)):
        raise RecipeError(f"{folder} holds another evaluation ({change}); give another --out")


def evaluate_and_keep(
    recipe: Recipe,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> dict[str, BenchmarkResult]:
    """Evaluates the model of an :func:`evaluation_recipe` and keeps the results in its folder.

    Episodes are written benchmark by benchmark: the first one's as those of step 0, and so on.

    Args:
        recipe: What ``evaluation_recipe`` made.
        console: Where progress is shown; None: stderr.
        stop: A request to stop that is entered already; it abandons the evaluation.

    Returns:
        Verdicts and costs of each benchmark, by its name.

    Raises:
        RecipeError: As of ``build_evaluation_parts``; likewise DataError and CheckpointError.
        TrainingFailed: As of ``evaluate``.
        Stopped: It was asked to stop.
    """
    from srpo_jax.rollout.transcript import episode_transcript
    from srpo_jax.run.build import build_evaluation_parts
    from srpo_jax.run.evaluate import evaluate

    folder, started = recipe.run_dir, time.perf_counter()
    processes = Processes()
    check_folder(recipe)
    console = console if processes.first else Console(quiet=True)
    stop = stop or StopRequest()
    with RunProgress(0, 0, console) as progress, processes.ending_together(stop):
        processes.agree("checked")  # before the first one writes there
        parts = build_evaluation_parts(
            recipe, starting=progress.starting, note=progress.note, check=stop.check,
            processes=processes,
        )  # fmt: skip
        if not recipe.rollout.remote:
            progress.generated = lambda: parts.engine.stats["decode_tokens"]
        if not processes.first:
            with _said_as_options():
                return evaluate(parts, progress)
        with _said_as_options(), locked(folder):
            if not (folder / RESULTS).exists():  # from here on the folder is an evaluation's
                write_json(folder / RESULTS, {"finished": False})
            record_run(recipe, Path(parts.tokenizer.folder))
            write_json(folder / RESULTS, {"finished": False})
            writer = EpisodeWriter(folder)
            writer.truncate_to(-1)
            numbers = {name: number for number, name in enumerate(parts.benchmarks)}
            results = evaluate(
                parts,
                progress,
                keep=lambda name, episodes: writer.write(
                    numbers[name], [episode_transcript(r, numbers[name], {}) for r in episodes]
                ),
            )
            write_verdicts(folder, 0, {name: r.correct for name, r in results.items()})
            seconds = time.perf_counter() - started
            write_json(folder / RESULTS, summary(recipe, results) | {"seconds": seconds})
    return results


def summary(recipe: Recipe, results: Mapping[str, BenchmarkResult]) -> dict[str, Any]:
    """What ``evaluation.json`` holds; a figure that is not finite is null."""
    rows = {
        name: {
            "tasks": len(r.correct), "samples": r.correct.shape[1], "avg": r.avg,
            "avg_error": r.avg_error, "pass": r.passed, "pass_error": r.passed_error,
            "failed": r.failed, "undecided": r.undecided, "cost": asdict(r.cost),
        }
        for name, r in results.items()
    }  # fmt: skip
    means = {
        "avg": macro([row["avg"] for row in rows.values()]),
        "avg_error": macro_error([row["avg_error"] for row in rows.values()]),
        "pass": macro([row["pass"] for row in rows.values()]),
        "pass_error": macro_error([row["pass_error"] for row in rows.values()]),
    }
    found = {"model": recipe.model.path, "benchmarks": rows, "macro": means}
    return {"finished": True} | _without_nan(found)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _said_as_options() -> Iterator[None]:
    """What a run says about its folder, with the option that names an evaluation's."""
    try:
        yield
    except (RecipeError, RunFolderBusy) as error:
        raise type(error)(str(error).replace("trainer.out", "--out")) from None
