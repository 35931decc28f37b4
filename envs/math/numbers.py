"""Exact values of plain numbers as answers write them, and their comparison without algebra."""

from __future__ import annotations

import re
from fractions import Fraction

from envs.math.latex import clean, unwrap


class Undecided(Exception):
    """Two values need algebra."""


_MAX_CHARACTERS = 4000  # below Python's limit for integers in text
_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DEC = rf"(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]?\s*{_DEC}"
_FRAC = rf"\\frac\{{\s*({_SIGNED})\s*\}}\{{\s*({_SIGNED})\s*\}}"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))"
_NUMBER_FORMS = [
    (re.compile(rf"({_DEC})"), lambda a: _dec(a)),
    (re.compile(_FRAC), lambda a, b: _dec(a) / _dec(b)),
    (re.compile(rf"({_SIGNED})\s*/\s*({_SIGNED})"), lambda a, b: _dec(a) / _dec(b)),
    (re.compile(rf"([0-9]+)\s*{_FRAC}"), lambda n, a, b: int(n) + _dec(a) / _dec(b)),
    (re.compile(r"([0-9]+)\s+([0-9]+)/([0-9]+)"), lambda n, a, b: int(n) + _dec(a) / _dec(b)),
    (re.compile(rf"({_DEC})[eE]([+-]?[0-9]+)"), lambda a, n: _dec(a) * _ten(n)),
    (re.compile(_POWER), lambda n, m: _ten(n or m)),
    (
        re.compile(rf"({_DEC})\s*(?:\\times|\\cdot|\*|x)\s*{_POWER}"),
        lambda a, n, m: _dec(a) * _ten(n or m),
    ),
    (
        re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}"),
        lambda a, b, c: _repeating(a, b, c),
    ),
]


def parse_number(text: str) -> Fraction | None:
    """Exact value of a plain integer, decimal, fraction, mixed number or power of ten, or None."""
    text = unwrap(clean(text))
    sign = 1
    while text[:1] in ("+", "-"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:].lstrip()
    if not text or len(text) > _MAX_CHARACTERS:
        return None
    for pattern, value in _NUMBER_FORMS:
        if match := pattern.fullmatch(text):
            try:
                return sign * value(*match.groups())
            except (ZeroDivisionError, OverflowError):
                return None
    return None


def _dec(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text).rstrip("."))


def _ten(exponent: str) -> Fraction:
    if abs(int(exponent)) > _MAX_CHARACTERS:
        raise OverflowError
    return Fraction(10) ** int(exponent)


def _repeating(whole: str, head: str, cycle: str) -> Fraction:
    tail = Fraction(int(cycle), 10 ** len(cycle) - 1)
    return Fraction(f"{whole or 0}.{head or 0}") + tail / 10 ** len(head)


def answer_key(answer: str) -> Fraction | str:
    """What two answers share when a vote counts them together: value of a number, else the text."""
    value = parse_number(answer)
    return re.sub(r"\s", "", clean(answer)) if value is None else value


def equal_numbers(a: str, b: str) -> bool:
    """Whether two values are equal, if both are plain numbers. Raises Undecided if not."""
    if re.sub(r"\s", "", a) == re.sub(r"\s", "", b):
        return True
    x, y = parse_number(a), parse_number(b)
    if x is None or y is None:
        raise Undecided
    return x == y
