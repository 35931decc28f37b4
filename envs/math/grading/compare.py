r"""Whether two answers are the same answer: the conventions of the package, without algebra.

``same_answer`` compares the trees of two answers and asks its ``equal`` argument about single
values. In the process ``equal_numbers`` decides plain numbers and raises Undecided for the rest; a
worker process answers with sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from envs.math.grading.answers import (
    FLIP,
    Bracket,
    Many,
    Matrix,
    Node,
    Relation,
    Value,
    Words,
    is_word,
    read,
)
from envs.math.grading.latex import MAX_CHARACTERS, clean, squeeze
from envs.math.grading.names import literal_call, names_quantity, unknowns
from envs.math.grading.numbers import LENGTH_LIMIT, Undecided, equal_numbers, plain_verdict

Equal = Callable[[str, str], bool]

_CHOICE = re.compile(r"(?:\\text\{ ?)?\(?([A-Ja-j])\)?[.:]? ?\}?[.:]?")
_CHOICE_AND_VALUE = re.compile(
    r"(?:\\text\{ ?\(?([A-J])\)?[.:]? ?\}|\(([A-J])\)|([A-J])[).:]) ?[.:]? ?(\S.*)", re.DOTALL
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_LETTERS = re.compile(r"[A-Za-z ]+")
_TEXT_SIGNS = re.compile(r"\\text(?![a-zA-Z])|[{}$]|\\(?=[ ,;])")
_PUNCTUATION = re.compile(r"(?<![0-9])[.,:]|[.,:](?![0-9])|[;!?()\"'`]|(?<=[a-zA-Z])-(?=[a-zA-Z])")


def same_answer(answer: str, gold: str, equal: Equal = equal_numbers) -> bool:
    """Whether a boxed answer and a gold answer, as written, are the same answer.

    Raises:
        Undecided: Where an answer is over a limit and, with the default ``equal``, where the
            values need algebra.
    """
    if (verdict := plain_verdict(answer, gold)) is not None:
        return verdict
    for text in (answer, gold):
        if len(text) > MAX_CHARACTERS:
            raise Undecided(f"{LENGTH_LIMIT}: {len(text)} characters, at most {MAX_CHARACTERS}")
    answer, gold = clean(answer), clean(gold)
    if answer == gold:
        return answer != ""
    labelled = _CHOICE_AND_VALUE.fullmatch(answer)
    if (choice := _CHOICE.fullmatch(gold)) and choice.group(1).isupper():
        if labelled:
            return choice.group(1) in labelled.groups()[:3]
        if written := _CHOICE.fullmatch(answer):
            return written.group(1).upper() == choice.group(1)
    readings = _readings(answer) + (_readings(labelled.group(4)) if labelled else [])
    return any(same(a, g, equal) for a in readings for g in _readings(gold))


def _readings(text: str) -> list[Node]:
    """The tree, and for "100,200" the list beside the number."""
    if _GROUPED.fullmatch(text):
        return [read(text), Many("list", tuple(Value(part) for part in text.split(",")))]
    return [read(text)]


def same(answer: Node, gold: Node, equal: Equal) -> bool:
    """Whether an answer's tree says the same as the gold's; ``equal`` decides single values."""
    if isinstance(answer, Relation) and isinstance(gold, Value) and gold.name:
        gold = Relation("=", gold.name, gold.latex)
    if isinstance(gold, Relation) and isinstance(answer, Value) and answer.name:
        answer = Relation("=", answer.name, answer.latex)
    if isinstance(answer, Relation) and answer.op == "=" and not isinstance(gold, Relation):
        return _states(answer, gold, equal)
    if isinstance(answer, Value) and answer.steps:
        if not _same_steps(answer.steps, gold, equal):
            return False
        answer = replace(answer, steps=())
    if isinstance(answer, Many) and answer.kind == "set" and len(answer.items) == 1:
        if not isinstance(gold, Many):
            return same(answer.items[0], gold, equal)
    if isinstance(gold, Many) and gold.kind == "set" and len(gold.items) == 1:
        if not isinstance(answer, Many):
            return same(answer, gold.items[0], equal)
    if isinstance(answer, Words) or isinstance(gold, Words):
        return bool(_words(answer)) and _words(answer) == _words(gold)
    match answer, gold:
        case Value(), Value():
            return _same_value(answer, gold, equal)
        case Many(), Many():
            return _same_items(answer, gold, equal)
        case Bracket(), Bracket():
            names = {answer.name, gold.name} - {None}
            return (
                (answer.opening, answer.closing) == (gold.opening, gold.closing)
                and len(answer.items) == len(gold.items)
                and len(names) < 2
                and all(same(a, g, equal) for a, g in zip(answer.items, gold.items, strict=True))
            )
        case Matrix(), Matrix():
            return [len(row) for row in answer.rows] == [len(row) for row in gold.rows] and all(
                same(a, g, equal)
                for rows in zip(answer.rows, gold.rows, strict=True)
                for a, g in zip(*rows, strict=True)
            )
        case Relation(), Relation():
            return _same_relation(answer, gold, equal)
        case Value(), Matrix():
            return _factored(answer) and equal(answer.latex, gold.latex)
        case Matrix(), Value():
            return _factored(gold) and equal(answer.latex, gold.latex)
    return False


def _states(answer: Relation, gold: Node, equal: Equal) -> bool:
    r"""Whether an equation gives the gold as a value: ``\cos x = 1/2`` gives 1/2, ``1+1 = 2`` 2."""
    right = read(answer.right)
    if is_word(right) or not _same_steps(answer.steps, gold, equal):
        return False
    named = names_quantity(answer.left) or _same_steps((answer.left,), gold, equal, strict=True)
    return named and same(right, gold, equal)


def _same_steps(steps: Sequence[str], gold: Node, equal: Equal, strict: bool = False) -> bool:
    """Whether the known values among the sides of an equation (all, if strict) are the gold."""
    return all(same(read(s), gold, equal) for s in steps if strict or not unknowns(s))


def _factored(value: Value) -> bool:
    """Whether a value is a matrix with a factor."""
    return r"\begin" in value.latex


def _words(node: Node) -> str | None:
    if isinstance(node, Words):
        text = node.text
    elif isinstance(node, Value) and _LETTERS.fullmatch(node.latex):
        text = node.latex
    else:
        return None
    return " ".join(_PUNCTUATION.sub(" ", _TEXT_SIGNS.sub(" ", text)).casefold().split())


def _same_items(answer: Many, gold: Many, equal: Equal) -> bool:
    if "union" in (answer.kind, gold.kind) and answer.kind != gold.kind:
        return False
    if "set" in (answer.kind, gold.kind):
        return all(any(same(a, g, equal) for g in gold.items) for a in answer.items) and all(
            any(same(a, g, equal) for a in answer.items) for g in gold.items
        )
    if len(answer.items) != len(gold.items):
        return False
    if _distinct_names(gold) and not any(getattr(i, "name", None) for i in answer.items):
        return all(same(a, g, equal) for a, g in zip(answer.items, gold.items, strict=True))
    left = list(gold.items)
    for item in answer.items:
        found = next((g for g in left if same(item, g, equal)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _distinct_names(node: Many) -> bool:
    """Whether every item has a name of its own: a = 2, b = 3 is no list of 2 and 3."""
    names = [getattr(item, "name", None) for item in node.items]
    return None not in names and len(set(names)) == len(names) > 1


def _same_value(answer: Value, gold: Value, equal: Equal) -> bool:
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if answer.base or gold.base:
        if answer.base and gold.base and answer.base != gold.base:
            values = [_in_base(answer.latex, answer.base), _in_base(gold.latex, gold.base)]
            return None not in values and values[0] == values[1]
        return answer.latex.upper() == gold.latex.upper()
    if answer.name and gold.name and answer.name != gold.name:
        return same(
            Relation("=", answer.name, answer.latex), Relation("=", gold.name, gold.latex), equal
        )
    if answer.name and not gold.name and _no_value(answer.name, gold):
        return False
    if answer.mark == gold.mark:
        return equal(answer.latex, gold.latex)
    if {answer.mark, gold.mark} == {"%", "degree"}:
        return False
    if equal(answer.latex, gold.latex):
        return True
    marked, bare = (answer, gold) if answer.mark else (gold, answer)
    if marked.mark == "%":
        return equal(rf"\frac{{{marked.latex}}}{{100}}", bare.latex)
    return r"\pi" in bare.latex and equal(rf"\frac{{({marked.latex})\pi}}{{180}}", bare.latex)


def _no_value(name: str, gold: Value) -> bool:
    """Whether naming a value says nothing of a bare gold: f(8) = 5, and A = B of choice B."""
    return literal_call(name) or bool(
        _CHOICE.fullmatch(name) and name.isupper() and _CHOICE.fullmatch(gold.latex)
    )


def _in_base(digits: str, base: str) -> int | None:
    try:
        return int(digits, int(base))
    except ValueError:
        return None


def _same_relation(answer: Relation, gold: Relation, equal: Equal) -> bool:
    if answer.op != gold.op and FLIP.get(answer.op) == gold.op:
        answer = Relation(gold.op, answer.right, answer.left)
    if answer.op != gold.op:
        return False
    sides = [(answer.left, gold.left), (answer.right, gold.right)]
    if gold.op == r"\equiv":
        return all(squeeze(a) == squeeze(g) for a, g in sides)
    read_sides = [(read(a), read(g)) for a, g in sides]
    if any(isinstance(side, Bracket | Many) for pair in read_sides for side in pair):
        return all(same(a, g, equal) for a, g in read_sides)
    # Proportional differences: left - right of one is a constant times that of the other. The
    # marker tells the worker so; a negative factor turns an inequality round.
    kind = "proportional" if gold.op in ("=", r"\ne") else "positive"
    return equal(f"{kind}:({answer.left})-({answer.right})", f"{kind}:({gold.left})-({gold.right})")
