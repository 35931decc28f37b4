"""Episodes over the processes of a run: each takes the next task when its engine has a free slot,
and all have every result in the end.

A task's episodes stay together. Nothing that is drawn depends on where a task runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.workflow import Call, Prompt
from srpo_jax.events import Member
from srpo_jax.rollout.prompting import Fitted
from srpo_jax.rollout.rollout import EpisodePlan, EpisodeResult, Rollout, SamplingConfig
from srpo_jax.run.processes import Processes
from srpo_jax.run.stopping import Stopped


@dataclass
class _Record:
    """What a team did in another process."""

    calls: list[Call]
    members: dict[int, Member]
    fitted: dict[int, Fitted]
    tool_calls: dict[str, int]


@dataclass(frozen=True)
class _Sent:
    """A result on its way to the other processes, which have its plan."""

    index: int
    result: EpisodeResult


def run_shared(
    rollout: Rollout,
    processes: Processes,
    plans: Sequence[EpisodePlan],
    sampling: SamplingConfig,
    on_done: Callable[[EpisodeResult], None],
) -> list[EpisodeResult]:
    """Runs all episodes; every process must call it with the same plans.

    Args:
        rollout: Of this process.
        processes: Of the run.
        plans: A task's episodes stand together.
        sampling: How they are sampled.
        on_done: Sees each result of this process as it comes, the others at the end.

    Returns:
        The results, in the order of the plans.

    Raises:
        Stopped: A process was asked to stop.
        ProcessLost: A process failed.
        UserCodeError: As of ``Rollout.run``.
    """
    if processes.count == 1:
        return rollout.run(plans, sampling, on_done)
    groups = [list(group) for _, group in itertools.groupby(enumerate(plans), _task)]
    taken: list[int] = []
    counter = processes.new_counter()

    def next_groups() -> Iterator[list[EpisodePlan]]:
        while (number := processes.take(counter)) < len(groups):
            taken.extend(index for index, _ in groups[number])
            yield [plan for _, plan in groups[number]]

    stopped = False
    own: list[EpisodeResult] = []
    try:
        own = rollout.run_groups(next_groups(), sampling, on_done)
    except Stopped:
        stopped = True
    if "stopped" in processes.agree("stopped" if stopped else "done"):
        raise Stopped("the run was asked to stop")
    sent = [_Sent(i, _portable(result)) for i, result in zip(taken, own, strict=True)]
    results: list[EpisodeResult | None] = [None] * len(plans)
    for index, result in zip(taken, own, strict=True):
        results[index] = result
    for found in itertools.chain.from_iterable(processes.gather(sent)):
        if results[found.index] is None:
            results[found.index] = replace(found.result, plan=plans[found.index])
            on_done(found.result)
    return [result for result in results if result is not None]


def _task(numbered: tuple[int, EpisodePlan]) -> tuple[Any, ...]:
    _, plan = numbered
    return plan.key, plan.slot


def _portable(result: EpisodeResult) -> EpisodeResult:
    """What the others need of a result: no engine, no functions, states as their text."""
    team, outcome = result.team, result.outcome
    calls = [
        replace(call, state=Text(repr(call.state)), render=_no_prompt, prompts=())
        for call in team.calls
    ]
    record = _Record(calls, team.members, team.fitted, team.tool_calls)
    if outcome is not None:
        outcome = replace(outcome, state=None)
    return replace(result, team=record, outcome=outcome)


def _no_prompt(role: str, state: Any) -> Prompt:
    raise LookupError("another process rendered this prompt")


class Text(str):
    """The repr of a state, in the state's place: its own repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
