"""Estimators of an evaluation: Avg@k, Pass@k, their standard errors, and what the answers cost.

``correct`` is an array [tasks, samples] of bool: one row per task, one column per sampled episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike


def avg_at_k(correct: ArrayLike) -> float:
    """Mean fraction of correct samples over tasks; k is the number of columns.

    Args:
        correct: Bool [tasks, samples].

    Raises:
        ValueError: ``correct`` is no such array.
    """
    return float(_samples(correct).mean(axis=1).mean())


def pass_at_k(correct: ArrayLike, k: int) -> float:
    """Mean probability over tasks that one of k samples is correct, estimated without bias.

    With n samples of which c are correct: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374). For k = n it is the fraction of tasks solved at least once.

    Args:
        correct: Bool [tasks, samples].
        k: From 1 to the samples of a task.

    Raises:
        ValueError: ``k`` is out of range, or ``correct`` is no such array.
    """
    return float(pass_per_task(correct, k).mean())


def pass_per_task(correct: ArrayLike, k: int) -> np.ndarray:
    """The unbiased Pass@k of each task.

    Args:
        correct: Bool [tasks, samples].
        k: From 1 to the samples of a task.

    Returns:
        float64 [tasks].

    Raises:
        ValueError: ``k`` is out of range.
    """
    samples = _samples(correct)
    n = samples.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to {n} (the samples of a task), got {k}")
    failures = n - samples.sum(axis=1)
    return np.array([1 - math.comb(int(f), k) / math.comb(n, k) for f in failures])


def standard_error(per_task: ArrayLike) -> float:
    """Standard error of the mean over tasks.

    A task's samples share its difficulty, so tasks are the independent units (clusters).

    Args:
        per_task: One figure per task [tasks]: the mean over its samples, not the samples.

    Returns:
        NaN for a single task.
    """
    values = np.asarray(per_task, dtype=np.float64)
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else math.nan


def paired_difference(before: ArrayLike, after: ArrayLike) -> tuple[float, float]:
    """Mean of (after - before) over the same tasks, and its standard error.

    Args:
        before: [tasks, samples] or [tasks].
        after: The same tasks; the number of samples may differ.

    Raises:
        ValueError: The numbers of tasks differ.
    """
    means = [
        array.mean(axis=1) if array.ndim == 2 else array
        for array in (np.asarray(side, dtype=np.float64) for side in (before, after))
    ]
    if means[0].shape != means[1].shape:
        raise ValueError(f"not the same tasks: {len(means[0])} before, {len(means[1])} after")
    difference = means[1] - means[0]
    return float(difference.mean()), standard_error(difference)


def macro(figures: Mapping[str, float] | Sequence[float]) -> float:
    """Unweighted mean over benchmarks; NaN where one of them has no figure."""
    values = list(figures.values()) if isinstance(figures, Mapping) else list(figures)
    return float(np.mean(values))


def macro_error(errors: Mapping[str, float] | Sequence[float]) -> float:
    """Standard error of ``macro`` from the standard errors of independent benchmarks."""
    values = list(errors.values()) if isinstance(errors, Mapping) else list(errors)
    return float(np.sqrt(np.sum(np.square(values))) / len(values))


def over_seeds(per_seed: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation over seeds, each seed's figure computed first.

    The deviation of a single seed is NaN.
    """
    values = np.asarray(per_seed, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class EpisodeCost:
    """What one episode cost (SRPO eq. 8).

    Attributes:
        tokens: C_tok, the tokens that the members of its events generated.
        calls: C_call, the sum of K over its events.
        tools: C_tool, tool calls.
        events: Its events.
        seconds: Wall time.
    """

    tokens: int
    calls: int
    tools: int
    events: int
    seconds: float


@dataclass(frozen=True)
class CostSummary:
    """Costs per episode over an evaluation.

    Attributes:
        c_tok: Mean generated tokens.
        c_call: Mean calls.
        c_tool: Mean tool calls.
        mean_k: Members per event.
        mean_tokens: Tokens per member.
        proxy: ``mean_k * mean_tokens``.
        u_tok: Correct answers per million tokens (SRPO eq. 9).
        p50: Median seconds of an episode.
        p95: 95th percentile of the seconds.
    """

    c_tok: float
    c_call: float
    c_tool: float
    mean_k: float
    mean_tokens: float
    proxy: float
    u_tok: float
    p50: float
    p95: float


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark's evaluation.

    An episode that failed or whose grade is undecided counts as wrong. Where none was graded the
    averages are NaN: nothing was measured.

    Attributes:
        correct: Bool [tasks, samples].
        costs: In the same nesting.
        failed: Episodes without an outcome.
        undecided: Episodes whose grade hit a limit.
    """

    correct: np.ndarray
    costs: Sequence[Sequence[EpisodeCost]]
    failed: int = 0
    undecided: int = 0

    @property
    def graded(self) -> int:
        return self.correct.size - self.failed - self.undecided

    @property
    def avg(self) -> float:
        return avg_at_k(self.correct) if self.graded else math.nan

    @property
    def avg_error(self) -> float:
        return standard_error(self.correct.mean(axis=1)) if self.graded else math.nan

    @property
    def passed(self) -> float:
        """Pass@k for k = all samples."""
        return pass_at_k(self.correct, self.correct.shape[1]) if self.graded else math.nan

    @property
    def passed_error(self) -> float:
        return standard_error(self.correct.any(axis=1)) if self.graded else math.nan

    @property
    def cost(self) -> CostSummary:
        summary = summarise_cost(self.correct, self.costs)
        return summary if self.graded else replace(summary, u_tok=math.nan)


def summarise_cost(correct: ArrayLike, costs: Sequence[Sequence[EpisodeCost]]) -> CostSummary:
    """Costs of an evaluation.

    Args:
        correct: Bool [tasks, samples].
        costs: In the same nesting.

    Raises:
        ValueError: The two have different shapes.
    """
    samples = _samples(correct)
    table = np.array(
        [[(c.tokens, c.calls, c.tools, c.events, c.seconds) for c in row] for row in costs],
        dtype=np.float64,
    )
    if table.shape[:2] != samples.shape:
        raise ValueError(
            f"costs must be nested like correct {samples.shape}, got {table.shape[:2]}"
        )
    tokens, calls, tools, events, seconds = np.moveaxis(table, 2, 0)
    mean_k = _ratio(calls.sum(), events.sum())
    mean_tokens = _ratio(tokens.sum(), calls.sum())
    return CostSummary(
        c_tok=float(tokens.mean()),
        c_call=float(calls.mean()),
        c_tool=float(tools.mean()),
        mean_k=mean_k,
        mean_tokens=mean_tokens,
        proxy=mean_k * mean_tokens,
        u_tok=u_tok(samples, tokens),
        p50=float(np.percentile(seconds, 50)),
        p95=float(np.percentile(seconds, 95)),
    )


def u_tok(correct: ArrayLike, tokens: ArrayLike) -> float:
    """Correct answers per million generated tokens (SRPO eq. 9).

    U_tok = 1e6 * sum_x Avg@k(x) / sum_x C_tok(x), both means over the samples of task x.

    Args:
        correct: Bool [tasks, samples].
        tokens: Generated tokens [tasks, samples].

    Returns:
        NaN where nothing was generated.
    """
    per_task = np.asarray(tokens, dtype=np.float64).mean(axis=1)
    return 1e6 * _ratio(_samples(correct).mean(axis=1).sum(), per_task.sum())


def _samples(correct: ArrayLike) -> np.ndarray:
    samples = np.asarray(correct)
    if samples.ndim != 2 or samples.size == 0 or not np.isin(samples, (0, 1)).all():
        raise ValueError(
            f"correct must be a non-empty bool array [tasks, samples], got {samples.dtype} "
            f"{list(samples.shape)}"
        )
    return samples.astype(bool)


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below else math.nan
