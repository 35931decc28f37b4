"""Exact match and F1 for short factual answers.

Both compare normalised texts by SQuAD's rules, as Search-R1 does: lower-case, ASCII punctuation
dropped (curly quotes, dashes and the minus sign are not ASCII: they stay and count), the articles
a/an/the dropped, spaces collapsed. Accents are kept, in Unicode's composed form (NFC), so that one
text in two encodings is one. An answer that normalises to nothing never matches.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def normalize(text: str) -> str:
    """The form in which answers are compared."""
    text = unicodedata.normalize("NFC", text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, golds: str | Sequence[str]) -> bool:
    """Whether the normalised prediction equals any of the normalised golds."""
    predicted = normalize(prediction)
    return bool(predicted) and any(predicted == normalize(gold) for gold in _listed(golds))


def f1(prediction: str, golds: str | Sequence[str]) -> float:
    """The best harmonic mean of word precision and recall over the golds, in [0, 1]."""
    predicted = normalize(prediction).split()
    best = 0.0
    for gold in _listed(golds):
        words = normalize(gold).split()
        common = (Counter(predicted) & Counter(words)).total()
        if common:
            best = max(best, 2 * common / (len(predicted) + len(words)))
    return best


def extract_answer(response: str) -> str | None:
    """The stripped text of a response's last complete ``<answer>`` pair, None if there is none.

    The response alone is searched, never the prompt, which may show an example of the tag.
    """
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def contains_answer(text: str, golds: str | Sequence[str]) -> bool:
    """Whether a text holds any of the golds as whole words, both normalised."""
    padded = f" {normalize(text)} "
    return any(f" {gold} " in padded for gold in map(normalize, _listed(golds)) if gold)


def _listed(golds: str | Sequence[str]) -> Sequence[str]:
    return (golds,) if isinstance(golds, str) else golds
