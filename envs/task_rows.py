"""Rows of task files, JSONL or Parquet, each with the place that an error about it names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TaskError(ValueError):
    """Tasks that cannot be made or read; one line that names the file and the line."""

    exit_code = 2


def read_rows(path: str | os.PathLike) -> Iterator[tuple[str, int, Any]]:
    """(place, number from 1, row) of every row of a ``.jsonl`` or ``.parquet`` file.

    Empty lines are passed over. Raises TaskError naming the file and the line (Parquet: row).
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise TaskError(f"{path}: need a .jsonl or .parquet file")
    if not path.is_file():
        raise TaskError(f"{path}: no such file")
    yield from _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)


def first(*values: Any) -> Any:
    """The first value that is there."""
    return next((value for value in values if value is not None), None)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, number, json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", number, row
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{path}: not Parquet: {str(error).splitlines()[0]}") from None
