"""How the built-in workflows read what a role wrote: strictly, and in one way.

A parser takes the text of one output and returns what it says. What does not have the form raises
:class:`Malformed` with the reason; nothing is ever repaired. :func:`read` marks the output with
that reason, so that it is penalised and trained, and the workflow decides how it goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from envs.workflow import Output, Team

STOP = "STOP"

_ROUTE = re.compile(r"<route>([^<>]*)</route>")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")

T = TypeVar("T")


class Malformed(ValueError):
    """An output that does not follow its role's format; the message is the reason."""


def read(team: Team, output: Output, parse: Callable[[str], T]) -> T | Malformed:
    """What ``parse`` finds in an output, or why it is malformed after marking it so."""
    try:
        return parse(output.text)
    except Malformed as error:
        team.malformed(output, str(error))
        return error


def parse_route(text: str, count: int, *, dedupe: bool = False) -> tuple[int, ...]:
    """The router's choice, on a last line that is exactly ``<route>1,3</route>``.

    Args:
        text: The router's output.
        count: How many agents there are; they are numbered from 1.
        dedupe: Keep the first place of a number that is named again, instead of refusing it.

    Returns:
        The numbers in the order named; ``()`` for ``<route>STOP</route>``.

    Raises:
        Malformed: The last line is another one, names nobody or an agent that is not there, or
            names an agent twice.
    """
    lines = text.strip().splitlines()
    match = _ROUTE.fullmatch(lines[-1].strip()) if lines else None
    if match is None:
        raise Malformed("the last line is not one <route> pair")
    choice = match[1].strip()
    if choice == STOP:
        return ()
    parts = [part.strip() for part in choice.split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise Malformed(f"<route> holds neither numbers nor {STOP}")
    numbers = [int(part) for part in parts]
    if max(numbers) > count:
        raise Malformed(f"<route> names a number outside 1..{count}")
    unique = tuple(dict.fromkeys(numbers))
    if len(unique) < len(numbers) and not dedupe:
        raise Malformed("<route> names a number twice")
    return unique


def route_to_all(roles: Sequence[str], prefix: str) -> str:
    """The route that names every one of ``roles`` that starts with ``prefix`` (``solver_``)."""
    numbers = [role.removeprefix(prefix) for role in roles if role.startswith(prefix)]
    return f"<route>{','.join(numbers)}</route>"


def check_one_pair(text: str, tag: str) -> None:
    """Raises Malformed unless ``tag`` opens once and closes once in the whole text."""
    opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    if (opened, closed) != (1, 1):
        raise Malformed(f"{opened} <{tag}> and {closed} </{tag}>, want one pair")
