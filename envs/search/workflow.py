"""The Search workflow: workers query a retriever turn by turn until an answer agent may speak.

Three variants, by the two switches:

    router and verifier   router -> K workers -> retrieval -> verifier -> next turn
    router only           router -> K workers -> retrieval -> next turn
    verifier only         verifier -> all K workers -> retrieval -> next turn

The router's STOP or the verifier's yes hands over to the answer agent. Passages are observations in
the state: no role outputs them and nothing is ever trained on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from envs.search import parsing
from envs.search.prompts import Searching, Step, full_prompt, short_prompt
from envs.search.retrieval.base import Passage, RetrievalError, Retriever, merge
from envs.search.scoring import contains_answer, exact_match, extract_answer, f1
from envs.workflow import EpisodeFailed, Outcome, Output, Prompt, Score, Task, Team

_PRESETS: dict[str, dict[str, Any]] = {
    # Dr. MAS: a verifier hands over to one search agent (no) or to the answer agent (yes); a
    # missing verdict counts as yes, and a "no" on the last turn ends the episode without an answer.
    "dr_mas": {
        "workers": 1,
        "router": False,
        "verifier": True,
        "max_turns": 4,
        "answer_at_max_turns": False,
        "missing_verdict": "yes",
    },
}


class SearchWorkflow:
    """Router, search workers, evidence verifier and answer agent over one retriever.

    ``workers`` is K, the number of search workers; with a router each turn activates a subset of
    them. ``topk`` is asked per query; ``max_passages`` caps what one turn's merged results bring
    into the state, ``passage_tokens`` what one passage may take of a prompt.
    ``answer_at_max_turns`` lets the answer agent speak when the turns are spent; without it the
    episode ends with no answer, and a last turn whose passages nobody would read does not search.
    ``dedupe`` accepts repeated worker numbers from the router. ``missing_verdict`` says how the
    loop goes on after a malformed verdict.
    """

    def __init__(
        self,
        *,
        retriever: Retriever,
        workers: int = 3,
        router: bool = True,
        verifier: bool = True,
        max_turns: int = 4,
        topk: int = 3,
        max_passages: int | None = None,
        passage_tokens: int | None = None,
        answer_at_max_turns: bool = True,
        dedupe: bool = False,
        missing_verdict: Literal["yes", "no"] = "no",
        prompt_style: Literal["full", "short"] = "full",
    ):
        counts = {"workers": workers, "max_turns": max_turns, "topk": topk}
        limits = {"max_passages": max_passages, "passage_tokens": passage_tokens}
        for name, value in (counts | {k: v for k, v in limits.items() if v is not None}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        switches = {"router": router, "verifier": verifier, "dedupe": dedupe}
        for name, value in (switches | {"answer_at_max_turns": answer_at_max_turns}).items():
            if not isinstance(value, bool):  # a text "no" would be true
                raise ValueError(f"{name} must be true or false, got {value!r}")
        if not router and not verifier:
            raise ValueError("router and verifier are both off: nobody would decide when to answer")
        if missing_verdict not in ("yes", "no"):
            raise ValueError(f"missing_verdict must be 'yes' or 'no', got {missing_verdict!r}")
        if prompt_style not in ("full", "short"):
            raise ValueError(f"prompt_style must be 'full' or 'short', got {prompt_style!r}")
        self.workers = tuple(f"worker_{number}" for number in range(1, workers + 1))
        self.router = router
        self.verifier = verifier
        self.roles: tuple[str, ...] = (
            *(("router",) if router else ()),
            *self.workers,
            *(("verifier",) if verifier else ()),
            "answerer",
        )
        self._retriever = retriever
        self._max_turns = max_turns
        self._topk = topk
        self._max_passages = max_passages
        self._passage_tokens = passage_tokens
        self._answer_at_max_turns = answer_at_max_turns
        self._dedupe = dedupe
        self._missing_verdict = missing_verdict == "yes"
        self._prompt_style = prompt_style

    @classmethod
    def preset(cls, name: str, *, retriever: Retriever, **changes: Any) -> SearchWorkflow:
        """A published form by name (``dr_mas``); ``changes`` override its arguments."""
        if name not in _PRESETS:
            raise ValueError(f"no Search preset {name!r}; there is: {', '.join(_PRESETS)}")
        return cls(retriever=retriever, **(_PRESETS[name] | changes))

    def prompt(self, role: str, state: Searching) -> Prompt:
        """The prompt of a role in this state."""
        if self._prompt_style == "short":
            return short_prompt(role, state, passage_tokens=self._passage_tokens)
        return full_prompt(
            role, state, workers=len(self.workers), passage_tokens=self._passage_tokens
        )

    async def run(self, task: Task, team: Team) -> Outcome:
        """One episode. Raises EpisodeFailed("retrieval") when a search fails for good."""
        state = Searching(task.prompt)
        response = ""
        for turn in range(1, self._max_turns + 1):
            state = replace(state, turn=turn)
            state, done = await self._turn(state, team)
            if done:
                break
        if done or self._answer_at_max_turns:
            (answer,) = await team.act("answer", state, roles=["answerer"], render=self.prompt)
            self._parsed(team, answer, parsing.parse_answer)
            response = answer.text
            state = replace(state, answer=response)
        return Outcome(response, state, info=_figures(state, task))

    async def reward(self, task: Task, outcome: Outcome, team: Team) -> Score:
        """Exact match of the response's last answer; F1 beside it."""
        answer = extract_answer(outcome.response) or ""
        correct = exact_match(answer, task.answers)
        return Score(float(correct), correct, info={"f1": f1(answer, task.answers)})

    async def _turn(self, state: Searching, team: Team) -> tuple[Searching, bool]:
        """One turn: the state after it, and whether the answer agent may speak."""
        active: Sequence[str] = self.workers
        if self.router:
            (choice,) = await team.act("route", state, roles=["router"], render=self.prompt)
            route = self._parsed(
                team, choice, parsing.parse_route, len(self.workers), dedupe=self._dedupe
            )
            if isinstance(route, parsing.Malformed):
                return state.noted("router", None), False
            state = state.noted("router", choice.text)
            if route is None:
                return state, True
            active = [self.workers[number - 1] for number in route]
        elif self.verifier:
            state, supported = await self._verify(state, team)
            if supported:
                return state, True

        verified_after = self.router and self.verifier
        read = verified_after or self._answer_at_max_turns or state.turn < self._max_turns
        if read:
            state = await self._search(state, team, active)
        if verified_after:
            return await self._verify(state, team)
        return state, False

    async def _verify(self, state: Searching, team: Team) -> tuple[Searching, bool]:
        (output,) = await team.act("verify", state, roles=["verifier"], render=self.prompt)
        verdict = self._parsed(team, output, parsing.parse_verdict)
        if isinstance(verdict, parsing.Malformed):
            return state.noted("verifier", None), self._missing_verdict
        return state.noted("verifier", output.text), verdict

    async def _search(self, state: Searching, team: Team, active: Sequence[str]) -> Searching:
        outputs = await team.act("search", state, roles=active, render=self.prompt)
        parsed = [self._parsed(team, output, parsing.parse_query) for output in outputs]
        queries = tuple(query for query in parsed if isinstance(query, str))
        passages: tuple[Passage, ...] = ()
        if queries:
            wanted = list(dict.fromkeys(queries))
            try:
                found = await team.tool("retrieve", self._retriever.search, wanted, self._topk)
            except RetrievalError as error:
                raise EpisodeFailed("retrieval", str(error)) from error
            passages = merge(found, self._max_passages)
        return replace(state, steps=(*state.steps, Step(queries, passages)))

    @staticmethod
    def _parsed(team: Team, output: Output, parse: Any, *args: Any, **options: Any) -> Any:
        """What the output says, or the Malformed error after marking the output with its reason."""
        try:
            return parse(output.text, *args, **options)
        except parsing.Malformed as error:
            team.malformed(output, str(error))
            return error


def _figures(state: Searching, task: Task) -> dict[str, float]:
    queries = [" ".join(query.lower().split()) for step in state.steps for query in step.queries]
    supported = any(contains_answer(p.contents, task.answers) for p in state.passages)
    return {
        "turns": float(state.turn),
        "queries": float(len(queries)),
        "duplicate_queries": float(len(queries) - len(set(queries))),
        "evidence_support": float(supported),
    }
