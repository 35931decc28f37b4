"""Reads GGUF files (version 3, little-endian): metadata, and tensors in F32, Q4_1 or Q8_0.

Layout and quantisation blocks follow the format's public description in ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from models.config import CheckpointError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_TEXT = 2**26  # bytes of a text: a damaged length is not allocated
_BLOCK = 32  # values in a quantisation block
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BYTES_PER_BLOCK = {_F32: 4 * _BLOCK, _Q4_1: 2 + 2 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        file: The file.
        shape: In row-major order, outermost axis first.
        kind: The format's number of its quantisation.
        start: Its first byte within the file.
    """

    file: Path
    shape: tuple[int, ...]
    kind: int
    start: int

    def read(self) -> np.ndarray:
        """The dequantised values, float32 of ``shape``.

        Raises:
            CheckpointError: The file ends before the tensor does.
        """
        count = math.prod(self.shape) // _BLOCK
        size = count * _BYTES_PER_BLOCK[self.kind]
        if self.start + size > self.file.stat().st_size:
            raise CheckpointError(f"{self.file}: truncated")
        raw = np.fromfile(self.file, np.uint8, size, offset=self.start)
        if self.kind == _F32:
            return raw.view(np.float32).reshape(self.shape)
        blocks = raw.reshape(count, -1)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if self.kind == _Q8_0:
            values = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
        else:  # the low halves of the bytes are the first sixteen values, the high halves the rest
            minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            packed = blocks[:, 4:]
            quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
            values = scale * quants + minimum
        return values.reshape(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and the tensors of a file, by name.

    Raises:
        CheckpointError: Not a GGUF version 3 file, truncated, or a tensor of another quantisation.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (EOFError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(f"{path}: truncated or damaged GGUF header") from None


def _read(path: Path, file: BinaryIO) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if file.read(4) != b"GGUF" or _scalar(file, 4) != 3:
        raise CheckpointError(f"{path}: not a GGUF version 3 file")
    tensor_count, field_count = _scalar(file, 10), _scalar(file, 10)
    fields = {}
    for _ in range(field_count):
        name = _value(file, _STRING)
        fields[name] = _value(file, _scalar(file, 4))
    entries = {}
    for _ in range(tensor_count):
        name = _value(file, _STRING)
        inner_first = [_scalar(file, 10) for _ in range(_scalar(file, 4))]
        kind, offset = _scalar(file, 4), _scalar(file, 10)
        if kind not in _BYTES_PER_BLOCK or not inner_first or inner_first[0] % _BLOCK:
            raise CheckpointError(f"{path}: tensor {name} has unsupported quantisation type {kind}")
        entries[name] = (tuple(reversed(inner_first)), kind, offset)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
    data = -(-file.tell() // alignment) * alignment
    tensors = {
        name: GgufTensor(path, shape, kind, data + offset)
        for name, (shape, kind, offset) in entries.items()
    }
    return fields, tensors


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(min(count, _MAX_TEXT))
    if len(data) != count:
        raise EOFError
    return data


def _scalar(file: BinaryIO, kind: int) -> Any:
    if kind not in _SCALARS:
        raise EOFError  # what follows cannot be read
    layout = _SCALARS[kind]
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))[0]


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _bytes(file, _scalar(file, 10)).decode("utf-8")
    if kind == _ARRAY:
        item_kind, count = _scalar(file, 4), _scalar(file, 10)
        return [_value(file, item_kind) for _ in range(count)]
    return _scalar(file, kind)
