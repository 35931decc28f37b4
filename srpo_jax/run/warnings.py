"""Signs that a run is not learning what its user expects, found in the figures of a step."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from srpo_jax.events import Event
from srpo_jax.rollout.rollout import UNDECIDED, EpisodeResult

# Past these there is a warning.
CUT, MALFORMED, PENALTY_ONLY, CLIPPED, LEFT_OUT = 0.25, 0.5, 0.5, 50.0, 0.1


def step_warnings(
    results: Sequence[EpisodeResult],
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    grad_norm: float | None,
    grad_clip: float | None,
) -> dict[str, str]:
    """Finds what the user of a run should know.

    Args:
        results: The step's episodes.
        events: Those that were trained on.
        advantages: [K] floats for each of them.
        grad_norm: Mean gradient norm of the step's updates, before clipping; None: no update.
        grad_clip: The limit that it is clipped to; None: none.

    Returns:
        The text of each warning, one line, by its kind.
    """
    found = {}
    members = [m for r in results for m in r.team.members.values()]
    cut = _share([m.stop_reason == "length" for m in members])
    if cut > CUT:
        found["cut"] = (
            f"{cut:.0%} of the outputs were cut by rollout.response_tokens: what they would have "
            "answered is unknown"
        )
    undecided = [r for r in results if r.failure == UNDECIDED]
    if len(undecided) > LEFT_OUT * len(results):
        found["undecided"] = (
            f"{len(undecided)} of {len(results)} episodes are left out: their grade is undecided "
            f"({undecided[0].plan.id}: {undecided[0].detail})"
        )
    malformed = _share([not m.well_formed for event in events for m in event.members])
    if malformed > MALFORMED:
        found["malformed"] = (
            f"{malformed:.0%} of the outputs are malformed: the model does not keep to the "
            "workflow's format (python -m launch.show prints episodes)"
        )
    penalty = _penalty_share(results, events, advantages)
    if penalty > PENALTY_ONLY:
        found["penalty"] = (
            f"in {penalty:.0%} of the groups that have a contrast all rewards are equal: only "
            "advantage.invalid_penalty separates them, so the format is what is learnt"
        )
    if grad_clip is not None and grad_norm is not None and grad_norm > CLIPPED * grad_clip:
        found["clipped"] = (
            f"the gradient norm is {grad_norm:.3g}, clipped by more than {CLIPPED:.0f} times to "
            f"optimizer.grad_clip {grad_clip:g}"
        )
    return found


def _penalty_share(
    results: Sequence[EpisodeResult], events: Sequence[Event], advantages: Sequence[np.ndarray]
) -> float:
    """Of the tasks with an advantage in any event, the share in which every episode has the same
    reward and some output is malformed."""
    rewards: dict[int, set[float]] = collections.defaultdict(set)
    malformed: dict[int, bool] = collections.defaultdict(bool)
    slot_of: dict[str, int] = {}
    for result in results:
        if result.episode is not None:
            rewards[result.plan.slot].add(result.episode.reward)
            slot_of |= {event.id: result.plan.slot for event in result.episode.events}
    contrast = set()
    for event, advantage in zip(events, advantages, strict=True):
        slot = slot_of[event.id]
        malformed[slot] |= not all(m.well_formed for m in event.members)
        if np.any(advantage):
            contrast.add(slot)
    return _share([len(rewards[slot]) == 1 and malformed[slot] for slot in contrast])


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
