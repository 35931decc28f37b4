"""Prompts to token ids, cut to the prompt budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from envs.workflow import Cut, EpisodeFailed, Prompt

MARK = "[...] "  # stands where a text was cut


class Tokenizer(Protocol):
    """What rollouts and warm starts need of models.tokenizer.ChatTokenizer."""

    def encode_chat(self, system: str, user: str, *, thinking: bool = False) -> list[int]: ...
    def encode_text(self, text: str) -> list[int]: ...
    def count_text(self, text: str) -> int: ...
    def cut_text(self, text: str, limit: int, keep: Literal["last", "first"] = "last") -> str: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Fitted:
    """A prompt within its budget.

    Attributes:
        ids: Its tokens.
        text: The user turn, as it was cut.
        cuts: How many of its texts were cut, to their own limit or to fit.
    """

    ids: tuple[int, ...]
    text: str
    cuts: int


def fit_prompt(
    tokenizer: Tokenizer, prompt: Prompt, budget: int, *, thinking: bool = False
) -> Fitted:
    """Renders a prompt within its budget.

    Every cuttable text first keeps at most its own limit. If the whole is still too long, all of
    them get an equal share of what the fixed part leaves (what short ones do not use goes to the
    others). A cut of either kind is counted, and marked where the mark fits.

    Args:
        tokenizer: Of the model.
        prompt: With its texts uncut.
        budget: Tokens, those of the chat template among them.
        thinking: For chat templates that know it.

    Raises:
        EpisodeFailed: ("prompt_budget") where the fixed part alone does not fit.
    """

    def render(texts: list[str]) -> tuple[str, list[int]]:
        rest = iter(texts)
        user = "".join(p if isinstance(p, str) else next(rest) for p in prompt.user)
        return user, tokenizer.encode_chat(prompt.system, user, thinking=thinking)

    def fitted(texts: list[str]) -> Fitted:
        cuts = sum(part.text != text for part, text in zip(cuttable, texts, strict=True))
        return Fitted(tuple(ids), user, cuts)

    cuttable = [part for part in prompt.user if isinstance(part, Cut)]
    texts = [
        part.text if part.limit is None else _shorten(tokenizer, part, part.limit)
        for part in cuttable
    ]
    user, ids = render(texts)
    if len(ids) <= budget:
        return fitted(texts)
    fixed = len(render([""] * len(texts))[1])
    if fixed > budget or not texts:
        raise EpisodeFailed(
            "prompt_budget",
            f"the fixed part of the prompt has {fixed} tokens, the limit is {budget}",
        )
    lengths = [tokenizer.count_text(text) for text in texts]
    left = budget - fixed
    while True:
        # Tokens may merge differently at the seams, so what is left shrinks until the whole fits.
        share = equal_share(lengths, left)
        shorter = [
            text if length <= share else _shorten(tokenizer, part, share)
            for part, text, length in zip(cuttable, texts, lengths, strict=True)
        ]
        user, ids = render(shorter)
        if len(ids) <= budget:
            return fitted(shorter)
        left -= len(ids) - budget


def equal_share(lengths: list[int], budget: int) -> int:
    """The largest share such that texts cut to it fit ``budget`` together: what short texts leave
    is shared by the others."""
    share = 0
    for i, length in enumerate(ordered := sorted(lengths)):
        share = max(budget, 0) // (len(ordered) - i)
        if length > share:
            return share
        budget -= length
    return share


def _shorten(tokenizer: Tokenizer, part: Cut, limit: int) -> str:
    """The kept end of a text within ``limit`` tokens; the cut is marked where the mark fits."""
    if limit <= 0:
        return ""
    if tokenizer.count_text(part.text) <= limit:
        return part.text
    for length in range(limit - tokenizer.count_text(MARK), 0, -1):
        kept = tokenizer.cut_text(part.text, length, part.keep)
        marked = MARK + kept if part.keep == "last" else kept + " " + MARK.strip()
        if tokenizer.count_text(marked) <= limit:  # tokens may merge differently at the seam
            return marked
    return tokenizer.cut_text(part.text, limit, part.keep)
