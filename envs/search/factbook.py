"""The embedded Search domain: passages and multi-hop questions about countries.

Both come from one small table of facts (``data/factbook.jsonl.gz``, see ``data/PROVENANCE.md``). A
passage states one fact in two lines:

    "Chad"
    currency code of Chad: XAF

A two-hop question names a country by its capital or its highest point and asks for another of its
facts; a three-hop question goes on to the neighbour with the longest common border. Answers are
exact and each question has one. A country is in the test split by the hash of its id, and a
question by the country of its first hop.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from envs.search.retrieval.base import Passage
from envs.search.scoring import normalize
from envs.workflow import Task

TABLE = Path(__file__).parent / "data" / "factbook.jsonl.gz"

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

# What a question may ask of a country: field -> its phrase.
ASKED = {
    "capital": "capital",
    "highest point": "highest point",
    "currency code": "currency code",
    "internet code": "internet code",
    "aircraft prefix": "aircraft prefix",
    "nationality": "nationality",
    "population": "population",
    "area": "area",
    "coastline": "coastline",
    "mean elevation": "mean elevation",
    "median age": "median age",
    "life expectancy": "life expectancy",
    "urban share": "urban share",
    "airports": "airports",
    "independence": "date of independence",
}
KEYS = ("capital", "highest point")  # facts that name a country in a question
NEIGHBOUR = "longest border"
_UNITS = re.compile(r" (sq km|km|m|years)$")
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Country:
    """A row of the table: an id such as ``cd``, the name, and the facts by field."""

    id: str
    name: str
    facts: dict[str, str]

    def passage_id(self, field: str) -> str:
        return f"{self.id}/{field}"


@dataclass(frozen=True)
class Hop:
    """One link of a question: queries that find it, in several words, the passage that states it,
    and what it says (the bridge to the next hop; of the last hop, the answer)."""

    queries: tuple[str, ...]
    passage: str
    finds: str


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers and the hops that lead there."""

    id: str
    question: str
    answers: tuple[str, ...]
    field: str
    hops: tuple[Hop, ...]

    def task(self) -> Task:
        """The question as a task; ``extra`` holds ``field`` and ``hops`` as plain dictionaries."""
        hops = [asdict(hop) | {"queries": list(hop.queries)} for hop in self.hops]  # as JSON reads
        extra = {"field": self.field, "hops": hops}
        return Task(self.id, self.question, self.answers, "factbook", extra)


@functools.cache
def countries() -> tuple[Country, ...]:
    """The rows of the table, by id."""
    with gzip.open(TABLE, "rt", encoding="utf-8") as lines:
        return tuple(Country(**json.loads(line)) for line in lines)


@functools.cache
def passages() -> tuple[Passage, ...]:
    """One passage for every fact, in the table's order; its id is ``country id/field``."""
    return tuple(
        Passage(country.passage_id(field), f'"{country.name}"\n{field} of {country.name}: {value}')
        for country in countries()
        for field, value in country.facts.items()
    )


def split_of(country: Country) -> Split:
    """The split of the questions whose first hop is this country."""
    digest = hashlib.sha256(country.id.encode()).digest()
    return "test" if digest[0] < 256 * _TEST_SHARE else "train"


def questions(
    split: Split, hops: int = 2, fields: Sequence[str] | None = None
) -> tuple[Question, ...]:
    """The questions of a split with 2 or 3 hops, in the table's order.

    ``fields`` keeps the questions that ask for one of these (see ``ASKED``). Raises ValueError for
    a split, a number of hops or a field that there is not.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r} of factbook; there are: {', '.join(SPLITS)}")
    if hops not in (2, 3):
        raise ValueError(f"factbook has questions of 2 or 3 hops, not {hops!r}")
    if isinstance(fields, str) or (fields is not None and not len(fields)):
        raise ValueError(f"fields: a list of at least one field is due, got {fields!r}")
    for field in fields or ():
        if field not in ASKED:
            raise ValueError(f"factbook asks for no field {field!r}; it does: {', '.join(ASKED)}")
    return tuple(
        question
        for country, question in _all_questions(hops)
        if split_of(country) == split and (fields is None or question.field in fields)
    )


def select(
    split: Split, *, hops: int, fields: Sequence[str] | None, seed: int, size: int | None
) -> list[Question]:
    """``size`` questions of a split (None: all) in an order drawn from ``seed``.

    Raises:
        ValueError: For an argument that does not fit.
    """
    chosen = list(questions(split, hops, fields))
    if size is not None and not 1 <= size <= len(chosen):
        raise ValueError(f"size: factbook {split} has {len(chosen)} such questions, not {size}")
    random.Random(seed).shuffle(chosen)
    return chosen[:size]


@functools.cache
def _all_questions(hops: int) -> tuple[tuple[Country, Question], ...]:
    counts = {key: Counter(normalize(c.facts.get(key, "")) for c in countries()) for key in KEYS}
    by_name = {country.name: country for country in countries()}
    made = []
    for country in countries():
        for key in KEYS:
            value = country.facts.get(key, "")
            if not value or counts[key][normalize(value)] > 1 or _gives_away(value, country.name):
                continue
            queries = (f"{key} {value}", f"country with {key} {value}")
            first = Hop(queries, country.passage_id(key), country.name)
            if hops == 2:
                asked = _two_hops(country, key, value, first)
            else:
                asked = _three_hops(country, key, value, first, by_name)
            made += [(country, question) for question in asked]
    return tuple(made)


def _two_hops(country: Country, key: str, value: str, first: Hop) -> Iterator[Question]:
    for field, phrase in ASKED.items():
        if field != key and field in country.facts:
            text = f"What is the {phrase} of the country whose {key} is {value}?"
            yield _question(f"2/{country.id}/{key}/{field}", text, field, country, (first,))


def _three_hops(
    country: Country, key: str, value: str, first: Hop, by_name: dict[str, Country]
) -> Iterator[Question]:
    neighbour = by_name.get(country.facts.get(NEIGHBOUR, ""))
    if neighbour is None:
        return
    second = _fact(country, NEIGHBOUR)
    for field, phrase in ASKED.items():
        if field in neighbour.facts:
            text = (
                f"What is the {phrase} of the country that shares the {NEIGHBOUR} with the country "
                f"whose {key} is {value}?"
            )
            identity = f"3/{country.id}/{key}/{field}"
            yield _question(identity, text, field, neighbour, (first, second))


def _question(
    identity: str, text: str, field: str, country: Country, before: tuple[Hop, ...]
) -> Question:
    value = country.facts[field]
    answers = tuple(dict.fromkeys((value, _UNITS.sub("", value))))
    return Question(identity, text, answers, field, (*before, _fact(country, field)))


def _fact(country: Country, field: str) -> Hop:
    queries = (f"{country.name} {field}", f"{field} of {country.name}")
    return Hop(queries, country.passage_id(field), country.facts[field])


def _gives_away(value: str, name: str) -> bool:
    """Whether a capital or a summit shares a long word with its country's name."""
    words = [set(re.findall(r"\w{4,}", text.lower())) for text in (value, name)]
    return bool(words[0] & words[1])
