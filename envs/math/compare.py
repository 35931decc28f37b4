r"""Whether two answers are the same answer: conventions of envs/math/grading.py, without algebra.

``same_answer`` compares the trees of two answers and asks its ``equal`` argument about single
values. In the process ``equal_numbers`` decides plain numbers and raises Undecided for the rest; a
worker process answers with sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from envs.math.answers import FLIP, Bracket, Many, Matrix, Node, Relation, Value, Words, read
from envs.math.latex import clean, deepest
from envs.math.numbers import equal_numbers, parse_number

Equal = Callable[[str, str], bool]

_MAX_DEPTH, _MAX_CHARACTERS = 40, 2000  # longer answers can only be numbers
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(?([A-Ja-j])\)?[.:]?\s*\}?[.:]?")
_CHOICE_AND_VALUE = re.compile(
    r"(?:\\text\{\s*\(?([A-J])\)?[.:]?\s*\}|\(([A-J])\)|([A-J])[).:])\s*[.:]?\s*(\S.*)", re.DOTALL
)


def same_answer(answer: str, gold: str, equal: Equal = equal_numbers) -> bool:
    """Whether a boxed answer and a gold answer, as written, are the same answer.

    With the default ``equal`` raises Undecided where the values need algebra.
    """
    answer, gold = clean(answer), clean(gold)
    if answer == gold:
        return answer != ""
    if max(len(answer), len(gold)) > _MAX_CHARACTERS:
        value = parse_number(answer)
        return value is not None and value == parse_number(gold)
    if max(deepest(answer), deepest(gold)) > _MAX_DEPTH:
        return False
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
    if re.fullmatch(r"[0-9]{1,3}(?:,[0-9]{3})+", text):
        return [read(text), Many("list", tuple(Value(part) for part in text.split(",")))]
    return [read(text)]


def same(answer: Node, gold: Node, equal: Equal) -> bool:
    """Whether an answer's tree says the same as the gold's; ``equal`` decides single values."""
    if isinstance(answer, Relation) and isinstance(gold, Value) and gold.name:
        gold = Relation("=", gold.name, gold.latex)
    if isinstance(gold, Relation) and isinstance(answer, Value) and answer.name:
        answer = Relation("=", answer.name, answer.latex)
    if isinstance(answer, Relation) and answer.op == "=" and not isinstance(gold, Relation):
        return same(read(answer.right), gold, equal)  # \cos x = 1/2 against 1/2
    if isinstance(answer, Many) and answer.kind == "set" and len(answer.items) == 1:
        if not isinstance(gold, Many):
            return same(answer.items[0], gold, equal)
    if isinstance(gold, Many) and gold.kind == "set" and len(gold.items) == 1:
        if not isinstance(answer, Many):
            return same(answer, gold.items[0], equal)
    if isinstance(answer, Words) or isinstance(gold, Words):
        return bool(_words(answer)) and _words(answer) == _words(gold)
    if type(answer) is not type(gold):
        if {type(answer), type(gold)} == {Value, Matrix} and _factored(answer, gold):
            return equal(answer.latex, gold.latex)  # a matrix with a factor
        return False
    match answer:
        case Value():
            return _same_value(answer, gold, equal)
        case Many():
            return _same_items(answer, gold, equal)
        case Bracket():
            names = {answer.name, gold.name} - {None}
            return (
                (answer.opening, answer.closing) == (gold.opening, gold.closing)
                and len(answer.items) == len(gold.items)
                and len(names) < 2
                and all(same(a, g, equal) for a, g in zip(answer.items, gold.items, strict=True))
            )
        case Matrix():
            return [len(row) for row in answer.rows] == [len(row) for row in gold.rows] and all(
                same(a, g, equal)
                for rows in zip(answer.rows, gold.rows, strict=True)
                for a, g in zip(*rows, strict=True)
            )
        case Relation():
            return _same_relation(answer, gold, equal)


def _factored(answer: Node, gold: Node) -> bool:
    value = answer if isinstance(answer, Value) else gold
    return r"\begin" in value.latex


def _words(node: Node) -> str | None:
    if isinstance(node, Words):
        text = node.text
    elif isinstance(node, Value) and re.fullmatch(r"[A-Za-z ]+", node.latex):
        text = node.latex
    else:
        return None
    return " ".join(re.sub(r"[^\w\s]", " ", text).casefold().split())


def _same_items(answer: Many, gold: Many, equal: Equal) -> bool:
    if "union" in (answer.kind, gold.kind) and answer.kind != gold.kind:
        return False
    if "set" in (answer.kind, gold.kind):
        return all(any(same(a, g, equal) for g in gold.items) for a in answer.items) and all(
            any(same(a, g, equal) for a in answer.items) for g in gold.items
        )
    left = list(gold.items)
    for item in answer.items:
        found = next((g for g in left if same(item, g, equal)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_value(answer: Value, gold: Value, equal: Equal) -> bool:
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if answer.base or gold.base:
        if answer.base and gold.base and answer.base != gold.base:
            values = [_in_base(v.latex, v.base) for v in (answer, gold)]
            return None not in values and values[0] == values[1]
        return answer.latex.upper() == gold.latex.upper()
    if answer.name and gold.name and answer.name != gold.name:
        return same(
            Relation("=", answer.name, answer.latex), Relation("=", gold.name, gold.latex), equal
        )
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


def _in_base(digits: str, base: str | None) -> int | None:
    try:
        return int(digits, int(base))
    except (TypeError, ValueError):
        return None


def _same_relation(answer: Relation, gold: Relation, equal: Equal) -> bool:
    if answer.op != gold.op and FLIP.get(answer.op) == gold.op:
        answer = Relation(gold.op, answer.right, answer.left)
    if answer.op != gold.op:
        return False
    # Proportional differences: left - right of one is a constant times that of the other. The
    # marker tells the worker so; a negative factor turns an inequality round.
    kind = "proportional" if gold.op in ("=", r"\ne") else "positive"
    return equal(f"{kind}:({answer.left})-({answer.right})", f"{kind}:({gold.left})-({gold.right})")
