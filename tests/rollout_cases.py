"""A workflow, an engine without a model and a tokenizer of letters, for tests of the rollout."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from envs.workflow import Cut, Outcome, Prompt, Score, Task
from srpo_jax.engine import Completion, PromptTooLong
from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.rollout.rollout import EpisodePlan, Rollout, SamplingConfig

CONFIG = SamplingConfig(prompt_tokens=64, response_tokens=8, episode_seconds=20, tool_seconds=20)


class Letters:
    """One token a letter; a chat is ``system>user=``."""

    def encode_chat(self, system, user, *, thinking=False):
        return [ord(c) for c in f"{system}>{user}="]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def count_text(self, text):
        return len(text)

    def cut_text(self, text, limit, keep="last"):
        return text[max(0, len(text) - limit) :] if keep == "last" else text[:limit]


class FakeEngine:
    """The engine's methods without a model: a step answers all that has a slot, except what has the
    word ``stuck`` in its prompt. It answers with the request's key in letters."""

    version = 3

    def __init__(self, limit=64, slots=1000, step_seconds=0.0):
        self.limit, self.slots, self.step_seconds = limit, slots, step_seconds
        self.waiting, self.requests, self.cancelled, self.together = {}, [], [], []
        self.queued = set()

    @property
    def idle(self):
        return not self.waiting

    def submit(self, request):
        if len(request.prompt_ids) > self.limit:
            raise PromptTooLong(f"prompt has {len(request.prompt_ids)} tokens")
        uid = len(self.requests)
        self.requests.append(request)
        self.waiting[uid] = request
        self.queued.add(uid)
        return uid

    def cancel(self, uid):
        del self.waiting[uid]
        self.queued.discard(uid)
        self.cancelled.append(uid)

    def reply(self, request):
        return [ord(c) for c in f"{request.key[0] % 10**6}"]

    def step(self):
        self.together.append(len(self.waiting))
        for uid in list(self.waiting)[: self.slots]:
            self.queued.discard(uid)
        time.sleep(self.step_seconds)
        done = []
        for uid, request in reversed(list(self.waiting.items())):
            if uid in self.queued or "stuck" in "".join(map(chr, request.prompt_ids)):
                continue
            del self.waiting[uid]
            ids = self.reply(request)
            logps = np.full(len(ids), -0.5, np.float32)
            done.append((uid, Completion(ids, logps, "stop", self.version)))
        return done


@dataclass(frozen=True)
class State:
    problem: str
    drafts: tuple[str, ...] = ()


def render(role, state):
    return Prompt(role, (state.problem, *map(Cut, state.drafts)))


class TwoTurns:
    """A private draft, an event of two and an event of one; ``trouble`` happens in between."""

    roles = ("a", "b", "judge")

    async def run(self, task, team):
        state = State(task.prompt)
        await team.draft(state, roles=["a"], render=render)
        drafts = await team.act("solve", state, roles=["a", "b"], render=render)
        await self.trouble(task, team)
        state = replace(state, drafts=tuple(d.text for d in drafts))
        (verdict,) = await team.act("judge", state, roles=["judge"], render=render)
        return Outcome(verdict.text, state, info={"seen": 1.0})

    async def trouble(self, task, team):
        pass

    async def reward(self, task, outcome, team):
        return await team.tool("grade", lambda: Score(0.25, False, info={"graded": 1.0}))


def plans_of(prompts, key=(1, 0, 5), rollouts=1):
    return [
        EpisodePlan(Task(f"t{i}", prompt, "4"), key, slot=i, rollout=g)
        for i, prompt in enumerate(prompts)
        for g in range(rollouts)
    ]


def run(workflow, prompts, *, engine=None, config=CONFIG, on_done=None, **options):
    rollout = Rollout(EngineThread(engine or FakeEngine()), Letters(), workflow, **options)
    return rollout.run(plans_of(prompts), config, on_done)
