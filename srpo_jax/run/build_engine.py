"""What a run samples from: an engine on its own devices, or a server for evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.attention.select import cache_attention_on
from models.config import ModelConfig
from models.qwen import Qwen, split_params
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Engine
from srpo_jax.engine.layout import (
    TENSOR,
    check_tensor,
    engine_mesh,
    fewest_devices,
    key_head_copies,
)
from srpo_jax.engine.plan import Shapes
from srpo_jax.engine.remote import RemoteEngine
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.recipe.sections import RemoteConfig
from srpo_jax.recipe.servers import key_from_environment

WEIGHTS_SHARE = 0.3  # of a device's memory that an engine's weights may take beside a learner's
_MEMINFO = Path("/proc/meminfo")  # Linux
CACHE_SHARE = 0.85  # of what weights and learner leave free; the programs' own arrays need the rest


class MeshError(ValueError):
    """A mesh that does not make the devices or divide the model."""


@dataclass(frozen=True)
class EngineSettings:
    """What sizes an engine.

    Attributes:
        slots: Requests decoded at once on each replica.
        longest: The most tokens of a request, prompt and response together.
        dtype: Of weights and cache.
        burst: Decode steps of one dispatch.
        cache_tokens: Tokens of a replica's KV cache (None: ``longest`` in every slot, as far as
            there is memory).
        stored_tokens: Those of them that may keep prompts which no request reads (None: whatever is
            free).
        mesh: Sizes of its axes (None: as few devices a replica as hold the weights).
    """

    slots: int
    longest: int
    dtype: np.dtype
    burst: int = 16
    cache_tokens: int | None = None
    stored_tokens: int | None = None
    mesh: Mapping[str, int] | None = None


def engine_settings(recipe: Recipe) -> EngineSettings:
    """What a recipe says of its engine."""
    rollout = recipe.rollout
    return EngineSettings(
        slots=rollout.slots, longest=rollout.prompt_tokens + rollout.response_tokens,
        dtype=jnp.dtype(rollout.dtype or recipe.model.dtype), burst=rollout.burst,
        cache_tokens=rollout.cache_tokens, stored_tokens=rollout.stored_tokens,
        mesh=rollout.mesh.model_dump() if rollout.mesh else None,
    )  # fmt: skip


def local_engine(
    settings: EngineSettings, model: Qwen, tokenizer: ChatTokenizer, devices: Sequence[jax.Device]
) -> Engine:
    """A recipe's engine.

    Args:
        settings: Of the run's memory plan.
        model: Whose weights it gets.
        tokenizer: Of the model.
        devices: The engine's.

    Raises:
        RecipeError: Where the mesh, the cache or the model's shape does not fit.
    """
    try:
        return build_engine(settings, model, tokenizer, devices)
    except ValueError as error:
        raise RecipeError(recipe_line(error)) from None


def recipe_line(error: ValueError) -> str:
    """What ``build_engine`` or ``settings_mesh`` refuses, as a line about a recipe."""
    return f"{'rollout.mesh' if isinstance(error, MeshError) else 'rollout'}: {error}"


def build_engine(
    settings: EngineSettings,
    model: Qwen,
    tokenizer: ChatTokenizer,
    devices: Sequence[jax.Device],
    version: int = 0,
) -> Engine:
    """The engine of every command: training, evaluation, serving and rehearsal.

    It has a copy of the model's weights; the model itself is the caller's to keep or drop.

    Args:
        settings: What sizes it.
        model: Whose weights it gets.
        tokenizer: Of the model.
        devices: Those of its mesh, in one process.
        version: Of the weights.

    Raises:
        MeshError: Where the mesh does not make the devices or divide the model.
        ValueError: Where the cache or the model's shape does not fit.
    """
    graphdef, params = split_params(model)
    config = model.config
    num_params = sum(a.size for a in jax.tree.leaves(params))
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    mesh = settings_mesh(settings, config, num_params, devices, memory)
    tensor = mesh.shape[TENSOR]
    free = free_bytes(devices)
    if free is not None:
        free -= num_params * settings.dtype.itemsize // tensor
    shapes = engine_shapes(settings, devices[0].platform)
    return Engine(
        config, graphdef, params, mesh=mesh, vocab_size=tokenizer.vocab_size,
        stop_ids=tokenizer.stop_ids, slots=settings.slots, cache_tokens=settings.longest,
        burst=settings.burst, budget_tokens=cache_budget(settings, config, tensor, shapes, free),
        store_tokens=settings.stored_tokens, tokenizer=tokenizer, dtype=settings.dtype,
        version=version,
    )  # fmt: skip


def settings_mesh(
    settings: EngineSettings,
    config: ModelConfig,
    num_params: int,
    devices: Sequence[jax.Device],
    memory: float | None,
) -> Mesh:
    """The engine's mesh: as the settings say, else with as few devices a replica as leave enough
    memory beside the weights.

    Args:
        settings: Of the engine.
        config: The model's.
        num_params: Of the model.
        devices: Those of the mesh.
        memory: Bytes of one device (None: a CPU's, enough).

    Raises:
        MeshError: Where it does not make the devices or divide the model.
    """
    axes = {"replicas": -1, "tensor": 1}
    if settings.mesh is not None:
        axes = dict(settings.mesh)
    elif memory is not None:
        size = num_params * settings.dtype.itemsize
        axes["tensor"] = fewest_devices(config, len(devices), size, WEIGHTS_SHARE * memory)
    try:
        mesh = engine_mesh(devices, **axes)
        check_tensor(config, mesh.shape[TENSOR])
    except ValueError as error:
        raise MeshError(str(error)) from None
    return mesh


def engine_shapes(settings: EngineSettings, platform: str) -> Shapes:
    """The sizes of the engine's programs on a kind of devices."""
    attention = cache_attention_on(platform)
    return Shapes(settings.slots, attention.page, attention.lanes, settings.longest)


def token_bytes(config: ModelConfig, tensor: int, itemsize: int) -> int:
    """Bytes of one token's keys and values on each of a replica's ``tensor`` devices."""
    heads = config.num_kv_heads * key_head_copies(config, tensor) // tensor
    return 2 * config.num_layers * heads * config.head_dim * itemsize


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Free bytes of one device's memory; of a CPU's, its share of what the machine has available.
    None where nobody says."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if devices[0].platform == "cpu" and _MEMINFO.is_file():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 // len(devices) if found else None
    return None


def cache_budget(
    settings: EngineSettings, config: ModelConfig, tensor: int, shapes: Shapes, free: float | None
) -> int:
    """Tokens of a replica's KV cache: as set, else the longest request in every slot, or what of it
    fits ``free`` bytes of a device (None: enough)."""
    if settings.cache_tokens is not None:
        return settings.cache_tokens
    whole = shapes.slots * shapes.request_pages * shapes.page
    if free is None:
        return whole
    one = token_bytes(config, tensor, settings.dtype.itemsize)
    return min(int(CACHE_SHARE * max(free, 0)) // one, whole)


def remote_engine(remote: RemoteConfig, tokenizer: ChatTokenizer) -> RemoteEngine:
    """The server of ``rollout.remote``, asked whether it has the model.

    Raises:
        RecipeError: For a key that is not in the environment, or that no header can hold.
        RemoteEngineError: For a server that does not answer or serves something else.
    """
    engine = RemoteEngine(
        stop_ids=tokenizer.stop_ids, special_tokens=tokenizer.special_tokens,
        api_key=key_from_environment(remote.api_key_env, "rollout.remote.api_key_env"),
        **remote.model_dump(exclude={"api_key_env"}),
    )  # fmt: skip
    engine.check()
    return engine
