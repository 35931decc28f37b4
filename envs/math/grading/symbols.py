r"""LaTeX of one value as a sympy expression. For worker processes only (see symbolic.py).

The parser is math-verify's (latex2sympy2_extended). It drops what it has no meaning for and takes
letters for constants, either of which makes two values one: so y' is y, x^T is x, I_0 is the
imaginary unit, \gamma is Euler's constant and 2(3) is 2 + 3. What is rewritten or refused here is
what it would drop or mistake.
"""

from __future__ import annotations

import re

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef

from envs.math.grading.latex import tokens
from envs.math.grading.numbers import LENGTH_LIMIT, Undecided, parse_number

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_MAX_CHARACTERS = 1000
_FUNCTIONS = {"f", "g", "h", "F", "G", "H"}


def _mixed(match: re.Match[str]) -> str:
    """A mixed number as a sum; 3 times 4/2 is none."""
    whole, above, below = match.groups()
    sign = "+" if int(above) < int(below) else r"\cdot "
    return rf"({whole}{sign}\frac{{{above}}}{{{below}}})"


_PREPARE = [
    (re.compile(rule), to)
    for rule, to in (
        (r"(?<![0-9])([0-9]+(?:\.[0-9]+)?) ?\^\\circ", r"(\\frac{\1\\pi}{180})"),
        (r"(?<![0-9.^_a-zA-Z}\\])([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}", _mixed),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\^ ?\(([^()]*)\)", r"^{\1}"),
        # T as a power, unless what stands before it can be transposed.
        (r"(?<!matrix\})(?<!array\})\^ ?(?:T|\{ ?T ?\})", r"^{(T)}"),
        (r"\\bmod(?![a-zA-Z])", r"\\mod "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\text\{([^{}]*)\}", r"\\mathrm{\1}"),
    )
]
_DECIMAL = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]+)")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
# Dots for "and so on", values at a point, decimals of three parts and numbers side by side.
_UNREADABLE = re.compile(
    r"\\(?:ldots|phantom)|\|[_^]|\.[0-9]* ?\.|(?<![0-9._^])[0-9]+(?:\.[0-9]*)? \.?[0-9]"
)
_PRIMED = re.compile(r"([a-zA-Z]|\\[a-zA-Z]+)(_\{[^{}]*\}|_[a-zA-Z0-9])?('+)")
_KEPT = re.compile(r"(\\(?:mathrm|operatorname|begin|end) ?\{[^{}]*\}|\\Gamma(?= ?\())")
_RENAMED = {"I": "I", "E": "E", r"\gamma": "gammasymbol", r"\Gamma": "Gammasymbol"}


def parse(latex: str) -> sympy.Basic:
    """The expression of a cleaned LaTeX value. Raises Undecided where it is too long."""
    if len(latex) > _MAX_CHARACTERS:
        raise Undecided(f"{LENGTH_LIMIT}: {len(latex)} characters, at most {_MAX_CHARACTERS}")
    number = parse_number(latex)
    if number is not None:
        return sympy.Rational(number.numerator, number.denominator)
    latex = _ungrouped(latex)
    for pattern, to in _PREPARE:
        latex = pattern.sub(to, latex)
    if _UNREADABLE.search(latex):
        raise ValueError(f"no value: {latex[:80]}")
    # Decimals as exact fractions: sympy's floats would compare by rounding.
    latex = _DECIMAL.sub(
        lambda m: rf"(\frac{{{int(m.group(1) + m.group(2))}}}{{{10 ** len(m.group(2))}}})", latex
    )
    value = _convert(_rename(latex))
    if not isinstance(value, sympy.Expr):
        return value
    value = value.replace(lambda e: isinstance(e, AppliedUndef), _applied)
    value = value.replace(lambda e: isinstance(e, sympy.Derivative), _derivative)
    unit = [s for s in value.free_symbols if s.name == "i"]
    return value.subs({s: sympy.I for s in unit})


class _Converter(_Latex2Sympy):
    """The library's converter without its mixed numbers and without what it drops."""

    def convert_postfix_list(self, arr, i=0):
        factors = [self.convert_postfix(factor) for factor in arr[i:]]
        if not all(isinstance(factor, sympy.Expr | sympy.MatrixBase) for factor in factors):
            return super().convert_postfix_list(arr, i)  # a derivative
        value = factors[-1]
        for factor in reversed(factors[:-1]):
            matrix = getattr(factor, "is_Matrix", False) or getattr(value, "is_Matrix", False)
            value = (self.mat_mul_flat if matrix else self.mul_flat)(factor, value)
        return value

    def convert_postfix(self, postfix):
        exp = postfix.exp if hasattr(postfix, "exp") else postfix.exp_nofunc
        value, bangs = self.convert_exp(exp()), 0
        for op in postfix.postfix_op():
            if op.BANG():
                bangs += 1
            elif op.degree():
                value = sympy.Mul(value, sympy.pi / 180)
            elif op.transpose() and getattr(value, "is_Matrix", False):
                value = value.T
            else:
                raise ValueError("an operation that would be dropped")
        if bangs > 2:
            raise ValueError("a factorial that is none")
        factorial = (None, sympy.factorial, sympy.factorial2)[bangs]
        return factorial(value, evaluate=False) if factorial else value

    def convert_func(self, func):
        if func.FUNC_SQRT() and func.root:
            value, root = self.convert_expr(func.base), self.convert_expr(func.root)
            if root.is_Integer and root % 2 == 1 and not value.has(sympy.Symbol("i", real=True)):
                return sympy.sign(value) * sympy.Abs(value) ** (1 / root)  # the real root
        return super().convert_func(func)

    def convert_atom(self, atom):
        if atom.number_subexpr() and atom.number_subexpr().subexpr():
            raise ValueError("a subscript that would be dropped")
        return super().convert_atom(atom)


def _convert(latex: str) -> sympy.Basic:
    return _Converter(is_real=True, config=_CONVERSION).parse(latex)


def _ungrouped(latex: str) -> str:
    r"""Without the commas of 1,000; those between a function's arguments stay."""
    if "," not in latex:
        return latex
    places, calls = set(), []
    place = 0
    for token in tokens(latex):
        if token in ("(", "["):
            calls.append(token == "(" and _called(latex, place))
        elif token in (")", "]") and calls:
            calls.pop()
        elif token == "," and any(calls):
            places.add(place)
        place += len(token)
    return _THOUSANDS.sub(lambda m: "," if m.start() in places else "", latex)


def _called(latex: str, place: int) -> bool:
    """Whether the parenthesis at a place holds a function's arguments."""
    return re.search(r"[a-zA-Z}]$", latex[max(0, place - 20) : place].rstrip()) is not None


def _rename(latex: str) -> str:
    r"""Letters that the parser takes for constants, and primed ones, as symbols of their own."""
    latex = _PRIMED.sub(_primed, latex)
    parts = _KEPT.split(latex)
    for i in range(0, len(parts), 2):
        out = []
        for token in tokens(parts[i]):
            out.append(rf"\text{{{_RENAMED[token]}}}" if token in _RENAMED else token)
        parts[i] = "".join(out)
    return "".join(parts)


def _primed(match: re.Match[str]) -> str:
    letter, subscript, primes = match.groups()
    return rf"\mathrm{{{letter.lstrip(chr(92))}{'prime' * len(primes)}}}{subscript or ''}"


def _applied(call: AppliedUndef) -> sympy.Expr:
    """``n(n+1)`` is a product; ``f(x)`` and the value ``I(0)`` stay unknowns of their own."""
    name = call.func.__name__
    argument = call.args[0]
    product = len(call.args) == 1 and not argument.is_Symbol and argument.free_symbols
    if name in _FUNCTIONS or "prime" in name or not product:
        if name not in (r"\pi", "e", "i") or not (name == r"\pi" or argument.is_Add):
            return sympy.Symbol(str(call), real=True)
    return _convert(name) * argument


def _derivative(call: sympy.Derivative) -> sympy.Expr:
    """``dy/dx`` is an unknown: y may depend on x. Sympy's would be 0."""
    return sympy.Symbol(str(call), real=True) if call.expr.is_Symbol else call
