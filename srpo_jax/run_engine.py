"""What a run samples from: an engine on its own devices, or a server for evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.config import ModelConfig
from models.qwen import Qwen, split_params
from models.tokenizer import ChatTokenizer
from srpo_jax.config import Recipe, RecipeError
from srpo_jax.engine import Engine
from srpo_jax.engine.layout import TENSOR, check_tensor, engine_mesh, fewest_devices
from srpo_jax.remote_engine import RemoteEngine

WEIGHTS_SHARE = 0.3  # of a device's memory that an engine's weights may take beside a learner's


def local_engine(recipe: Recipe, model: Qwen, tokenizer: ChatTokenizer, learner: Mesh) -> Engine:
    """The recipe's engine on the devices of the learner's mesh.

    Raises RecipeError where ``rollout.mesh`` or ``rollout.cache_tokens`` does not fit.
    """
    rollout, config = recipe.rollout, model.config
    graphdef, params = split_params(model)
    devices = list(learner.devices.flat)
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    axes = engine_axes(
        recipe, config, sum(a.size for a in jax.tree.leaves(params)), devices, memory
    )
    try:
        mesh = engine_mesh(devices, **axes)
        check_tensor(config, mesh.shape[TENSOR])
    except ValueError as error:
        raise RecipeError(f"rollout.mesh: {error}") from None
    try:
        return Engine(
            config, graphdef, params, mesh=mesh,
            vocab_size=tokenizer.vocab_size, stop_ids=tokenizer.stop_ids, slots=rollout.slots,
            cache_tokens=rollout.prompt_tokens + rollout.response_tokens, burst=rollout.burst,
            budget_tokens=rollout.cache_tokens, store_tokens=rollout.stored_tokens,
            decode_text=tokenizer.decode, dtype=jnp.dtype(rollout.dtype or recipe.model.dtype),
        )  # fmt: skip
    except ValueError as error:
        raise RecipeError(f"rollout.cache_tokens: {error}") from None


def engine_axes(
    recipe: Recipe,
    config: ModelConfig,
    num_params: int,
    devices: Sequence[jax.Device],
    memory: int | None,
) -> dict[str, int]:
    """The sizes of the engine's mesh: the recipe's, else the fewest devices a replica whose
    ``memory`` (bytes of one; None: a CPU's, enough) has room beside the weights."""
    if recipe.rollout.mesh is not None:
        return recipe.rollout.mesh.model_dump()
    if memory is None:
        return {"replicas": -1, "tensor": 1}
    size = num_params * jnp.dtype(recipe.rollout.dtype or recipe.model.dtype).itemsize
    tensor = fewest_devices(config, len(devices), size, WEIGHTS_SHARE * memory)
    return {"replicas": -1, "tensor": tensor}


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
    engine = RemoteEngine(stop_ids=tokenizer.stop_ids, **settings)
    engine.check()
    return engine
