"""Transcripts of a team on factbook questions, for the supervised start of a tiny model.

The teacher plays every role from the same state that the role's prompt shows, and knows the
question's hops from ``task.extra``. ``poor`` is how often a role errs, always in its format; the
errors are of the kind that reinforcement can remove: a search for the wrong thing, stopping too
early, an answer taken from the wrong passage.
"""

from __future__ import annotations

import functools
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.parsing import route_to_all
from envs.search.factbook import ASKED, KEYS, countries
from envs.search.prompts import Searching, role_number
from envs.task_rows import TaskError
from envs.workflow import Prompt, Task


def reply(
    role: str,
    state: Searching,
    task: Task,
    rng: random.Random,
    poor: float = 0.0,
    *,
    workers: int = 2,
) -> str:
    """What ``role`` says in this state, right with probability 1 - ``poor``.

    Router: STOP once every hop's passage is found, before that any subset of the ``workers`` (poor:
    STOP too early). Worker: a query for the first hop that is not found yet, in other words than
    its neighbour's (poor: another country, another field, or an earlier hop again). Verifier: yes
    once the passage that holds the answer is found (poor: yes too early). Answer agent: the fact of
    that passage (poor, or not found: of another one).

    Raises:
        TaskError: For a task without hops.
    """
    hops = task.extra.get("hops")
    if not hops:
        raise TaskError(f"task {task.id}: the teacher needs a factbook question with its hops")
    found = {passage.id for passage in state.passages}
    errs = rng.random() < poor
    if role == "router":
        if errs or hops[-1]["passage"] in found:
            return "<route>STOP</route>"
        active = rng.sample(range(1, workers + 1), rng.randint(1, workers))
        return f"<route>{','.join(map(str, sorted(active)))}</route>"
    if role == "verifier":
        verdict = "yes" if errs or hops[-1]["passage"] in found else "no"
        return f"<verify>{verdict}</verify>"
    if role == "answerer":
        return _answer(state, hops, rng, errs)
    missing = next((i for i, hop in enumerate(hops) if hop["passage"] not in found), len(hops) - 1)
    query = _wrong_query(hops, missing, rng) if errs else _query(hops[missing], role_number(role))
    thought = "next fact" if missing else "find country"
    return f"<think>{thought}</think><search>{query}</search>"


def _query(hop: Mapping[str, Any], number: int) -> str:
    queries = hop["queries"]
    return queries[(number - 1) % len(queries)]


def _wrong_query(hops: Sequence[Mapping[str, Any]], missing: int, rng: random.Random) -> str:
    """A query that misses: an earlier hop again, another field, or another country."""
    field = hops[missing]["passage"].split("/")[1]
    if missing == 0:
        other = rng.choice([country for country in countries() if field in country.facts])
        return f"{field} {other.facts[field]}"
    choice = rng.randrange(3)
    if choice == 0:
        return hops[missing - 1]["queries"][0]
    if choice == 1:
        fields = [other for other in ASKED if other not in (field, *KEYS)]
        return f"{hops[missing - 1]['finds']} {rng.choice(fields)}"
    return f"{rng.choice(countries()).name} {field}"


def _answer(
    state: Searching, hops: Sequence[Mapping[str, Any]], rng: random.Random, errs: bool
) -> str:
    facts = {passage.id: passage.contents.split(": ", 1)[-1] for passage in state.passages}
    right = facts.pop(hops[-1]["passage"], None)
    if right is not None and not (errs and facts):
        return f"<think>found</think><answer>{right}</answer>"
    guess = rng.choice(list(facts.values())) if facts else "unknown"
    return f"<think>{'found' if errs else 'guess'}</think><answer>{guess}</answer>"


_CONSONANTS, _VOWELS = "bcdfghjklmnprstvz", "aeiou"


def invent_names(texts: Sequence[str], rng: random.Random) -> list[str]:
    """The texts with every name and code of the factbook replaced by an invented one.

    One name becomes the same invention in all of the texts. A model that learns from such texts
    cannot know the facts by heart: it has to read them from the passages.
    """
    invented: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        name = match[0]
        if name not in invented:
            invented[name] = _invention(name, rng)
        return invented[name]

    pattern = _names_pattern()
    return [pattern.sub(replace, text) for text in texts]


@functools.cache
def _names_pattern() -> re.Pattern[str]:
    names = {country.name for country in countries()}
    for country in countries():
        for field in (*KEYS, "currency code", "internet code", "aircraft prefix", "nationality"):
            names.add(country.facts.get(field, ""))
    longest_first = sorted(filter(None, names), key=lambda name: (-len(name), name))
    return re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


def _invention(name: str, rng: random.Random) -> str:
    if name.startswith("."):
        return "." + "".join(rng.choices(string.ascii_lowercase, k=2))
    if len(name) <= 3 and name.upper() == name:
        return "".join(rng.choices(string.ascii_uppercase, k=len(name)))
    words = 1 if rng.random() < 0.8 else 2
    return " ".join(_word(rng) for _ in range(words))


def _word(rng: random.Random) -> str:
    syllables = [rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(syllables).capitalize() + rng.choice(("", "", "n", "s", "r"))


def script(task: Task, roles: Sequence[str]) -> Callable[[str, Searching, Prompt], str]:
    """Replies of a rehearsal: one turn of searches for the question itself, then the answer."""

    def say(role: str, state: Searching, prompt: Prompt) -> str:
        if role == "router":
            return "<route>STOP</route>" if state.steps else route_to_all(roles, "worker_")
        if role == "verifier":
            return f"<verify>{'yes' if state.steps else 'no'}</verify>"
        if role == "answerer":
            return f"<think>It is stated.</think><answer>{task.answers[0]}</answer>"
        query = re.sub(r"[<>]", " ", task.prompt)
        return f"<think>I look it up.</think><search>{query}</search>"

    return say
