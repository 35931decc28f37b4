"""Runs one update of three learners on the same rows and model, and compares their speed.

Ours, Tunix and PyTorch with transformers, one process after the other, each peer in an environment
of its own that is made on first use. The last line is JSON: ratio_tunix and ratio_torch (our real
tokens per second over the peer's), matmul_share and peak_gib (ours).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.peer_environments import ROOT, PeerError, last_lines, peer_python
from launch.cli import Parser, entry, output

OURS = "srpo_jax"
MODULES = {
    OURS: "benchmarks.ours_learner",
    "tunix": "benchmarks.peers.tunix_learner",
    "torch": "benchmarks.peers.torch_learner",
}
PEERS = [name for name in MODULES if name != OURS]
MEASURED = ("seconds", "tokens_per_second", "peak_gflops", "matmul_share", "peak_gib")
MEMORY_GROWTH = 0.10  # what a larger batch of equal micro-batches may add to the peak

Figures = Mapping[str, float]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.learner", __doc__, "python -m benchmarks.learner --steps 3")
    parser.add_argument("--rows", type=positive, default=16, help="rows of the batch (default: 16)")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps (default: 5)")
    parser.add_argument(
        "--rounds", type=positive, default=1,
        help="times that the learners take turns; medians over them (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", choices=PEERS, default=[], help="leave a peer out; repeatable"
    )
    parser.add_argument(
        "--batch-factor", type=positive, metavar="N",
        help="also run ours on N times as many rows in micro-batches of the same size, and compare "
        "the peak memory",
    )  # fmt: skip
    args = parser.parse_args(argv)
    names = [name for name in MODULES if name not in args.skip]
    console = Console(stderr=True, highlight=False)
    try:
        pythons = {
            name: Path(sys.executable) if name == OURS else peer_python(name, say=console.print)
            for name in names
        }
        found = take_turns(pythons, args.rows, args.steps, args.rounds, console)
        larger = None
        if args.batch_factor:
            console.print(f"{OURS} on {args.batch_factor} times the rows")
            larger = run_learner(OURS, pythons[OURS], args.rows * args.batch_factor, steps=1)
    except PeerError as error:
        console.print(error.output, markup=False, soft_wrap=True)
        raise
    out = output()
    out.print(results_table(found))
    if larger:
        out.print(memory_line(found[OURS], larger, args.batch_factor))
    print(json.dumps(summary(found)), flush=True)
    return 0


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def take_turns(
    pythons: Mapping[str, Path], rows: int, steps: int, rounds: int, console: Console
) -> dict[str, dict[str, float]]:
    """Runs every learner once a round, never two at once; medians of each over the rounds."""
    seen: dict[str, list[Figures]] = {name: [] for name in pythons}
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with progress:
        task = progress.add_task("", total=rounds * len(pythons))
        for turn in range(1, rounds + 1):
            for name, python in pythons.items():
                progress.update(task, description=name)
                figures = run_learner(name, python, rows, steps)
                seen[name].append(figures)
                progress.advance(task)
                console.print(
                    f"round {turn}/{rounds}  {name}  {figures['tokens_per_second']:.0f} tok/s  "
                    f"{figures['peak_gflops']:.0f} GFLOP/s matmul peak"
                )
    return {name: medians(runs) for name, runs in seen.items()}


def run_learner(name: str, python: Path, rows: int, steps: int) -> dict[str, float]:
    """Runs a learner's program on the CPU. Raises PeerError with the end of its output."""
    command = [str(python), "-m", MODULES[name], "--rows", str(rows), "--steps", str(steps)]
    # The peers' environments are for the CPU, so ours must not take an accelerator either.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTHONPATH", None)  # of the environment that runs us
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise PeerError(
            f"{name}: its program ended with code {done.returncode}",
            last_lines(done.stdout + done.stderr),
        )
    return read_figures(name, done.stdout)


def read_figures(name: str, printed: str) -> dict[str, float]:
    """The JSON object on the last line that a learner printed."""
    try:
        figures = json.loads(printed.strip().splitlines()[-1])
        return {key: float(figures[key]) for key in MEASURED}
    except (IndexError, KeyError, TypeError, ValueError):
        raise PeerError(
            f"{name}: the last line it printed does not hold its figures", last_lines(printed)
        ) from None


def medians(runs: Sequence[Figures]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in MEASURED}


def results_table(found: Mapping[str, Figures]) -> Table:
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
            "" if name == OURS else f"{ratio(found, name):.2f}",
        )
    return table


def ratio(found: Mapping[str, Figures], peer: str) -> float | None:
    """Our tokens per second over the peer's; None where the peer was left out."""
    if peer not in found:
        return None
    return found[OURS]["tokens_per_second"] / found[peer]["tokens_per_second"]


def memory_line(figures: Figures, larger: Figures, factor: int) -> str:
    growth = larger["peak_gib"] / figures["peak_gib"] - 1
    verdict = "below" if growth < MEMORY_GROWTH else "NOT below"
    return (
        f"peak memory: {figures['peak_gib']:.2f} GiB, on {factor} times the rows "
        f"{larger['peak_gib']:.2f} GiB: {growth:+.1%}, {verdict} the limit of {MEMORY_GROWTH:.0%}"
    )


def summary(found: Mapping[str, Figures]) -> dict[str, float | None]:
    ours = found[OURS]
    return {f"ratio_{peer}": ratio(found, peer) for peer in PEERS} | {
        "matmul_share": ours["matmul_share"],
        "peak_gib": ours["peak_gib"],
    }


if __name__ == "__main__":
    entry(main)
