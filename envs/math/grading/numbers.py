"""Exact values of plain numbers as answers write them, and their comparison without algebra."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from envs.math.grading.latex import MAX_CHARACTERS, clean, squeeze, unwrap


class Undecided(Exception):
    """Two answers need algebra, or are over a limit; the message says which."""


LENGTH_LIMIT = "length limit"
_MAX_EXPONENT, _SHORT = 4000, 64
_PLAIN = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DEC = rf"(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]? ?{_DEC}"
_FRAC = rf"\\frac\{{ ?({_SIGNED}) ?\}}\{{ ?({_SIGNED}) ?\}}"
_POWER = r"10 ?\^ ?(?:\{ ?([+-]?[0-9]+) ?\}|([0-9]))"
_NUMBER_FORMS: list[tuple[re.Pattern[str], Callable[..., Fraction | None]]] = [
    (re.compile(rf"({_DEC})"), lambda a: _dec(a)),
    (re.compile(_FRAC), lambda a, b: _dec(a) / _dec(b)),
    (re.compile(rf"({_SIGNED}) ?/ ?({_SIGNED})"), lambda a, b: _dec(a) / _dec(b)),
    (re.compile(rf"([0-9]+) ?{_FRAC}"), lambda n, a, b: _mixed(int(n), _dec(a) / _dec(b))),
    (re.compile(r"([0-9]+) ([0-9]+)/([0-9]+)"), lambda n, a, b: _mixed(int(n), _dec(a) / _dec(b))),
    (re.compile(rf"({_DEC})[eE]([+-]?[0-9]+)"), lambda a, n: _dec(a) * _ten(n)),
    (re.compile(_POWER), lambda n, m: _ten(n or m)),
    (
        re.compile(rf"({_DEC}) ?(?:\\times|\\cdot|\*|x) ?{_POWER}"),
        lambda a, n, m: _dec(a) * _ten(n or m),
    ),
    (
        re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}"),
        lambda a, b, c: _repeating(a, b, c),
    ),
]


def parse_number(text: str) -> Fraction | None:
    """Exact value of a plain integer, decimal, fraction, mixed number or power of ten, or None.

    Texts over ``MAX_CHARACTERS`` have none: Python's conversion takes quadratic time.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = unwrap(clean(text))
    sign = 1
    while text[:1] in ("+", "-"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:].lstrip()
    if not text:
        return None
    for pattern, value in _NUMBER_FORMS:
        if match := pattern.fullmatch(text):
            try:
                number = value(*match.groups())
            except (ZeroDivisionError, OverflowError):
                return None
            return None if number is None else sign * number
    return None


def _dec(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text).rstrip("."))


def _mixed(whole: int, part: Fraction) -> Fraction | None:
    """A whole number and a proper fraction; 3 beside 4/2 is no mixed number."""
    return whole + part if 0 <= part < 1 else None


def _ten(exponent: str) -> Fraction:
    if abs(int(exponent)) > _MAX_EXPONENT:
        raise OverflowError
    return Fraction(10) ** int(exponent)


def _repeating(whole: str, head: str, cycle: str) -> Fraction:
    tail = Fraction(int(cycle), 10 ** len(cycle) - 1)
    return Fraction(f"{whole or 0}.{head or 0}") + tail / 10 ** len(head)


def plain_verdict(answer: str, gold: str) -> bool | None:
    """Whether two texts are one text or two plain numbers; None if more must be read to tell.

    For use outside a worker: time is linear in decimals of any length, and short else.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return answer != ""
    a, b = _digits(answer), _digits(gold)
    if a is not None and b is not None:
        return a == b
    if max(len(answer), len(gold)) > _SHORT:
        return None
    x, y = parse_number(answer), parse_number(gold)
    if x is None or y is None:
        return None
    grouped = "," in answer + gold  # 100,200 is also a list
    return True if x == y else None if grouped else False


def _digits(text: str) -> tuple[str, str, str] | None:
    """Sign, whole and fractional digits of a plain decimal."""
    match = _PLAIN.fullmatch(text)
    if match is None or not (match.group(2) or match.group(3)):
        return None
    whole, fraction = match.group(2).lstrip("0"), (match.group(3) or "").rstrip("0")
    return "-" if match.group(1) == "-" and (whole or fraction) else "", whole, fraction


def answer_key(answer: str) -> Fraction | str:
    """What two answers share when a vote counts them together: value of a number, else the text."""
    if len(answer) > MAX_CHARACTERS:
        return squeeze(answer)
    value = parse_number(answer)
    return squeeze(clean(answer)) if value is None else value


def equal_numbers(a: str, b: str) -> bool:
    """Whether two values are equal, if both are plain numbers. Raises Undecided if not."""
    if squeeze(a) == squeeze(b):
        return True
    x, y = parse_number(a), parse_number(b)
    if x is None or y is None:
        raise Undecided("needs algebra")
    return x == y
