"""The event audit: did every event's members share one pre-action state, and did they move it?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.workflow import Call, state_digest


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
    audited: list[AuditedEvent] = []
    for position, call in enumerate(calls):
        if call.kind != "event":
            continue
        post: str | None
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
