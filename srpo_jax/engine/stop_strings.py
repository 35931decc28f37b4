"""Where a response ends by its stop strings, found from its newest tokens alone: reading the whole
response after every burst would take quadratic time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

_PARTIAL = "\ufffd"  # what a decoder gives for a character whose bytes are not all there
_HELD = 32  # tokens in a row that may end within a character; more are no text


class TextDecoder(Protocol):
    """What stop strings need of models.tokenizer.ChatTokenizer."""

    @property
    def special_tokens(self) -> Collection[str]:
        """Texts of the tokens that ``decode`` leaves out unless ``special``."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...


def names_special(string: str, special_tokens: Collection[str]) -> bool:
    """Whether a stop string contains the text of a special token."""
    return any(token in string for token in special_tokens)


def text_before(
    ids: Sequence[int], strings: Sequence[str], tokenizer: TextDecoder, *, special: bool = False
) -> str:
    """A response's text up to its first stop string.

    Args:
        ids: The response.
        strings: Stop strings.
        tokenizer: Of the ids.
        special: Whether the text shows special tokens.
    """
    text = tokenizer.decode(ids, special=special)
    end = len(text)
    for string in strings:
        named = names_special(string, tokenizer.special_tokens)
        at = tokenizer.decode(ids, special=named).find(string)
        if at >= 0 and named != special:  # the same place in the other text, by whole tokens

            def length(tokens: int, kept: bool) -> int:
                return len(tokenizer.decode(ids[:tokens], special=kept))

            before = bisect.bisect(range(len(ids) + 1), at, key=lambda n: length(n, named)) - 1
            at += length(before, special) - length(before, named)
        if at >= 0:
            end = min(end, at)
    return text[:end]


class StopStrings:
    """The search for one request's stop strings, as its response grows.

    A string that contains the text of a special token is looked for in the text with special
    tokens, any other in the text without.

    Args:
        strings: The stop strings, at least one.
        tokenizer: Of the response.
    """

    def __init__(self, strings: Sequence[str], tokenizer: TextDecoder):
        self._searches = []
        for special in (False, True):
            group = [s for s in strings if names_special(s, tokenizer.special_tokens) == special]
            if group:
                self._searches.append(_Search(group, partial(tokenizer.decode, special=special)))

    def end(self, ids: Sequence[int]) -> int | None:
        """The number of tokens that complete the earliest stop string, or None.

        Args:
            ids: The response so far: that of the previous call and what came since.
        """
        ends = [search.end(ids) for search in self._searches]
        return min((end for end in ends if end is not None), default=None)


class _Search:
    """Looks for strings in a text that grows.

    New text is what new tokens add to the text of the last ones that were read, because what a
    token decodes to can depend on those around it.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._strings, self._decode = strings, decode
        self._keep = max(map(len, strings)) - 1  # characters that may begin a string
        self._tail = ""  # the last of the text that was read
        self._context = self._read = self._seen = 0  # tokens

    def end(self, ids: Sequence[int]) -> int | None:
        seen, self._seen = self._seen, len(ids)
        before = len(self._decode(ids[self._context : self._read]))

        def text(end: int) -> str:
            return self._tail + self._decode(ids[self._context : end])[before:]

        whole = text(len(ids))
        if self._in(whole):
            return next(n for n in range(seen + 1, len(ids) + 1) if self._in(text(n)))
        if (read := self._whole_characters(ids)) > self._read:
            self._tail = text(read)[-self._keep :] if self._keep else ""
            self._context, self._read = self._read, read
        return None

    def _whole_characters(self, ids: Sequence[int]) -> int:
        """The number of tokens up to the last one that ends with a whole character."""
        least = max(self._read, len(ids) - _HELD)
        for n in range(len(ids), least, -1):
            if not self._decode(ids[self._context : n]).endswith(_PARTIAL):
                return n
        return least

    def _in(self, text: str) -> bool:
        return any(string in text for string in self._strings)
