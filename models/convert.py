"""Hugging Face checkpoints to and from ``models.qwen.Qwen``, tensor by tensor.

Every tensor is accounted for in both directions, and a checkpoint that is read and written in its
own dtype comes back bit for bit. Beside the model only a small parameter, or a piece of a large
one, is in memory.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.checkpoint_files import (
    FLOAT_DTYPES,
    SIDE_FILES,
    StoredTensor,
    TensorToWrite,
    check_checkpoint_file,
    list_tensors,
    read_config,
    read_json,
    write_checkpoint_json,
    write_tensors,
)
from models.config import CheckpointError, ModelConfig
from models.hub import resolve_checkpoint
from models.partition import param_sharding
from models.qwen import Qwen
from models.stream import stream_parameter

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Fields of config.json that describe the text side and are carried over unchanged.
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")

STREAM_ABOVE = 128 * 2**20  # bytes of a shard; smaller ones are not worth a program of their own

Path_ = tuple[str, ...]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """Where a parameter lives in a checkpoint: one name per layer, or one name in all.

    Kernels are [in, out] here and [out, in] in the files.
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        inner = shape[1:] if self.stacked else shape
        return inner[::-1] if self.transposed else inner


def parameter_sources(config: ModelConfig) -> dict[Path_, _Source]:
    """The Hugging Face name(s) behind every parameter path of a model."""
    sources: dict[Path_, _Source] = {
        ("embed", "embedding"): _Source((EMBEDDING,), stacked=False, transposed=False),
        ("norm", "scale"): _Source(("model.norm.weight",), stacked=False, transposed=False),
    }
    if not config.tie_embeddings:
        sources["lm_head", "kernel"] = _Source((HEAD,), stacked=False, transposed=True)

    def add(module: str, leaf: str, name: str, transposed: bool = False) -> None:
        names = tuple(f"model.layers.{i}.{name}" for i in range(config.num_layers))
        sources["layers", module, leaf] = _Source(names, stacked=True, transposed=transposed)

    add("input_norm", "scale", "input_layernorm.weight")
    add("post_norm", "scale", "post_attention_layernorm.weight")
    for module in ("q_proj", "k_proj", "v_proj"):
        add(module, "kernel", f"self_attn.{module}.weight", transposed=True)
        if config.qkv_bias:
            add(module, "bias", f"self_attn.{module}.bias")
    add("o_proj", "kernel", "self_attn.o_proj.weight", transposed=True)
    if config.qk_norm:
        add("q_norm", "scale", "self_attn.q_norm.weight")
        add("k_norm", "scale", "self_attn.k_norm.weight")
    for module in ("gate_proj", "up_proj", "down_proj"):
        add(module, "kernel", f"mlp.{module}.weight", transposed=True)
    return sources


def load_config(
    path_or_hub_name: str | Path, *, revision: str | None = None, weights: bool = True
) -> ModelConfig:
    """A checkpoint's architecture; no weights are read.

    Args:
        path_or_hub_name: A folder, or a hub name such as ``Qwen/Qwen3-4B``.
        revision: Branch, tag or commit of a hub name.
        weights: Whether a hub's checkpoint is downloaded with its tensors.

    Raises:
        CheckpointError: No such checkpoint, or one of another family.
    """
    return read_config(resolve_checkpoint(path_or_hub_name, revision=revision, weights=weights))


def load_hf(
    path_or_hub_name: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    stream_above: int = STREAM_ABOVE,
) -> tuple[Qwen, ModelConfig]:
    """Loads a checkpoint folder, or a hub repository.

    Args:
        path_or_hub_name: A folder, or a hub name such as ``Qwen/Qwen3-4B``.
        dtype: The parameters' dtype; files in another float dtype are cast. None keeps each
            parameter's own.
        mesh: Places parameters by ``models.partition``; every process then reads only the parts
            of its own devices. None puts them on the default device.
        revision: Branch, tag or commit of a hub name.
        stream_above: Bytes of a parameter's shard above which it is filled in pieces, see
            ``stream_parameter``; others are read whole.

    Returns:
        The model and its architecture.

    Raises:
        CheckpointError: Names the file or tensor that is missing, unexpected, truncated, of the
            wrong shape or dtype, or contradicts the config. All of this is found before any tensor
            is read, but for a tied checkpoint whose own ``lm_head.weight`` differs from its
            embedding.
    """
    folder = resolve_checkpoint(path_or_hub_name, revision=revision)
    config = load_config(folder)
    tensors = list_tensors(folder)
    files = {tensor.file.name for tensor in tensors.values()}
    if ignored := sorted({path.name for path in folder.glob("*.safetensors")} - files):
        logger.warning("%s: not part of the checkpoint, ignored: %s", folder, ignored)
    if config.tie_embeddings and HEAD in tensors:
        _check_tied_head(folder, tensors.pop(HEAD), tensors.get(EMBEDDING))

    graphdef, state = abstract_model(config)
    sources = parameter_sources(config)
    shapes = {path: param.shape for path, param in state.items()}
    _check_against_files(folder, shapes, sources, tensors)
    for path, shape in shapes.items():
        stored = [tensors[name] for name in sources[path].names]
        stored_dtype = functools.reduce(jnp.promote_types, [tensor.dtype for tensor in stored])
        kind = np.dtype(dtype or stored_dtype)
        if mesh is None:
            one = Mesh(np.asarray(jax.local_devices()[:1]), ("device",))
            sharding = NamedSharding(one, PartitionSpec())
        else:
            sharding = param_sharding(mesh, path, shape)
        size = math.prod(sharding.shard_shape(shape)) * kind.itemsize
        if size > stream_above and len(stored[0].shape) == 2:
            array = stream_parameter(
                stored, shape, kind, sharding,
                stacked=sources[path].stacked, transposed=sources[path].transposed,
            )  # fmt: skip
        else:
            read = _parameter_reader(stored, sources[path], shape, kind)
            if mesh is None:
                array = jnp.asarray(read(None))
            else:
                array = jax.make_array_from_callback(shape, sharding, read)
        state[path].set_value(array)
    return nnx.merge(graphdef, nnx.from_flat_state(state.items())), config


def save_hf(
    model: Qwen,
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    tokenizer_from: str | Path | None = None,
    dtype: Any = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that transformers and vLLM load: config, safetensors, tokenizer files.

    The folder appears whole or not at all. On several processes all must call this; the first one
    writes.

    Args:
        model: Its parameters may be sharded over a mesh.
        path: The folder to write.
        config: What the folder declares; None: the model's own.
        tokenizer_from: A checkpoint folder whose tokenizer files, generation config and token ids
            of ``config.json`` are copied.
        dtype: Of the files, or one for each tensor by its name in the files; None, as for a
            name that is not there, keeps the parameter's own.
        overwrite: Whether an earlier checkpoint at ``path`` is replaced once the new one is
            complete.
        max_shard_bytes: Of one safetensors file.

    Raises:
        CheckpointError: The target may not be written to, or a parameter has no Hugging Face name.
    """
    config = config or model.config
    _, state = nnx.split(model)
    params = {path: param[...] for path, param in _by_path(state).items()}
    sources = parameter_sources(config)
    if sources.keys() != params.keys():
        unmatched = sorted(".".join(path) for path in sources.keys() ^ params.keys())
        raise CheckpointError(
            f"parameters without a Hugging Face counterpart: {', '.join(unmatched)}"
        )
    tensors = []
    for param_path, source in sources.items():
        array = params[param_path]
        for layer, name in enumerate(source.names):
            chosen = dtype.get(name) if isinstance(dtype, Mapping) else dtype
            stored = np.dtype(array.dtype if chosen is None else chosen)
            read = _tensor_reader(array, layer, source, stored)
            tensors.append(TensorToWrite(name, stored, source.file_shape(array.shape), read))
    unsupported = sorted({str(t.dtype) for t in tensors if t.dtype not in FLOAT_DTYPES.values()})
    if unsupported:
        raise CheckpointError(f"cannot write dtype {', '.join(unsupported)}")
    hf_config = exported_config(config, tokenizer_from)
    hf_config["torch_dtype"] = str(tensors[0].dtype)
    if jax.process_index() != 0:
        for tensor in tensors:  # takes part in the gathers, writes nothing
            tensor.read()
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_tensors(folder, tensors, max_shard_bytes)
        write_checkpoint_json(folder / "config.json", hf_config)
        if tokenizer_from is not None:
            copy_side_files(tokenizer_from, folder)


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A sibling folder to fill, renamed to ``path`` at the end and removed after an error.

    Args:
        path: The folder that appears.
        overwrite: Whether a checkpoint at ``path`` is replaced.

    Yields:
        The folder to fill.

    Raises:
        CheckpointError: ``path`` is neither new nor an empty folder, nor, with ``overwrite``, a
            checkpoint.
    """
    target = Path(path)
    if target.name in ("", ".."):
        target = target.resolve()
    try:
        empty = not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))
        if not empty and not (overwrite and (target / "config.json").is_file()):
            kind = "a checkpoint" if overwrite else "an empty folder"
            raise CheckpointError(f"{target}: exists and is not {kind}")
        partial = target.with_name(target.name + ".partial")
        replaced = target.with_name(target.name + ".replaced")
        for leftover in (partial, replaced):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    except OSError as error:  # no permission, or a parent that is a file
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        yield partial
        if not empty:
            target.replace(replaced)
        partial.replace(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk
            error.filename = str(target)
        raise
    if not empty:
        shutil.rmtree(replaced)


def copy_side_files(source: str | Path, target: Path) -> None:
    """Copies the tokenizer, chat template and generation config that ``source`` has.

    Raises:
        CheckpointError: One of them cannot be read.
    """
    for name in SIDE_FILES:
        path = Path(source) / name
        if os.path.lexists(path):
            check_checkpoint_file(path)
            shutil.copyfile(path, target / name)


def abstract_model(config: ModelConfig) -> tuple[Any, dict[Path_, Any]]:
    """The graph definition, and parameter path -> Param of a shape without a value."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0))))
    return graphdef, _by_path(state)


def _by_path(state: nnx.State) -> dict[Path_, Any]:
    """The parameters of a module's state; the steps of all their paths are names."""
    return {tuple(map(str, path)): param for path, param in nnx.to_flat_state(state)}


def _check_against_files(
    folder: Path,
    shapes: dict[Path_, tuple[int, ...]],
    sources: dict[Path_, _Source],
    tensors: dict[str, StoredTensor],
) -> None:
    expected = {
        name: sources[path].file_shape(shape)
        for path, shape in shapes.items()
        for name in sources[path].names
    }
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        untied = " (tie_word_embeddings is false)" if missing == [HEAD] else ""
        raise CheckpointError(f"{folder}: missing tensor {_some(missing)}{untied}")
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(f"{folder}: tensor {_some(unexpected)} has no place in this model")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{tensors[name].file}: tensor {name} has shape {list(tensors[name].shape)}, "
                f"the config asks for {list(shape)}"
            )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_tied_head(folder: Path, head: StoredTensor, embedding: StoredTensor | None) -> None:
    """A tied checkpoint may carry a copy of its embedding as a head, but not another head."""
    if embedding is None:
        return  # reported as missing with the others
    same = head.shape == embedding.shape and all(
        np.array_equal(a, b) for a, b in zip(head.open(), embedding.open(), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true"
        )
    logger.warning("%s: %s repeats the tied embedding and is not kept", folder, HEAD)


def _parameter_reader(
    stored: list[StoredTensor], source: _Source, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Reads any part of a parameter (None: all) from its files; equal parts are read once."""
    parts: dict[tuple, np.ndarray] = {}

    def view(tensor: StoredTensor) -> np.ndarray:
        return tensor.open().T if source.transposed else tensor.open()

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        if index is None:
            index = (slice(None),) * len(shape)
        ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
        key = tuple((r.start, r.stop) for r in ranges)
        if key not in parts:
            out = np.empty([len(r) for r in ranges], dtype)
            if source.stacked:
                for row, layer in enumerate(ranges[0]):
                    out[row] = view(stored[layer])[index[1:]]
            else:
                out[...] = view(stored[0])[index]
            parts[key] = out
        return parts[key]

    return read


def _tensor_reader(
    array: jax.Array, layer: int, source: _Source, dtype: np.dtype
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        values = array
        if isinstance(array.sharding, NamedSharding) and not array.is_fully_addressable:
            replicated = NamedSharding(array.sharding.mesh, PartitionSpec())
            if source.stacked:
                values = jax.jit(lambda x, i: x[i], out_shardings=replicated)(array, layer)
            else:
                values = jax.jit(lambda x: x, out_shardings=replicated)(array)
        elif source.stacked:
            values = array[layer]
        host = np.asarray(values)
        return (host.T if source.transposed else host).astype(dtype)

    return read


def exported_config(config: ModelConfig, tokenizer_from: str | Path | None) -> dict[str, Any]:
    """A ``config.json`` of the architecture, with the token ids of another folder's."""
    hf_config = config.to_hf()
    if tokenizer_from is not None and (Path(tokenizer_from) / "config.json").is_file():
        side = read_json(Path(tokenizer_from) / "config.json")
        hf_config |= {key: side[key] for key in TOKEN_FIELDS if key in side}
    return hf_config
