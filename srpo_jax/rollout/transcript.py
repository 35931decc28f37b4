"""A finished episode as a JSON-able record: prompts, responses and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from srpo_jax.rollout.rollout import EpisodeResult, episode_cost


def episode_transcript(
    result: EpisodeResult, step: int, advantages: Mapping[str, Sequence[float] | np.ndarray]
) -> dict[str, Any]:
    """What ``launch.show`` prints: a mapping that JSON can hold.

    Args:
        result: The episode, also one that failed.
        step: The training step that it belongs to.
        advantages: The advantages of the members of trained events, by event id.
    """
    plan, team, episode = result.plan, result.team, result.episode
    events: list[dict[str, Any]] = []
    for call in team.calls:
        if call.kind != "event":
            continue
        id_ = f"{plan.id}/{len(events)}"
        members = []
        for output in call.outputs:
            member, fitted = team.members[output.uid], team.fitted[output.uid]
            members.append(
                {
                    "role": output.role,
                    "prompt": fitted.text,
                    "response": output.text,
                    "prompt_tokens": len(member.prompt_ids),
                    "response_tokens": len(member.response_ids),
                    "stop_reason": output.stop_reason,
                    "well_formed": output.uid not in call.malformed,
                    "malformed": call.malformed.get(output.uid),
                }
            )
        shared = advantages.get(id_)
        events.append(
            {
                "id": id_,
                "type": call.type,
                "turn": len(events),
                "state_id": call.state_id,
                "state": repr(call.state),
                "expected": len(call.roles),
                "advantage": None if shared is None else float(sum(shared) / len(shared)),
                "members": members,
            }
        )
    return {
        "id": plan.id,
        "step": step,
        "task": {"id": plan.task.id, "prompt": plan.task.prompt, "answer": list(plan.task.answers)},
        "reward": None if episode is None else episode.reward,
        "correct": None if episode is None else episode.correct,
        "failure": result.failure,
        "detail": result.detail,
        "events": events,
        "outcome": {"response": result.outcome.response} if result.outcome else None,
        "cost": episode_cost(team),
    }
