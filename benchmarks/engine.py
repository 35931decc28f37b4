"""Runs three generation engines on the same work and model, and compares their speed.

Ours, Tunix's sampler and transformers' generate, one process after the other, each peer in an
environment of its own that is made on first use. The last line is JSON: uniform_ratio_tunix,
uniform_ratio_transformers and workload_ratio_tunix (our generated tokens per second over the
peer's), and workload_limit_factor (the machine's computed limit over ours).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness
from benchmarks.harness import OURS, Figures, Program, ratio
from launch.cli import Parser, entry

ENGINES = {
    OURS: Program("benchmarks.ours_engine"),
    "tunix": Program("benchmarks.peers.tunix_engine", "tunix"),
    "transformers": Program("benchmarks.peers.torch_engine", "torch"),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.engine", __doc__, "python -m benchmarks.engine --rounds 3")
    parser.add_argument(
        "--repeats", type=harness.positive, default=3,
        help="timed runs of each work (default: 3)",
    )  # fmt: skip
    harness.add_comparison_options(parser, ENGINES)
    args = parser.parse_args(argv)
    console = harness.progress_console()

    def run(name: str, python: Path) -> Figures:
        options = {"repeats": args.repeats}
        return harness.run_peer(name, python, ENGINES[name].module, options, read=engine_figures)

    with harness.output_of_failures(console):
        pythons = harness.interpreters(ENGINES, console, args.skip)
        found = harness.run_interleaved(pythons, args.rounds, run, engine_line, console)
    harness.report(engine_table(found), machine_line(found[OURS]), figures=engine_ratios(found))
    return 0


def engine_figures(printed: Any) -> dict[str, float]:
    """The figures that an engine's program printed."""
    return {key: float(value) for key, value in printed.items()}


def engine_line(figures: Figures) -> str:
    """What is printed of a run of one engine."""
    return ", ".join(f"{key} {value:.0f}" for key, value in figures.items())


def engine_table(found: Mapping[str, Figures]) -> Table:
    """A row for each engine and work, and how far ours is from the peer and from the limit."""
    table = Table(title="generated tokens per second, sampled, with log-probs")
    for title in ("work", "engine"):
        table.add_column(title)
    for title in ("slots", "tok/s", "ours is faster by", "of the machine's limit"):
        table.add_column(title, justify="right")
    for work in ("uniform", "workload"):
        for name, figures in found.items():
            if work in figures:
                table.add_row(
                    work,
                    name,
                    f"{found[OURS]['slots']:.0f}" if name == OURS else "32",
                    f"{figures[work]:.0f}",
                    harness.ratio_cell(found, work, name),
                    f"{figures[work] / found[OURS][f'{work}_limit']:.0%}",
                )
    return table


def machine_line(ours: Figures) -> str:
    """The measured rates of the machine, the limits computed from them, and our compiles."""
    return (
        f"measured: {ours['peak_gflops']:.0f} GFLOP/s at 2048 cubed, "
        f"{ours['decode_gflops']:.0f} GFLOP/s at {ours['slots']:.0f} rows, "
        f"{ours['read_gbs']:.0f} GB/s of weight reads; limits: {ours['uniform_limit']:.0f} and "
        f"{ours['workload_limit']:.0f} tok/s; compiles after warm-up: {ours['compiles']:.0f}"
    )


def engine_ratios(found: Mapping[str, Figures]) -> dict[str, float | None]:
    """The figures of the last line."""
    return {
        "uniform_ratio_tunix": ratio(found, "uniform", "tunix"),
        "uniform_ratio_transformers": ratio(found, "uniform", "transformers"),
        "workload_ratio_tunix": ratio(found, "workload", "tunix"),
        "workload_limit_factor": found[OURS]["workload_limit"] / found[OURS]["workload"],
    }


if __name__ == "__main__":
    entry(main)
