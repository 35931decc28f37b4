"""Points at which two expressions are compared. For worker processes only (see symbolic.py).

Analytic functions that agree on a stretch agree everywhere, but |x+4| and x+4 part below -4, max(n,
5) and n below 5, and floors at whole numbers: where something has corners, points are taken on
several scales, and where something rounds, among the whole numbers too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import sympy

_SCALES = (1, 3, 30, 300, 3000)
_NEAR, _NEEDED = 3, 3
_SMALL = 16  # whole numbers from 1 to this are all tried for a single unknown
_HUGE = sympy.Float(10) ** 1000
_ROUNDING = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.frac)
_CORNERED = (
    *_ROUNDING,
    sympy.Abs,
    sympy.Max,
    sympy.Min,
    sympy.sign,
    sympy.Piecewise,
    sympy.asin,
    sympy.acos,
    sympy.atan,
    sympy.acot,
    sympy.asec,
    sympy.acsc,
)
_WHOLE = set("ijklmnpKMN")  # letters of whole numbers, where something rounds

Point = list[sympy.Rational]


def values_at_points(
    a: sympy.Expr, b: sympy.Expr, digits: int
) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Values of both, to ``digits`` decimal digits, at points where both are defined.

    Where neither has an imaginary part written in it, only points of real values count. Values
    beyond 10^1000 end the sequence: further out they only grow, and so does their cost.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=lambda s: s.name)
    real = not (a.has(sympy.I) or b.has(sympy.I))
    rounding = a.has(*_ROUNDING) or b.has(*_ROUNDING)
    whole = rounding and all(s.name.split("_")[0] in _WHOLE for s in symbols)
    analytic = _analytic(a) and _analytic(b)
    found = 0
    for needed, point in _points(len(symbols), rounding, whole, analytic):
        if found >= _NEEDED and not needed:
            continue
        here = dict(zip(symbols, point, strict=True))
        x, y = (_value_at(value, here, digits) for value in (a, b))
        if x is None or y is None or (real and not (x.is_real and y.is_real)):
            continue
        found += 1
        yield x, y
        if found >= _NEEDED and max(abs(x), abs(y)) > _HUGE:
            return


def _value_at(
    value: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational], digits: int
) -> sympy.Expr | None:
    try:
        return decimal(value.subs(point).doit(), digits)
    except ValueError:  # sympy's way to say of n!! that it is not defined
        return None


def _points(
    unknowns: int, rounding: bool, whole: bool, analytic: bool
) -> Iterator[tuple[bool, Point]]:
    """Points from near to far; those not needed are for want of others where both are defined."""
    if rounding:
        yield from ((True, point) for point in _small_numbers(unknowns))
    if not whole:
        for scale, points in _real_points(unknowns):
            yield from ((not analytic or scale <= _NEAR, point) for point in points)
    if rounding:
        yield from ((True, point) for point in _large_numbers(unknowns))
    else:
        yield from ((False, point) for point in _small_numbers(unknowns))


def decimal(value: sympy.Expr, digits: int) -> sympy.Expr | None:
    """Decimal value of a constant, or None if it has no finite one."""
    result = value.evalf(digits)
    real, imaginary = result.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    return result if real.is_finite and imaginary.is_finite else None


def _analytic(value: sympy.Expr) -> bool:
    """Whether an expression has neither jumps, corners nor branches; logarithms are left to it."""
    return not value.has(*_CORNERED) and all(
        power.exp.is_integer or power.base.is_positive for power in value.atoms(sympy.Pow)
    )


def _real_points(unknowns: int) -> Iterator[tuple[int, list[Point]]]:
    """On each scale, from small to large, two points of positive numbers and two of mixed signs."""
    rng = random.Random(0)

    def place(scale: int, sign: int) -> sympy.Rational:
        return sign * sympy.Rational(rng.randint(101, 1008) * scale, 1009)

    for scale in _SCALES:
        points = [[place(scale, 1) for _ in range(unknowns)] for _ in range(2)]
        for _ in range(2):
            signs = [-1, *(rng.choice((-1, 1)) for _ in range(unknowns - 1))]
            points.append([place(scale, sign) for sign in signs[:unknowns]])
        yield scale, points


def _small_numbers(unknowns: int) -> Iterator[Point]:
    """Whole numbers: all small ones for one unknown, else a few of their combinations."""
    if unknowns == 1:
        yield from ([sympy.Integer(n)] for n in range(1, _SMALL + 1))
        return
    rng = random.Random(1)
    for _ in range(2 * _SMALL):
        yield [sympy.Integer(rng.randint(1, 12)) for _ in range(unknowns)]


def _large_numbers(unknowns: int) -> Iterator[Point]:
    rng = random.Random(2)
    for scale in _SCALES[2:]:
        for _ in range(_SMALL):
            yield [sympy.Integer(rng.randint(scale // 10, scale)) for _ in range(unknowns)]
