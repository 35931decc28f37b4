"""What the benchmarks share: options, programs run in turn, medians, ratios and the report.

A comparison runs our program and those of the peers one after the other, each peer in an
environment of its own that is made on first use. The machine's speed drifts, so the programs are
interleaved over the rounds, and every figure is its median over them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console, RenderableType
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.peer_environments import ROOT, PeerError, last_lines, peer_python
from benchmarks.timing import print_json
from launch.cli import Parser, output

OURS = "srpo_jax"

Figures = Mapping[str, float]
FiguresRead = TypeVar("FiguresRead")


class Program(NamedTuple):
    """A measured program: its module, and the peer environment that it runs in (None: ours)."""

    module: str
    environment: str | None = None


def positive(text: str) -> int:
    """The type of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def add_comparison_options(parser: Parser, programs: Mapping[str, Program]) -> None:
    """``--rounds`` and ``--skip``."""
    parser.add_argument(
        "--rounds", type=positive, default=1,
        help="times that every program runs, interleaved; figures are medians over them "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", choices=[name for name in programs if name != OURS], default=[],
        help="leave a peer out; repeatable",
    )  # fmt: skip


def progress_console() -> Console:
    """Where progress is printed: standard error."""
    return Console(stderr=True, highlight=False)


@contextmanager
def output_of_failures(console: Console) -> Iterator[None]:
    """Prints the end of a failed program's output before its error goes on."""
    try:
        yield
    except PeerError as error:
        console.print(error.output, markup=False, soft_wrap=True)
        raise


def interpreters(
    programs: Mapping[str, Program], console: Console, skip: Sequence[str] = ()
) -> dict[str, Path]:
    """The interpreter of every program that is not skipped, by name.

    Raises:
        PeerError: A peer's environment could not be made.
    """
    return {
        name: peer_python(program.environment, say=console.print)
        if program.environment
        else Path(sys.executable)
        for name, program in programs.items()
        if name not in skip
    }


def run_peer(
    name: str,
    python: Path,
    module: str,
    options: Mapping[str, int] | None = None,
    *,
    read: Callable[[Any], FiguresRead],
    stdin: str = "",
) -> FiguresRead:
    """Runs a measured program on the CPU and reads the figures on the last line of its output.

    Args:
        name: What errors call it.
        python: Its interpreter.
        module: What ``python -m`` runs, in the project's root.
        options: Values of its ``--NAME`` options.
        read: Takes the figures from the JSON value; a lookup or conversion that fails there is
            an error of the program.
        stdin: Its standard input.

    Raises:
        PeerError: It failed, or its last line does not hold the figures; with the end of its
            output.
    """
    command = [str(python), "-m", module]
    for key, value in (options or {}).items():
        command += [f"--{key}", str(value)]
    # The peers' environments are for the CPU, so ours must not take an accelerator either.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)  # of the environment that runs us
    done = subprocess.run(
        command, input=stdin, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise PeerError(
            f"{name}: its program ended with code {done.returncode}",
            last_lines(done.stdout + done.stderr),
        )
    try:
        return read(json.loads(done.stdout.strip().splitlines()[-1]))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise PeerError(
            f"{name}: the last line it printed does not hold its figures", last_lines(done.stdout)
        ) from None


def run_interleaved(
    pythons: Mapping[str, Path],
    rounds: int,
    run: Callable[[str, Path], Figures],
    describe: Callable[[Figures], str],
    console: Console,
) -> dict[str, dict[str, float]]:
    """Runs every program once a round, never two at once.

    Args:
        pythons: Interpreters by program, in the order in which they run.
        rounds: Of all programs.
        run: Runs one program and returns its figures.
        describe: What is printed of the figures after each run.
        console: Where to.

    Returns:
        By program, the median of each figure over the rounds.
    """
    found: dict[str, list[Figures]] = {name: [] for name in pythons}
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with progress:
        task = progress.add_task("", total=rounds * len(pythons))
        for number in range(1, rounds + 1):
            for name, python in pythons.items():
                progress.update(task, description=name)
                found[name].append(run(name, python))
                progress.advance(task)
                console.print(f"round {number}/{rounds}  {name}  {describe(found[name][-1])}")
    return {name: medians(runs) for name, runs in found.items()}


def medians(runs: Sequence[Figures]) -> dict[str, float]:
    """The median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def ratio(found: Mapping[str, Figures], figure: str, peer: str) -> float | None:
    """Our figure over the peer's; None where the peer was left out."""
    return found[OURS][figure] / found[peer][figure] if peer in found else None


def ratio_cell(found: Mapping[str, Figures], figure: str, name: str) -> str:
    """A ratio for a table; empty in our own row."""
    return "" if name == OURS else f"{found[OURS][figure] / found[name][figure]:.2f}"


def report(*parts: RenderableType, figures: dict[str, Any]) -> None:
    """Prints tables and lines, then ``figures`` as JSON on the last line."""
    out = output()
    for part in parts:
        out.print(part)
    print_json(figures)
