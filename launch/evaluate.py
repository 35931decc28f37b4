"""Evaluates a recipe's model on its benchmarks: Avg@k, Pass@k, macro means and costs.

model.path=runs/NAME/model evaluates what a run has trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from launch.cli import Parser, add_recipe_arguments, entry, output
from srpo_jax.config import RecipeError, load_recipe
from srpo_jax.evaluation import BenchmarkResult, macro, macro_error


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.evaluate",
        __doc__,
        "python -m launch.evaluate configs/math_smollm2_cpu.yaml evaluation.samples=4",
    )
    add_recipe_arguments(parser)
    args = parser.parse_args(argv)
    recipe = load_recipe(args.recipe, args.overrides)
    if not recipe.tasks.eval:
        raise RecipeError(f"{args.recipe}: tasks.eval names no benchmark")
    from srpo_jax.run_evaluation import evaluate_recipe

    results = evaluate_recipe(recipe)
    output().print(results_tables(results, title=recipe.name))
    return 0


def results_tables(results: Mapping[str, BenchmarkResult], title: str = "") -> Group:
    """Avg@k and Pass@k in percent with their standard errors over tasks, then costs per episode."""
    samples = {result.correct.shape[1] for result in results.values()}
    k = samples.pop() if len(samples) == 1 else "k"
    scores = _table(title, ("tasks", f"Avg@{k}", f"Pass@{k}", "failed episodes"))
    costs = _table(
        "cost of an episode",
        ("C_tok", "C_call", "C_tool", "mean K", "tokens a call", "U_tok", "P50 s", "P95 s"),
    )
    for name, result in results.items():
        scores.add_row(
            Text(name),
            str(len(result.correct)),
            _percent(result.avg, result.avg_error),
            _percent(result.passed, result.passed_error),
            str(result.failed) + f", {result.undecided} undecided" * bool(result.undecided),
        )
        c = result.cost
        figures = (c.c_tok, c.c_call, c.c_tool, c.mean_k, c.mean_tokens, c.u_tok, c.p50, c.p95)
        costs.add_row(Text(name), *(f"{figure:.4g}" for figure in figures))
    if len(results) > 1:
        rows = results.values()
        scores.add_section()
        scores.add_row(
            "macro",
            "",
            _percent(macro([r.avg for r in rows]), macro_error([r.avg_error for r in rows])),
            _percent(macro([r.passed for r in rows]), macro_error([r.passed_error for r in rows])),
        )
    return Group(scores, costs)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=Text(title))
    table.add_column("benchmark", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _percent(value: float, error: float) -> str:
    if math.isnan(value):
        return "not graded"
    return f"{100 * value:.1f} ± {100 * error:.1f}"


if __name__ == "__main__":
    entry(main)
