r"""The shape of a boxed answer: values, lists, sets, intervals, matrices, relations and words.

``read`` takes a cleaned answer apart into a tree whose leaves are LaTeX of single values. Nothing
here knows algebra (see envs/math/symbolic.py) or compares (see envs/math/compare.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.math.latex import clean, matching_end, split_top, unwrap


@dataclass(frozen=True)
class Value:
    """One value: its LaTeX, and what was written around it."""

    latex: str
    unit: str | None = None
    mark: str | None = None  # "%" or "degree"
    base: str | None = None
    name: str | None = None  # the left side of an assignment


@dataclass(frozen=True)
class Words:
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
_BARE_WORDS = re.compile(
    r"[A-Za-z][A-Za-z'’-]{3,}(?:\s+[A-Za-z'’-]+)*|[A-Za-z'’-]+(?:\s+[A-Za-z'’-]{2,})+"
)
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{[^{}]*\}|[a-zA-Z0-9]))?"
_ASSIGNED = re.compile(rf"({_NAME}(?:\([^()]*\))?|[a-zA-Z]{{1,3}})")
_CONSTANTS = {"e", "i", r"\pi", r"\infty"}
_MEMBER = re.compile(rf"{_NAME}\s*\\in(?![a-zA-Z])\s*")
FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_MAX_SIGNS = 4


def read(text: str) -> Node:
    """The tree of one cleaned answer."""
    text = unwrap(text)
    if text in _SYNONYMS:
        return _SYNONYMS[text]
    if (inner := _text_only(text)) is not None:
        return _read_text(inner)
    while match := _MEMBER.match(text):
        text = text[match.end() :]
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
        cells = tuple(tuple(read(cell) for cell in split_top(row, {"&"})) for row in rows)
        return Matrix(cells, text)
    return _relation(text) or _ratio(text) or _value(text)


def _text_only(text: str) -> str | None:
    if text.startswith(r"\text{") and matching_end(text, 5) == len(text) - 1:
        return text[6:-1].strip()
    return None


def _read_text(inner: str) -> Node:
    r"""Content of ``\text{...}``: words, a list of words, or mathematics in the wrong font."""
    if not re.search(r"[A-Za-z]{2}", inner) and re.search(r"[0-9,]", inner):
        return read(clean(inner))
    parts = [part.strip() for part in inner.split(",") if part.strip()]
    return Words(inner) if len(parts) < 2 else Many("list", tuple(map(Words, parts)))


def _split_commas(text: str, bracketed: bool = False) -> list[str]:
    """Items of a list; a comma that groups thousands (1,000) does not separate.

    In brackets, (1,200) is a pair: there commas group only beside commas that spaces follow.
    """
    parts = split_top(text, {",", ";"})
    may_group = not bracketed or re.search(r"[,;]\s", text) is not None
    merged: list[str] = []
    for part in parts:
        grouped = may_group and re.fullmatch(r"[0-9]{3}(?![0-9]).*", part, re.DOTALL)
        if merged and grouped and re.search(r"(?:^|[^0-9.,])[0-9]{1,3}(?:,[0-9]{3})*$", merged[-1]):
            merged[-1] += "," + part
        else:
            merged.append(part)
    return [part.strip() for part in merged if part.strip()]


def _list(parts: Sequence[str]) -> Node:
    items: list[Node] = []
    for part in parts:
        item = read(part)
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
        item = read(part)
        items += item.items if isinstance(item, Many) else [item]
    if all(isinstance(item, Bracket | Many) for item in items):
        return Many(kind, tuple(items))
    return Many("list", tuple(items))


def _expand_signs(text: str) -> list[str] | None:
    r"""Both readings of each ``\pm``; ``\mp`` takes the sign opposite to the ``\pm`` before it."""
    pieces = re.split(r"(\\pm|\\mp)(?![a-zA-Z])", text)
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
        results.append(re.sub(r"(^|[=(\[{,]\s*)\+", r"\1", out))
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
            condition = split_top(inner, {r"\mid", "|", ":"})
            if len(condition) > 1 and re.match(_NAME, condition[0].strip()):
                return read(condition[-1])
            return Many("set", _list(_split_commas(inner, bracketed=True)).items)
        parts = _split_commas(inner, bracketed=True)
        if len(parts) == 1:
            return read(parts[0]) if (opening, closing) in (("(", ")"), ("[", "]")) else None
        if opening == r"\langle":
            opening, closing = "(", ")"
        return Bracket(opening, closing, tuple(read(part) for part in parts))
    return None


def _relation(text: str) -> Node | None:
    """Assignments, equations and inequalities."""
    text = split_top(text, {r"\approx"})[0].strip()
    pieces = split_top(text, {"<", ">", r"\le", r"\ge", r"\ne", "="}, keep=True)
    sides, ops = [piece.strip() for piece in pieces[::2]], pieces[1::2]
    if not ops or not all(sides):
        return None
    if set(ops) == {"="}:
        left, right = sides[0], sides[-1]
        if _ASSIGNED.fullmatch(left) and left not in _CONSTANTS:
            value = read(right)
            return replace(value, name=left) if isinstance(value, Value) else value
        return Relation("=", left, right)
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
    return Bracket(":", ":", tuple(read(part) for part in parts))


def _interval(sides: list[str], ops: list[str]) -> Node | None:
    def unknown(side: str) -> bool:
        return re.fullmatch(_NAME, side) is not None and side not in _CONSTANTS

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

_TEXT_TAIL = re.compile(
    r"(?:\s*(?:\\cdot|/)?\s*\\text\{[^{}]*\}(?:\s*\^\s*(?:\{-?[0-9]\}|[0-9]))?"
    r"(?:/[a-z]+(?:\^[0-9])?)?)+$"
)
_WORD_TAIL = re.compile(
    r"(?<=[0-9})])(\s*)([a-zA-Z]{2,}(?:\s+[a-zA-Z]+)*(?:/\s*[a-zA-Z]+)?)(?:\^\{?[0-9]\}?)?$"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_BASE = re.compile(r"([0-9][0-9A-Za-z]*)_(?:\{\s*(?:\\text\{)?\s*(\w+)\s*\}?\s*\}|([0-9]))")
_UNITS = {
    "inch": "in",
    "inche": "in",
    "foot": "ft",
    "feet": "ft",
    "yard": "yd",
    "mile": "mi",
    "meter": "m",
    "metre": "m",
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "millimetre": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "gram": "g",
    "kilogram": "kg",
    "liter": "l",
    "litre": "l",
    "dollar": "$",
    "usd": "$",
    "mph": "mi/h",
    "degree": "degree",
    "percent": "%",
}
_SHORT_UNITS = {"cm", "mm", "km", "kg", "ft", "in", "yd", "mi", "min", "hr", "mph", "ml", "sec"}


def _value(text: str) -> Value:
    unit = None
    if text.startswith(r"\$"):
        text, unit = text[2:].strip(), "$"
    elif text.startswith(r"-\$"):
        text, unit = "-" + text[3:].strip(), "$"
    if text.startswith(r"\text{") and (end := matching_end(text, 5)) is not None:
        rest = text[end + 1 :].strip()
        if re.search(r"[0-9]", rest):  # words before the value
            text = rest
    if (match := _TEXT_TAIL.search(text)) and match.start() > 0:
        text, unit = text[: match.start()], _unit(match.group())
    elif (match := _WORD_TAIL.search(text)) and _is_unit(*match.groups()):
        text, unit = text[: match.start()], _unit(match.group())
    text = text.strip()
    mark = None
    if unit in ("%", "degree"):
        mark, unit = unit, None
    elif text.endswith("%"):
        text, mark = text[:-1].strip(), "%"
    elif text.endswith(r"^\circ") and not _TRIGONOMETRIC.search(text):
        text, mark = text[: -len(r"^\circ")].strip(), "degree"
    if match := _BASE.fullmatch(text):
        digits, base = match.group(1), (match.group(2) or match.group(3)).lower()
        return Value(digits, unit, mark, _BASES.get(base, base))
    return Value(unwrap(text), unit, mark)


_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve".split()
_BASES = {name: str(i) for i, name in enumerate(_BASE_NAMES, 2)}


def _is_unit(gap: str, words: str) -> bool:
    """Whether letters after a value are a unit, not a product of symbols."""
    first = re.match(r"[a-zA-Z]+", words).group().lower()
    return first in _SHORT_UNITS or (gap != "" and len(first) > 3)


def _unit(text: str) -> str | None:
    """One spelling for a unit: ``inches^2`` and ``square inch`` become ``in^2``; None if empty."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace(r"\cdot", " ").lower()
    text = re.sub(r"[{}().,]", "", text)
    text = re.sub(r"\bper\b", "/", text)
    power = ""
    for word, exponent in (("square", "^2"), ("sq", "^2"), ("cubic", "^3"), ("cu", "^3")):
        text, count = re.subn(rf"\b{word}\b", "", text)
        if count:
            power = exponent

    def singular(match: re.Match[str]) -> str:
        word = match.group()
        word = word[:-1] if len(word) > 3 and word.endswith("s") else word
        return _UNITS.get(word, word)

    return re.sub(r"\s", "", re.sub(r"[a-z]+", singular, text)) + power or None
