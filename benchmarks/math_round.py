"""Where the time of a Math rollout round goes, and how fast its requests run beside transformers.

The round is that of configs/math_smollm2_cpu.yaml: its team, tasks, reward and model, in float32 on
the CPU. Every program of the engine blocks, so nothing overlaps and the host's share is an upper
bound. Grading is the time in which the engine has nothing to do and every episode that runs awaits
its reward; host is the rest. The last line is JSON: host_share, prefill_share, decode_share,
grading_share, tok_s, tok_s_transformers and their ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.learner import positive
from benchmarks.peer_environments import ROOT, PeerError, last_lines, peer_python
from launch.cli import Parser, entry, output
from srpo_jax.engine import Completion, Engine, Request
from srpo_jax.recipe.recipe import Recipe, load_recipe
from srpo_jax.rollout.rollout import EpisodePlan, EpisodeResult, Rollout, count_failures
from srpo_jax.run.build import Parts, build_parts

RECIPE = ROOT / "configs" / "math_smollm2_cpu.yaml"
PEER = "benchmarks.peers.torch_math_round"
PARTS = ("prefill", "decode", "host", "grading")


@dataclass
class RoundTimes:
    """Seconds of a round's parts but for the host's, and the requests in order of submission."""

    prefill: float = 0.0
    decode: float = 0.0
    grading: float = 0.0
    requests: list[Request] = field(default_factory=list)

    def seconds(self, wall: float) -> dict[str, float]:
        """The seconds of PARTS, which add up to ``wall``."""
        host = wall - self.prefill - self.decode - self.grading
        return {
            "prefill": self.prefill, "decode": self.decode, "host": host, "grading": self.grading
        }  # fmt: skip


@dataclass(frozen=True)
class Round:
    """A measured round: seconds of PARTS, programs compiled in it, what the engine counted,
    requests and episodes."""

    seconds: dict[str, float]
    compiles: int
    counts: Counter[str]
    requests: list[Request]
    results: list[EpisodeResult]

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        return {f"{name}_share": self.seconds[name] / self.wall for name in PARTS}


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
        "--repeats", type=positive, default=3, help="timed runs of each batch (default: 3)"
    )
    args = parser.parse_args(argv)
    recipe = round_recipe(args.model, args.tasks, args.slots)
    console = Console(stderr=True, highlight=False)
    jax.config.update("jax_platforms", "cpu")  # the peer's environment has no accelerator
    python = peer_python("torch", say=console.print)
    parts = build_parts(recipe)
    console.print("a round that compiles")
    run_round(parts, 0)
    console.print("a round that is measured")
    measured = measure_round(parts, 1)
    console.print("its requests in this engine")
    ours = engine_speed(parts, measured.requests, args.repeats)
    console.print("its requests in transformers")
    try:
        theirs = transformers_speed(python, parts, measured.requests, ours.lengths, args.repeats)
    except PeerError as error:
        console.print(error.output, markup=False, soft_wrap=True)
        raise
    out = output()
    out.print(round_table(measured))
    out.print(round_line(measured, parts.engine.slots))
    out.print(speed_table(ours, theirs, parts.engine.slots))
    out.print(length_line(ours, theirs))
    print(json.dumps(summary(measured, ours, theirs)), flush=True)
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


def run_round(parts: Parts, step: int) -> list[EpisodeResult]:
    """The episodes of a training step."""
    recipe = parts.recipe
    plans = [
        EpisodePlan(task, (recipe.seed, 0, step), slot, rollout)
        for slot, task in enumerate(parts.stream.step(step))
        for rollout in range(recipe.rollout.group_size)
    ]
    return parts.rollout.run(plans, parts.train_sampling)


def measure_round(parts: Parts, step: int) -> Round:
    parts.sync()  # as before every round of training: no prompt is stored
    before, compiled = Counter(parts.engine.stats), parts.engine.compile_count()
    with watched(parts.engine, parts.rollout) as times:
        start = time.perf_counter()
        results = run_round(parts, step)
        wall = time.perf_counter() - start
    return Round(
        times.seconds(wall), parts.engine.compile_count() - compiled,
        parts.engine.stats - before, times.requests, results,
    )  # fmt: skip


@contextmanager
def watched(engine: Engine, rollout: Rollout) -> Iterator[RoundTimes]:
    """Within it each call of the engine's programs ends when its outputs are there, and all that
    RoundTimes holds is noted."""
    times = RoundTimes()
    now = time.perf_counter
    submit, step = engine.submit, engine.step
    running: Counter[str] = Counter()  # coroutines: episodes, and rewards among them
    grading_since: float | None = None

    def blocking(name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = now()
            out = jax.block_until_ready(program(*args, **kwargs))
            setattr(times, name, getattr(times, name) + now() - start)
            return out

        return call

    def note() -> None:
        nonlocal grading_since
        if grading_since is not None:
            times.grading += now() - grading_since
        grading = engine.idle and 0 < running["episode"] == running["reward"]
        grading_since = now() if grading else None

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            running[name] += 1
            note()
            try:
                return await function(*args)
            finally:
                running[name] -= 1
                note()

        return call

    def noted_submit(request: Request) -> int:
        times.requests.append(request)
        return submit(request)

    def noted_step() -> list[tuple[int, Completion]]:
        finished = step()
        note()
        return finished

    with (
        mock.patch.multiple(
            engine, _prefill=blocking("prefill", engine._prefill),
            _decode=blocking("decode", engine._decode), submit=noted_submit, step=noted_step,
        ),
        mock.patch.multiple(
            rollout, _episode=counted("episode", rollout._episode),
            _score=counted("reward", rollout._score),
        ),
    ):  # fmt: skip
        yield times


def engine_speed(parts: Parts, requests: Sequence[Request], repeats: int) -> Speed:
    """The requests as one batch, with the round's keys, so that it draws the round's texts."""
    speeds, lengths = [], []
    for _ in range(repeats):
        parts.sync()  # no prompt is stored
        start = time.perf_counter()
        lengths = [len(done.ids) for done in parts.engine.run(requests)]
        speeds.append(sum(lengths) / (time.perf_counter() - start))
    return Speed(speeds, lengths)


def transformers_speed(
    python: Path,
    parts: Parts,
    requests: Sequence[Request],
    lengths: Sequence[int],
    repeats: int,
) -> Speed:
    """As many tokens for each request in transformers' own program, in batches of the engine's
    slots. The lengths that come back are of the texts that it would have drawn. Raises PeerError
    with the end of its output."""
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
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)  # of the environment that runs us
    done = subprocess.run(
        [str(python), "-m", PEER], input=json.dumps(work), cwd=ROOT, env=env,
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise PeerError(
            f"transformers: its program ended with code {done.returncode}",
            last_lines(done.stdout + done.stderr),
        )
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Speed(found["tokens_per_second"], found["lengths"])
    except (IndexError, KeyError, TypeError, ValueError):
        raise PeerError(
            "transformers: the last line it printed does not hold its figures",
            last_lines(done.stdout),
        ) from None


def round_table(measured: Round) -> Table:
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
    counts, failed = measured.counts, count_failures(measured.results)
    return (
        f"{slots} slots; {len(measured.results)} episodes, {failed.total()} of them failed; "
        f"{len(measured.requests)} requests; prompt tokens: {counts['prompt_tokens']} given, "
        f"{counts['prefill_tokens']} prefilled; {counts['decode_tokens']} tokens drawn in "
        f"{counts['decode_steps']} steps; compiles after warm-up: {measured.compiles}"
    )


def speed_table(ours: Speed, theirs: Speed, slots: int) -> Table:
    table = Table(title="its requests as one batch, sampled, with log-probs")
    table.add_column("engine")
    for title in ("slots", "tok/s", "ours is faster by"):
        table.add_column(title, justify="right")
    for name, speed in {"srpo_jax": ours, "transformers": theirs}.items():
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


def summary(measured: Round, ours: Speed, theirs: Speed) -> Mapping[str, float]:
    shares = measured.shares
    order = ("host", "prefill", "decode", "grading")
    return {f"{name}_share": shares[f"{name}_share"] for name in order} | {
        "tok_s": ours.median,
        "tok_s_transformers": theirs.median,
        "ratio": ours.median / theirs.median,
    }


if __name__ == "__main__":
    entry(main)
