r"""The shape of a boxed answer: values, lists, sets, intervals, matrices, relations and words.

``read`` takes a cleaned answer apart into a tree whose leaves are LaTeX of single values. Nothing
here knows algebra (see symbolic.py) or compares (see compare.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.math.grading.latex import (
    MAX_CHARACTERS,
    clean,
    deepest,
    matching_end,
    split_top,
    unwrap,
)
from envs.math.grading.names import CONSTANTS, NAME, VARIABLE, is_assigned, unknowns
from envs.math.grading.numbers import LENGTH_LIMIT, Undecided, parse_number
from envs.math.grading.units import Unit, bare_unit, idle_lead, negates, read_unit


@dataclass(frozen=True)
class Value:
    """One value: its LaTeX, and what was written around it."""

    latex: str
    unit: str | None = None
    mark: str | None = None  # "%" or "degree"
    base: str | None = None
    name: str | None = None  # the left side of an assignment
    steps: tuple[str, ...] = ()  # what stands between: 2+3 in x = 2+3 = 5


@dataclass(frozen=True)
class Words:
    """Words, and values that words change ("at least 5"): they agree with the same words alone."""

    text: str


@dataclass(frozen=True)
class Many:
    """Unordered items: ``list``, ``set`` (repetition does not count), ``union`` (of intervals)."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Bracket:
    """A tuple or an interval: brackets and order count. ``name``: the unknown of an inequality."""

    opening: str
    closing: str
    items: tuple[Node, ...]
    name: str | None = None


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]
    latex: str


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that is neither an assignment nor an interval: left op right."""

    op: str
    left: str
    right: str
    steps: tuple[str, ...] = ()


Node = Value | Words | Many | Bracket | Matrix | Relation

_REALS = Bracket("(", ")", (Value(r"-\infty"), Value(r"\infty")))
_NO_SOLUTION = Words("no solution")
_SYNONYMS: dict[str, Node] = {
    r"\mathbb{R}": _REALS,
    r"\R": _REALS,
    r"\text{all real numbers}": _REALS,
    r"\text{all reals}": _REALS,
    r"\emptyset": _NO_SOLUTION,
    r"\varnothing": _NO_SOLUTION,
    r"\{\}": _NO_SOLUTION,
    r"\text{no solutions}": _NO_SOLUTION,
    r"\text{no real solutions}": _NO_SOLUTION,
}
_BARE_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]{3,}(?: [A-Za-z'-]+)*|[A-Za-z'-]+(?: [A-Za-z'-]{2,})+")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_MEMBER = re.compile(rf"{NAME} ?\\in(?![a-zA-Z]) ?")
_REAL_MEMBER = re.compile(rf"({NAME})(?: ?\\in ?\\(?:mathbb ?\{{R\}}|R))?")
_SIGN = re.compile(r"(\\pm|\\mp)(?![a-zA-Z])")
_IDLE_PLUS = re.compile(r"(^|[=(\[{,] ?)\+")
_THOUSANDS = re.compile(r"[0-9]{3}(?![0-9]).*", re.DOTALL)
_LEADING_THOUSANDS = re.compile(r"(?:^|[^0-9.,])[0-9]{1,3}(?:,[0-9]{3})*$")
_SPACED = re.compile(r"[,;]\s")
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_DIGIT = re.compile(r"[0-9]")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")
FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_MAX_SIGNS, _MAX_DEPTH = 4, 40


def read(text: str) -> Node:
    """The tree of one cleaned answer. Raises Undecided where it is too long or nested too deep."""
    if len(text) > MAX_CHARACTERS:
        raise Undecided(f"{LENGTH_LIMIT}: {len(text)} characters, at most {MAX_CHARACTERS}")
    if (depth := deepest(text)) > _MAX_DEPTH:
        raise Undecided(f"{LENGTH_LIMIT}: brackets nest {depth} deep, at most {_MAX_DEPTH}")
    return _read(text)


def _read(text: str) -> Node:
    text = unwrap(text)
    if text in _SYNONYMS:
        return _SYNONYMS[text]
    if (inner := _text_only(text)) is not None:
        return _read_text(inner)
    while match := _MEMBER.match(text):
        text = text[match.end() :]
    if match := _CLOCK.fullmatch(text):
        return Words(f"{match.group(1)}:{match.group(2)} {match.group(3)}m")
    if len(parts := split_top(text, {r"\lor"})) > 1:
        return _joined("union", parts)
    if len(parts := _split_commas(text)) > 1:
        return _list(parts)
    if len(parts := split_top(text, {r"\cup"})) > 1:
        return _joined("union", parts)
    if text.startswith(r"\{") and (group := _group(text)) is not None:
        return group
    if (signs := _expand_signs(text)) is not None:
        return _list(signs)
    if (group := _group(text)) is not None:
        return group
    if _BARE_WORDS.fullmatch(text):
        return Words(text)
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        rows = [row for row in split_top(matrix.group(2), {r"\\"}) if row.strip()]
        cells = tuple(tuple(_read(cell) for cell in split_top(row, {"&"})) for row in rows)
        return Matrix(cells, text)
    return _relation(text) or _ratio(text) or _value(text)


def _text_only(text: str) -> str | None:
    if text.startswith(r"\text{") and matching_end(text, 5) == len(text) - 1:
        return text[6:-1].strip()
    return None


def _read_text(inner: str) -> Node:
    r"""Content of ``\text{...}``: words, a list of words, or mathematics in the wrong font."""
    if not _TWO_LETTERS.search(inner) and re.search(r"[0-9,]", inner):
        return _read(clean(inner))
    parts = [part.strip() for part in inner.split(",") if part.strip()]
    return Words(inner) if len(parts) < 2 else Many("list", tuple(map(Words, parts)))


def _split_commas(text: str, bracketed: bool = False) -> list[str]:
    """Items of a list; a comma that groups thousands (1,000) does not separate.

    In brackets, (1,200) is a pair: there commas group only beside commas that spaces follow.
    """
    parts = split_top(text, {",", ";"})
    may_group = not bracketed or _SPACED.search(text) is not None
    merged: list[str] = []
    for part in parts:
        grouped = may_group and _THOUSANDS.fullmatch(part)
        if merged and grouped and _LEADING_THOUSANDS.search(merged[-1]):
            merged[-1] += "," + part
        else:
            merged.append(part)
    return [part.strip() for part in merged if part.strip()]


def _list(parts: Sequence[str]) -> Many:
    items: list[Node] = []
    for part in parts:
        item = _read(part)
        items += item.items if isinstance(item, Many) and item.kind == "list" else [item]
    names = {item.name for item in items[1:] if isinstance(item, Value)}
    first = items[0] if items else None
    if isinstance(first, Value) and first.name and names == {None}:  # n = 1, 2, 3
        items = [replace(i, name=first.name) if isinstance(i, Value) else i for i in items]
    inequalities = items and all(isinstance(item, Bracket) and item.name for item in items)
    return Many("union" if inequalities else "list", tuple(items))


def _joined(kind: str, parts: Sequence[str]) -> Node:
    """Alternatives: intervals make a union, single values a list."""
    items: list[Node] = []
    for part in parts:
        item = _read(part)
        items += item.items if isinstance(item, Many) else [item]
    if all(isinstance(item, Bracket | Many) for item in items):
        return Many(kind, tuple(items))
    return Many("list", tuple(items))


def _expand_signs(text: str) -> list[str] | None:
    r"""Both readings of each ``\pm``; ``\mp`` takes the sign opposite to the ``\pm`` before it."""
    pieces = _SIGN.split(text)
    plus_minus = pieces.count(r"\pm")
    if not 1 <= plus_minus <= _MAX_SIGNS:
        return None
    results = []
    for choice in range(2**plus_minus):
        index, sign, out = 0, "+", ""
        for piece in pieces:
            if piece == r"\pm":
                sign = "-" if choice >> index & 1 else "+"
                index += 1
                out += sign
            elif piece == r"\mp":
                out += "-" if sign == "+" else "+"
            else:
                out += piece
        results.append(_IDLE_PLUS.sub(r"\1", out))
    return results


def _group(text: str) -> Node | None:
    """A whole answer in one pair of brackets, or None."""
    for opening in (r"\{", "(", "[", r"\langle"):
        if not text.startswith(opening):
            continue
        end = matching_end(text, 0)
        if end is None:
            return None
        closing = next((c for c in (r"\}", ")", "]", r"\rangle") if text.endswith(c)), None)
        if closing is None or end != len(text) - len(closing):
            return None
        inner = text[len(opening) : -len(closing)].strip()
        if opening == r"\{":
            if (built := _set_builder(inner)) is not None:
                return built
            return Many("set", _list(_split_commas(inner, bracketed=True)).items)
        parts = _split_commas(inner, bracketed=True)
        if len(parts) == 1:
            return _read(parts[0]) if (opening, closing) in (("(", ")"), ("[", "]")) else None
        if opening == r"\langle":
            opening, closing = "(", ")"
        return Bracket(opening, closing, tuple(_read(part) for part in parts))
    return None


def _set_builder(inner: str) -> Node | None:
    r"""``x \mid x > 2`` of real x is the interval; of other heads, head and condition in order."""
    for separator in (r"\mid", ":", "|"):
        head, *conditions = split_top(inner, {separator})
        if conditions and unknowns(head):
            condition = separator.join(conditions).strip()
            if _REAL_MEMBER.fullmatch(head.strip()):
                return _read(condition)
            return Bracket("{|", "|}", (_read(head), _read(condition)))
    return None


def is_word(node: Node) -> bool:
    """Whether an answer is a word, in text or in letters side by side."""
    return isinstance(node, Words) or (
        isinstance(node, Value) and _LETTERS.fullmatch(node.latex) is not None
    )


def _relation(text: str) -> Node | None:
    """Assignments, equations and inequalities."""
    text = split_top(text, {r"\approx"})[0].strip()
    pieces = split_top(text, {"<", ">", r"\le", r"\ge", r"\ne", "=", r"\equiv"}, keep=True)
    sides, ops = [piece.strip() for piece in pieces[::2]], pieces[1::2]
    if not ops or not all(sides):
        return None
    if set(ops) == {"="}:
        left, *steps, right = sides
        value = _read(right)
        if is_word(value):
            return value if VARIABLE.fullmatch(left) and not steps else Relation("=", left, right)
        if is_assigned(left) and not negates(left):
            if isinstance(value, Value):
                return replace(value, name=left, steps=tuple(steps))
            if not steps:
                return value
        return Relation("=", left, right, tuple(steps))
    if (interval := _interval(sides, ops)) is not None:
        return interval
    if len(ops) == 1:
        return Relation(ops[0], sides[0], sides[1])
    return None


def _ratio(text: str) -> Node | None:
    """``a:b`` is the quotient; longer ratios are ordered items."""
    parts = [part.strip() for part in split_top(text, {":"})]
    if len(parts) < 2 or not all(parts):
        return None
    if len(parts) == 2:
        return Value(rf"\frac{{{parts[0]}}}{{{parts[1]}}}")
    return Bracket(":", ":", tuple(_read(part) for part in parts))


def _interval(sides: list[str], ops: list[str]) -> Node | None:
    def unknown(side: str) -> bool:
        return VARIABLE.fullmatch(side) is not None and side not in CONSTANTS

    if len(ops) == 1:
        if unknown(sides[1]) and not unknown(sides[0]) and ops[0] != r"\ne":
            sides, ops = sides[::-1], [FLIP[ops[0]]]
        if not unknown(sides[0]) or unknown(sides[1]):
            return None
        name, op, bound = sides[0], ops[0], Value(sides[1])
        low, high = Value(r"-\infty"), Value(r"\infty")
        if op == r"\ne":
            halves = Bracket("(", ")", (low, bound), name), Bracket("(", ")", (bound, high), name)
            return Many("union", halves)
        if op in ("<", r"\le"):
            return Bracket("(", ")" if op == "<" else "]", (low, bound), name)
        return Bracket("(" if op == ">" else "[", ")", (bound, high), name)
    if len(ops) == 2 and unknown(sides[1]):
        if set(ops) <= {">", r"\ge"}:
            sides, ops = sides[::-1], [FLIP[op] for op in ops[::-1]]
        if set(ops) <= {"<", r"\le"}:
            opening, closing = "(" if ops[0] == "<" else "[", ")" if ops[1] == "<" else "]"
            return Bracket(opening, closing, (Value(sides[0]), Value(sides[2])), sides[1])
    return None


# ---- single values ------------------------------------------------------------------------------

_TEXT_UNIT = re.compile(
    r" ?(?:(?:\\cdot|/) ?)?\\text\{[^{}]*\}(?: ?\^ ?(?:\{-?[0-9]\}|[0-9]))?(?:/[a-z]+(?:\^[0-9])?)?"
)
_WORD_TAIL = re.compile(
    r"(?<=[0-9})])( ?)([a-zA-Z]{2,}(?: [a-zA-Z]+)*(?:/ ?[a-zA-Z]+)?(?:\^\{?[0-9]\}?)?)$"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_BASE = re.compile(r"([0-9][0-9A-Za-z]*)_(?:\{ ?(?:\\text\{)? ?(\w+) ?\}? ?\}|([0-9]))")
_CLOCK = re.compile(r"([0-9]{1,2})\{?:\}?([0-9]{2}) ?(?:\\text\{)? ?([ap])\.? ?m\.? ?\}?")
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve".split()
_BASES = {name: str(i) for i, name in enumerate(_BASE_NAMES, 2)} | {"sixteen": "16"}


def _value(text: str) -> Value | Words:
    """A value without its unit and lead; words where what stands around it changes it."""
    whole, name = text, None
    for sign in (r"\$", r"-\$"):
        if text.startswith(sign):
            text, name = sign[:-2] + text[len(sign) :].strip(), "$"
    if text.startswith(r"\text{") and (end := matching_end(text, 5)) is not None:
        rest = text[end + 1 :].strip()
        if _DIGIT.search(rest):  # words before the value
            if not idle_lead(text[6:end]):
                return Words(whole)
            text = rest
    unit: Unit | None = Unit(name)
    if start := _text_tail(text):
        text, unit = text[:start], read_unit(text[start:])
    elif match := _WORD_TAIL.search(text):
        gap, words = match.groups()
        if read := bare_unit(gap, words):
            text, unit = text[: match.start()], read
    if unit is None:
        return Words(whole)
    text, name, mark = text.strip(), unit.name or name, None
    if unit.scale != 1:
        number = parse_number(text)
        if number is None:
            return Words(whole)
        text = str(number * unit.scale)
    if name in ("%", "degree"):
        name, mark = None, name
    elif text.endswith("%"):
        text, mark = text[:-1].strip(), "%"
    elif text.endswith(r"^\circ") and not _TRIGONOMETRIC.search(text):
        text, mark = text[: -len(r"^\circ")].strip(), "degree"
    if match := _BASE.fullmatch(text):
        base = (match.group(2) or match.group(3)).lower()
        if (base := _BASES.get(base, base)).isdigit():
            return Value(match.group(1), name, mark, base)
    return Value(unwrap(text), name, mark)


def _text_tail(text: str) -> int:
    r"""Where the ``\text{...}`` groups begin that end a value; 0 without any."""
    start = end = 0
    for match in _TEXT_UNIT.finditer(text):
        start = start if match.start() == end else match.start()
        end = match.end()
    return start if end == len(text) else 0
