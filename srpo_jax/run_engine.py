"""What a run samples from: an engine on its own devices, or a server for evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.cache_attention import cache_attention_on
from models.config import ModelConfig
from models.qwen import Qwen, split_params
from models.tokenizer import ChatTokenizer
from srpo_jax.compile_report import bytes_per_device
from srpo_jax.config import Recipe, RecipeError
from srpo_jax.engine import Engine
from srpo_jax.engine.layout import (
    TENSOR,
    check_tensor,
    engine_mesh,
    fewest_devices,
    key_head_copies,
)
from srpo_jax.engine.plan import Shapes
from srpo_jax.remote_engine import RemoteEngine

WEIGHTS_SHARE = 0.3  # of a device's memory that an engine's weights may take beside a learner's
CACHE_SHARE = 0.85  # of what weights and learner leave free; the programs' own arrays need the rest


def local_engine(recipe: Recipe, model: Qwen, tokenizer: ChatTokenizer, learner: Mesh) -> Engine:
    """The recipe's engine on the devices of the learner's mesh, beside what is there already.

    Raises RecipeError where the mesh, the cache or the model's shape does not fit.
    """
    rollout, config = recipe.rollout, model.config
    graphdef, params = split_params(model)
    num_params = sum(a.size for a in jax.tree.leaves(params))
    devices = list(learner.devices.flat)
    memory = devices[0].memory_stats() or {}
    mesh = recipe_mesh(recipe, config, num_params, devices, memory.get("bytes_limit"))
    free = None
    if "bytes_limit" in memory:
        weights = num_params * engine_dtype(recipe).itemsize // mesh.shape[TENSOR]
        # The frozen reference is the loaded parameters themselves, until an update makes new ones.
        reference = bytes_per_device(params) if recipe.objective_config().kl_coef else 0
        free = memory["bytes_limit"] - memory["bytes_in_use"] - weights - reference
    shapes = engine_shapes(recipe, devices[0].platform)
    try:
        return Engine(
            config, graphdef, params, mesh=mesh,
            vocab_size=tokenizer.vocab_size, stop_ids=tokenizer.stop_ids, slots=rollout.slots,
            cache_tokens=shapes.cache_tokens, burst=rollout.burst,
            budget_tokens=cache_budget(recipe, config, mesh.shape[TENSOR], shapes, free),
            store_tokens=rollout.stored_tokens, tokenizer=tokenizer,
            dtype=engine_dtype(recipe),
        )  # fmt: skip
    except ValueError as error:
        raise RecipeError(f"rollout: {error}") from None


def recipe_mesh(
    recipe: Recipe,
    config: ModelConfig,
    num_params: int,
    devices: Sequence[jax.Device],
    memory: float | None,
) -> Mesh:
    """The engine's mesh over ``devices``: as the recipe says, else with the fewest devices a
    replica whose ``memory`` (bytes of one; None: a CPU's, enough) has room beside the weights.

    Raises RecipeError where it does not make the devices or divide the model.
    """
    axes = {"replicas": -1, "tensor": 1}
    if recipe.rollout.mesh is not None:
        axes = recipe.rollout.mesh.model_dump()
    elif memory is not None:
        size = num_params * engine_dtype(recipe).itemsize
        axes["tensor"] = fewest_devices(config, len(devices), size, WEIGHTS_SHARE * memory)
    try:
        mesh = engine_mesh(devices, **axes)
        check_tensor(config, mesh.shape[TENSOR])
    except ValueError as error:
        raise RecipeError(f"rollout.mesh: {error}") from None
    return mesh


def engine_shapes(recipe: Recipe, platform: str) -> Shapes:
    """The sizes of the engine's programs on a kind of devices."""
    rollout, attention = recipe.rollout, cache_attention_on(platform)
    longest = rollout.prompt_tokens + rollout.response_tokens
    return Shapes(rollout.slots, attention.page, attention.lanes, longest)


def engine_dtype(recipe: Recipe) -> np.dtype:
    """Of the engine's weights and cache."""
    return jnp.dtype(recipe.rollout.dtype or recipe.model.dtype)


def token_bytes(config: ModelConfig, tensor: int, itemsize: int) -> int:
    """What a cached token takes on each of a replica's devices."""
    heads = config.num_kv_heads * key_head_copies(config, tensor) // tensor
    return 2 * config.num_layers * heads * config.head_dim * itemsize


def cache_budget(
    recipe: Recipe, config: ModelConfig, tensor: int, shapes: Shapes, free: float | None
) -> int | None:
    """Tokens of a replica's cache: the recipe's, else what fits ``free`` bytes of a device, at most
    the longest call in every slot. None: that (a CPU, whose memory is taken to be enough)."""
    if recipe.rollout.cache_tokens is not None or free is None:
        return recipe.rollout.cache_tokens
    fits = int(CACHE_SHARE * max(free, 0)) // token_bytes(
        config, tensor, engine_dtype(recipe).itemsize
    )
    return min(fits, shapes.slots * shapes.request_pages * shapes.page)


def remote_engine(recipe: Recipe, tokenizer: ChatTokenizer) -> RemoteEngine:
    """The server of ``rollout.remote``, asked whether it has the model.

    Raises RecipeError for a key that is not in the environment, RemoteEngineError for a server that
    does not answer or serves something else.
    """
    remote = recipe.rollout.remote
    settings = remote.model_dump(exclude={"api_key_env"})
    if remote.api_key_env is not None:
        if not os.environ.get(remote.api_key_env):
            raise RecipeError(
                f"rollout.remote.api_key_env: {remote.api_key_env} is not set in the environment"
            )
        settings["api_key"] = os.environ[remote.api_key_env]
    engine = RemoteEngine(
        stop_ids=tokenizer.stop_ids, special_tokens=tokenizer.special_tokens, **settings
    )
    engine.check()
    return engine
