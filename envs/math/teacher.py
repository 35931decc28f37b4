"""Transcripts of a team on sums, for the supervised start of a tiny model (short prompt style).

The teacher plays every role from the same state that the role's prompt shows, in at most 32 tokens
at one token for each digit and mark. ``poor`` is how often it errs; its errors are of the kind that
reinforcement can remove: a slip in one step, a wrong verdict, a team stopped too early.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

from envs.math.parsing import last_boxed
from envs.math.prompts import MathState
from envs.parsing import route_to_all
from envs.task_rows import TaskError
from envs.workflow import Prompt, Task

_SUM = re.compile(r"[0-9]+(?:[+-][0-9]+)*")
_SLIPS = (-10, -2, -1, 1, 2, 10)


def reply(role: str, state: MathState, task: Task, rng: random.Random, poor: float = 0.0) -> str:
    r"""What ``role`` says in the event ``state.next``.

    Solvers: ``12+7=19 19+30=49 \boxed{49}``. Verifier: its own sum, then the verdict on the
    plurality of the drafts. Aggregator: its own sum, then ``FINAL: \boxed{49}``. Router: a random
    subset, STOP once the drafts' plurality is right. With probability ``poor`` the sum has one
    wrong step that is carried on, and what follows from it is wrong with it.

    Raises:
        TaskError: If ``task.extra["expression"]`` is not a sum of integers.
    """
    expression = task.extra.get("expression", "")
    if not _SUM.fullmatch(expression):
        raise TaskError(f"task {task.id}: the teacher needs a sum like 12+7+30, got {expression!r}")
    errs = rng.random() < poor
    if state.next == "route":
        return _route(state, expression, rng, errs)
    if state.next == "verify":
        steps, value = work_out(expression)
        right = _plurality(state) == str(value)
        verdict = "approve" if right != errs else "reject"
        if errs:
            # The written sum has to agree with the wrong verdict.
            steps = _steps_for(expression, state, right, rng)
        return " ".join([*steps, f"<verify>{verdict}</verify>"])
    steps, value = work_out(expression, rng if errs else None)
    if state.next == "aggregate":
        return " ".join(steps) + f"\nFINAL: \\boxed{{{value}}}"
    return " ".join([*steps, f"\\boxed{{{value}}}"])


def work_out(expression: str, slip: random.Random | None = None) -> tuple[list[str], int]:
    """The sum's steps from left to right and its value; ``slip`` makes one step wrong."""
    first, *rest = re.findall(r"[+-]?[0-9]+", expression)
    value, steps = int(first), []
    wrong = slip.randrange(max(1, len(rest))) if slip else None
    for i, term in enumerate(rest):
        result = value + int(term)
        if slip and i == wrong:
            result = _slipped(result, slip)
        steps.append(f"{value}{term}={result}")
        value = result
    if slip and not rest:
        value = _slipped(value, slip)
    return steps, value


def _slipped(value: int, rng: random.Random) -> int:
    """A near miss, of the same sign where the right value is not negative."""
    return value + rng.choice([slip for slip in _SLIPS if value < 0 or value + slip >= 0])


def _plurality(state: MathState) -> str | None:
    answers = [a for _, text in state.drafts if (a := last_boxed(text)) is not None]
    return Counter(answers).most_common(1)[0][0] if answers else None


def _steps_for(expression: str, state: MathState, right: bool, rng: random.Random) -> list[str]:
    """Steps behind a wrong verdict: a slip that rejects a right answer or meets a wrong one."""
    steps, _ = work_out(expression, rng)
    target = _plurality(state)
    if right or target is None or not re.fullmatch(r"-?[0-9]{1,4}", target) or not steps:
        return steps
    steps, _ = work_out(expression)
    steps[-1] = f"{steps[-1].split('=')[0]}={target}"
    return steps


def _route(state: MathState, expression: str, rng: random.Random, errs: bool) -> str:
    right = _plurality(state) == str(work_out(expression)[1])
    # Without drafts the teacher never stops: such an episode teaches the other roles nothing.
    if state.drafts and right != errs:
        return "<route>STOP</route>"
    size = rng.randint(1, state.solvers)
    chosen = sorted(rng.sample(range(1, state.solvers + 1), size))
    return f"<route>{','.join(map(str, chosen))}</route>"


def script(task: Task, roles: Sequence[str]) -> Callable[[str, MathState, Prompt], str]:
    """Replies of a rehearsal: solvers that box the gold answer, a verifier that approves it."""
    boxed = f"\\boxed{{{task.answers[0]}}}"

    def say(role: str, state: MathState, prompt: Prompt) -> str:
        if role == "router":
            return "<route>STOP</route>" if state.drafts else route_to_all(roles, "solver_")
        if role == "verifier":
            return "The drafts agree. <verify>approve</verify>"
        if role == "aggregator":
            return f"The drafts agree.\nFINAL: {boxed}"
        return f"I work it out. {boxed}"

    return say
