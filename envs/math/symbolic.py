r"""Equality of two LaTeX values by sympy. Slow to import, free to hang: for worker processes only.

The parser is math-verify's (latex2sympy2_extended); the comparison is ours and exact. Numbers are
compared as rationals where they are rational, and by 120 digits relative to their size where they
are not, so that 1/2004! and 1/2006! differ. Expressions with symbols are compared at random points
at which both are defined. There is no tolerance for rounded decimals.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.function import AppliedUndef

from envs.math.numbers import Undecided, equal_numbers, parse_number

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_MAX_CHARACTERS = 1000
_DIGITS, _SLOW_DIGITS = 120, 30
_POINTS, _NEEDED = 8, 3
_FUNCTIONS = {"f", "g", "h", "F", "G", "H"}


class Unparsed(Exception):
    """A gold value that is no mathematics we can read."""


def equal(answer: str, gold: str) -> bool:
    """Whether two values are equal. Raises Unparsed where the gold cannot be read."""
    try:
        return equal_numbers(answer, gold)
    except Undecided:
        pass
    kind = next((k for k in ("positive:", "proportional:") if gold.startswith(k)), "")
    answer, gold = answer.removeprefix(kind), gold.removeprefix(kind)
    try:
        right = _parse(gold)
    except MemoryError:
        raise
    except Exception as error:
        raise Unparsed(gold[:80]) from error
    try:
        left = _parse(answer)
    except MemoryError:
        raise
    except Exception:  # the parser's errors have no common class
        return False
    if kind:
        return _proportional(left, right, positive=kind == "positive:")
    if left == right:
        return True
    matrices = [value.doit() for value in (left, right) if hasattr(value, "shape")]
    if len(matrices) == 2 and matrices[0].shape == matrices[1].shape:
        return all(_same(a, b) for a, b in zip(*map(list, matrices), strict=True))
    return _same(left, right)


def _same(left: sympy.Basic, right: sympy.Basic) -> bool:
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    left, right = left.doit(), right.doit()
    if left.free_symbols or right.free_symbols:
        return _identical(left, right)
    return _equal_constants(left, right)


# ---- parsing ------------------------------------------------------------------------------------

_PREPARE = [
    (re.compile(rule), to)
    for rule, to in (
        (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),
        (r"([0-9]+(?:\.[0-9]+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})"),
        (
            r"(?<![0-9.^_a-zA-Z}\\])([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\})",
            r"(\1+\2)",  # a mixed number
        ),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\text\{([^{}]*)\}", r"\\mathrm{\1}"),
    )
]
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")


def _parse(latex: str) -> sympy.Basic:
    if len(latex) > _MAX_CHARACTERS:
        raise ValueError("too long")
    number = parse_number(latex)
    if number is not None:
        return sympy.Rational(number.numerator, number.denominator)
    for pattern, to in _PREPARE:
        latex = pattern.sub(to, latex)
    # Decimals as exact fractions: sympy's floats would compare by rounding.
    latex = _DECIMAL.sub(
        lambda m: rf"(\frac{{{int(m.group(1) + m.group(2))}}}{{{10 ** len(m.group(2))}}})", latex
    )
    value = latex2sympy(
        latex, is_real=True, normalization_config=None, conversion_config=_CONVERSION
    )
    if not isinstance(value, sympy.Expr):
        return value
    value = value.replace(lambda e: isinstance(e, AppliedUndef), _applied)
    unit = [s for s in value.free_symbols if s.name == "i"]
    return value.subs({s: sympy.I for s in unit})


def _applied(call: AppliedUndef) -> sympy.Expr:
    """``n(n+1)`` is a product; ``f(x)`` stays one unknown."""
    name = call.func.__name__
    if name in _FUNCTIONS or len(call.args) != 1:
        return sympy.Symbol(str(call), real=True)
    return sympy.Symbol(name, real=True) * call.args[0]


# ---- comparing ----------------------------------------------------------------------------------


def _equal_constants(a: sympy.Expr, b: sympy.Expr) -> bool:
    if a.is_Rational and b.is_Rational:
        return a == b
    x, y = _number(a), _number(b)
    if x is None or y is None:
        return a == b or sympy.simplify(a - b) == 0
    verdict = _close(x, y, _digits(a, b))
    return sympy.simplify(a - b) == 0 if verdict is None else verdict


def _close(x: sympy.Expr, y: sympy.Expr, digits: int) -> bool | None:
    """Equality relative to size; None where both are so small that a true 0 may stand for them."""
    difference = abs(x - y)
    if difference <= max(abs(x), abs(y)) * sympy.Float(10) ** (10 - digits):
        return True
    return None if difference < sympy.Float(10) ** (20 - digits) else False


def _digits(*values: sympy.Expr) -> int:
    slow = any(v.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit) for v in values)
    return _SLOW_DIGITS if slow else _DIGITS


def _number(value: sympy.Expr) -> sympy.Expr | None:
    """Decimal value of a constant, or None if it has no finite one."""
    result = value.evalf(_digits(value))
    real, imaginary = result.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    return result if real.is_finite and imaginary.is_finite else None


def _identical(a: sympy.Expr, b: sympy.Expr) -> bool:
    verdicts = [_close(x, y, _digits(a, b)) for x, y in _values(a, b)]
    if False in verdicts:
        return False
    if None in verdicts or not verdicts:
        return sympy.simplify(a - b) == 0
    return len(verdicts) >= _NEEDED


def _proportional(a: sympy.Basic, b: sympy.Basic, positive: bool) -> bool:
    """Whether a = c b for a constant c other than 0 (greater than 0, if ``positive``)."""
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    factor = None
    agreed = 0
    for x, y in _values(a.doit(), b.doit()):
        if x == 0 or y == 0:
            return False
        factor = x / y if factor is None else factor
        if abs(x - factor * y) > abs(x) * sympy.Float(10) ** (20 - _DIGITS):
            return False
        if positive and not factor.is_positive:
            return False
        agreed += 1
    return agreed >= _NEEDED


def _values(a: sympy.Expr, b: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Values of both at points where both are defined: random, then small whole numbers."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=lambda s: s.name)
    real = not (a.has(sympy.I) or b.has(sympy.I))
    rng = random.Random(0)
    found = 0
    for point in range(2 * _POINTS):
        if point >= _POINTS and found >= _NEEDED:
            return
        if point < _POINTS:
            sign = 1 if point < _POINTS // 2 else -1
            places = [sympy.Rational(rng.randint(100, 2999), 1009) for _ in symbols]
            places = [p * (sign if rng.random() < 0.7 else 1) for p in places]
        else:
            places = [sympy.Integer(rng.randint(1, 12)) for _ in symbols]
        here = dict(zip(symbols, places, strict=True))
        x, y = (_at(value, here) for value in (a, b))
        if x is None or y is None or (real and not (x.is_real and y.is_real)):
            continue
        found += 1
        yield x, y


def _at(value: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr | None:
    return _number(value.subs(point).doit())
