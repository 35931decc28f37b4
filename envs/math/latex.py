r"""LaTeX of answers as text: one spelling for the same thing, and splitting outside brackets."""

from __future__ import annotations

import re
from collections.abc import Collection

_TOKEN = re.compile(r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN = {"(", "[", "{", r"\{", r"\langle", r"\lbrace"}
_CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\rbrace"}

_UNICODE = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "±": r"\pm ",
    "°": r"^\circ",
    "²": "^2",
    "³": "^3",
    "\u00a0": " ",
    "\u2009": " ",
}
_FONT = (
    r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm"
    r"|textbf|textit|textrm|textsf|textnormal|mbox)"
)
_RULES = [
    (re.compile(rule), to)
    for rule, to in (
        (r"\\\\\[[^\]]*\]", r"\\\\"),  # a row break with a gap
        (r"(?<!\\)\$", ""),
        (r"(?<!\\)\\[()\[\]]", " "),  # maths delimiters
        (r"(?:,\s*)?\\(?:dots|ldots|cdots)", " "),
        (r"\\(?:left|right|mleft|mright|[bB]ig+[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\thinspace", " "),
        (r"\{,\}", ","),
        (r"\\mathrm\{([edi])\}|\\(?:mathbf|mathit|boldsymbol|bm)\{([a-zA-Z])\}", r"\1\2"),
        (_FONT + r"(?=\s*\{)", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=|\\leq?q(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=|\\geq?q(?![a-zA-Z])", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\bigcup(?![a-zA-Z])", r"\\cup"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\vert(?![a-zA-Z])", "|"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\infin(?![a-zA-Z])|(?<![a-zA-Z\\])(?:infinity|oo)(?![a-zA-Z])", r"\\infty"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\\%", "%"),
        (r"\\text\{\s*(?:\\?%|percent)\s*\}|\s*\bpercent\b", "%"),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)", r"^\\circ"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ"),
        (r"\\text\{\s*,?\s*and\s*\}|(?<![a-zA-Z])and(?![a-zA-Z])|\\land(?![a-zA-Z])", ","),
        (r"\\text\{\s*,?\s*or\s*\}|(?<![a-zA-Z])or(?![a-zA-Z])|\\vee(?![a-zA-Z])", r"\\lor "),
        (r",\s*(?=,|\\lor)", ""),
        (r"\\text\{\s*\}", ""),
        (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\}\s+\{", "}{"),
        (r"(?<![.,;:])[.,;:]+\s*$", ""),
        (r"\s+", " "),
    )
]
_MAX_CHARACTERS = 20_000


def clean(text: str) -> str:
    """One spelling: no delimiters, sizes or fonts, ``\\frac{a}{b}``, ``\\le``, plain spaces."""
    text = " ".join(text[-_MAX_CHARACTERS:].split())
    for char, latex in _UNICODE.items():
        text = text.replace(char, latex)
    for pattern, to in _RULES:
        text = pattern.sub(to, text).strip()
    return text


def tokens(text: str) -> list[str]:
    r"""Commands (``\frac``, ``\{``, ``\begin{pmatrix}``) and single characters."""
    return _TOKEN.findall(text)


def _depth(token: str) -> int:
    if token in _OPEN or token.startswith(r"\begin"):
        return 1
    return -1 if token in _CLOSE or token.startswith(r"\end") else 0


def deepest(text: str) -> int:
    """How deep brackets nest."""
    depth = most = 0
    for token in tokens(text):
        depth += _depth(token)
        most = max(most, depth)
    return most


def split_top(text: str, separators: Collection[str], keep: bool = False) -> list[str]:
    """Parts between separators that stand outside all brackets; ``keep`` returns those too."""
    parts, depth = [""], 0
    for token in tokens(text):
        depth += _depth(token)
        if depth == 0 and token in separators:
            parts += [token, ""] if keep else [""]
        else:
            parts[-1] += token
    return parts


def matching_end(text: str, start: int) -> int | None:
    """Where the bracket that opens at ``start`` closes (the closing token's place), or None."""
    depth, place = 0, start
    for token in tokens(text[start:]):
        depth += _depth(token)
        if depth == 0:
            return place
        place += len(token)
    return None


def unwrap(text: str) -> str:
    """Without bare braces around the whole."""
    text = text.strip()
    while text.startswith("{") and matching_end(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
