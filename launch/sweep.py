"""Runs one recipe over a grid of settings and seeds; a rerun runs what is not finished.

A member counts as finished only when its run folder records its target step. The table gives, for
each setting, the mean and the sample standard deviation of the metric over seeds. Ctrl-C or SIGTERM
stops the member that runs, which saves its last step, and the sweep; the same command goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from launch.cli import Parser, entry, output
from srpo_jax.evaluation import over_seeds
from srpo_jax.recipe.errors import RecipeError, first_problem, nearest
from srpo_jax.recipe.paths import find
from srpo_jax.recipe.recipe import Recipe, Section, load_recipe
from srpo_jax.recipe.yaml import inline_yaml, read_yaml
from srpo_jax.run.files import write_json
from srpo_jax.run.logs import METRICS_FILE, read_metrics

FAILED, STOPPED = 1, 75
RECORD = "sweep.json"
LOG = "train.log"


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
class SweepMember:
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
        """The step that the run recorded when it finished; None where it has not.

        Raises:
            RecipeError: the record is none of ours.
        """
        path = self.out / "done.json"
        if not path.exists():
            return None
        try:
            step = json.loads(path.read_bytes())["step"]
        except (ValueError, RecursionError, KeyError, TypeError, IndexError):
            step = None
        if type(step) is not int:
            raise RecipeError(
                f"{path}: not the record of a finished run; remove it to run it again"
            )
        return step

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
    out, members = plan(find(args.sweep), config)
    if args.dry_run:
        for member in members:
            print(shlex.join(["python", *member.command[1:]]))
        return 0
    return run_sweep(out, members, config.metric, run_local)


def load_sweep(path: str | Path) -> SweepConfig:
    """Reads a sweep file, looked up like a recipe.

    Raises:
        RecipeError: it names the file and the key.
    """
    try:
        return SweepConfig.model_validate(read_yaml(find(path)))
    except ValidationError as error:
        raise RecipeError(f"{path}: {first_problem(error, SweepConfig)}") from None


def plan(path: Path, config: SweepConfig) -> tuple[Path, list[SweepMember]]:
    """The sweep's folder and its members, every recipe checked before anything runs.

    Args:
        path: the sweep's file, beside which its recipe is looked up.
        config: its content.

    Raises:
        RecipeError: a member's recipe is wrong, settings contradict each other, or a member's
            folder holds another run.
    """
    if "trainer.out" in {**config.grid, **config.set}:
        raise RecipeError(f"{path}: trainer.out: the sweep sets it; its own folder is `out`")
    if both := config.grid.keys() & config.set.keys():
        raise RecipeError(f"{path}: {min(both)}: in `grid` and in `set`")
    if config.seeds and ("seed" in config.grid or "seed" in config.set):
        raise RecipeError(f"{path}: seed: `seeds` sets it too")
    out = Path(config.out) if config.out else Path("runs") / path.stem
    recipe = Path(os.path.normpath(find(config.recipe, path.parent)))
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
        settings = {**config.set, **dict(point), "trainer.out": str(folder)}
        overrides = tuple(f"{key}={inline_yaml(value)}" for key, value in settings.items())
        loaded: Recipe = load_recipe(recipe, overrides)
        saved = folder / "recipe.yaml"
        if saved.exists() and (change := loaded.first_difference(saved)):
            raise RecipeError(
                f"{folder} holds a run of another recipe ({change}): give the sweep another `out`"
            )
        members.append(
            SweepMember(folder.name, setting, recipe, overrides, folder, loaded.trainer.steps)
        )
        members[-1].step  # noqa: B018 (a record that cannot be read is said before anything runs)
    names = [member.name for member in members]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"{path}: two members would share the folder {min(twice)}")
    return out, members


def run_local(member: SweepMember) -> int:
    """Trains a member in a process of its own; what it prints goes to its ``train.log``.

    The process gets every SIGINT and SIGTERM that comes meanwhile, as if it had been started alone.

    Returns:
        The process's exit code; negative: the signal that ended it.
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(member.out / LOG, "a", encoding="utf-8") as log:
        child = subprocess.Popen(
            member.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # a terminal's Ctrl-C comes to the sweep alone, which passes it on
        )
        previous = {
            number: signal.signal(number, lambda number, _: child.send_signal(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run_sweep(
    out: Path, members: Sequence[SweepMember], metric: str, run_member: Callable[[SweepMember], int]
) -> int:
    """Runs the members that are not finished, records each, prints the table.

    Args:
        out: the sweep's folder, for its record.
        members: the runs, in their order.
        metric: the logged figure that the table compares.
        run_member: trains one; gives an exit code.

    Returns:
        0 when all are finished, 75 where a signal stopped a member (the rest is not begun), else 1.
    """
    console = output()
    records: dict[str, dict[str, Any]] = {}
    stopped = False
    for index, member in enumerate(members, 1):
        title = f"[{index}/{len(members)}] {member.name}"
        code, begun = None, 0
        if not member.finished:
            console.print(Text(f"{title}: running"))
            member.out.mkdir(parents=True, exist_ok=True)
            log = member.out / LOG
            begun = log.stat().st_size if log.exists() else 0
            code = run_member(member)
        records[member.name] = record = _record(member, code, begun)
        console.print(Text(f"{title}: {record['status']}, {record['detail']}"))
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / RECORD, {"metric": metric, "members": records})
        stopped = not member.finished and code in (STOPPED, -signal.SIGINT, -signal.SIGTERM)
        if stopped:
            break
    finished = [member for member in members if member.finished]
    values: dict[str, list[float]] = {member.setting: [] for member in members}
    for member in finished:
        if (value := _last_value(member.out, metric)) is not None:
            values[member.setting].append(value)
    console.print(seed_table(values, metric))
    if finished and not any(values.values()):
        logged = {name for member in finished for row in _rows(member.out) for name in row}
        console.print(Text(f"no finished run has a value of {metric}, {nearest(metric, logged)}"))
    if stopped:
        console.print(Text(f"stopped in {member.name}; the same command goes on"))
        return STOPPED
    failed = [member.name for member in members if not member.finished]
    if failed:
        console.print(Text(f"{len(failed)} of {len(members)} failed: {', '.join(failed)}"))
    return FAILED if failed else 0


def seed_table(values: Mapping[str, Sequence[float]], metric: str) -> Table:
    """Mean and sample standard deviation over seeds for each setting; a setting without a value
    has none."""
    table = Table(title=Text(metric))
    table.add_column("setting")
    for name in ("mean", "sd", "seeds"):
        table.add_column(name, justify="right")
    for setting, figures in values.items():
        if not figures:
            table.add_row(Text(setting), "no value", "-", "0")
            continue
        mean, deviation = over_seeds(figures)
        spread = f"{deviation:.4f}" if len(figures) > 1 else "-"
        table.add_row(Text(setting), f"{mean:.4f}", spread, str(len(figures)))
    return table


def _record(member: SweepMember, code: int | None, begun: int) -> dict[str, Any]:
    """``code``: the exit code, None where nothing had to run. ``begun``: where in the log the
    member's own lines begin."""
    if member.finished:
        status, detail = "ok", f"step {member.step}" + (" (earlier)" if code is None else "")
    else:
        step = member.step
        reached = "no finished step recorded" if step is None else f"finished at step {step}"
        status = "failed"
        detail = f"exit code {code}, {reached}, target {member.target}; see {member.out / LOG}"
        if said := _last_error(member.out / LOG, begun):
            detail = f"{said} ({detail})"
    return {
        "status": status,
        "detail": detail,
        "out": str(member.out),
        "target": member.target,
        "step": member.step,
        "overrides": list(member.overrides),
    }


def _last_error(log: Path, begun: int) -> str | None:
    """The last line that a command ends with where its input was bad."""
    if not log.exists():
        return None
    lines = log.read_bytes()[begun:].decode("utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), None)


def _rows(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run) if (run / METRICS_FILE).exists() else []


def _last_value(run: Path, metric: str) -> float | None:
    return next((row[metric] for row in reversed(_rows(run)) if row.get(metric) is not None), None)


def _short(key: str, config: SweepConfig) -> str:
    """The last word of a key path, where no other axis ends in it."""
    word = key.rpartition(".")[2]
    same = [other for other in config.grid if other.rpartition(".")[2] == word]
    return word if len(same) <= 1 and not (word == "seed" and key != "seed") else key


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


if __name__ == "__main__":
    entry(main)
