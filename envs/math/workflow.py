"""The Math workflow: propose, verify, revise, aggregate; its variants are switches.

One round::

    [router] -> propose: K solvers in one event -> verify (K = 1)

An approval, the router's STOP or the last round leads on to::

    [aggregator (K = 1)] -> [final revision by one solver (K = 1)] -> the scored answer

What is ours, where the papers leave it open:

* Without an aggregator and without a final revision the last proposal is scored: the plurality of
  its boxed answers, ties to the answer whose first solver comes first in role order; the response
  is that solver's. A proposal by one solver is its own plurality.
* One-solver events are solver_1's. With a router, a ``revise`` round goes to the first solver that
  it names.
* A team that ends without a draft (STOP at once, or no route that parses) has no answer: nothing is
  left to aggregate or revise, and the reward is 0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from envs.arguments import check_arguments, preset_arguments
from envs.math.grading import Grade, default_pool, grade
from envs.math.grading.numbers import answer_key
from envs.math.parsing import last_boxed, parse_box, parse_final, parse_verdict
from envs.math.prompts import STYLES, MathState, Turn, render
from envs.parsing import Malformed, parse_route, read
from envs.tool_threads import ToolThreads
from envs.workflow import EpisodeFailed, Outcome, Output, Prompt, Score, Task, Team


@dataclass(frozen=True, kw_only=True)
class MathWorkflow:
    """A team for problems with one boxed answer.

    Args:
        solvers: How many solver roles there are; without a router all of them propose.
        rounds: Proposals at most.
        revision: What rounds after the first do: ``solve`` (all again) or ``revise`` (one solver,
            event type ``revise``).
        router: Asks for a subset of the solvers, or STOP, before each proposal.
        verifier: Verifies each proposal.
        verify_last: Verifies the last round's proposal too.
        aggregator: Closes with an event that settles on one answer.
        final_revision: Closes with a solver's revision (after the aggregator's event).
        missing_verdict: How the loop goes on when a verdict is malformed.
        prompt_style: ``full`` for real checkpoints, ``short`` for a tiny model (see
            envs/math/prompts.py).

    Raises:
        ValueError: An argument of a wrong kind, or a combination that makes no sense.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Dr. MAS: solver, verifier, solver; a missing verdict counts as approval.
        "dr_mas": {
            "solvers": 1,
            "rounds": 2,
            "verify_last": False,
            "aggregator": False,
            "missing_verdict": "approve",
        },
        "single": {"solvers": 1, "rounds": 1, "verifier": False, "aggregator": False},
    }

    solvers: int = 3
    rounds: int = 2
    revision: Literal["solve", "revise"] = "solve"
    router: bool = False
    verifier: bool = True
    verify_last: bool = True
    aggregator: bool = True
    final_revision: bool = False
    missing_verdict: Literal["reject", "approve"] = "reject"
    prompt_style: Literal["full", "short"] = "full"

    def __post_init__(self) -> None:
        check_arguments(
            {field.name: getattr(self, field.name) for field in fields(self)},
            counts=("solvers", "rounds"),
            choices={
                "revision": ("solve", "revise"),
                "missing_verdict": ("reject", "approve"),
                "prompt_style": STYLES,
            },
        )
        if self.verifier and not self.verify_last and self.rounds == 1:
            raise ValueError(
                "verify_last: false with rounds: 1 leaves the verifier without a call; "
                "set verifier: false"
            )
        if self.missing_verdict == "approve" and not self.verifier:
            raise ValueError("missing_verdict: approve needs verifier: true")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MathWorkflow:
        """A published form by name, ``dr_mas`` or ``single``; ``changes`` override its arguments.

        Raises:
            ValueError: There is no such preset, or an argument does not fit.
        """
        return cls(**{**preset_arguments(cls.PRESETS, name), **changes})

    @property
    def solver_roles(self) -> tuple[str, ...]:
        return tuple(f"solver_{i}" for i in range(1, self.solvers + 1))

    @property
    def roles(self) -> tuple[str, ...]:
        return (
            ("router",) * self.router
            + self.solver_roles
            + ("verifier",) * self.verifier
            + ("aggregator",) * self.aggregator
        )

    @property
    def terminal_role(self) -> str | None:
        """Whose output is scored; None where the last proposal's plurality decides."""
        if self.final_revision or (self.solvers == 1 and not self.aggregator):
            return "solver_1"
        return "aggregator" if self.aggregator else None

    def prompt(self, role: str, state: MathState) -> Prompt:
        """The prompt of a role in this state."""
        return render(role, state, self.prompt_style)

    async def run(self, task: Task, team: Team) -> Outcome:
        """One episode."""
        problem = task.prompt
        if self.prompt_style == "short":
            problem = task.extra.get("expression", problem)
        state = MathState(problem=problem, solvers=self.solvers)
        approved = stopped = False
        for round_ in range(1, self.rounds + 1):
            state = replace(state, round=round_)
            active = self.solver_roles
            if self.router:
                state, route = await self._route(state, team)
                if isinstance(route, Malformed):
                    continue
                stopped = not route
                if stopped:
                    break
                active = tuple(self.solver_roles[number - 1] for number in route)
            revising = bool(state.drafts) and self.revision == "revise"
            state = await self._propose(state, team, active[:1] if revising else active, revising)
            if self.verifier and (self.verify_last or round_ < self.rounds):
                state, approved = await self._verify(state, team)
                if approved:
                    break
        info = {
            "rounds": float(state.round),
            "approved": float(approved),
            "stopped": float(stopped),
        }
        if not state.drafts:
            return Outcome(response="", state=state, info=info)
        if self.aggregator:
            state = await self._close(state, team, "aggregate", "aggregator")
        if self.final_revision:
            state = await self._close(state, team, "final", "solver_1")
        return Outcome(response=scored_response(state), state=state, info=info)

    async def reward(self, task: Task, outcome: Outcome, team: Team) -> Score:
        """1 if the scored answer equals a gold answer, else 0.

        A grade that hits a limit has ``error`` set: it is undecided.

        Raises:
            EpisodeFailed: ("grader") The grader itself broke.
        """
        result: Grade = await team.tool(
            "grade", grade, outcome.response, task.answers, threads=_grading_threads()
        )
        if result.error is not None and result.error.startswith("crash"):
            raise EpisodeFailed("grader", result.error)
        return Score(reward=float(result.correct), correct=result.correct, error=result.error)

    async def _act(
        self, type_: str, state: MathState, team: Team, roles: Sequence[str]
    ) -> tuple[MathState, tuple[Output, ...]]:
        """One event and the transition that keeps its outputs."""
        state = replace(state, next=type_)
        outputs = await team.act(type_, state, roles=roles, render=self.prompt)
        turn = Turn(type_, state.round, tuple((o.role, o.text) for o in outputs))
        return replace(state, turns=(*state.turns, turn), next=""), outputs

    async def _route(
        self, state: MathState, team: Team
    ) -> tuple[MathState, tuple[int, ...] | Malformed]:
        """The numbers of the solvers to activate, in the order named; () is STOP."""
        state, (output,) = await self._act("route", state, team, ("router",))
        return state, read(team, output, lambda text: parse_route(text, self.solvers))

    async def _propose(
        self, state: MathState, team: Team, roles: Sequence[str], revising: bool
    ) -> MathState:
        type_ = "revise" if revising else "solve"
        ordered = [role for role in self.solver_roles if role in roles]
        state, outputs = await self._act(type_, state, team, ordered)
        for output in outputs:
            read(team, output, parse_box)
        return state

    async def _verify(self, state: MathState, team: Team) -> tuple[MathState, bool]:
        state, (output,) = await self._act("verify", state, team, ("verifier",))
        verdict = read(team, output, parse_verdict)
        if isinstance(verdict, Malformed):
            return state, self.missing_verdict == "approve"
        return state, verdict

    async def _close(self, state: MathState, team: Team, type_: str, role: str) -> MathState:
        state, (output,) = await self._act(type_, state, team, (role,))
        read(team, output, parse_final if type_ == "aggregate" else parse_box)
        return state


@functools.cache
def _grading_threads() -> ToolThreads:
    """As many as there are grading processes: the time of a grade is not that of others'."""
    return ToolThreads(default_pool().size)


def scored_response(state: MathState) -> str:
    """The whole text that is scored: the closing event's, or the last proposal's plurality."""
    last = state.turns[-1]
    if last.type in ("aggregate", "final"):
        return last.outputs[0][1]
    texts = [text for _, text in state.drafts]
    keys = [answer_key(answer) for text in texts if (answer := last_boxed(text)) is not None]
    if not keys:
        return texts[0]
    winner, _ = Counter(keys).most_common(1)[0]  # first seen wins among equal counts
    return next(t for t in texts if (a := last_boxed(t)) is not None and answer_key(a) == winner)
