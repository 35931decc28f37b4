"""Host records of an episode: members, decision events, completeness.

An event is the set of outputs that were sampled from one pre-action state and consumed by one
transition (arXiv 2609.08452, definition 1). Records hold token ids exactly as sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from envs.workflow import Call, Score


def role_kind(role: str) -> str:
    """solver_2 -> solver: figures are by kind of role."""
    head, _, tail = role.rpartition("_")
    return head if head and tail.isdigit() else role


@dataclass(frozen=True, eq=False)
class Member:
    """One sampled output of an event.

    Attributes:
        role: As the workflow names it, such as ``solver_2``.
        policy: Whose parameters sampled it.
        version: Which version of them.
        prompt_ids: Token ids as given to the sampler.
        response_ids: Token ids as drawn.
        logps: [len(response_ids)] float32, the sampler's log-prob of each token.
        stop_reason: "stop" or "length".
        well_formed: Whether the output parses.
        index: Its place among the members of its event.
        uid: Its place among the outputs of its episode.
    """

    role: str
    policy: str
    version: int
    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    logps: np.ndarray
    stop_reason: str = "stop"
    well_formed: bool = True
    index: int = 0
    uid: int = 0


@dataclass(frozen=True, eq=False)
class Event:
    """One decision event.

    Attributes:
        id: Unique in a run.
        episode: Its episode's id.
        task: Its task's id.
        type: As the workflow names it; comparable events share it.
        turn: Its place among the events of its episode, from 0.
        state_id: Of the pre-action state.
        expected: The cardinality K_e.
        members: In the order of their index; fewer than K_e where one is missing.
        reward: The team reward that arrives after it.
        slot: Its task's place in the step.
    """

    id: str
    episode: str
    task: str
    type: str
    turn: int
    state_id: str
    expected: int
    members: tuple[Member, ...]
    reward: float
    slot: int = 0

    @property
    def complete(self) -> bool:
        """Whether every member is there, once. Malformed outputs are there too."""
        return sorted(member.index for member in self.members) == list(range(self.expected))

    @property
    def k(self) -> int:
        """The cardinality K_e, whether or not all its members are there."""
        return self.expected


@dataclass(frozen=True, eq=False)
class Episode:
    """One rollout of a workflow: its events and how it was scored.

    Attributes:
        id: Unique in a run.
        task: Its task's id.
        slot: The task's place in the step's batch.
        rollout: Its place among that task's rollouts.
        events: In the order of their turns.
        reward: The team reward.
        correct: Whether the answer is right.
        answer: The team's answer.
        cost: Figures to log: tokens, calls, tools.
        info: Other figures to log, of the workflow or the reward.
    """

    id: str
    task: str
    slot: int
    rollout: int
    events: tuple[Event, ...]
    reward: float
    correct: bool
    answer: str = ""
    cost: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)


def record_episode(
    calls: Iterable[Call],
    members: Mapping[int, Member],
    score: Score,
    *,
    id: str,
    task: str,
    slot: int,
    rollout: int,
    answer: str = "",
    cost: Mapping[str, float] | None = None,
    info: Mapping[str, float] | None = None,
) -> Episode:
    """The episode's record from its team's calls (drafts make no event and are left out).

    Args:
        calls: In the order in which the workflow made them.
        members: By an output's uid; index, uid and well-formedness are filled in here. An output
            without one makes its event incomplete.
        score: The reward's.
        id: The episode's.
        task: Its task's id.
        slot: The task's place in the step's batch.
        rollout: Its place among that task's rollouts.
        answer: The team's answer.
        cost: Figures to log.
        info: Figures to log beside those of the score.
    """
    events: list[Event] = []
    for call in calls:
        if call.kind != "event":
            continue
        turn = len(events)
        found = tuple(
            replace(
                members[output.uid],
                index=index,
                uid=output.uid,
                well_formed=output.uid not in call.malformed,
            )
            for index, output in enumerate(call.outputs)
            if output.uid in members
        )
        events.append(
            Event(
                id=f"{id}/{turn}",
                episode=id,
                task=task,
                type=call.type,
                turn=turn,
                state_id=call.state_id,
                expected=len(call.roles),
                members=found,
                reward=score.reward,
                slot=slot,
            )
        )
    return Episode(
        id=id,
        task=task,
        slot=slot,
        rollout=rollout,
        events=tuple(events),
        reward=score.reward,
        correct=score.correct,
        answer=answer,
        cost=dict(cost or {}),
        info={**score.info, **(info or {})},
    )


def split_complete(events: Iterable[Event]) -> tuple[list[Event], list[Event]]:
    """(complete, dropped): an event with a missing member is dropped whole, never shrunk."""
    complete: list[Event] = []
    dropped: list[Event] = []
    for event in events:
        (complete if event.complete else dropped).append(event)
    return complete, dropped
