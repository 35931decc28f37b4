"""Files of a run that appear whole, and errors that name their file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Gives an OSError that comes without a file name (a full disk, met while writing) this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader, or who comes after a kill, sees the old one or the new one.

    Raises:
        OSError: It names the file; the old one is still there.
    """
    partial = path.with_name(path.name + ".partial")
    with naming(path):
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes a small JSON file whole."""
    write_whole(path, json.dumps(value) + "\n")
