"""Prompts of the Search roles: a full style for pretrained chat models, a short one for tiny ones.

Every prompt has three parts: the question with the searches so far, the teammates' outputs visible
before the event, and the role's instruction. Queries, passages and teammates' texts may be cut to
the prompt budget; the rest may not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from envs.search.retrieval.base import Passage
from envs.workflow import Cut, Prompt

STYLES = ("full", "short")
QUERY_TOKENS = 64  # a query in the history; a longer one is no search query


@dataclass(frozen=True)
class Step:
    """One search event: the parsed queries, and the passages found for them, merged."""

    queries: tuple[str, ...]
    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Searching:
    """The shared state. ``notes`` holds the latest text of the router and of the verifier;
    ``answer`` what the answer agent said, once it did."""

    question: str
    turn: int = 1
    steps: tuple[Step, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    answer: str | None = None

    def noted(self, role: str, text: str | None) -> Searching:
        """This state with ``text`` as the role's latest output; None takes the old one away."""
        others = tuple(note for note in self.notes if note[0] != role)
        return replace(self, notes=others if text is None else (*others, (role, text)))

    @property
    def passages(self) -> tuple[Passage, ...]:
        return tuple(passage for step in self.steps for passage in step.passages)


_SYSTEM = "You are one member of a team that answers questions with the help of a search engine."

_ROUTER = """You are the router. Decide which of the search workers 1 to {workers} search next. \
Activate the smallest set that is enough: one for a single missing fact, several when several \
facts can be looked up side by side. If the passages found so far already support an answer, stop.
You may reason briefly. Your last line must be exactly one tag, either worker numbers such as \
<route>1,3</route> or <route>STOP</route>."""

_WORKER = """You are search worker {number} of {workers}. Write one search query that brings a \
fact which is still missing. Name people, places and things in full, ask for one relation, and do \
not repeat an earlier query. Other workers may search at the same moment: look at the part that \
fits your number.
First think inside <think> and </think>, then give exactly one query inside <search> and \
</search>, and write nothing after it."""

_VERIFIER = """You are the evidence verifier. Check whether the passages found so far directly \
support every relation that the question needs. Your own knowledge is not evidence.
Explain briefly, then write exactly one tag: <verify>yes</verify> if every relation is supported, \
<verify>no</verify> if anything is missing."""

_ANSWERER = """You are the answer agent. Answer the question from the passages found so far, in as \
few words as possible: a name, a number or a short phrase, without a sentence around it.
First think inside <think> and </think>, then give exactly one answer inside <answer> and \
</answer>."""


def role_number(role: str) -> int:
    """The number of a worker role such as ``worker_2``."""
    return int(role.removeprefix("worker_"))


def render(
    role: str,
    state: Searching,
    style: str = "full",
    workers: int = 1,
    passage_tokens: int | None = None,
) -> Prompt:
    """The chat of ``role`` in a team of ``workers``, passages cut to ``passage_tokens`` each."""
    if style == "short":
        return _short(role, state, passage_tokens)
    return _full(role, state, workers, passage_tokens)


# ---- full ---------------------------------------------------------------------------------------


def _full(role: str, state: Searching, workers: int, passage_tokens: int | None) -> Prompt:
    parts: list[str | Cut] = [f"Question: {state.question}\n"]
    for number, step in enumerate(state.steps, 1):
        parts.append(f"\nStep {number}:\n")
        if not step.queries:
            parts.append("no valid query\n")
        for query in step.queries:
            parts += ["<search>", Cut(query, "first", QUERY_TOKENS), "</search>\n"]
        if step.queries:
            parts.append("<information>\n")
            for place, passage in enumerate(step.passages, 1):
                parts += [f"Doc {place}: ", Cut(passage.contents, "first", passage_tokens), "\n"]
            parts.append("</information>\n" if step.passages else "nothing found\n</information>\n")
    if not state.steps:
        parts.append("\nNothing has been searched yet.\n")
    for teammate, text in state.notes:
        parts += [f"\nThe {teammate} said:\n", Cut(text), "\n"]
    if role == "router":
        instruction = _ROUTER.format(workers=workers)
    elif role == "verifier":
        instruction = _VERIFIER
    elif role == "answerer":
        instruction = _ANSWERER
    else:
        instruction = _WORKER.format(number=role_number(role), workers=workers)
    parts.append("\n" + instruction)
    return Prompt(_SYSTEM, tuple(parts))


# ---- short --------------------------------------------------------------------------------------


def _short(role: str, state: Searching, passage_tokens: int | None) -> Prompt:
    """The system message names the role, and that is all."""
    parts: list[str | Cut] = [state.question]
    for step in state.steps:
        for query in step.queries:
            parts += ["\n<search>", Cut(query, "first", QUERY_TOKENS), "</search>"]
        parts.append("\n<information>")
        for passage in step.passages:
            parts += [Cut(passage.contents, "first", passage_tokens), "\n"]
        parts.append("</information>")
    for _, text in state.notes:
        parts += ["\n", Cut(text)]
    return Prompt(role.replace("_", " "), tuple(parts))
