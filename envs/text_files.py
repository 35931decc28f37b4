"""Text files and JSON that a user names: whatever is wrong with one is said in one line."""

from __future__ import annotations

import gzip
import json
import math
import os
import reprlib
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def short(value: Any) -> str:
    """The value for a message: one line, whatever its length and depth."""
    return _short.repr(value)


def check_file(path: str | os.PathLike) -> None:
    """Raises ValueError, one line that names the path, unless it is a file that is there."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise ValueError(f"this is {kind}, a file is due")
        with open(path, "rb") as file:
            if file.read(24) == b"version https://git-lfs.":
                raise ValueError("a pointer of git-lfs, not the file itself (`git lfs pull`)")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # also os.stat's, for a zero byte in the name
        raise ValueError(f"{path}: {error}") from None


def json_lines(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of the JSON lines of a file, or of a ``.gz`` file of them.

    Empty lines are passed over, a byte order mark as well. Raises ValueError, one line with file
    and line, for whatever cannot be read.
    """
    opened = gzip.open if Path(path).suffix == ".gz" else open
    number = 0
    try:
        check_file(path)
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text := text.rstrip():
                        yield number, parse_json(text)
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}:{number}: not UTF-8: byte {line[error.start]:#04x} at column "
                        f"{error.start + 1}"
                    ) from None
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged after line {number}: {error}") from None


def parse_json(text: str) -> Any:
    """``json.loads``, but every refusal is a ValueError of one line.

    Also refused: text that no file and no tokenizer takes (half of a surrogate pair).
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deep") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"not JSON that can be read: half of a surrogate pair, {half!a}") from None
    except ValueError:  # from int(): there is a limit to a number's digits
        raise ValueError("not JSON that can be read: a number of thousands of digits") from None
    return value


def is_missing(value: Any) -> bool:
    """Whether a field of a row holds nothing: null, or the NaN that data frames write for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))
