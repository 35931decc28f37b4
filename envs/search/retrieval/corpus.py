"""Corpora: JSONL files with rows ``{"id", "contents"}``, and the embedded factbook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envs.search.factbook import passages as factbook_passages
from envs.search.retrieval.base import Passage
from envs.text_files import json_lines


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and the line."""

    exit_code = 2


def load_corpus(source: str) -> Sequence[Passage]:
    """The passages of ``factbook`` or of a JSONL file by its path."""
    return factbook_passages() if source == "factbook" else read_corpus(Path(source))


def read_corpus(path: Path) -> list[Passage]:
    """The passages of a ``.jsonl`` or ``.jsonl.gz`` file; ids may be numbers.

    Raises:
        CorpusError: For a file that cannot be read, a row that is no JSON object with ``id`` and a
            textual ``contents``, and an id that an earlier row has.
    """
    passages: list[Passage] = []
    numbers: dict[str, int] = {}
    try:
        for number, row in json_lines(path):
            try:
                passage = _passage(row)
                earlier = numbers.setdefault(passage.id, number)
                if earlier != number:
                    raise ValueError(f"id {passage.id!r} is that of line {earlier}")
            except ValueError as error:
                raise CorpusError(f"{path}:{number}: {error}") from None
            passages.append(passage)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(str(error)) from None
    if not passages:
        raise CorpusError(f"{path}: no passages in this file")
    return passages


def _passage(row: object) -> Passage:
    if not isinstance(row, dict):
        raise ValueError('want a JSON object {"id": .., "contents": ..}')
    identity, contents = row.get("id"), row.get("contents")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ValueError('"id" must be a string or a whole number')
    if not isinstance(contents, str):
        raise ValueError('"contents" must be a string')
    return Passage(str(identity), contents)
