"""Safetensors files of a checkpoint folder: which are read, what they hold, how they are written.

Tensors are memory-mapped and written one at a time, so neither direction holds a whole checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.config import CheckpointError, ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that was not fetched

# Files that travel beside the weights: the tokenizer, its template and the generation defaults.
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
GGUF = "a GGUF file, which is not read here: it must be a folder with config.json and safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: In the file.
        file: The file.
        dtype: As it is stored.
        shape: Its axes.
        start: Its first byte within the file.
    """

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def open(self) -> np.ndarray:
        """A read-only memory map of the tensor, in its stored dtype and shape."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.start, shape=self.shape)


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor to be written.

    Attributes:
        name: In the file.
        dtype: Of the file.
        shape: Its axes.
        read: Returns the values; called when they are written, so that one tensor at a time is
            in memory.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_checkpoint_file(path: Path) -> None:
    """Opens a file of a checkpoint and looks at its first bytes.

    Raises:
        CheckpointError: There is no such file (or only a link to none), it is a folder or may not
            be read, or it is the git-lfs pointer to a file that was never fetched.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{path}: {why_unreadable(path, error)}") from None
    if start == _LFS_POINTER:
        raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself (git lfs pull)")


def why_unreadable(path: Path, error: OSError) -> str:
    """What keeps a path from being read, in words."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return f"a link to {os.readlink(path)}, which does not exist"
        return "file not found"
    return error.strerror or type(error).__name__


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        CheckpointError: It cannot be read (see ``check_checkpoint_file``) or is not UTF-8.
    """
    check_checkpoint_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: The file cannot be read (see ``read_text``) or holds no JSON object.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """The architecture that a folder's ``config.json`` declares.

    Raises:
        CheckpointError: No such file, or one that declares what cannot be loaded.
    """
    path = folder / "config.json"
    if not os.path.lexists(path) and (files := sorted(folder.glob("*.gguf"))):
        raise CheckpointError(f"{files[0]}: {GGUF}")
    content = read_json(path)
    if content.get("quantization_config"):
        raise CheckpointError(f"{folder}: quantised checkpoints are not supported")
    try:
        return ModelConfig.from_hf(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the files' headers alone.

    With an index, the index decides which file each tensor comes from; other safetensors files are
    ignored. Without one, ``model.safetensors`` is read.

    Raises:
        CheckpointError: No safetensors, a missing shard, a tensor that the index and its file
            disagree about, or a damaged file.
    """
    present = {path.name for path in folder.glob("*.safetensors")}
    if os.path.lexists(folder / INDEX_NAME):
        return _list_indexed(folder)
    if SINGLE_NAME in present:
        return read_header(folder / SINGLE_NAME)
    if present:
        raise CheckpointError(
            f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME}, only {', '.join(sorted(present))}"
        )
    found = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {', '.join(found)} must be converted to safetensors first" if found else ""
    raise CheckpointError(f"{folder}: no safetensors file{hint}")


def stored_dtypes(folder: Path) -> dict[str, np.dtype]:
    """The dtype of every tensor of a checkpoint, by name.

    Raises:
        CheckpointError: See ``list_tensors``.
    """
    return {name: tensor.dtype for name, tensor in list_tensors(folder).items()}


def _list_indexed(folder: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_NAME}: weight_map missing or empty")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX_NAME}: {file!r} is no name of a shard")
    shards = sorted(set(weight_map.values()))
    # Through links: the cache's snapshots link to files that may be gone.
    missing = [file for file in shards if not os.path.exists(folder / file)]
    if missing:
        raise CheckpointError(f"{folder}: missing shards named by the index: {', '.join(missing)}")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        header = read_header(folder / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        for name in sorted(listed ^ header.keys()):
            where = "index, not in the file" if name in listed else "file, not there in the index"
            raise CheckpointError(f"{folder / shard}: tensor {name} is in the {where}")
        tensors.update((name, header[name]) for name in listed)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: The header is damaged, a tensor's dtype is not a float that can be read,
            its byte count does not fit its shape, or the file ends before the tensor does.
    """
    check_checkpoint_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path}: truncated, its header is incomplete")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [_entry(name, entry) for name, entry in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}: not a safetensors file (bad header)") from None
    tensors = {}
    for name, dtype_name, shape, begin, end in entries:
        dtype = FLOAT_DTYPES.get(dtype_name)
        if dtype is None:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {dtype_name}, "
                f"not one of {', '.join(FLOAT_DTYPES)}"
            )
        expected = math.prod(shape) * dtype.itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name} of shape {list(shape)} needs {expected} bytes, "
                f"its entry has {end - begin}"
            )
        if 8 + length + end > size:
            raise CheckpointError(f"{path}: truncated, tensor {name} ends after the file does")
        tensors[name] = StoredTensor(name, path, dtype, shape, 8 + length + begin)
    return tensors


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    """A header's entry as name, dtype, shape, first and last byte; ValueError if it is none."""
    begin, end = entry["data_offsets"]
    counts = [*entry["shape"], begin, end]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("sizes and offsets must be integers from 0")
    return name, str(entry["dtype"]), tuple(counts[:-2]), begin, end


def write_tensors(folder: Path, tensors: list[TensorToWrite], max_shard_bytes: int) -> None:
    """Writes ``model.safetensors``, or numbered shards with an index where that would be too large.

    Args:
        folder: An existing folder.
        tensors: In the order of the files.
        max_shard_bytes: Of one file, unless a single tensor is larger.
    """
    shards: list[list[TensorToWrite]] = [[]]
    for tensor in tensors:
        size = sum(other.nbytes for other in shards[-1])
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        _write_file(folder / SINGLE_NAME, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map.update((tensor.name, name) for tensor in shard)
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_checkpoint_json(folder / INDEX_NAME, index)


def write_checkpoint_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: list[TensorToWrite]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.read(), tensor.dtype)
            if values.shape != tensor.shape:
                raise ValueError(f"{tensor.name}: {values.shape} is not {tensor.shape}")
            file.write(values.view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
