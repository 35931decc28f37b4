"""A recipe's engine on devices that need not be there: its programs, compiled, and its memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from models.attention.select import cache_attention_on
from models.known_configs import Architecture
from models.qwen import abstract_params
from srpo_jax.compile_check.report import OutOfMemory, ProgramReport, compiled_report
from srpo_jax.engine.build import engine_programs
from srpo_jax.engine.layout import engine_mesh
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.build_engine import engine_shapes, recipe_line
from srpo_jax.run.memory_plan import MemoryPlan


def compile_engine(
    architecture: Architecture, plan: MemoryPlan, devices: Sequence[jax.Device]
) -> dict[str, ProgramReport]:
    """Compiles prefill and decode of a recipe's engine on a host's devices.

    Args:
        architecture: Of its model.
        plan: What sizes the engine.
        devices: Of one host.

    Raises:
        RecipeError: The devices' attention does not support the model.
        OutOfMemory: The KV cache cannot hold one call, or a program alone needs more than a device
            has.
    """
    if plan.cache_tokens < plan.request_tokens:
        raise OutOfMemory(
            f"rollout: beside weights and learner the KV cache holds {plan.cache_tokens} tokens, "
            f"one call needs {plan.request_tokens}"
        )
    config, settings = architecture.config, plan.engine
    graphdef, params = abstract_params(config, jnp.dtype(jnp.float32))
    platform = devices[0].platform
    shapes = engine_shapes(settings, platform)
    try:
        programs = engine_programs(
            config, graphdef, params, engine_mesh(devices, **(settings.mesh or {})),
            cache_attention_on(platform), shapes, pages=plan.cache_tokens // shapes.page + 1,
            vocab_size=architecture.tokenizer_ids, stop_ids=(0,), burst=settings.burst,
            dtype=settings.dtype,
        )  # fmt: skip
    except ValueError as error:
        raise RecipeError(recipe_line(error)) from None
    arguments = programs.weights, programs.state
    return {
        "prefill": compiled_report("prefill", programs.prefill.lower(*arguments, programs.pages)),
        "decode": compiled_report(
            "decode", programs.decode.lower(*arguments, programs.plan, top=False)
        ),
    }
