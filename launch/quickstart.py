"""The main job on the embedded checkpoint: SRPO on Math, then on Search, each evaluated before and
after on the same held-out tasks and keys; ends with a table and curves."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table
from rich.text import Text

from launch.cli import Parser, as_called, entry, output
from srpo_jax.evaluation import paired_difference
from srpo_jax.recipe.recipe import Recipe, load_recipe
from srpo_jax.run.logs import RunFileError, read_metrics, read_verdicts
from srpo_jax.run.stopping import StopRequest

RECIPES = ("configs/quickstart_math.yaml", "configs/quickstart_search.yaml")
CURVES = (
    "reward/mean",
    "eval/*/avg",
    "eval/*/pass",
    "update/grad_norm",
    "update/clip_fraction",
    "policy/entropy",
)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("launch.quickstart", __doc__, "python -m launch.quickstart --seed 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training runs")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the runs")
    args = parser.parse_args(argv)
    recipes = [
        load_recipe(
            path,
            [
                f"seed={args.seed}",
                f"trainer.out={args.out / f'{Path(path).stem}_seed{args.seed}'}",
            ],
        )
        for path in RECIPES
    ]
    console = output()
    seconds = {}
    with StopRequest(owns_process=True) as stop:
        from srpo_jax import trainer

        for recipe in recipes:
            console.print(Text(f"{recipe.name}: {recipe.trainer.steps} steps in {recipe.run_dir}"))
            started = time.perf_counter()
            code = trainer.run(recipe, stop=stop)
            seconds[recipe.name] = time.perf_counter() - started
            if code:
                return code
    console.print(before_after_table(recipes, seconds))
    from launch.report import draw_curves, metric_names

    runs = {recipe.name: read_metrics(recipe.run_dir) for recipe in recipes}
    folder = args.out / "quickstart_report"
    for path in draw_curves(runs, metric_names(runs, CURVES), folder):
        console.print(Text(f"curves: {path}"))
    last = recipes[-1].run_dir
    console.print(Text(as_called(f"episodes: python -m launch.show {last}")))
    return 0


def before_after_table(recipes: list[Recipe], seconds: dict[str, float]) -> Table:
    """Avg@k before and after training, and the mean paired difference with its standard error."""
    table = Table(title="held-out tasks, same keys before and after")
    table.add_column("benchmark")
    for name in ("tasks x samples", "before", "after", "difference", "in s.e.", "seconds"):
        table.add_column(name, justify="right")
    for recipe in recipes:
        verdicts = read_verdicts(recipe.run_dir)
        if len(verdicts) < 2:
            raise RunFileError(f"{recipe.run_dir}: there are no two evaluations to compare")
        first, last = verdicts[min(verdicts)], verdicts[max(verdicts)]
        for name in recipe.tasks.eval:
            shapes = {side[name].shape if name in side else None for side in (first, last)}
            if len(shapes) > 1 or None in shapes:
                raise RunFileError(f"{recipe.run_dir}: {name} was not evaluated alike twice")
            difference, error = paired_difference(first[name], last[name])
            table.add_row(
                name,
                " x ".join(map(str, first[name].shape)),
                f"{first[name].mean():.3f}",
                f"{last[name].mean():.3f}",
                f"{difference:+.3f} ± {error:.3f}",
                f"{difference / error:.1f}" if error else "-",
                f"{seconds[recipe.name]:.0f}",
            )
    return table


if __name__ == "__main__":
    entry(main, tear_down=False)
