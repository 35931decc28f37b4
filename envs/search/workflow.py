"""The Search workflow: workers query a retriever turn by turn until an answer agent may speak.

Three variants, by the two switches:

    router and verifier   router -> K workers -> retrieval -> verifier -> next turn
    router only           router -> K workers -> retrieval -> next turn
    verifier only         verifier -> all K workers -> retrieval -> next turn

The router's STOP or the verifier's yes hands over to the answer agent. Passages are observations in
the state: no role outputs them and nothing is ever trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from envs.arguments import check_arguments, preset_arguments
from envs.parsing import Malformed, read
from envs.search.parsing import parse_answer, parse_query, parse_route, parse_verdict
from envs.search.prompts import STYLES, Searching, Step, render
from envs.search.retrieval.base import Passage, RetrievalError, Retriever, merge
from envs.search.scoring import contains_answer, exact_match, extract_answer, f1
from envs.workflow import EpisodeFailed, Outcome, Output, Prompt, Score, Task, Team


@dataclass(frozen=True, kw_only=True)
class SearchWorkflow:
    """Router, search workers, evidence verifier and answer agent over one retriever.

    Args:
        retriever: What the workers' queries are given to.
        workers: K, how many search workers there are; without a router all of them search.
        router: Asks for a subset of the workers, or STOP, in each turn.
        verifier: Checks the evidence: after each search beside a router, before it without one.
        max_turns: Searches at most.
        topk: Passages asked for each query.
        max_passages: What one turn's merged results bring into the state at most (None: all).
        passage_tokens: What one passage may take of a prompt (None: what is free).
        answer_at_max_turns: Lets the answer agent speak when the turns are spent; without it the
            episode ends with no answer, and a last turn whose passages nobody would read does not
            search.
        dedupe: Accepts repeated worker numbers from the router.
        missing_verdict: How the loop goes on when a verdict is malformed.
        prompt_style: ``full`` for real checkpoints, ``short`` for a tiny model (see
            envs/search/prompts.py).

    Raises:
        ValueError: An argument of a wrong kind, or a combination that makes no sense.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Dr. MAS: a verifier hands over to one search agent (no) or to the answer agent (yes); a
        # missing verdict counts as yes, and a "no" on the last turn ends without an answer.
        "dr_mas": {
            "workers": 1,
            "router": False,
            "verifier": True,
            "max_turns": 4,
            "answer_at_max_turns": False,
            "missing_verdict": "yes",
        },
    }

    retriever: Retriever
    workers: int = 3
    router: bool = True
    verifier: bool = True
    max_turns: int = 4
    topk: int = 3
    max_passages: int | None = None
    passage_tokens: int | None = None
    answer_at_max_turns: bool = True
    dedupe: bool = False
    missing_verdict: Literal["yes", "no"] = "no"
    prompt_style: Literal["full", "short"] = "full"

    def __post_init__(self) -> None:
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        del arguments["retriever"]
        for limit in ("max_passages", "passage_tokens"):
            if arguments[limit] is None:
                del arguments[limit]
        check_arguments(
            arguments,
            counts=("workers", "max_turns", "topk", "max_passages", "passage_tokens"),
            choices={"missing_verdict": ("yes", "no"), "prompt_style": STYLES},
        )
        if not self.router and not self.verifier:
            raise ValueError("router and verifier are both off: nobody would decide when to answer")

    @classmethod
    def preset(cls, name: str, *, retriever: Retriever, **changes: Any) -> SearchWorkflow:
        """A published form by name, ``dr_mas``; ``changes`` override its arguments.

        Raises:
            ValueError: There is no such preset, or an argument does not fit.
        """
        return cls(retriever=retriever, **{**preset_arguments(cls.PRESETS, name), **changes})

    @property
    def worker_roles(self) -> tuple[str, ...]:
        return tuple(f"worker_{i}" for i in range(1, self.workers + 1))

    @property
    def roles(self) -> tuple[str, ...]:
        return (
            ("router",) * self.router
            + self.worker_roles
            + ("verifier",) * self.verifier
            + ("answerer",)
        )

    terminal_role: ClassVar[str] = "answerer"  # whose output is scored

    def prompt(self, role: str, state: Searching) -> Prompt:
        """The prompt of a role in this state."""
        return render(role, state, self.prompt_style, self.workers, self.passage_tokens)

    async def run(self, task: Task, team: Team) -> Outcome:
        """One episode.

        Raises:
            EpisodeFailed: ("retrieval") A search failed for good.
        """
        state = Searching(task.prompt)
        response = ""
        for turn in range(1, self.max_turns + 1):
            state = replace(state, turn=turn)
            state, done = await self._turn(state, team)
            if done:
                break
        if done or self.answer_at_max_turns:
            (answer,) = await self._act("answer", state, team, (self.terminal_role,))
            read(team, answer, parse_answer)
            response = answer.text
            state = replace(state, answer=response)
        return Outcome(response, state, info=_figures(state, task))

    async def reward(self, task: Task, outcome: Outcome, team: Team) -> Score:
        """Exact match of the response's last answer; F1 beside it."""
        answer = extract_answer(outcome.response) or ""
        correct = exact_match(answer, task.answers)
        return Score(float(correct), correct, info={"f1": f1(answer, task.answers)})

    async def _act(
        self, type_: str, state: Searching, team: Team, roles: Sequence[str]
    ) -> tuple[Output, ...]:
        """One event; what its outputs change of the state differs from type to type."""
        return await team.act(type_, state, roles=roles, render=self.prompt)

    async def _turn(self, state: Searching, team: Team) -> tuple[Searching, bool]:
        """One turn: the state after it, and whether the answer agent may speak."""
        active = self.worker_roles
        if self.router:
            state, route = await self._route(state, team)
            if isinstance(route, Malformed):
                return state, False
            if not route:
                return state, True
            active = tuple(self.worker_roles[number - 1] for number in sorted(route))
        elif self.verifier:
            state, supported = await self._verify(state, team)
            if supported:
                return state, True

        verified_after = self.router and self.verifier
        read_by_anyone = verified_after or self.answer_at_max_turns or state.turn < self.max_turns
        if read_by_anyone:
            state = await self._search(state, team, active)
        if verified_after:
            return await self._verify(state, team)
        return state, False

    async def _route(
        self, state: Searching, team: Team
    ) -> tuple[Searching, tuple[int, ...] | Malformed]:
        """The numbers of the workers to activate, in the order named; () is STOP."""
        (output,) = await self._act("route", state, team, ("router",))
        route = read(team, output, lambda text: parse_route(text, self.workers, dedupe=self.dedupe))
        note = None if isinstance(route, Malformed) else output.text
        return state.noted("router", note), route

    async def _verify(self, state: Searching, team: Team) -> tuple[Searching, bool]:
        (output,) = await self._act("verify", state, team, ("verifier",))
        verdict = read(team, output, parse_verdict)
        if isinstance(verdict, Malformed):
            return state.noted("verifier", None), self.missing_verdict == "yes"
        return state.noted("verifier", output.text), verdict

    async def _search(self, state: Searching, team: Team, active: Sequence[str]) -> Searching:
        outputs = await self._act("search", state, team, active)
        parsed = [read(team, output, parse_query) for output in outputs]
        queries = tuple(query for query in parsed if isinstance(query, str))
        passages: tuple[Passage, ...] = ()
        if queries:
            wanted = list(dict.fromkeys(queries))
            try:
                found = await team.tool("retrieve", self.retriever.search, wanted, self.topk)
            except RetrievalError as error:
                raise EpisodeFailed("retrieval", str(error)) from error
            passages = merge(found, self.max_passages)
        return replace(state, steps=(*state.steps, Step(queries, passages)))


def _figures(state: Searching, task: Task) -> dict[str, float]:
    queries = [" ".join(query.lower().split()) for step in state.steps for query in step.queries]
    supported = any(contains_answer(p.contents, task.answers) for p in state.passages)
    return {
        "turns": float(state.turn),
        "queries": float(len(queries)),
        "duplicate_queries": float(len(queries) - len(set(queries))),
        "evidence_support": float(supported),
    }
