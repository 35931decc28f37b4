"""Host records of an episode: members, decision events, completeness, and the event audit.

An event is the set of outputs that were sampled from one pre-action state and consumed by one
transition (arXiv 2609.08452, definition 1). Records hold token ids exactly as sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envs.workflow import Call, Score, state_digest


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
    events = []
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


@dataclass(frozen=True)
class AuditedEvent:
    """What one event was, and in ``problems`` every proof of event atomicity that fails."""

    id: str
    type: str
    k: int
    state_id: str
    state: str
    consumed: tuple[tuple[str, str], ...]  # (role, text)
    post_state_id: str | None
    malformed: Mapping[int, str]  # member index -> reason
    problems: tuple[str, ...]


def audit_episode(calls: Sequence[Call], final_state: Any = None) -> list[AuditedEvent]:
    """Checks of every event that its members shared one pre-action state and moved it.

    (a) K is the number of roles and of distinct outputs; (b) the stored pre-action state still has
    the identity it had when the event began; (c) every member's prompt is what its role renders
    from that state alone, so no member saw another's current output; (d) the next call, or
    ``final_state`` after the last one, starts from another state.
    """
    audited = []
    for position, call in enumerate(calls):
        if call.kind != "event":
            continue
        if position + 1 < len(calls):
            post = calls[position + 1].state_id
        else:
            post = None if final_state is None else state_digest(final_state)
        audited.append(
            AuditedEvent(
                id=f"event {len(audited)}",
                type=call.type,
                k=len(call.roles),
                state_id=call.state_id,
                state=repr(call.state),
                consumed=tuple((output.role, output.text) for output in call.outputs),
                post_state_id=post,
                malformed={
                    index: call.malformed[output.uid]
                    for index, output in enumerate(call.outputs)
                    if output.uid in call.malformed
                },
                problems=tuple(_problems(call, post)),
            )
        )
    return audited


def _problems(call: Call, post: str | None) -> Iterable[str]:
    distinct = len({output.uid for output in call.outputs})
    if not len(call.roles) == len(call.outputs) == distinct:
        yield (
            f"K: {len(call.roles)} roles, {len(call.outputs)} outputs, {distinct} of them distinct"
        )
    by_role = [output.role for output in call.outputs]
    if len(by_role) == len(call.roles) and by_role != list(call.roles):
        yield f"K: the outputs are of {by_role}, the roles are {list(call.roles)}"
    if (now := state_digest(call.state)) != call.state_id:
        yield f"state: changed in place after the event began ({call.state_id} -> {now})"
    for role, prompt in zip(call.roles, call.prompts, strict=False):
        if call.render(role, call.state) != prompt:
            yield f"prompt: {role} did not act on the pre-action state alone"
    if post is None:
        yield "transition: no final state was given, so none can be shown (Outcome.state)"
    elif post == call.state_id:
        yield "transition: the state did not move; outputs that move nothing are drafts"


def render_audit(audited: Sequence[AuditedEvent], width: int = 100) -> str:
    """The audit as plain text for a terminal; long states and outputs are cut to ``width``."""

    def cut(text: str, room: int) -> str:
        line = " ".join(text.split())
        return line if len(line) <= room else line[: room - 3] + "..."

    lines = []
    for event in audited:
        lines.append(
            f"{event.id}  {event.type}  K={event.k}  "
            f"{event.state_id} -> {event.post_state_id or 'unknown'}"
        )
        lines.append(f"  state  {cut(event.state, width - 9)}")
        for index, (role, text) in enumerate(event.consumed):
            note = f" [malformed: {event.malformed[index]}]" if index in event.malformed else ""
            lines.append(f"  {role}{note}: {cut(text, max(20, width - 4 - len(role + note)))}")
        lines.extend(f"  PROBLEM  {problem}" for problem in event.problems)
    bad = sum(bool(event.problems) for event in audited)
    verdict = "all event-atomic" if not bad else f"{bad} with problems"
    lines.append(f"{len(audited)} events, {verdict}")
    return "\n".join(lines)
