r"""LaTeX of answers as text: one spelling for the same thing, and splitting outside brackets."""

from __future__ import annotations

import re
from collections.abc import Collection

_TOKEN = re.compile(r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_IDLE_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9\s])")
MAX_CHARACTERS = 2000  # of an answer that needs reading; plain numbers may be longer
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
    "’": "'",
    "′": "'",
    "″": "''",
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
        (r"\\\\\[[^\[\]\\]*\]", r"\\\\"),  # a row break with a gap
        (r"(?<!\\)\$", ""),
        (r"(?<!\\)\\[()\[\]]", " "),  # maths delimiters
        (r"\\(?:dots|ldots|cdots|dotsc|dotsb)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
        (r"\\(?:left|right|mleft|mright|[bB]ig+[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\!", ""),
        (r" ?\^ ?\{(?: ?\\prime)+ ?\}", lambda match: "'" * match.group().count("prime")),
        (r" ?\^ ?\\prime(?![a-zA-Z])", "'"),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\thinspace", " "),
        (r"\{,\}", ","),
        (r"\\mathrm\{([edi])\}|\\(?:mathbf|mathit|boldsymbol|bm)\{([a-zA-Z])\}", r"\1\2"),
        (_FONT + r"(?= ?\{)", r"\\text"),
        (r"\\text \{", r"\\text{"),
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
        (r"(^|[(\[{,] ?)\+ ?\\infty", r"\1\\infty"),
        (r"\\%", "%"),
        (r"\\text\{ ?(?:\\?%|percent) ?\}| ?\bpercent\b", "%"),
        (r"\^ ?\{ ?\\(?:circ|degree) ?\}|\^ ?\\(?:circ|degree)", r"^\\circ"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ"),
        (r"\\text\{ ?,? ?and ?\}|(?<![a-zA-Z])and(?![a-zA-Z])|\\land(?![a-zA-Z])", ","),
        (r"\\text\{ ?,? ?or ?\}|(?<![a-zA-Z])or(?![a-zA-Z])|\\vee(?![a-zA-Z])", r"\\lor "),
        (r", ?(?=,|\\lor)", ""),
        (r"\\text\{ ?\}", ""),
        (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\sqrt"),
        (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\frac ?([0-9a-zA-Z]) ?([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac ?([0-9a-zA-Z]) ?\{", r"\\frac{\1}{"),
        (r"\\frac ?(\{[^{}]*\}) ?([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\frac \{", r"\\frac{"),
        (r"\} \{", "}{"),
        (r"(?<![.,;:])[.,;:]+ ?$", ""),
    )
]


def clean(text: str) -> str:
    """One spelling: no delimiters, sizes or fonts, ``\\frac{a}{b}``, ``\\le``, plain spaces."""
    for char, latex in _UNICODE.items():
        text = text.replace(char, latex)
    text = " ".join(text.split())
    for pattern, to in _RULES:  # each sees single spaces only: runs of them cost quadratic time
        text = " ".join(pattern.sub(to, text).split())
    return text


def tokens(text: str) -> list[str]:
    r"""Commands (``\frac``, ``\{``, ``\begin{pmatrix}``) and single characters."""
    return _TOKEN.findall(text)


def squeeze(text: str) -> str:
    """Without spaces, but for those that keep two numbers apart."""
    return _IDLE_SPACE.sub("", text)


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
    parts, depth, start = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += _depth(token)
        if depth == 0 and token in separators:
            parts.append(text[start : match.start()])
            if keep:
                parts.append(token)
            start = match.end()
    return [*parts, text[start:]]


def matching_end(text: str, start: int) -> int | None:
    """Where the bracket that opens at ``start`` closes (the closing token's place), or None."""
    depth = 0
    for match in _TOKEN.finditer(text, start):
        depth += _depth(match.group())
        if depth == 0:
            return match.start()
    return None


def unwrap(text: str) -> str:
    """Without bare braces around the whole."""
    text = text.strip()
    if not text.startswith("{"):
        return text
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _TOKEN.finditer(text):
        step = _depth(match.group())
        if step > 0:
            opened.append(match.start())
        elif step < 0 and opened:
            closing[opened.pop()] = match.start()
    left, right = 0, len(text)
    while left < right and text[left] == "{" and closing.get(left) == right - 1:
        left, right = left + 1, right - 1
        while left < right and text[left].isspace():
            left += 1
        while left < right and text[right - 1].isspace():
            right -= 1
    return text[left:right]
