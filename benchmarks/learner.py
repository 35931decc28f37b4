"""Runs one update of three learners on the same rows and model, and compares their speed.

Ours, Tunix and PyTorch with transformers, one process after the other, each peer in an environment
of its own that is made on first use. The last line is JSON: ratio_tunix and ratio_torch (our real
tokens per second over the peer's), matmul_share and peak_gib (ours).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness
from benchmarks.harness import OURS, Figures, Program, positive, ratio
from launch.cli import Parser, entry

LEARNERS = {
    OURS: Program("benchmarks.ours_learner"),
    "tunix": Program("benchmarks.peers.tunix_learner", "tunix"),
    "torch": Program("benchmarks.peers.torch_learner", "torch"),
}
MEASURED = ("seconds", "tokens_per_second", "peak_gflops", "matmul_share", "peak_gib")
MEMORY_GROWTH = 0.10  # what a larger batch of equal micro-batches may add to the peak


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.learner", __doc__, "python -m benchmarks.learner --steps 3")
    parser.add_argument("--rows", type=positive, default=16, help="rows of the batch (default: 16)")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps (default: 5)")
    harness.add_comparison_options(parser, LEARNERS)
    parser.add_argument(
        "--batch-factor", type=positive, metavar="N",
        help="also run ours on N times as many rows in micro-batches of the same size, and compare "
        "the peak memory",
    )  # fmt: skip
    args = parser.parse_args(argv)
    console = harness.progress_console()

    def run(name: str, python: Path, factor: int = 1, steps: int = args.steps) -> Figures:
        options = {"rows": args.rows * factor, "steps": steps}
        return harness.run_peer(name, python, LEARNERS[name].module, options, read=learner_figures)

    with harness.output_of_failures(console):
        pythons = harness.interpreters(LEARNERS, console, args.skip)
        found = harness.run_interleaved(pythons, args.rounds, run, learner_line, console)
        lines = []
        if args.batch_factor:
            console.print(f"{OURS} on {args.batch_factor} times the rows")
            larger = run(OURS, pythons[OURS], args.batch_factor, steps=1)
            lines.append(memory_line(found[OURS], larger, args.batch_factor))
    harness.report(learner_table(found), *lines, figures=learner_ratios(found))
    return 0


def learner_figures(printed: Any) -> dict[str, float]:
    """The figures of MEASURED that a learner's program printed."""
    return {key: float(printed[key]) for key in MEASURED}


def learner_line(figures: Figures) -> str:
    """What is printed of a run of one learner."""
    return (
        f"{figures['tokens_per_second']:.0f} tok/s  "
        f"{figures['peak_gflops']:.0f} GFLOP/s matmul peak"
    )


def learner_table(found: Mapping[str, Figures]) -> Table:
    """A row for each learner, and how many times faster ours is."""
    table = Table(title="one update on the same rows, real tokens")
    table.add_column("learner")
    for title in ("tok/s", "share of matmul peak", "GiB", "seconds a step", "ours is faster by"):
        table.add_column(title, justify="right")
    for name, figures in found.items():
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['matmul_share']:.2f}",
            f"{figures['peak_gib']:.1f}",
            f"{figures['seconds']:.2f}",
            harness.ratio_cell(found, "tokens_per_second", name),
        )
    return table


def memory_line(figures: Figures, larger: Figures, factor: int) -> str:
    """How the peak memory grows with the rows, and whether that is within MEMORY_GROWTH."""
    growth = larger["peak_gib"] / figures["peak_gib"] - 1
    verdict = "below" if growth < MEMORY_GROWTH else "NOT below"
    return (
        f"peak memory: {figures['peak_gib']:.2f} GiB, on {factor} times the rows "
        f"{larger['peak_gib']:.2f} GiB: {growth:+.1%}, {verdict} the limit of {MEMORY_GROWTH:.0%}"
    )


def learner_ratios(found: Mapping[str, Figures]) -> dict[str, float | None]:
    """The figures of the last line."""
    return {
        "ratio_tunix": ratio(found, "tokens_per_second", "tunix"),
        "ratio_torch": ratio(found, "tokens_per_second", "torch"),
        "matmul_share": found[OURS]["matmul_share"],
        "peak_gib": found[OURS]["peak_gib"],
    }


if __name__ == "__main__":
    entry(main)
