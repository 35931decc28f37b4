"""Corpora: JSONL files with rows ``{"id", "contents"}``, and the embedded factbook."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from envs.search.factbook import passages as factbook_passages
from envs.search.retrieval.base import Passage


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file and the line."""

    exit_code = 2


def load_corpus(source: str) -> Sequence[Passage]:
    """The passages of ``factbook`` or of a JSONL file by its path."""
    return factbook_passages() if source == "factbook" else read_corpus(Path(source))


def read_corpus(path: Path) -> list[Passage]:
    """The passages of a ``.jsonl`` or ``.jsonl.gz`` file; ids may be numbers.

    Raises CorpusError for a missing file, a row that is no JSON object with ``id`` and a textual
    ``contents``, and an id that an earlier row has.
    """
    passages: list[Passage] = []
    lines_of: dict[str, int] = {}
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    passage = _passage(json.loads(line))
                except ValueError as error:
                    raise CorpusError(f"{path}:{number}: {error}") from None
                first = lines_of.setdefault(passage.id, number)
                if first != number:
                    raise CorpusError(f"{path}:{number}: id {passage.id!r} is that of line {first}")
                passages.append(passage)
    except OSError as error:
        raise CorpusError(f"{path}: {error.strerror or error}") from None
    except (EOFError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: {error}") from None
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
