"""Drives many workflow episodes at once against the engine and records their events.

All episodes of a step await at once; the engine batches whatever waits. An episode that fails is
dropped and counted by cause, and never stalls the others.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from envs.clock import Clock
from envs.tool_threads import TOOL_THREADS
from envs.workflow import (
    QUEUE_SECONDS,
    Call,
    EpisodeFailed,
    Outcome,
    Output,
    Score,
    Task,
    Team,
    Workflow,
)
from srpo_jax.engine import PromptTooLong, Request, request_key
from srpo_jax.engine.async_engine import AsyncEngine, run_anywhere
from srpo_jax.events import Episode, Member, record_episode
from srpo_jax.rollout.engine_calls import EngineCalls
from srpo_jax.rollout.prompting import Fitted, Tokenizer, fit_prompt
from srpo_jax.rollout.user_code import (
    UserCodeError,
    checked_outcome,
    checked_score,
    defined_at,
    first_leaf,
    raised_at,
)

POLICY = "policy"  # the name of the one shared policy
CHECK_SECONDS = 0.1  # between two calls of a rollout's ``check``
UNDECIDED = "undecided"  # why an episode whose grade could not be decided is dropped


@dataclass(frozen=True)
class SamplingConfig:
    """How a run's calls are sampled.

    Attributes:
        prompt_tokens: The most tokens of a prompt.
        response_tokens: The most tokens of a response.
        temperature: 0 is greedy.
        top_p: Mass that is sampled from, for evaluation only.
        top_k: Ids that are sampled from, for evaluation only; 0 is all.
        thinking: For chat templates that know it.
        stop_strings: They end a response.
        episode_seconds: The limit of an episode, from the start of its service.
        tool_seconds: That of a tool call or reward, from the start of its work.
        queue_seconds: That of one wait for slots or for a thread.
    """

    prompt_tokens: int
    response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    thinking: bool = False
    stop_strings: tuple[str, ...] = ()
    episode_seconds: float = 600.0
    tool_seconds: float = 30.0
    queue_seconds: float = QUEUE_SECONDS


@dataclass(frozen=True)
class EpisodePlan:
    """Which episode to run.

    Attributes:
        task: The task.
        key: What its request keys begin with: (seed, 0 train or 1 evaluation, step).
        slot: The task's place in the step.
        rollout: Which of the task's episodes this is.
    """

    task: Task
    key: tuple[int, int, int]
    slot: int
    rollout: int

    @property
    def id(self) -> str:
        phase = "e" if self.key[1] else "s"
        return f"{phase}{self.key[2]}-t{self.slot}-r{self.rollout}"


class Played(Protocol):
    """A team whose episode is over: its calls, and members and prompts of outputs by uid."""

    calls: list[Call]
    members: dict[int, Member]
    fitted: dict[int, Fitted]
    tool_calls: dict[str, int]


@dataclass
class EpisodeResult:
    """An episode that ended with a score, or the cause for which it was dropped.

    Attributes:
        plan: What it was to be.
        team: Its calls, members and tools.
        episode: Its events; None where it was dropped.
        outcome: How it ended; None where it failed.
        failure: The cause, UNDECIDED where the grade could not be decided, None where it has one.
        detail: One line about it.
        seconds: From its start to its end.
    """

    plan: EpisodePlan
    team: Played
    episode: Episode | None = None
    outcome: Outcome | None = None
    failure: str | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it has no outcome."""
        return self.failure not in (None, UNDECIDED)


class EngineTeam(Team):
    """A team whose outputs the engine samples, all roles from one policy."""

    def __init__(
        self,
        plan: EpisodePlan,
        engine: EngineCalls,
        tokenizer: Tokenizer,
        config: SamplingConfig,
        prompts: dict[Any, Fitted],
        roles: Sequence[str] | None = None,
    ):
        super().__init__(config.tool_seconds, config.queue_seconds, roles)
        self.members: dict[int, Member] = {}
        self.fitted: dict[int, Fitted] = {}
        self.clock = Clock(config.episode_seconds)
        self._plan, self._engine, self._tokenizer = plan, engine, tokenizer
        self._config, self._prompts = config, prompts

    def queueing(self) -> AbstractContextManager[None]:
        return self.clock.stopped()

    async def sample(self, call: Call, first_uid: int) -> tuple[Output, ...]:
        config, plan = self._config, self._plan
        fitted = [self._fit(prompt) for prompt in call.prompts]
        index = len(self.calls) - 1
        requests = [
            Request(
                prompt_ids=fit.ids,
                key=request_key(*plan.key, plan.slot, plan.rollout, index, member),
                max_tokens=config.response_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                stop_strings=config.stop_strings,
            )
            for member, fit in enumerate(fitted)
        ]
        try:
            completions = await self._engine.generate(requests, self.clock)
        except PromptTooLong as error:
            raise EpisodeFailed("prompt_budget", str(error)) from None
        outputs = []
        for i, (role, fit, done) in enumerate(zip(call.roles, fitted, completions, strict=True)):
            uid = first_uid + i
            text = self._tokenizer.decode(done.ids)
            outputs.append(Output(uid, role, text, done.stop_reason))
            self.fitted[uid] = fit
            self.members[uid] = Member(
                role=role, policy=POLICY, version=done.version, prompt_ids=fit.ids,
                response_ids=done.ids, logps=done.logps, stop_reason=done.stop_reason,
            )  # fmt: skip
        return tuple(outputs)

    def _fit(self, prompt) -> Fitted:
        fit = self._prompts.get(prompt)
        if fit is None:
            config = self._config
            fit = fit_prompt(
                self._tokenizer, prompt, config.prompt_tokens, thinking=config.thinking
            )
            self._prompts[prompt] = fit
        return fit


Reward = Callable[[Task, Outcome], Any]


class Rollout:
    """Runs episodes of one workflow against one engine.

    Args:
        engine: An ``EngineThread`` or a remote engine; it is entered for every ``run``.
        tokenizer: Of the model.
        workflow: What an episode does.
        reward: A recipe's own reward (task, outcome) -> float, bool or Score, blocking or a
            coroutine. Without one, the outcome's own score counts, then the workflow's ``reward``.
        concurrency: Episodes at once (None: four for each slot, 256 at least).
        check: Called every CHECK_SECONDS while episodes run: what it raises abandons them all.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        workflow: Workflow,
        *,
        reward: Reward | None = None,
        concurrency: int | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self._engine, self._tokenizer, self._check = engine, tokenizer, check
        self._workflow, self._reward = workflow, reward
        self._concurrency = concurrency or max(4 * engine.slots, 256)

    def run(
        self,
        plans: Sequence[EpisodePlan],
        config: SamplingConfig,
        on_done: Callable[[EpisodeResult], None] | None = None,
    ) -> list[EpisodeResult]:
        """Runs all episodes.

        Args:
            plans: The episodes.
            config: How they are sampled.
            on_done: Sees each result as it comes.

        Returns:
            The results, in the order of the plans. A failed episode has one too.

        Raises:
            UserCodeError: For a workflow or reward that does not keep to its form.
            Exception: What the engine, ``check`` or ``on_done`` raises.
        """
        return self.run_groups(iter([plans]), config, on_done)

    def run_groups(
        self,
        groups: Iterator[Sequence[EpisodePlan]],
        config: SamplingConfig,
        on_done: Callable[[EpisodeResult], None] | None = None,
    ) -> list[EpisodeResult]:
        """Runs episodes by groups. The next group is asked for when fewer episodes run than the
        engine has slots, so that an iterator that several processes share gives each what it can
        do. The other arguments, results and errors are those of ``run``.
        """
        return run_anywhere(self._run(groups, config, on_done))

    async def _run(self, groups, config, on_done):
        # What a workflow itself gives to asyncio.to_thread may hang like any tool.
        asyncio.get_running_loop().set_default_executor(TOOL_THREADS)
        async with self._engine as engine:
            calls = EngineCalls(engine, config.queue_seconds)
            prompts: dict[Any, Fitted] = {}
            places = asyncio.Semaphore(self._concurrency)
            roles = getattr(self._workflow, "roles", None)

            async def one(plan):
                async with places:
                    team = EngineTeam(plan, calls, self._tokenizer, config, prompts, roles)
                    result = await self._episode(plan, team, config)
                if on_done is not None:
                    on_done(result)
                return result

            # An engine that breaks must end the run, not fail one episode after the other.
            guards: list[asyncio.Future[Any]] = [
                calls.broken, asyncio.create_task(self._keep_checking()),
            ]  # fmt: skip
            started = ([one(plan) for plan in group] for group in groups)
            episodes = asyncio.create_task(_results(started, engine.slots))
            try:
                await asyncio.wait({*guards, episodes}, return_when=asyncio.FIRST_COMPLETED)
                for guard in guards:
                    if guard.done():
                        guard.result()
                return episodes.result()
            finally:
                await _cancel_others()

    async def _keep_checking(self) -> None:
        while True:
            self._check()
            await asyncio.sleep(CHECK_SECONDS)

    async def _episode(self, plan, team, config) -> EpisodeResult:
        result = EpisodeResult(plan, team)
        started = time.perf_counter()
        try:
            async with team.clock:
                returned: Any = self._workflow.run(plan.task, team)
                if inspect.isawaitable(returned):
                    returned = await returned
                outcome = checked_outcome(returned, self._workflow.run)
                score = await self._score(plan.task, outcome, team)
            result.outcome = outcome
            if score.error is None:
                result.episode = record_episode(
                    team.calls, team.members, score, id=plan.id, task=plan.task.id, slot=plan.slot,
                    rollout=plan.rollout, answer=outcome.response, cost=episode_cost(team),
                    info=outcome.info,
                )  # fmt: skip
            else:
                result.failure, result.detail = UNDECIDED, score.error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            result.failure, result.detail = "CancelledError", "the workflow cancelled itself"
        except Exception as error:  # a user's workflow or reward: dropped, counted, shown
            error = first_leaf(error)
            if isinstance(error, UserCodeError):
                raise error from None
            if team.clock.expired:
                result.failure = "episode_timeout"
                result.detail = f"took more than {config.episode_seconds:g} s"
            elif isinstance(error, EpisodeFailed):
                result.failure, result.detail = error.cause, error.detail
            else:
                result.failure, result.detail = type(error).__name__, raised_at(error)
        result.seconds = time.perf_counter() - started
        return result

    async def _score(self, task, outcome, team) -> Score:
        workflow, own = self._workflow, getattr(self._workflow, "reward", None)
        if self._reward is not None:
            value = await team.tool("reward", self._reward, task, outcome)
            return checked_score(value, self._reward)
        if outcome.score is not None:
            return outcome.score
        if own is None:
            raise UserCodeError(
                f"{defined_at(workflow.run)} returned an Outcome without a score, "
                f"{type(workflow).__name__} has no `reward` method and the recipe no `reward`"
            )
        if inspect.iscoroutinefunction(own):
            return checked_score(await own(task, outcome, team), own)
        return checked_score(await team.tool("reward", own, task, outcome, team), own)


async def _results(
    groups: Iterator[Sequence[Coroutine[Any, Any, EpisodeResult]]], enough: int
) -> list[EpisodeResult]:
    """All results, in order; the first error as soon as it comes. The next group starts once fewer
    than ``enough`` episodes run."""
    tasks: list[asyncio.Task[EpisodeResult]] = []
    running: set[asyncio.Task[EpisodeResult]] = set()
    more = True
    while more or running:
        while more and len(running) < enough:
            group = next(groups, None)
            more = group is not None
            new = [asyncio.create_task(episode) for episode in group or ()]
            tasks += new
            running.update(new)
        if not running:
            break
        until = asyncio.FIRST_COMPLETED if more else asyncio.FIRST_EXCEPTION
        done, running = await asyncio.wait(running, return_when=until)
        for task in done:
            task.result()
    return [task.result() for task in tasks]


async def _cancel_others() -> None:
    """Ends every other task of the loop. A task can swallow a cancellation (a workflow's own
    wait_for does on Python 3.11), so it is said again until all have ended."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=0.1)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen: the first error is raised already


def episode_cost(team: Played) -> dict[str, float]:
    """Equations 8 and 9, of an episode that ended or failed: tokens and calls of its events'
    members (drafts are none), tool calls (rewards are none); and how many of its prompts were cut.
    """
    events = [call for call in team.calls if call.kind == "event"]
    members = [team.members[output.uid] for call in events for output in call.outputs]
    return {
        "tokens": float(sum(len(m.response_ids) for m in members)),
        "calls": float(len(members)),
        "tools": float(sum(n for k, n in team.tool_calls.items() if k not in ("grade", "reward"))),
        "prompt_cuts": float(sum(f.cuts > 0 for f in team.fitted.values())),
    }


def count_failures(results: Sequence[EpisodeResult]) -> collections.Counter[str]:
    """Failed episodes by cause."""
    return collections.Counter(r.failure for r in results if r.failure is not None and r.failed)
