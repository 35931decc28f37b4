"""Runs one recipe over a grid of settings and seeds; a rerun runs what is not finished.

A member counts as finished only when its run folder records its target step. The table gives, for
each setting, the mean and the sample standard deviation of the metric over seeds.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from launch.cli import Parser, entry, output
from srpo_jax.config import Recipe, RecipeError, Section, load_recipe
from srpo_jax.evaluation import over_seeds
from srpo_jax.metrics import read_metrics
from srpo_jax.recipe_errors import first_problem
from srpo_jax.yaml_reading import inline_yaml, read_yaml

FAILED = 1
RECORD = "sweep.json"


class SweepConfig(Section):
    """A sweep. ``recipe``: relative to the sweep's file. ``grid``: key path -> its values. ``set``:
    key paths that all members share. ``metric``: the logged figure to compare. ``out``: the
    sweep's folder (default: runs/NAME)."""

    recipe: str
    grid: dict[str, list[Any]] = {}
    seeds: list[int] = []
    set: dict[str, Any] = {}
    metric: str = "eval/macro/avg"
    out: str | None = None


@dataclass(frozen=True)
class Member:
    """One run of a sweep. ``setting`` is its point of the grid, without the seed."""

    name: str
    setting: str
    recipe: Path
    overrides: tuple[str, ...]
    out: Path
    target: int

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "launch.train", str(self.recipe), *self.overrides]

    @property
    def step(self) -> int | None:
        """The step that the run recorded when it finished."""
        path = self.out / "done.json"
        return json.loads(path.read_text())["step"] if path.exists() else None

    @property
    def finished(self) -> bool:
        return self.step is not None and self.step >= self.target


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.sweep",
        __doc__,
        "python -m launch.sweep configs/sweeps/set_reduction.yaml --dry-run",
    )
    parser.add_argument("sweep", help="sweep file")
    parser.add_argument("--backend", choices=["local"], default="local", help="where members run")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args(argv)
    config = load_sweep(args.sweep)
    out, members = plan(Path(args.sweep), config)
    if args.dry_run:
        for member in members:
            print(shlex.join(["python", *member.command[1:]]))
        return 0
    return run_sweep(out, members, config.metric, run_local)


def load_sweep(path: str | Path) -> SweepConfig:
    """Reads a sweep file. Raises RecipeError naming the file and the key."""
    try:
        return SweepConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise RecipeError(f"{path}: {first_problem(error, SweepConfig)}") from None


def plan(path: Path, config: SweepConfig) -> tuple[Path, list[Member]]:
    """The sweep's folder and its members, every recipe checked before anything runs."""
    out = Path(config.out) if config.out else Path("runs") / path.stem
    recipe = Path(os.path.normpath(path.parent / config.recipe))
    for key, values in config.grid.items():
        if not values:
            raise RecipeError(f"{path}: grid.{key}: this list is empty")
    axes = [[(key, value) for value in values] for key, values in config.grid.items()]
    if config.seeds:
        axes.append([("seed", seed) for seed in config.seeds])
    members = []
    for point in itertools.product(*axes):
        setting = ",".join(f"{key}={value}" for key, value in point if key != "seed") or "recipe"
        name = _slug("_".join(f"{_short(key, config)}-{value}" for key, value in point))
        folder = out / (name or "recipe")
        values = {**config.set, **dict(point), "trainer.out": str(folder)}
        overrides = tuple(f"{key}={inline_yaml(value)}" for key, value in values.items())
        loaded: Recipe = load_recipe(recipe, overrides)
        saved = folder / "recipe.yaml"
        if saved.exists() and (change := loaded.first_difference(saved)):
            raise RecipeError(
                f"{folder} holds a run of another recipe ({change}): give the sweep another `out`"
            )
        members.append(
            Member(folder.name, setting, recipe, overrides, folder, loaded.trainer.steps)
        )
    names = [member.name for member in members]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"{path}: two members would share the folder {min(twice)}")
    return out, members


def run_local(member: Member) -> int:
    """Trains a member in a process of its own; what it prints goes to its ``train.log``."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(member.out / "train.log", "a", encoding="utf-8") as log:
        return subprocess.run(
            member.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        ).returncode


def run_sweep(
    out: Path, members: Sequence[Member], metric: str, run_member: Callable[[Member], int]
) -> int:
    """Runs the members that are not finished, records each, prints the table.

    ``run_member`` gives an exit code. Returns 0 when all are finished, otherwise 1.
    """
    console = output()
    records: dict[str, dict[str, Any]] = {}
    for index, member in enumerate(members, 1):
        title = f"[{index}/{len(members)}] {member.name}"
        code = None
        if not member.finished:
            console.print(Text(f"{title}: running"))
            member.out.mkdir(parents=True, exist_ok=True)
            code = run_member(member)
        records[member.name] = record = _record(member, code)
        console.print(Text(f"{title}: {record['status']}, {record['detail']}"))
        out.mkdir(parents=True, exist_ok=True)
        (out / RECORD).write_text(json.dumps({"metric": metric, "members": records}, indent=2))
    values: dict[str, list[float]] = defaultdict(list)
    for member in members:
        if member.finished and (value := _last_value(member.out, metric)) is not None:
            values[member.setting].append(value)
    console.print(seed_table(values, metric))
    failed = [member.name for member in members if not member.finished]
    if failed:
        console.print(Text(f"{len(failed)} of {len(members)} failed: {', '.join(failed)}"))
    return FAILED if failed else 0


def seed_table(values: Mapping[str, Sequence[float]], metric: str) -> Table:
    """Mean and sample standard deviation over seeds for each setting."""
    table = Table(title=Text(metric))
    table.add_column("setting")
    for name in ("mean", "sd", "seeds"):
        table.add_column(name, justify="right")
    for setting, figures in values.items():
        mean, deviation = over_seeds(figures)
        spread = f"{deviation:.4f}" if len(figures) > 1 else "-"
        table.add_row(Text(setting), f"{mean:.4f}", spread, str(len(figures)))
    return table


def _record(member: Member, code: int | None) -> dict[str, Any]:
    """``code``: the exit code, None where nothing had to run."""
    if member.finished:
        status, detail = "ok", f"step {member.step}" + (" (earlier)" if code is None else "")
    else:
        step = member.step
        reached = "no finished step recorded" if step is None else f"finished at step {step}"
        status = "failed"
        detail = f"exit code {code}, {reached}, target {member.target}; see {member.out}/train.log"
    return {
        "status": status,
        "detail": detail,
        "out": str(member.out),
        "target": member.target,
        "step": member.step,
        "overrides": list(member.overrides),
    }


def _last_value(run: Path, metric: str) -> float | None:
    rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
    return next((row[metric] for row in reversed(rows) if row.get(metric) is not None), None)


def _short(key: str, config: SweepConfig) -> str:
    """The last word of a key path, where no other axis ends in it."""
    word = key.rpartition(".")[2]
    same = [other for other in config.grid if other.rpartition(".")[2] == word]
    return word if len(same) <= 1 and not (word == "seed" and key != "seed") else key


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


if __name__ == "__main__":
    entry(main)
