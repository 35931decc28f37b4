r"""Equality of two LaTeX values by sympy. Slow to import, free to hang: for worker processes only.

The parser is math-verify's (latex2sympy2_extended); the comparison is ours and exact. Numbers are
compared as rationals where they are rational, and by 120 digits relative to their size where they
are not, so that 1/2004! and 1/2006! differ. Expressions with symbols are compared at random points
at which both are defined. There is no tolerance for rounded decimals.
"""

from __future__ import annotations

import sympy

from envs.math.grading.numbers import Undecided, equal_numbers
from envs.math.grading.sampling import decimal, values_at_points
from envs.math.grading.symbols import parse

_DIGITS, _SLOW_DIGITS = 120, 30
_NEEDED = 3


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
        right = parse(gold)
    except (MemoryError, RecursionError, Undecided):
        raise
    except Exception as error:
        raise Unparsed(gold[:80]) from error
    try:
        left = parse(answer)
    except (MemoryError, RecursionError, Undecided):
        raise
    except Exception:  # the parser's errors have no common class
        return False
    if kind:
        return _proportional(left, right, positive=kind == "positive:")
    if left == right:
        return not _undefined(left)
    matrices = [value.doit() for value in (left, right) if hasattr(value, "shape")]
    if len(matrices) == 2 and matrices[0].shape == matrices[1].shape:
        return all(_same(a, b) for a, b in zip(*map(list, matrices), strict=True))
    return _same(left, right)


def _undefined(value: sympy.Basic) -> bool:
    """Whether a value is 1/0 or 0/0, which equal nothing."""
    value = value.doit() if isinstance(value, sympy.Expr) else value
    return value.has(sympy.nan, sympy.zoo)


def _same(left: sympy.Basic, right: sympy.Basic) -> bool:
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    left, right = left.doit(), right.doit()
    if _undefined(left) or _undefined(right):
        return False
    if left.free_symbols or right.free_symbols:
        return _identical(left, right)
    return _equal_constants(left, right)


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
    return decimal(value, _digits(value))


def _identical(a: sympy.Expr, b: sympy.Expr) -> bool:
    digits, verdicts = _digits(a, b), []
    for x, y in values_at_points(a, b, digits):
        verdicts.append(_close(x, y, digits))
        if verdicts[-1] is False:
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
    a, b = a.doit(), b.doit()
    for x, y in values_at_points(a, b, _digits(a, b)):
        if x == 0 and y == 0:
            continue
        if x == 0 or y == 0:
            return False
        factor = x / y if factor is None else factor
        if abs(x - factor * y) > abs(x) * sympy.Float(10) ** (20 - _digits(a, b)):
            return False
        if positive and not factor.is_positive:
            return False
        agreed += 1
    return agreed >= _NEEDED
