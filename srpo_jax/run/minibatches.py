"""The mini-batches of a step: what truncation does to its events, how they are split, and the order
in which they are gone through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from srpo_jax.events import Event
from srpo_jax.learner.batch import EventBatch, ShapeMemory, build_batch
from srpo_jax.recipe.recipe import Recipe


def apply_truncation(events: Sequence[Event], policy: str) -> list[Event]:
    """Applies ``rollout.truncated`` to the members that the length limit cut.

    Args:
        events: The step's.
        policy: "keep" leaves them, "penalise" calls them malformed, "drop_event" takes them out,
            so that their events are incomplete.

    Returns:
        The events in their order, new ones where a member changed.
    """
    if policy == "keep":
        return list(events)
    changed = []
    for event in events:
        if all(m.stop_reason != "length" for m in event.members):
            changed.append(event)
        elif policy == "penalise":
            members = tuple(
                replace(m, well_formed=m.well_formed and m.stop_reason != "length")
                for m in event.members
            )
            changed.append(replace(event, members=members))
        else:
            kept = tuple(m for m in event.members if m.stop_reason != "length")
            changed.append(replace(event, members=kept))
    return changed


def split_minibatches(
    recipe: Recipe,
    step: int,
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    shapes: ShapeMemory | None = None,
) -> list[EventBatch]:
    """Splits a step's events into mini-batches; no event is divided.

    Where the loss is the surrogate alone, events without an advantage are counted but not
    computed.

    Args:
        recipe: ``learner.updates_per_batch`` is the number of mini-batches; the seed draws them.
        step: Draws them too.
        events: Complete ones.
        advantages: [K] floats for each of them.
        shapes: Remembers the shapes of batches, so that later ones take the same programs.
    """
    objective = recipe.objective_config()
    parts = min(recipe.learner.updates_per_batch, len(events))
    if not parts:
        return []
    order = np.random.default_rng([recipe.seed, step]).permutation(len(events))
    batches = []
    for chosen in np.array_split(order, parts):
        chosen = np.sort(chosen)
        batches.append(
            build_batch(
                [events[i] for i in chosen],
                [advantages[i] for i in chosen],
                micro_batch_rows=recipe.learner.micro_batch_rows,
                sequence_tokens=recipe.learner.sequence_tokens,
                max_tokens=recipe.rollout.prompt_tokens + recipe.rollout.response_tokens,
                skip_zero_advantage=not (objective.kl_coef or objective.entropy_coef),
                shapes=shapes,
            )
        )
    return batches


def epoch_orders(recipe: Recipe, step: int, batches: int) -> list[list[int]]:
    """The order of the mini-batches in every epoch: as they are first, then drawn by seed, step.

    Args:
        recipe: Its seed and ``learner.epochs``.
        step: The training step.
        batches: The number of mini-batches.
    """
    rng = np.random.default_rng([recipe.seed, step, 1])
    rest = [rng.permutation(batches).tolist() for _ in range(recipe.learner.epochs - 1)]
    return [list(range(batches)), *rest]
