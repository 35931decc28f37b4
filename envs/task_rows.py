"""Rows of task files, JSONL or Parquet, as tasks; an error about a row names its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envs.text_files import check_file, is_missing, json_lines, parse_json, short
from envs.workflow import Task


class TaskError(ValueError):
    """Tasks that cannot be made or read; one line that names the file and the line."""

    exit_code = 2


def read_file(path: str | os.PathLike, to_task: Callable[[Any, int], Task]) -> list[Task]:
    """The tasks of a ``.jsonl`` or ``.parquet`` file; ``to_task`` gets a row and its number from 1.

    Raises:
        TaskError: Naming the file and the line (Parquet: row): the file cannot be read or holds no
            task, ``to_task`` raises a ValueError, or a task has the id of an earlier one.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise TaskError(f"{path}: need a .jsonl or .parquet file")
    parquet = path.suffix == ".parquet"
    tasks: list[Task] = []
    numbers: dict[str, int] = {}
    try:
        for number, row in _parquet_rows(path) if parquet else json_lines(path):
            try:
                if not isinstance(row, Mapping):
                    raise ValueError(f"need an object, got {type(row).__name__}")
                task = to_task(row, number)
                earlier = numbers.setdefault(task.id, number)
                if earlier != number:
                    place = f"{'row' if parquet else 'line'} {earlier}"
                    raise ValueError(f"the id {task.id!r} is that of {place}; ids must differ")
            except ValueError as error:
                where = f"{path}: row {number}" if parquet else f"{path}:{number}"
                raise TaskError(f"{where}: {error}") from None
            tasks.append(task)
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(str(error)) from None
    if not tasks:
        raise TaskError(f"{path}: no tasks")
    return tasks


class RowFields(NamedTuple):
    """What a row says of its task."""

    id: str
    source: str
    question: str
    gold: Any


def read_row(
    row: Mapping[str, Any],
    number: int,
    stem: str,
    question: Sequence[str],
    gold: Sequence[str],
) -> RowFields:
    """The fields of a row in one of the layouts of the verl family.

    The source is ``data_source`` or ``stem``; the id is the source and ``id``, else
    ``extra_info.index``, else ``#`` and the number of the row, which no other row has. A question
    may be given as turns: their last user's text is taken.

    Args:
        row: The row's columns.
        number: Of the row, from 1.
        stem: The source of rows that name none.
        question: Columns that may hold the question, in order; ``env_kwargs.question`` is a field
            of a column that holds an object.
        gold: Columns that may hold the gold answer, in order.

    Raises:
        ValueError: A column is of a wrong kind, or the question or the gold is missing.
    """
    for name in ("env_kwargs", "reward_model", "extra_info"):
        if not is_missing(row.get(name)) and not isinstance(row[name], Mapping):
            raise ValueError(f"{name}: need an object, got {type(row[name]).__name__}")
    source = _first(row, ("data_source", "env_kwargs.data_source"))
    if source is None:
        source = stem
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"data_source: need text, got {short(source)}")
    identity = _first(row, ("id", "extra_info.index"))
    if identity is None:
        identity = f"#{number}"
    if isinstance(identity, float) and identity.is_integer():
        identity = int(identity)  # a data frame's column of numbers of which some are missing
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise ValueError(f"id: need text or a whole number, got {short(identity)}")
    text, answer = _first(row, question), _first(row, gold)
    if text is None:
        raise ValueError(f"no question ({_listed(question)})")
    if answer is None:
        raise ValueError(f"no gold answer ({_listed(gold)})")
    return RowFields(f"{source}/{identity}", source, _last_user_turn(text), answer)


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The first value that is there, None if none is."""
    for column in columns:
        outer, dot, inner = column.partition(".")
        value = row.get(outer)
        if dot:
            value = value.get(inner) if isinstance(value, Mapping) else None
        if not is_missing(value):
            return value
    return None


def _listed(columns: Sequence[str]) -> str:
    return f"{', '.join(columns[:-1])} or {columns[-1]}"


def _last_user_turn(prompt: Any) -> str:
    if not isinstance(prompt, str):
        turns = prompt if isinstance(prompt, list) else [prompt]
        users = [t for t in turns if isinstance(t, Mapping) and t.get("role") == "user"]
        prompt = users[-1].get("content") if users else None
        if not isinstance(prompt, str):
            raise ValueError("the question: need text or turns with a user's text")
    if not prompt.strip():
        raise ValueError("the question is empty")
    return prompt


def unpacked(gold: Any) -> Any:
    """The gold, a list of texts where it is one written as JSON text: ``'["34"]'``."""
    if isinstance(gold, str) and gold.lstrip().startswith('["'):
        try:
            texts = parse_json(gold)
        except ValueError:
            return gold
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
    return gold


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    check_file(path)
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not Parquet, or damaged after row {number}: {reason}") from None
