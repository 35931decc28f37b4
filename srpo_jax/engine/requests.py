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
    """Key data of a request from the integers that identify it, equal on every process.

    The ids are (run seed, 0 train or 1 evaluation, step, task slot, rollout, call, member).
    """
    digest = hashlib.blake2b(np.asarray(ids, "<i8").tobytes(), digest_size=8).digest()
    a, b = np.frombuffer(digest, "<u4")
    return int(a), int(b)


@dataclass(frozen=True)
class Request:
    """One generation. Temperature 0 is greedy; top_p and top_k are for evaluation only.

    ``stop_strings`` end the response with the token that completes one of them; one that contains
    the text of a special token is looked for in the text with special tokens. With ``top_logps``
    (at most TOP_LOGPS) the completion also holds that many best ids of every step.
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
    """The sampled ids (stop id included), their log-probs under the learner's distribution,
    "stop" or "length", and the version of the weights that sampled them.

    ``top_ids`` and ``top_logps`` [tokens, n] hold the n best ids of each step, best first, where
    the request asked for them.
    """

    ids: list[int]
    logps: np.ndarray
    stop_reason: Literal["stop", "length"]
    version: int
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None
