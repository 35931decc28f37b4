"""Compares runs: a table of what they logged, and curves as PNG files."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.cli import Parser, entry, output
from srpo_jax.recipe.errors import RecipeError, nearest
from srpo_jax.run.logs import read_metrics

Rows = Sequence[Mapping[str, Any]]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.report", __doc__, "python -m launch.report runs/a runs/b --metrics 'eval/*'"
    )
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument(
        "--metrics", nargs="+", default=["*"], help="names or patterns (default: all)"
    )
    parser.add_argument("--out", default="report", help="folder for the curves (default: report)")
    args = parser.parse_args(argv)
    labels = run_labels(args.runs)
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise RecipeError(f"{min(twice)}: this run is given twice")
    runs = dict(zip(labels, map(read_metrics, args.runs), strict=True))
    names = metric_names(runs, args.metrics)
    if not names:
        logged = metric_names(runs, ["*"])
        if not logged:
            raise RecipeError(f"{', '.join(args.runs)}: nothing was logged yet")
        wanted = " ".join(args.metrics)
        raise RecipeError(f"no metric matches {wanted}: {nearest(wanted, logged)}")
    console = output()
    console.print(comparison_table(runs, names))
    for path in draw_curves(runs, names, Path(args.out)):
        console.print(Text(f"curves: {path}"))
    return 0


def run_labels(folders: Sequence[str]) -> list[str]:
    """A short distinct name for each run folder."""
    names = [os.path.basename(os.path.abspath(folder)) for folder in folders]
    return names if len(set(names)) == len(names) else [str(Path(folder)) for folder in folders]


def metric_names(runs: Mapping[str, Rows], patterns: Sequence[str]) -> list[str]:
    """All metrics that match a pattern, in the order first logged."""
    seen = {name: None for rows in runs.values() for row in rows for name in row if name != "step"}
    return [name for name in seen if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric where it was logged as a number."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def comparison_table(runs: Mapping[str, Rows], names: Sequence[str]) -> Table:
    """Per run and metric the mean over its first tenth of values, and over its last tenth.

    Args:
        runs: the logged rows of each run, by its label.
        names: the metrics. Where a run logged one, but never as a number, the cell is ``no value``.
    """
    table = Table(title="first tenth -> last tenth of the logged values")
    table.add_column("metric")
    for label, rows in runs.items():
        last = rows[-1]["step"] if rows else 0
        table.add_column(Text(f"{label} (step {last})"), justify="right")
    for name in names:
        cells = []
        for rows in runs.values():
            _, values = series(rows, name)
            n = max(1, len(values) // 10)
            first, last = values[:n], values[-n:]
            missing = "no value" if any(name in row for row in rows) else "not logged"
            cells.append(f"{sum(first) / n:.4g} -> {sum(last) / n:.4g}" if values else missing)
        table.add_row(Text(name), *cells)
    return table


def draw_curves(runs: Mapping[str, Rows], names: Sequence[str], folder: Path) -> list[Path]:
    """Draws one PNG for each first part of the metrics' names (``eval/...`` -> eval.png).

    Args:
        runs: the logged rows of each run, by its label.
        names: the metrics.
        folder: where the files go; made if it is not there.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    plt.rcParams["text.parse_math"] = False  # a $ in a benchmark's or a run's name is a $
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.partition("/")[0] if "/" in name else "other"].append(name)
    paths = []
    for group, members in groups.items():
        columns = min(3, len(members))
        lines = -(-len(members) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(5 * columns, 3 * lines), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(members) :]:
            axis.set_axis_off()
        for axis, name in zip(axes.flat, members, strict=False):
            for label, rows in runs.items():
                steps, values = series(rows, name)
                axis.plot(steps, values, marker="." if len(steps) < 30 else "", label=label)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("step", fontsize=8)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axis.grid(alpha=0.3)
        axes.flat[0].legend(fontsize=8)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', group) or 'other'}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        paths.append(path)
    return paths


if __name__ == "__main__":
    entry(main)
