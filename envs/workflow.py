"""The workflow protocol: how a team of roles changes one shared state.

A workflow is one coroutine. Every ``await team.act(...)`` is one decision event: the roles named in
the call are its active set, and all of them see the same pre-action state, because ``act`` renders
every member's prompt before any member is sampled. ``team.draft(...)`` samples outputs that make no
event and are never trained.

    class TwoSolvers:
        roles = ("solver_1", "solver_2")

        async def run(self, task, team):
            state = State(problem=task.prompt)
            drafts = await team.act("solve", state, roles=self.roles, render=self.prompt)
            state = replace(state, drafts=tuple(d.text for d in drafts))
            return Outcome(response=drafts[0].text, state=state)

The same class trains under the rollout loop and runs in a test with a :class:`ScriptedTeam`.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from envs.clock import Clock
from envs.tool_threads import QUEUEING, TOOL_THREADS, ToolThreads


class EpisodeFailed(Exception):
    """An episode that ends without an outcome: it is dropped and counted under ``cause``.

    Args:
        cause: One short word that metrics are counted by (``tool_timeout``, ``retrieval``, ...).
        detail: What happened, for the one line that is shown.
    """

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause, self.detail = str(cause), str(detail)


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        id: Unlike that of any other task of its set.
        prompt: The problem or question.
        answer: The gold answer, or a tuple of accepted ones.
        source: Where it comes from, as results are grouped by.
        extra: What else a workflow or a reward may want to know.
    """

    id: str
    prompt: str
    answer: str | tuple[str, ...]
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer,) if isinstance(self.answer, str) else tuple(self.answer)


@dataclass(frozen=True)
class Cut:
    """A teammate's or a tool's text inside a prompt: it may be shortened to fit the budget.

    All cuttable texts of a prompt share what its fixed part leaves in equal parts.

    Args:
        text: The text, without a label: a label is a part of its own, before the Cut.
        keep: Which end survives.
        limit: Its most tokens in any case (None: what fits).

    Raises:
        TypeError: A value of another kind.
    """

    text: str
    keep: Literal["last", "first"] = "last"
    limit: int | None = None

    def __post_init__(self) -> None:
        _due("Cut: text", self.text, isinstance(self.text, str), "a string")
        _due("Cut: keep", self.keep, self.keep in ("last", "first"), "'last' or 'first'")
        whole = isinstance(self.limit, int) and self.limit >= 0
        _due("Cut: limit", self.limit, self.limit is None or whole, "a number of tokens or None")


@dataclass(frozen=True)
class Prompt:
    """A fresh chat: a system message and one user turn.

    Args:
        system: The system message.
        user: The parts of the user turn, joined without separators: any sequence of texts and
            Cuts, or one of them.

    Raises:
        TypeError: A value of another kind.
    """

    system: str
    user: tuple[str | Cut, ...]

    def __post_init__(self) -> None:
        _due("Prompt: system", self.system, isinstance(self.system, str), "a string")
        parts = (self.user,) if isinstance(self.user, str | Cut) else self.user
        _due("Prompt: user", parts, isinstance(parts, Sequence), "strings and Cuts in a tuple")
        for part in parts:
            _due("Prompt: a part of user", part, isinstance(part, str | Cut), "a string or a Cut")
        object.__setattr__(self, "user", tuple(parts))

    def text(self) -> str:
        """The user turn, uncut."""
        return "".join(part if isinstance(part, str) else part.text for part in self.user)


@dataclass(frozen=True)
class Output:
    """One sampled output.

    Args:
        uid: Its place among the outputs of its episode.
        role: Who said it.
        text: What was said, without special tokens.
        stop_reason: Whether it ended itself or was cut at the response's most tokens.
    """

    uid: int
    role: str
    text: str
    stop_reason: Literal["stop", "length"] = "stop"


@dataclass(frozen=True)
class Score:
    """What a reward says of an outcome.

    Args:
        reward: The team's reward, finite.
        correct: Whether the answer is right, as accuracies count it.
        error: Why the grade could not be decided in its limits (None: it could): counted apart
            from wrong answers.
        info: Figures to log.

    Raises:
        TypeError: A value of another kind, a reward that is not finite among them.
    """

    reward: float
    correct: bool
    error: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _finite("Score: reward", self.reward))
        verdict = self.correct is not None and self.correct in (True, False)
        _due("Score: correct", self.correct, verdict, "True or False")
        object.__setattr__(self, "correct", bool(self.correct))
        _due("Score: error", self.error, isinstance(self.error, str | None), "a string or None")
        object.__setattr__(self, "info", _figures("Score: info", self.info))


@dataclass(frozen=True)
class Outcome:
    """How an episode ended.

    Args:
        response: The text that is scored.
        state: The last state.
        score: Of a workflow that scores itself; otherwise the recipe's reward is asked, then the
            workflow's own ``reward`` method.
        info: Figures to log.

    Raises:
        TypeError: A value of another kind.
    """

    response: str
    state: Any = None
    score: Score | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _due("Outcome: response", self.response, isinstance(self.response, str), "a string")
        _due("Outcome: score", self.score, isinstance(self.score, Score | None), "a Score or None")
        object.__setattr__(self, "info", _figures("Outcome: info", self.info))


def _due(what: str, value: Any, right: bool, due: str) -> None:
    """Raises TypeError at the line where a workflow or a reward made a wrong value."""
    if not right:
        found = "None" if value is None else f"{type(value).__name__} {value!r:.60}"
        raise TypeError(f"{what}: {due} is due, got {found}")


def _finite(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    _due(what, value, math.isfinite(number), "a finite number")
    return number


def _figures(what: str, info: Any) -> dict[str, float]:
    _due(what, info, isinstance(info, Mapping), "a mapping of names to numbers")
    for name in info:
        _due(f"{what}: a name", name, isinstance(name, str), "a string")
    return {name: _finite(f"{what}[{name!r}]", value) for name, value in info.items()}


Render = Callable[[str, Any], Prompt]


@dataclass
class Call:
    """One ``act`` (an event) or ``draft`` (no event), as it happened."""

    kind: Literal["event", "draft"]
    type: str
    state: Any
    state_id: str
    roles: tuple[str, ...]
    render: Render
    prompts: tuple[Prompt, ...]
    outputs: tuple[Output, ...] = ()
    malformed: dict[int, str] = field(default_factory=dict)  # output uid -> reason


class Workflow(Protocol):
    """What the rollout loop needs: the roles it may ask for, and the coroutine."""

    roles: Sequence[str]

    async def run(self, task: Task, team: Team) -> Outcome: ...


QUEUE_SECONDS = 3600.0


def state_digest(state: Any) -> str:
    """Identity of a shared state: 16 hex digits of its repr (states are frozen dataclasses)."""
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


class Team(ABC):
    """Samples the outputs of one episode and keeps the record of its calls.

    Subclasses say how outputs are sampled; what makes an event is decided here, once.

    Args:
        tool_seconds: Time limit of one tool call, from the start of its work.
        queue_seconds: Time limit of its waiting for a free thread before.
        roles: Those that calls may name (None: any).
    """

    def __init__(
        self,
        tool_seconds: float = 30.0,
        queue_seconds: float = QUEUE_SECONDS,
        roles: Sequence[str] | None = None,
    ):
        self.calls: list[Call] = []
        self.tool_calls: dict[str, int] = {}
        self._tool_seconds, self._queue_seconds = tool_seconds, queue_seconds
        self._roles = roles
        self._outputs = 0

    @abstractmethod
    async def sample(self, call: Call, first_uid: int) -> tuple[Output, ...]:
        """One output for each role of ``call``, with uids from ``first_uid``."""

    async def act(
        self, event_type: str, state: Any, *, roles: Sequence[str], render: Render
    ) -> tuple[Output, ...]:
        """Samples one decision event: every role acts on the same pre-action ``state``.

        Args:
            event_type: What kind of decision it is (``solve``, ``verify``, ...).
            state: The shared state, a frozen dataclass as a rule.
            roles: The active set: who acts, each once.
            render: (role, state) -> the Prompt that the role is shown.

        Returns:
            One output for each role, in their order.

        Raises:
            ValueError: No role, one twice, or one that the workflow does not declare.
            TypeError: A prompt that is none.
            EpisodeFailed: The outputs cannot be sampled.
        """
        return await self._call("event", event_type, state, roles, render)

    async def draft(
        self, state: Any, *, roles: Sequence[str], render: Render, name: str = "draft"
    ) -> tuple[Output, ...]:
        """Samples private outputs: no event, never trained. Arguments as of ``act``; ``name``
        stands for the event's type."""
        return await self._call("draft", name, state, roles, render)

    def malformed(self, output: Output, reason: str) -> None:
        """Marks an output that does not parse. It stays in its event, is penalised and trained.

        Raises:
            TypeError: The reason is no text.
            ValueError: The output is none of this episode's.
        """
        _due("malformed(): the reason", reason, isinstance(reason, str), "a string")
        for call in reversed(self.calls):
            if any(output is o for o in call.outputs):
                call.malformed[output.uid] = reason
                return
        raise ValueError(f"malformed(): no call of this episode made the output of {output.role!r}")

    async def tool(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        threads: ToolThreads = TOOL_THREADS,
    ) -> Any:
        """Runs a tool under the time limit, which counts from the start of its work.

        An async function runs in the event loop, any other in a thread; what it returns is awaited
        if it can be.

        Args:
            name: What its calls are counted under.
            function: The tool.
            *args: Its arguments.
            threads: Where it runs: its own ones for a tool that takes only so many calls at once.

        Returns:
            What the tool returns.

        Raises:
            EpisodeFailed: It is too slow ("tool_timeout"), or no thread was free for longer than
                ``queue_seconds`` ("tool_queue"). What the tool itself raises passes through: it
                raises EpisodeFailed for a failure that ends the episode.
        """
        self.tool_calls[name] = self.tool_calls.get(name, 0) + 1
        loop = asyncio.get_running_loop()
        if _is_async(function):
            deadline = loop.time() + self._tool_seconds
            result = function(*args)
        else:
            result, deadline = await self._in_thread(name, partial(function, *args), threads)
        if not inspect.isawaitable(result):
            return result
        # wait_for would do, but for a defect of Python 3.11: it can swallow a cancellation.
        clock = Clock(deadline - loop.time())
        queueing = QUEUEING.set(partial(self._stand_still, clock))  # for its asyncio.to_thread
        try:
            async with clock:
                return await result
        except TimeoutError:
            if clock.expired:
                raise self._too_slow(name) from None
            raise  # the tool's own
        finally:
            QUEUEING.reset(queueing)

    def queueing(self) -> AbstractContextManager[None]:
        """Entered while the episode waits for a free place; it is no time of its own."""
        return nullcontext()

    @contextmanager
    def _stand_still(self, clock: Clock) -> Iterator[None]:
        with clock.stopped(), self.queueing():
            yield

    async def _in_thread(
        self, name: str, call: Callable[[], Any], threads: ToolThreads
    ) -> tuple[Any, float]:
        """What a blocking call returns, and when the time of its tool is over."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[float] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> Any:
            loop.call_soon_threadsafe(started.set_result, loop.time())
            return context.run(call)

        future = threads.submit(work)
        ended = asyncio.wrap_future(future)
        try:
            with self.queueing():
                await asyncio.wait({started}, timeout=self._queue_seconds)
            if not started.done():
                raise EpisodeFailed(
                    "tool_queue",
                    f"{name} waited more than {self._queue_seconds:g} s for one of "
                    f"{threads.width} threads",
                )
            deadline = started.result() + self._tool_seconds
            await asyncio.wait({ended}, timeout=max(0.0, deadline - loop.time()))
            if not ended.done():
                raise self._too_slow(name)
            return ended.result(), deadline
        finally:
            future.cancel()  # where it still runs, another thread takes its place

    def _too_slow(self, name: str) -> EpisodeFailed:
        return EpisodeFailed("tool_timeout", f"{name} took more than {self._tool_seconds:g} s")

    async def _call(
        self,
        kind: Literal["event", "draft"],
        type_: str,
        state: Any,
        roles: Sequence[str],
        render: Render,
    ) -> tuple[Output, ...]:
        _due("the type of an event", type_, isinstance(type_, str), "a string")
        _due(f"{type_}: roles", roles, not isinstance(roles, str), "a list of roles")
        roles = tuple(roles)
        if not roles:
            raise ValueError(f"{type_}: a call needs at least one role")
        if len(set(roles)) != len(roles):
            raise ValueError(f"{type_}: a role acts once in an event, got {list(roles)}")
        known = roles if self._roles is None else self._roles
        for role in roles:
            if role not in known:
                raise ValueError(
                    f"{type_}: {role!r} is none of the workflow's roles: {', '.join(known)}"
                )
        prompts = tuple(render(role, state) for role in roles)
        for role, prompt in zip(roles, prompts, strict=True):
            _due(f"{type_}: what {role!r} is shown", prompt, isinstance(prompt, Prompt), "a Prompt")
        call = Call(kind, type_, state, state_digest(state), roles, render, prompts)
        self.calls.append(call)
        first = self._outputs
        self._outputs += len(roles)
        call.outputs = await self.sample(call, first)
        return call.outputs


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a call only makes a coroutine: it may be made in the event loop."""
    kinds = (function, type(function).__call__)  # an object's __call__ may be async
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)


Replies = Mapping[str, Iterable[str]] | Sequence[str] | Callable[[str, Any, Prompt], str]


class ScriptedTeam(Team):
    """A team whose outputs are given, for tests and rehearsals.

        team = ScriptedTeam({"solver_1": ["4"], "solver_2": ["5"]})
        outcome = asyncio.run(TwoSolvers().run(Task("1", "2 + 2?", "4"), team))
        assert [len(call.roles) for call in team.calls] == [2]

    Args:
        replies: Outputs by role, all outputs in call order, or a function of (role, state, prompt).
        tool_seconds: As of Team.
        queue_seconds: As of Team.
        roles: As of Team.

    A call raises EpisodeFailed("script") where no output is left for a role.
    """

    def __init__(
        self,
        replies: Replies,
        tool_seconds: float = 30.0,
        queue_seconds: float = QUEUE_SECONDS,
        roles: Sequence[str] | None = None,
    ):
        super().__init__(tool_seconds, queue_seconds, roles)
        if callable(replies):
            self._reply = replies
        elif isinstance(replies, Mapping):
            queues = {role: iter(texts) for role, texts in replies.items()}
            self._reply = lambda role, state, prompt: next(queues.get(role, iter(())))
        else:
            queue = iter(replies)
            self._reply = lambda role, state, prompt: next(queue)

    async def sample(self, call: Call, first_uid: int) -> tuple[Output, ...]:
        outputs = []
        for i, (role, prompt) in enumerate(zip(call.roles, call.prompts, strict=True)):
            try:
                text = self._reply(role, call.state, prompt)
            except StopIteration:
                raise EpisodeFailed(
                    "script", f"no reply left for {role!r} in {call.type!r}"
                ) from None
            outputs.append(Output(first_uid + i, role, text))
        return tuple(outputs)
