"""What the Math roles wrote: boxed answers, routes, verdicts and the aggregator's FINAL line.

Parsers read, they never repair: what does not have the form is ``None``, and the workflow marks the
output as malformed.
"""

from __future__ import annotations

import re
from typing import Literal

_BOX = re.compile(r"\\boxed\s*\{")
_ROUTE = re.compile(r"<route>([^<>]*)</route>")
_INDEX = re.compile(r"[1-9][0-9]{0,5}")
_FINAL = re.compile(r"FINAL:(.*)")

STOP: Literal["STOP"] = "STOP"


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, stripped; None without one.

    A ``\boxed`` that no brace follows is prose and is skipped. A last box whose braces do not close
    (a generation cut inside it), or an empty one, is no answer: an earlier box was withdrawn by it.
    """
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth, i = 1, start
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 2  # an escaped brace is a character of the answer
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start:i].strip() or None
        i += 1
    return None


def parse_route(
    text: str, n: int, dedupe: bool = False
) -> tuple[int, ...] | Literal["STOP"] | None:
    """The router's choice: indices in 1..n as named, ``"STOP"``, or None where malformed.

    The last line must be exactly one ``<route>1,3</route>`` or ``<route>STOP</route>``. A repeated
    index is malformed unless ``dedupe``, which keeps its first place.
    """
    lines = text.strip().splitlines()
    match = _ROUTE.fullmatch(lines[-1].strip()) if lines else None
    if match is None:
        return None
    content = match.group(1).strip()
    if content == STOP:
        return STOP
    parts = [part.strip() for part in content.split(",")]
    if not all(_INDEX.fullmatch(part) for part in parts):
        return None
    indices = [int(part) for part in parts]
    if max(indices) > n:
        return None
    unique = tuple(dict.fromkeys(indices))
    return unique if dedupe or len(unique) == len(indices) else None


def parse_verdict(text: str) -> Literal["approve", "reject"] | None:
    """The verdict if the text has exactly one ``<verify>`` pair, around one of the two words."""
    if text.count("<verify>") != 1 or text.count("</verify>") != 1:
        return None
    if "<verify>approve</verify>" in text:
        return "approve"
    return "reject" if "<verify>reject</verify>" in text else None


def parse_final(text: str) -> str | None:
    r"""The aggregator's answer: exactly one line ``FINAL: ... \boxed{...}``, with the last box."""
    lines = text.splitlines()
    finals = [(i, match) for i, line in enumerate(lines) if (match := _FINAL.match(line.strip()))]
    if len(finals) != 1:
        return None
    place, match = finals[0]
    later = _BOX.search("\n".join(lines[place + 1 :]))
    return None if later else last_boxed(match.group(1))
