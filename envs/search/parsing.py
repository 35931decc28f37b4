"""Parsers of the Search roles' outputs: what does not fit is Malformed and is never repaired."""

from __future__ import annotations

import re

STOP = "STOP"

_INDICES = re.compile(r"[0-9]{1,6}(\s*,\s*[0-9]{1,6})*")
_WORKER = re.compile(r"\s*<think>.*</think>\s*<search>(.*)</search>\s*", re.DOTALL)
_ANSWER = re.compile(r"<think>.*</think>.*<answer>(.*)</answer>", re.DOTALL)
_VERIFY = re.compile(r"<verify>\s*(yes|no)\s*</verify>")


class Malformed(ValueError):
    """An output that does not follow its role's format; the message is the reason."""


def parse_route(text: str, workers: int, *, dedupe: bool = False) -> tuple[int, ...] | None:
    """The router's choice: sorted worker numbers in 1..workers, or None for STOP.

    The last line is one ``<route>`` pair, the only one of the text. Repeated numbers are malformed
    unless ``dedupe``.
    """
    _once(text, "route")
    inner = re.fullmatch(r"<route>(.*)</route>", text.strip().rsplit("\n", 1)[-1].strip())
    if inner is None:
        raise Malformed("<route> is not the last line")
    choice = inner[1].strip()
    if choice == STOP:
        return None
    if not _INDICES.fullmatch(choice):
        raise Malformed("<route> holds neither worker numbers nor STOP")
    numbers = [int(number) for number in choice.split(",")]
    if not all(1 <= number <= workers for number in numbers):
        raise Malformed(f"<route> names a worker outside 1..{workers}")
    if len(set(numbers)) < len(numbers) and not dedupe:
        raise Malformed("<route> repeats a worker")
    return tuple(sorted(set(numbers)))


def parse_query(text: str) -> str:
    """A worker's query: one ``<think>`` block, then one ``<search>`` pair and nothing else."""
    _once(text, "think")
    _once(text, "search")
    match = _WORKER.fullmatch(text)
    if match is None:
        raise Malformed("not <think>...</think><search>...</search> and nothing else")
    return _filled(match[1], "search")


def parse_verdict(text: str) -> bool:
    """The verifier's verdict, yes (True) or no (False), in exactly one ``<verify>`` pair."""
    _once(text, "verify")
    match = _VERIFY.search(text)
    if match is None:
        raise Malformed("<verify> holds neither yes nor no")
    return match[1] == "yes"


def parse_answer(text: str) -> str:
    """The answer agent's answer: one ``<think>`` block, then exactly one ``<answer>`` pair."""
    _once(text, "think")
    _once(text, "answer")
    match = _ANSWER.search(text)
    if match is None:
        raise Malformed("<answer> does not follow a <think> block")
    return _filled(match[1], "answer")


def _once(text: str, tag: str) -> None:
    opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    if (opened, closed) != (1, 1):
        raise Malformed(f"{opened} <{tag}> and {closed} </{tag}>, want one pair")


def _filled(inner: str, tag: str) -> str:
    if not inner.strip():
        raise Malformed(f"<{tag}> is empty")
    return inner.strip()
