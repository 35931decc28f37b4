"""Runs a rollout round and measures where its time goes: prefill, decoding, grading, the host.

Every program of the engine blocks, so nothing overlaps and the host's share is an upper bound.
Grading is the time in which the engine is idle and every running episode awaits its reward; host
is the rest.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

from benchmarks.timing import elapsed
from srpo_jax.engine import Completion, Engine, Request
from srpo_jax.rollout.rollout import EpisodePlan, EpisodeResult, Rollout
from srpo_jax.run.build import Parts

PARTS = ("prefill", "decode", "host", "grading")


@dataclass(frozen=True)
class Round:
    """A measured round.

    Attributes:
        seconds: By part of PARTS; they add up to the whole round.
        compiles: Programs compiled during it.
        counts: What the engine counted.
        requests: In order of submission.
        results: Of the episodes.
    """

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
    """Runs the episodes of a training step with an empty prefix cache, as training does."""
    parts.sync()
    engine = parts.engine
    counts, compiled = Counter(engine.stats), engine.compile_count()
    timer, results = RoundTimer(engine, parts.rollout), []
    with timer.attached():
        wall = elapsed(lambda: results.extend(run_round(parts, step)))
    return Round(
        timer.split(wall), engine.compile_count() - compiled, engine.stats - counts,
        timer.requests, results,
    )  # fmt: skip


class RoundTimer:
    """Times the engine's programs and the grading of one round, and records its requests."""

    def __init__(self, engine: Engine, rollout: Rollout):
        self.requests: list[Request] = []
        self._engine, self._rollout = engine, rollout
        self._seconds = dict.fromkeys(("prefill", "decode", "grading"), 0.0)
        self._running: Counter[str] = Counter()  # coroutines: episodes, and rewards among them
        self._grading_since: float | None = None
        self._lock = threading.Lock()  # the engine steps in a thread of its own

    def split(self, wall: float) -> dict[str, float]:
        """Seconds by part of PARTS, which add up to ``wall``."""
        rest = wall - sum(self._seconds.values())
        return {name: self._seconds.get(name, rest) for name in PARTS}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, each call of the engine's programs returns when its outputs are there."""
        engine, rollout = self._engine, self._rollout
        submit, step = engine.submit, engine.step

        def recording_submit(request: Request) -> int:
            self.requests.append(request)
            return submit(request)

        def recording_step() -> list[tuple[int, Completion]]:
            finished = step()
            self._update()
            return finished

        with (
            mock.patch.multiple(
                engine, _prefill=self._blocking("prefill", engine._prefill),
                _decode=self._blocking("decode", engine._decode),
                submit=recording_submit, step=recording_step,
            ),
            mock.patch.multiple(
                rollout, _episode=self._counted("episode", rollout._episode),
                _score=self._counted("reward", rollout._score),
            ),
        ):  # fmt: skip
            yield

    def _blocking(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = jax.block_until_ready(program(*args, **kwargs))
            self._seconds[name] += time.perf_counter() - start
            return out

        return call

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            self._update({name: 1})
            try:
                return await function(*args)
            finally:
                self._update({name: -1})

        return call

    def _update(self, change: dict[str, int] | None = None) -> None:
        """Counts coroutines that begin or end, and the grading time since the last call."""
        with self._lock:
            self._running.update(change or {})
            now = time.perf_counter()
            if self._grading_since is not None:
                self._seconds["grading"] += now - self._grading_since
            running = self._running
            grading = self._engine.idle and 0 < running["episode"] == running["reward"]
            self._grading_since = now if grading else None
