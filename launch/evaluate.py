"""Evaluates a model on benchmarks: Avg@k, Pass@k, macro means and costs.

What is evaluated is a recipe's model on its tasks.eval (keys of training may be missing; with
model.path=runs/NAME/model what a run has trained), or --model on --tasks. Episodes and figures are
kept in --out; launch.show prints the episodes. A signal abandons it: exit code 75, run it again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from launch.cli import Parser, add_process_options, as_called, entry, output
from srpo_jax.evaluation import BenchmarkResult, macro, macro_error
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.files import read_with_base
from srpo_jax.recipe.paths import find, find_model
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.processes import Processes, joined
from srpo_jax.run.stopping import STOPPED, Stopped, StopRequest


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.evaluate",
        __doc__,
        "python -m launch.evaluate --model assets/tiny_team --tasks arithmetic",
    )
    parser.add_argument(
        "recipe", nargs="*", default=[], metavar="RECIPE key.path=value",
        help="recipe file, for instance configs/math_smollm2_cpu.yaml, and changes to it; with "
        "--model changes alone",
    )  # fmt: skip
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or hub name")
    parser.add_argument(
        "--tasks", nargs="+", metavar="NAME_OR_FILE[:SIZE]",
        help="with --model: benchmarks by name (arithmetic, factbook) or file, and how many tasks",
    )  # fmt: skip
    parser.add_argument(
        "--workflow", help="with --model: math (default), search or my_team.py:MyWorkflow"
    )
    parser.add_argument("--samples", type=int, help="episodes of a task (with --model: 4)")
    parser.add_argument("--out", metavar="FOLDER", help="default: runs/NAME_eval")
    add_process_options(parser)
    args = parser.parse_intermixed_args(argv)
    if args.tasks:  # which takes all that follows it
        args.recipe += [text for text in args.tasks if "=" in text]
        args.tasks = [text for text in args.tasks if "=" not in text]
    recipe = _from_model(args, parser) if args.model else _from_recipe(args, parser)

    places = args.coordinator, args.processes, args.process
    with StopRequest(owns_process=True) as stop, joined(*places):
        from srpo_jax.run.evaluation_folder import evaluate_and_keep

        stop.on_end = lambda: print("stopped; the same command starts it again", file=sys.stderr)
        try:
            results = evaluate_and_keep(recipe, stop=stop)
        except Stopped:
            stop.on_end()
            return STOPPED
        if not Processes().first:
            return 0
    console = output()
    console.print(results_tables(results, title=recipe.name))
    console.print(Text(f"figures: {recipe.run_dir}/evaluation.json", overflow="fold"))
    for number, name in enumerate(results):
        step = f" --step {number}" if len(results) > 1 else ""
        shown = as_called(f"python -m launch.show {recipe.run_dir}{step}")
        console.print(Text(f"episodes of {name}: {shown}"))
    return 0


def _from_recipe(args: argparse.Namespace, parser: Parser) -> Recipe:
    from srpo_jax.run.evaluation_folder import evaluation_recipe

    for name in ("tasks", "workflow"):
        if getattr(args, name) is not None:
            parser.error(f"--{name} belongs to --model; a recipe has a key for it")
    if not args.recipe or "=" in args.recipe[0]:
        parser.error("the following arguments are required: RECIPE or --model")
    path, *overrides = args.recipe
    file = find(path)
    return evaluation_recipe(
        read_with_base(file), [*overrides, *_samples(args)],
        where=path, folder=file.parent, out=_out(args),
    )  # fmt: skip


def _from_model(args: argparse.Namespace, parser: Parser) -> Recipe:
    from models.checkpoint_files import read_config
    from models.hub import resolve_checkpoint
    from srpo_jax.run.evaluation_folder import evaluation_recipe, model_content

    if not args.tasks:
        parser.error("the following arguments are required: --tasks")
    if args.recipe and "=" not in args.recipe[0]:
        parser.error(f"{args.recipe[0]}: a recipe has a model of its own: leave out --model")
    config = read_config(resolve_checkpoint(find_model(args.model), weights=False))
    content = model_content(args.model, args.tasks, args.workflow or "math", 4, config.max_position)
    return evaluation_recipe(
        content, [*args.recipe, *_samples(args)], where="--model", out=_out(args)
    )


def _samples(args: argparse.Namespace) -> list[str]:
    return [] if args.samples is None else [f"evaluation.samples={args.samples}"]


def _out(args: argparse.Namespace) -> str | None:
    if any(text.startswith("trainer.out=") for text in args.recipe):
        raise RecipeError("trainer.out is a run's folder: give that of the evaluation with --out")
    return args.out


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
    entry(main, tear_down=False)
