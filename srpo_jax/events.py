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

    prompt_ids, response_ids  token ids as given to and drawn by the sampler
    logps                     [len(response_ids)] float32, the sampler's log-prob of each token
    policy, version           whose parameters sampled it, and which of their versions
    index                     its place among the members of its event
    uid                       its place among the outputs of its episode
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
    """One decision event. ``expected`` is K_e; ``reward`` the team reward that arrives after it;
    ``turn`` its place among the events of its episode, from 0; ``slot`` its task's in the step."""

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

    ``slot`` is the task's place in the step's batch, ``rollout`` the place among that task's
    rollouts; ``cost`` and ``info`` are figures to log.
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

    ``members`` maps an output's uid to its Member; index, uid and well-formedness are filled in
    here. An output without a Member makes its event incomplete.
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
