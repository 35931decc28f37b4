"""What the Search roles wrote: routes, queries, verdicts and answers.

What does not have the form raises Malformed (envs/parsing.py).
"""

from __future__ import annotations

import re

from envs import parsing
from envs.parsing import Malformed, check_one_pair

_WORKER = re.compile(r"\s*<think>.*</think>\s*<search>(.*)</search>\s*", re.DOTALL)
_ANSWER = re.compile(r"<think>.*</think>.*<answer>(.*)</answer>", re.DOTALL)
_VERIFY = re.compile(r"<verify>\s*(yes|no)\s*</verify>")


def parse_route(text: str, workers: int, *, dedupe: bool = False) -> tuple[int, ...]:
    """The router's choice as in ``envs.parsing.parse_route``, its ``<route>`` pair the only one."""
    check_one_pair(text, "route")
    return parsing.parse_route(text, workers, dedupe=dedupe)


def parse_query(text: str) -> str:
    """A worker's query: one ``<think>`` block, then one ``<search>`` pair and nothing else."""
    check_one_pair(text, "think")
    check_one_pair(text, "search")
    match = _WORKER.fullmatch(text)
    if match is None:
        raise Malformed("not <think>...</think><search>...</search> and nothing else")
    return _filled(match[1], "search")


def parse_verdict(text: str) -> bool:
    """The verifier's verdict, yes (True) or no (False), in exactly one ``<verify>`` pair."""
    check_one_pair(text, "verify")
    match = _VERIFY.search(text)
    if match is None:
        raise Malformed("<verify> holds neither yes nor no")
    return match[1] == "yes"


def parse_answer(text: str) -> str:
    """The answer agent's answer: one ``<think>`` block, then exactly one ``<answer>`` pair."""
    check_one_pair(text, "think")
    check_one_pair(text, "answer")
    match = _ANSWER.search(text)
    if match is None:
        raise Malformed("<answer> does not follow a <think> block")
    return _filled(match[1], "answer")


def _filled(inner: str, tag: str) -> str:
    if not inner.strip():
        raise Malformed(f"<{tag}> is empty")
    return inner.strip()
