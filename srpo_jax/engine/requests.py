"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


class PromptTooLong(ValueError):
    """A prompt that does not fit; says its length and the limit."""


def request_key(*ids: int) -> tuple[int, int]:
    """Key data of a request, equal on every process.

    Args:
        ids: What identifies it: (run seed, 0 train or 1 evaluation, step, task slot, rollout, call,
            member).

    Returns:
        Two 32-bit numbers: the first 8 bytes of the blake2b digest of the ids as int64.
    """
    digest = hashlib.blake2b(np.asarray(ids, "<i8").tobytes(), digest_size=8).digest()
    a, b = np.frombuffer(digest, "<u4")
    return int(a), int(b)


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt_ids: Token ids, at least one.
        key: Key data (``request_key``): it alone decides the draws.
        max_tokens: Of the response.
        temperature: 0 is greedy, else at least LEAST_TEMPERATURE.
        top_p: Probability mass that is sampled from, for evaluation only; 1 keeps all.
        top_k: Ids that are sampled from, for evaluation only; 0 keeps all.
        stop_strings: They end the response with the token that completes one of them. One that
            contains the text of a special token is looked for in the text with special tokens.
        top_logps: How many best ids of every step the completion also holds, at most TOP_LOGPS.
    """

    prompt_ids: Sequence[int]
    key: tuple[int, int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_strings: tuple[str, ...] = ()
    top_logps: int = 0


LEAST_TEMPERATURE = 1e-6  # but for 0: logits over less overflow
TOP_LOGPS = 20  # the most that a request can ask for: one program serves every number


@dataclass
class Completion:
    """What a request gave.

    Attributes:
        ids: The sampled ids, stop id included.
        logps: float32 [T], their log-probs under the distribution that the learner scores (top_p
            and top_k left out).
        stop_reason: "stop" (a stop id or string) or "length".
        version: Of the weights that sampled them.
        top_ids: [T, n] the n best ids of each step, best first, where the request asked for them.
        top_logps: [T, n] their log-probs.
    """

    ids: list[int]
    logps: np.ndarray
    stop_reason: Literal["stop", "length"]
    version: int
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None
