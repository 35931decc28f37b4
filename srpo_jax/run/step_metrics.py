"""The figures of one training step, from its episodes and its updates.

Everything but ``time/*`` is a function of the seed: a resumed run repeats it bit for bit. A mean of
nothing is NaN, never 0, and is logged as null; a value that is not finite leaves the others' mean.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from srpo_jax.events import Event, role_kind
from srpo_jax.learner.batch import EventBatch
from srpo_jax.rollout.rollout import UNDECIDED, EpisodeResult, count_failures
from srpo_jax.run.update_diagnostics import update_diagnostics

CV_WINDOW = 20  # steps over which the gradient norm's coefficient of variation is taken


def rollout_metrics(
    results: Sequence[EpisodeResult], complete: Sequence[Event], dropped: Sequence[Event]
) -> dict[str, float]:
    """Team score, shape of the events, lengths, invalid actions, costs, and what was dropped.

    All but the counts of ``complete`` and ``dropped`` events is of the episodes as they ended,
    before ``rollout.truncated`` drops an event or calls it malformed: what training leaves out
    would leave its lengths and its cuts out of sight.

    Args:
        results: The step's episodes.
        complete: Events that training can use, after truncation.
        dropped: The others.
    """
    episodes = [r.episode for r in results if r.episode is not None]
    scored = [e for e in episodes if np.isfinite(e.reward)]
    events = [event for episode in episodes for event in episode.events]
    members = [m for event in events for m in event.members]
    metrics: dict[str, float] = {
        "reward/mean": _mean([e.reward for e in scored]),
        "reward/correct": _mean([e.correct for e in scored]),
        "episodes/total": float(len(results)),
        "episodes/failed": float(sum(r.failed for r in results)),
        "episodes/unscored": float(len(episodes) - len(scored)),
        "episodes/grade_errors": float(sum(r.failure == UNDECIDED for r in results)),
        "events/complete": float(len(complete)),
        "events/complete_rate": _mean([True] * len(complete) + [False] * len(dropped)),
        "events/mean_k": _mean([event.k for event in events]),
        "response/length": _mean([len(m.response_ids) for m in members]),
        "prompt/length": _mean([len(m.prompt_ids) for m in members]),
    }
    for k, n in sorted(collections.Counter(event.k for event in events).items()):
        metrics[f"events/k_{k}"] = float(n)
    for cause, n in sorted(count_failures(results).items()):
        metrics[f"episodes/failed_{cause}"] = float(n)
    logps = [m.logps for m in members]
    if logps:
        # Sampled at the training temperature, -log p is an unbiased estimate of the entropy.
        metrics["policy/entropy"] = float(-np.concatenate(logps).mean(dtype=np.float64))
    by_role: dict[str, list[Any]] = collections.defaultdict(list)
    for member in members:
        by_role[role_kind(member.role)].append(member)
    for role, group in sorted(by_role.items()):
        metrics[f"invalid/{role}"] = _mean([not m.well_formed for m in group])
        metrics[f"truncated/{role}"] = _mean([m.stop_reason == "length" for m in group])
    cuts: dict[str, list[bool]] = collections.defaultdict(list)
    for result in results:
        for uid, fitted in result.team.fitted.items():
            cuts[role_kind(result.team.members[uid].role)].append(fitted.cuts > 0)
    for role, flags in sorted(cuts.items()):
        metrics[f"prompt_cut/{role}"] = _mean(flags)
    for name in sorted({name for e in episodes for name in e.cost}):
        metrics[f"cost/{name}"] = _mean([e.cost.get(name, 0.0) for e in episodes])
    for name in sorted({name for e in episodes for name in e.info}):
        metrics[f"info/{name}"] = _mean([e.info[name] for e in episodes if name in e.info])
    return metrics


def row_metrics(
    results: Sequence[EpisodeResult], complete: Sequence[Event], batches: Sequence[EventBatch]
) -> dict[str, float]:
    """What became of every sampled output: the other figures add up to ``rows/sampled``.

    trained; zero_advantage: counted but not computed; incomplete: of an event that misses a member;
    draft: of no event; failed: of an episode that failed or whose grade is undecided.

    Args:
        results: The step's episodes.
        complete: Events that training can use, after truncation.
        batches: The mini-batches made of them.
    """
    ended = [(r.episode, r.team) for r in results if r.episode is not None]
    of_events = sum(len(event.members) for episode, _ in ended for event in episode.events)
    drafts = [call for _, team in ended for call in team.calls if call.kind == "draft"]
    counts = {
        "rows/sampled": sum(len(r.team.members) for r in results),
        "rows/trained": sum(int(batch.event_size.sum()) for batch in batches),
        "rows/zero_advantage": sum(batch.skipped[1] for batch in batches),
        "rows/incomplete": of_events - sum(event.k for event in complete),
        "rows/draft": sum(len(call.outputs) for call in drafts),
        "rows/failed": sum(len(r.team.members) for r in results if r.episode is None),
    }
    metrics = {name: float(count) for name, count in counts.items()}
    return metrics | {"update/fill": _mean([batch.fill for batch in batches])}


def update_metrics(
    reports: Sequence[Mapping[str, Any]], past_norms: Sequence[float]
) -> dict[str, float]:
    """Loss, ratios, clipping and gradient norms over the optimiser steps of one batch.

    Figures of several mini-batches are weighted by what they are a mean of: events, units of the
    ratio, or tokens. Events without an advantage count as unclipped; where they were not computed,
    ratios and the KL between the policies are those of the others.

    Args:
        reports: What the learner returned for each optimiser step. None at all (a batch without a
            complete event) counts as a skipped one.
        past_norms: ``update/grad_norm`` of the steps before, where it is a number: the coefficient
            of variation is that of one value for each training step, the mean over its applied
            updates.
    """
    if not reports:
        return {
            "update/skipped": 1.0, "update/skipped_nonfinite": 0.0, "update/grad_norm": np.nan,
        }  # fmt: skip

    def values(name):
        return [float(r[name]) for r in reports]

    def mean(name, per):
        return _mean(values(name), values(per))

    computed = [r for r in reports if r["scored_units"]]
    norm = _mean([float(r["grad_norm"]) for r in reports if r["applied"]])
    window = [n for n in (*past_norms, norm) if np.isfinite(n)][-CV_WINDOW:]
    metrics = {
        "update/loss": mean("loss", "num_events"),
        "update/surrogate": mean("surrogate", "num_events"),
        "update/ratio_mean": mean("ratio_mean", "scored_units"),
        "update/ratio_min": min((float(r["ratio_min"]) for r in computed), default=np.nan),
        "update/ratio_max": max((float(r["ratio_max"]) for r in computed), default=np.nan),
        "update/clip_fraction": mean("clip_fraction", "num_units"),
        "update/clamped_events": sum(values("clamped_events")),
        "update/approx_kl": mean("approx_kl", "scored_tokens"),
        "update/grad_norm": norm,
        "update/grad_norm_cv": (
            float(np.std(window) / np.mean(window)) if len(window) > 1 else np.nan
        ),
        "update/nonfinite_events": sum(values("nonfinite_events")),
        "update/skipped": float(sum(not r["applied"] for r in reports)),
        "update/skipped_nonfinite": float(sum(not np.isfinite(n) for n in values("grad_norm"))),
        # Of the first step that computes any: for those after it the policy has moved.
        "policy/sampler_gap": next((float(r["sampler_gap"]) for r in computed), np.nan),
    }
    if "kl" in reports[0]:
        metrics["update/kl"] = mean("kl", "num_tokens")
    for role, value in reports[0]["role_norms"].items():
        metrics[f"update/grad_norm_{role}"] = float(value)
    if "sampler_weight_mean" in reports[0]:
        metrics["update/sampler_weight"] = mean("sampler_weight_mean", "scored_units")
        metrics["update/sampler_truncated"] = mean("sampler_truncated", "scored_units")
    if len(reports) > 1:  # the first step's ratios are all 1
        last = reports[-1]
        metrics |= update_diagnostics(
            last["log_ratio"],
            np.where(last["event_valid"], last["event_size"], 0),
            last["event_tokens"],
            last["member_log_ratio"],
            last["row_event"],
        )
    return metrics


def _mean(values: Sequence[Any], weights: Sequence[float] | None = None) -> float:
    """The mean of the finite values; NaN where there is none, or none that weighs anything."""
    x = np.asarray(values, np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
    w = np.where(np.isfinite(x), w, 0)
    if not w.any():
        return float("nan")
    return float(np.average(np.where(w > 0, x, 0), weights=w))
