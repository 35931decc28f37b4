"""A model's parameters in Orbax: Flax checkpoint folders, and the parameters of a training state.

A Flax checkpoint folder holds ``state`` (Orbax), ``config.json`` and the tokenizer files. In it, as
in a training state, the parameters are under ``params``, by the model's own parameter paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from models.checkpoint_files import read_config, write_checkpoint_json
from models.config import CheckpointError, ModelConfig
from models.convert import abstract_model, copy_side_files, exported_config, new_folder
from models.partition import param_sharding
from models.qwen import Qwen

STATE = "state"


def save_flax(model: Qwen, path: str | Path, *, tokenizer_from: str | Path) -> None:
    """Writes a Flax checkpoint folder, the parameters in their own dtypes.

    Args:
        model: What is saved.
        path: The folder to write; new or empty.
        tokenizer_from: A checkpoint folder whose token ids and tokenizer files are copied.

    Raises:
        CheckpointError: The target is not an empty or new folder.
    """
    from orbax.checkpoint import v1 as ocp

    params = nnx.to_pure_dict(nnx.state(model))
    with new_folder(path) as folder:
        ocp.save((folder / STATE).absolute(), {"params": params})
        write_checkpoint_json(folder / "config.json", exported_config(model.config, tokenizer_from))
        copy_side_files(tokenizer_from, folder)


def load_flax(
    path: str | Path, *, dtype: Any = None, mesh: Mesh | None = None
) -> tuple[Qwen, ModelConfig]:
    """Loads a folder of ``save_flax``.

    Args:
        path: The folder.
        dtype: See ``models.convert.load_hf``.
        mesh: See there.

    Raises:
        CheckpointError: Not such a folder, or its parameters do not fit its config.
    """
    folder = Path(path)
    if not (folder / STATE).is_dir():
        raise CheckpointError(f"{folder}: not a Flax checkpoint folder (no {STATE})")
    config = read_config(folder)
    return load_params(folder / STATE, config, dtype=dtype, mesh=mesh), config


def load_params(
    path: str | Path, config: ModelConfig, *, dtype: Any = None, mesh: Mesh | None = None
) -> Qwen:
    """The model of an Orbax checkpoint; of its entries only ``params`` is read.

    Args:
        path: A Flax checkpoint's ``state``, or a training state.
        config: The architecture that the parameters must fit.
        dtype: See ``models.convert.load_hf``.
        mesh: See there.

    Raises:
        CheckpointError: Not an Orbax checkpoint, or its parameters do not fit the config.
    """
    from orbax.checkpoint import v1 as ocp

    checkpoint = Path(path).absolute()
    try:
        stored = dict(nnx.traversals.flatten_mapping(ocp.metadata(checkpoint).metadata["params"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: not an Orbax checkpoint with params") from None
    graphdef, state = abstract_model(config)
    for name in sorted(state.keys() | stored.keys()):
        expected, found = (
            list(tree[name].shape) if name in tree else "missing" for tree in (state, stored)
        )
        if expected != found:
            raise CheckpointError(
                f"{path}: parameter {'.'.join(name)}: the config asks for {expected}, found {found}"
            )
    abstract = {}
    for name, param in state.items():
        if mesh is None:
            sharding: Sharding = SingleDeviceSharding(jax.local_devices()[0])
        else:
            sharding = param_sharding(mesh, name, param.shape)
        loaded_dtype = dtype or stored[name].dtype
        abstract[name] = jax.ShapeDtypeStruct(param.shape, loaded_dtype, sharding=sharding)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            loaded = ocp.load(checkpoint, {"params": nnx.traversals.unflatten_mapping(abstract)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: the parameters cannot be read: {reason}") from None
    arrays = nnx.traversals.flatten_mapping(loaded["params"])
    for name, param in state.items():
        param.set_value(arrays[name])
    return nnx.merge(graphdef, nnx.from_flat_state(state.items()))
