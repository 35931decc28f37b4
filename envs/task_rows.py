"""Rows of task files, JSONL or Parquet, as tasks; an error about a row names its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.text_files import check_file, is_missing, json_lines, parse_json, short
from envs.workflow import Task


class TaskError(ValueError):
    """Tasks that cannot be made or read; one line that names the file and the line."""

    exit_code = 2


def read_file(path: str | os.PathLike, to_task: Callable[[Any, int], Task]) -> list[Task]:
    """The tasks of a ``.jsonl`` or ``.parquet`` file; ``to_task`` gets a row and its number from 1.

    Raises TaskError naming the file and the line (Parquet: row): the file cannot be read or holds
    no task, ``to_task`` raises a ValueError, or a task has the id of an earlier one.
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


def first(*values: Any) -> Any:
    """The first value that is there."""
    return next((value for value in values if not is_missing(value)), None)


def sections(row: Mapping[str, Any]) -> tuple[Mapping, Mapping, Mapping]:
    """A row's ``env_kwargs``, ``reward_model`` and ``extra_info``; empty where there is none."""
    names = ("env_kwargs", "reward_model", "extra_info")
    found = {name: {} if is_missing(row.get(name)) else row[name] for name in names}
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}: need an object, got {type(value).__name__}")
    return tuple(found.values())


def source_and_id(row: Mapping[str, Any], number: int, stem: str) -> tuple[str, str]:
    """A row's source and its task's id: ``data_source/id``.

    The source is ``data_source`` or the file's stem; the id ``id``, else ``extra_info.index``, else
    ``#`` and the number of the row, which no other row has.
    """
    kwargs, _, extra = sections(row)
    source = first(row.get("data_source"), kwargs.get("data_source"), stem)
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"data_source: need text, got {short(source)}")
    identity = first(row.get("id"), extra.get("index"), f"#{number}")
    if isinstance(identity, float) and identity.is_integer():
        identity = int(identity)  # a data frame's column of numbers of which some are missing
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise ValueError(f"id: need text or a whole number, got {short(identity)}")
    return source, f"{source}/{identity}"


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
