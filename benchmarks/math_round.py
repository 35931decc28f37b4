"""Where the time of a Math rollout round goes, and how fast its requests run beside transformers.

The round is that of configs/math_smollm2_cpu.yaml: its team, tasks, reward and model, in float32 on
the CPU. Every program of the engine blocks, so nothing overlaps and the host's share is an upper
bound. Grading is the time in which the engine is idle and every running episode awaits its reward;
host is the rest. The last line is JSON: host_share, prefill_share, decode_share, grading_share,
tok_s, tok_s_transformers and their ratio.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import OURS, Program, positive
from benchmarks.peer_environments import ROOT
from benchmarks.round_times import PARTS, Round, measure_round, run_round
from benchmarks.timing import elapsed
from launch.cli import Parser, entry
from srpo_jax.engine import Request
from srpo_jax.recipe.recipe import Recipe, load_recipe
from srpo_jax.rollout.rollout import count_failures
from srpo_jax.run.build import Parts, build_parts

RECIPE = ROOT / "configs" / "math_smollm2_cpu.yaml"
PEER = "transformers"
PEERS = {PEER: Program("benchmarks.peers.torch_math_round", "torch")}


@dataclass(frozen=True)
class Speed:
    """Tokens per second of each repeat, and how long each response of the engine's own is."""

    tokens_per_second: Sequence[float]
    lengths: Sequence[int]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def mean_length(self) -> tuple[float, float]:
        """Mean tokens of a response, and its standard error."""
        return float(np.mean(self.lengths)), float(np.std(self.lengths) / len(self.lengths) ** 0.5)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.math_round", __doc__, "python -m benchmarks.math_round --slots 12")
    parser.add_argument(
        "--model", default="data/smollm2", metavar="FOLDER", help="default: data/smollm2"
    )
    parser.add_argument(
        "--tasks", type=positive, default=4,
        help="tasks of a round; with the recipe's team and group, 16 requests each (default: 4)",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=positive, default=32,
        help="requests decoded at once, and rows of a transformers batch (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive, default=3,
        help="timed runs of each batch (default: 3)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    recipe = round_recipe(args.model, args.tasks, args.slots)
    console = harness.progress_console()
    jax.config.update("jax_platforms", "cpu")  # the peer's environment has no accelerator
    with harness.output_of_failures(console):
        python = harness.interpreters(PEERS, console)[PEER]
        parts = build_parts(recipe)
        console.print("a round that compiles")
        run_round(parts, 0)
        console.print("a round that is measured")
        measured = measure_round(parts, 1)
        requests, slots = measured.requests, parts.engine.slots
        console.print("its requests in this engine")
        ours = engine_speed(parts, requests, args.repeats)
        console.print("its requests in transformers")
        theirs = transformers_speed(python, parts, requests, ours.lengths, args.repeats)
    harness.report(
        round_table(measured), round_line(measured, slots), speed_table(ours, theirs, slots),
        length_line(ours, theirs), figures=round_figures(measured, ours, theirs),
    )  # fmt: skip
    return 0


def round_recipe(model: str, tasks: int, slots: int) -> Recipe:
    """The recipe with another size. Raises FileNotFoundError where its model is not there."""
    if not Path(model, "config.json").is_file():
        raise FileNotFoundError(
            f"{model}: no model there; make it with: python -m launch.prepare_data smollm2 {model}"
        )
    return load_recipe(
        RECIPE,
        [f"model.path={model}", f"rollout.tasks_per_step={tasks}", f"rollout.slots={slots}"],
    )


def engine_speed(parts: Parts, requests: Sequence[Request], repeats: int) -> Speed:
    """The requests as one batch, with the round's keys, so that it draws the round's texts."""
    lengths: list[int] = []

    def run() -> None:
        lengths[:] = [len(done.ids) for done in parts.engine.run(requests)]

    speeds = []
    for _ in range(repeats):
        parts.sync()  # no prompt is stored
        seconds = elapsed(run)
        speeds.append(sum(lengths) / seconds)
    return Speed(speeds, lengths)


def transformers_speed(
    python: Path,
    parts: Parts,
    requests: Sequence[Request],
    lengths: Sequence[int],
    repeats: int,
) -> Speed:
    """As many tokens for each request in transformers' own program, in batches of our slots.

    Returns:
        Its speed, and the lengths of the texts that it would have drawn.

    Raises:
        PeerError: It failed; with the end of its output.
    """
    work = {
        "model": str(parts.tokenizer.folder.resolve()),
        "prompts": [list(request.prompt_ids) for request in requests],
        "lengths": list(lengths),
        "most": parts.train_sampling.response_tokens,
        "temperature": parts.train_sampling.temperature,
        "stop_ids": list(parts.tokenizer.stop_ids),
        "rows": parts.engine.slots,
        "repeats": repeats,
    }
    return harness.run_peer(
        PEER, python, PEERS[PEER].module, read=read_speed, stdin=json.dumps(work)
    )


def read_speed(printed: Any) -> Speed:
    """The figures that the peer's program printed."""
    return Speed(printed["tokens_per_second"], printed["lengths"])


def round_table(measured: Round) -> Table:
    """Seconds and share of every part of the round."""
    table = Table(title="a Math rollout round")
    table.add_column("part")
    for title in ("seconds", "share"):
        table.add_column(title, justify="right")
    for name in PARTS:
        share = measured.shares[f"{name}_share"]
        table.add_row(name, f"{measured.seconds[name]:.3f}", f"{share:.2%}")
    table.add_row("all", f"{measured.wall:.3f}", f"{sum(measured.shares.values()):.2%}")
    return table


def round_line(measured: Round, slots: int) -> str:
    """What the round consisted of."""
    counts, failed = measured.counts, count_failures(measured.results)
    return (
        f"{slots} slots; {len(measured.results)} episodes, {failed.total()} of them failed; "
        f"{len(measured.requests)} requests; prompt tokens: {counts['prompt_tokens']} given, "
        f"{counts['prefill_tokens']} prefilled; {counts['decode_tokens']} tokens drawn in "
        f"{counts['decode_steps']} steps; compiles after warm-up: {measured.compiles}"
    )


def speed_table(ours: Speed, theirs: Speed, slots: int) -> Table:
    """Both engines on the same requests."""
    table = Table(title="its requests as one batch, sampled, with log-probs")
    table.add_column("engine")
    for title in ("slots", "tok/s", "ours is faster by"):
        table.add_column(title, justify="right")
    for name, speed in {OURS: ours, PEER: theirs}.items():
        ratio = "" if speed is ours else f"{ours.median / theirs.median:.2f}"
        table.add_row(name, f"{slots}", f"{speed.median:.0f}", ratio)
    return table


def length_line(ours: Speed, theirs: Speed) -> str:
    """The mean lengths of both engines' own texts, which do not differ much: one distribution."""
    (a, error_a), (b, error_b) = ours.mean_length, theirs.mean_length
    alike = abs(a - b) <= 3 * float(np.hypot(error_a, error_b))
    return (
        f"tokens of a response: {a:.1f} ± {error_a:.1f}; of transformers' own, stopped where they "
        f"end: {b:.1f} ± {error_b:.1f}, " + ("alike" if alike else "NOT ALIKE")
    )


def round_figures(measured: Round, ours: Speed, theirs: Speed) -> dict[str, float]:
    """The figures of the last line."""
    shares = measured.shares
    order = ("host", "prefill", "decode", "grading")
    return {f"{name}_share": shares[f"{name}_share"] for name in order} | {
        "tok_s": ours.median,
        "tok_s_transformers": theirs.median,
        "ratio": ours.median / theirs.median,
    }


if __name__ == "__main__":
    entry(main)
