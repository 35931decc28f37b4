"""Drives many workflow episodes at once against the engine and records their events.

All episodes of a step await at once; the engine batches whatever waits. An episode that fails is
dropped and counted by cause, and never stalls the others.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from envs.workflow import Call, EpisodeFailed, Outcome, Output, Score, Task, Team, Workflow
from srpo_jax.engine import Completion, Engine, PromptTooLong, Request, request_key
from srpo_jax.events import Episode, Member, record_episode
from srpo_jax.prompting import Fitted, Tokenizer, fit_prompt

POLICY = "policy"  # the name of the one shared policy
TOOL_THREADS = 64  # blocking tool calls at once; started as needed


@dataclass(frozen=True)
class SamplingConfig:
    """How a run's calls are sampled; tokens are per call, seconds per episode and per tool call."""

    prompt_tokens: int
    response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    thinking: bool = False
    stop_strings: tuple[str, ...] = ()
    episode_seconds: float = 600.0
    tool_seconds: float = 30.0


@dataclass(frozen=True)
class EpisodePlan:
    """Which episode to run; ``key`` starts its request keys: (seed, 0 train or 1 eval, step)."""

    task: Task
    key: tuple[int, int, int]
    slot: int
    rollout: int

    @property
    def id(self) -> str:
        phase = "e" if self.key[1] else "s"
        return f"{phase}{self.key[2]}-t{self.slot}-r{self.rollout}"


@dataclass
class EpisodeResult:
    """An episode that ended with an outcome, or the cause for which it was dropped."""

    plan: EpisodePlan
    team: EngineTeam
    episode: Episode | None = None
    outcome: Outcome | None = None
    failure: str | None = None
    detail: str = ""
    seconds: float = 0.0


class EngineQueue:
    """Futures over the engine's submit and step; ``pump`` runs while episodes await."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._wake = asyncio.Event()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of one call's requests; cancelled, it frees their slots.

        Raises what a remote engine gave in a completion's place: the episode fails, no other does.
        """
        loop = asyncio.get_running_loop()
        uids: list[int] = []
        try:
            for request in requests:
                uid = self.engine.submit(request)
                uids.append(uid)
                self._futures[uid] = loop.create_future()
            self._wake.set()
            completions = []
            for uid in uids:
                result = await self._futures[uid]
                if isinstance(result, EpisodeFailed):
                    raise result
                completions.append(result)
            return completions
        finally:
            for uid in uids:
                future = self._futures.pop(uid)
                if future.cancelled() or not future.done():  # the one awaited is cancelled with us
                    self.engine.cancel(uid)

    async def pump(self) -> None:
        """Steps the engine whenever it has work; runs until cancelled."""
        while True:
            if self.engine.idle:
                self._wake.clear()
                await self._wake.wait()
            for uid, completion in self.engine.step():
                if uid in self._futures and not self._futures[uid].done():
                    self._futures[uid].set_result(completion)
            # Resumed episodes reach their next call within a few turns of the loop.
            for _ in range(4):
                await asyncio.sleep(0)


class EngineTeam(Team):
    """A team whose outputs the engine samples, all roles from one policy."""

    def __init__(
        self,
        plan: EpisodePlan,
        queue: EngineQueue,
        tokenizer: Tokenizer,
        config: SamplingConfig,
        prompts: dict[Any, Fitted],
    ):
        super().__init__(config.tool_seconds)
        self.members: dict[int, Member] = {}
        self.fitted: dict[int, Fitted] = {}
        self._plan, self._queue, self._tokenizer = plan, queue, tokenizer
        self._config, self._prompts = config, prompts

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
            completions = await self._queue.generate(requests)
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


class _ToolThreads(ThreadPoolExecutor):
    """Threads of blocking tools. One that is past its time limit cannot be stopped, so the end of a
    run does not wait for it."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class Rollout:
    """Runs episodes of one workflow against one engine.

    ``reward``: a recipe's own reward (task, outcome) -> float, bool or Score, blocking or a
    coroutine; without one, the outcome's own score, then the workflow's ``reward`` method.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        workflow: Workflow,
        *,
        reward: Reward | None = None,
        concurrency: int | None = None,
    ):
        self._engine, self._tokenizer = engine, tokenizer
        self._workflow, self._reward = workflow, reward
        self._concurrency = concurrency or max(4 * engine.slots, 256)

    def run(
        self,
        plans: Sequence[EpisodePlan],
        config: SamplingConfig,
        on_done: Callable[[EpisodeResult], None] | None = None,
    ) -> list[EpisodeResult]:
        """Runs all ``plans``; results come in their order. ``on_done`` sees each as it ends."""
        return asyncio.run(self._run(plans, config, on_done))

    async def _run(self, plans, config, on_done):
        asyncio.get_running_loop().set_default_executor(_ToolThreads(TOOL_THREADS))
        queue = EngineQueue(self._engine)
        prompts: dict[Any, Fitted] = {}
        gate = asyncio.Semaphore(self._concurrency)

        async def one(plan):
            async with gate:
                team = EngineTeam(plan, queue, self._tokenizer, config, prompts)
                result = await self._episode(plan, team, config)
            if on_done is not None:
                on_done(result)
            return result

        pump = asyncio.create_task(queue.pump())
        episodes = asyncio.gather(*(one(plan) for plan in plans))
        try:
            # An engine that breaks must end the run, not leave episodes waiting for ever.
            await asyncio.wait({pump, episodes}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            return await episodes
        finally:
            pump.cancel()
            episodes.cancel()
            await asyncio.gather(pump, episodes, return_exceptions=True)

    async def _episode(self, plan, team, config) -> EpisodeResult:
        result = EpisodeResult(plan, team)
        started = time.perf_counter()
        limit = asyncio.timeout(config.episode_seconds)
        try:
            async with limit:
                outcome = await self._workflow.run(plan.task, team)
                score = await self._score(plan.task, outcome, team)
            result.outcome = outcome
            result.episode = record_episode(
                team.calls, team.members, score, id=plan.id, task=plan.task.id, slot=plan.slot,
                rollout=plan.rollout, answer=outcome.response, cost=_cost(team), info=outcome.info,
            )  # fmt: skip
        except EpisodeFailed as error:
            result.failure, result.detail = error.cause, error.detail
        except Exception as error:  # a user's workflow or reward: dropped, counted, shown
            if limit.expired():
                result.failure = "episode_timeout"
                result.detail = f"took more than {config.episode_seconds:g} s"
            else:
                result.failure, result.detail = type(error).__name__, _where(error)
        result.seconds = time.perf_counter() - started
        return result

    async def _score(self, task, outcome, team) -> Score:
        if self._reward is not None:
            value = await team.tool("reward", self._reward, task, outcome)
        elif outcome.score is not None:
            value = outcome.score
        else:
            value = await self._workflow.reward(task, outcome, team)
        if isinstance(value, Score):
            return value
        return Score(float(value), bool(value == 1 or value is True))


def _cost(team: EngineTeam) -> dict[str, float]:
    """Equations 8 and 9: generated tokens, policy calls, tool calls (rewards are no tools)."""
    members = team.members.values()
    return {
        "tokens": float(sum(len(m.response_ids) for m in members)),
        "calls": float(len(members)),
        "tools": float(sum(n for k, n in team.tool_calls.items() if k not in ("grade", "reward"))),
        "prompt_cuts": float(sum(f.cuts > 0 for f in team.fitted.values())),
    }


def _where(error: Exception) -> str:
    """The error's message and the innermost line that raised it."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    place = f" ({tb.tb_frame.f_code.co_filename}:{tb.tb_lineno})" if tb is not None else ""
    return f"{error}{place}"


def count_failures(results: Sequence[EpisodeResult]) -> collections.Counter[str]:
    """Dropped episodes by cause."""
    return collections.Counter(r.failure for r in results if r.failure is not None)
