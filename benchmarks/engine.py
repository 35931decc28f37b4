"""Runs three generation engines on the same work and model, and compares their speed.

Ours, Tunix's sampler and transformers' generate, one process after the other, each peer in an
environment of its own that is made on first use. The last line is JSON: uniform_ratio_tunix,
uniform_ratio_transformers and workload_ratio_tunix (our generated tokens per second over the
peer's), and workload_limit_factor (the machine's computed limit over ours).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.learner import positive
from benchmarks.peer_environments import ROOT, PeerError, last_lines, peer_python
from launch.cli import Parser, entry, output

OURS = "srpo_jax"
PEERS = {"tunix": "tunix", "transformers": "torch"}  # engine -> environment
MODULES = {
    OURS: "benchmarks.ours_engine",
    "tunix": "benchmarks.peers.tunix_engine",
    "transformers": "benchmarks.peers.torch_engine",
}

Figures = Mapping[str, float]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.engine", __doc__, "python -m benchmarks.engine --rounds 3")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="timed runs of each work (default: 3)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=1,
        help="times that the engines take turns; medians over them (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", choices=list(PEERS), default=[],
        help="leave a peer out; repeatable",
    )  # fmt: skip
    args = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    names = [name for name in MODULES if name not in args.skip]
    try:
        pythons = {
            name: Path(sys.executable)
            if name == OURS
            else peer_python(PEERS[name], say=console.print)
            for name in names
        }
        seen: dict[str, list[Figures]] = {name: [] for name in names}
        for turn in range(1, args.rounds + 1):
            for name, python in pythons.items():
                seen[name].append(run_program(name, python, args.repeats))
                shown = ", ".join(f"{k} {v:.0f}" for k, v in seen[name][-1].items())
                console.print(f"round {turn}/{args.rounds}  {name}  {shown}")
    except PeerError as error:
        console.print(error.output, markup=False, soft_wrap=True)
        raise
    found = {name: medians(runs) for name, runs in seen.items()}
    out = output()
    out.print(results_table(found))
    out.print(machine_line(found[OURS]))
    print(json.dumps(summary(found)), flush=True)
    return 0


def run_program(name: str, python: Path, repeats: int) -> dict[str, float]:
    """Runs an engine's program on the CPU. Raises PeerError with the end of its output."""
    # The peers' environments are for the CPU, so ours must not take an accelerator either.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTHONPATH", None)  # of the environment that runs us
    done = subprocess.run(
        [str(python), "-m", MODULES[name], "--repeats", str(repeats)],
        cwd=ROOT, env=env, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise PeerError(
            f"{name}: its program ended with code {done.returncode}",
            last_lines(done.stdout + done.stderr),
        )
    try:
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        return {key: float(value) for key, value in figures.items()}
    except (IndexError, AttributeError, TypeError, ValueError):
        raise PeerError(
            f"{name}: the last line it printed does not hold its figures", last_lines(done.stdout)
        ) from None


def medians(runs: Sequence[Figures]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def results_table(found: Mapping[str, Figures]) -> Table:
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
                    "" if name == OURS else f"{ratio(found, work, name):.2f}",
                    f"{figures[work] / found[OURS][f'{work}_limit']:.0%}",
                )
    return table


def machine_line(ours: Figures) -> str:
    return (
        f"measured: {ours['peak_gflops']:.0f} GFLOP/s at 2048 cubed, "
        f"{ours['decode_gflops']:.0f} GFLOP/s at {ours['slots']:.0f} rows, "
        f"{ours['read_gbs']:.0f} GB/s of weight reads; limits: {ours['uniform_limit']:.0f} and "
        f"{ours['workload_limit']:.0f} tok/s; compiles after warm-up: {ours['compiles']:.0f}"
    )


def ratio(found: Mapping[str, Figures], work: str, peer: str) -> float | None:
    """Our tokens per second over the peer's; None where the peer was left out."""
    return found[OURS][work] / found[peer][work] if peer in found else None


def summary(found: Mapping[str, Figures]) -> dict[str, float | None]:
    return {
        "uniform_ratio_tunix": ratio(found, "uniform", "tunix"),
        "uniform_ratio_transformers": ratio(found, "uniform", "transformers"),
        "workload_ratio_tunix": ratio(found, "workload", "tunix"),
        "workload_limit_factor": found[OURS]["workload_limit"] / found[OURS]["workload"],
    }


if __name__ == "__main__":
    entry(main)
