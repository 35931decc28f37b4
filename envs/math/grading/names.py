"""Names in answers: what an expression leaves unknown, and what a left side stands for."""

from __future__ import annotations

import re

from envs.math.grading.latex import tokens
from envs.math.grading.units import negates

NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:'*_(?:\{[^{}]*\}|[a-zA-Z0-9]))?'*"
VARIABLE = re.compile(NAME)
_ASSIGNED = re.compile(rf"({NAME}(?:\([^()]*\))?|[a-zA-Z]{{1,3}})")
CONSTANTS = {"e", "i", r"\pi", r"\infty"}
_CALL = re.compile(rf"({NAME})\(([^()]*)\)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_STATEMENT = re.compile(r"[<>=]|\\(?:le|ge|ne|text|in|cap|cup)(?![a-zA-Z])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_GREEK = {
    "\\" + name
    for letter in (
        """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu
        nu xi rho sigma tau upsilon phi varphi chi psi omega ell hbar"""
    ).split()
    for name in (letter, letter.capitalize())
}
_FUNCTION = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]+|log|ln|lg|exp|det|gcd|lcm|max|min|operatorname|angle"
    r"|overline|vec|overrightarrow|triangle|dot|ddot|bar|hat|lim|int|sum)(?![a-zA-Z])|[|']"
)
_FUNCTION_WORD = re.compile(
    r"(?<![a-zA-Z\\])(?:sin|cos|tan|log|ln|exp|gcd|lcm|max|min|mod)(?![a-zA-Z])"
)


def unknowns(text: str) -> set[str]:
    """The letters of an expression that stand for unknown values; words in it are none."""
    text = _FUNCTION_WORD.sub("", _TEXT.sub("", text))
    return {
        token
        for token in tokens(text)
        if (len(token) == 1 and token.isalpha() and token not in "ei") or token in _GREEK
    }


def is_assigned(left: str) -> bool:
    """Whether a left side of an equation is a name: x, x_1, f(x), AB."""
    return _ASSIGNED.fullmatch(left) is not None and left not in (r"\pi", r"\infty")


def literal_call(text: str) -> bool:
    """Whether a function is taken at given numbers in it: f(8), which says nothing of f(x)."""
    return any(
        not (unknowns(arguments) or _STATEMENT.search(arguments))
        for name, arguments in _CALL.findall(text)
        if (command := _COMMAND.match(name)) is None or command.group() in _GREEK
    )


def names_quantity(left: str) -> bool:
    r"""Whether the left side of an equation names what its right side is the value of.

    So do m + n, \cos x and \text{Area}; 2x and x^2 do not: what they equal is not x.
    """
    words = _TEXT.findall(left)
    if negates(" ".join(words)) or negates(left) or literal_call(left):
        return False
    names = unknowns(left)
    return bool(is_assigned(left) or words or len(names) > 1 or (names and _FUNCTION.search(left)))
