"""What the Math roles wrote: boxed answers, verdicts and the aggregator's FINAL line.

``last_boxed`` reads any text; the parsers of the roles' outputs raise Malformed (envs/parsing.py).
"""

from __future__ import annotations

import re

from envs.parsing import Malformed, check_one_pair

_BOX = re.compile(r"\\boxed\s*\{")
_FINAL = re.compile(r"FINAL:(.*)")


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


def parse_box(text: str) -> str:
    """A solver's answer: the content of its last box."""
    answer = last_boxed(text)
    if answer is None:
        raise Malformed("no \\boxed answer")
    return answer


def parse_verdict(text: str) -> bool:
    """The verifier's verdict, approve (True) or reject (False), in one ``<verify>`` pair."""
    check_one_pair(text, "verify")
    approved = "<verify>approve</verify>" in text
    if not approved and "<verify>reject</verify>" not in text:
        raise Malformed("<verify> holds neither approve nor reject")
    return approved


def parse_final(text: str) -> str:
    r"""The aggregator's answer: exactly one line ``FINAL: ... \boxed{...}``, with the last box."""
    lines = text.splitlines()
    finals = [(i, match) for i, line in enumerate(lines) if (match := _FINAL.match(line.strip()))]
    if len(finals) != 1:
        raise Malformed(f"{len(finals)} lines FINAL:, want one")
    place, match = finals[0]
    if _BOX.search("\n".join(lines[place + 1 :])):
        raise Malformed("a \\boxed answer after the line FINAL:")
    answer = last_boxed(match[1])
    if answer is None:
        raise Malformed("no \\boxed answer in the line FINAL:")
    return answer
