"""A recipe's engine on devices that need not be there: its programs, compiled, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention.select import cache_attention_on
from models.known_configs import Architecture
from srpo_jax.compile_check.report import OutOfMemory, Phase, ProgramReport, compiled_report
from srpo_jax.compile_check.update import abstract_params
from srpo_jax.engine.build import EnginePrograms, engine_programs
from srpo_jax.engine.layout import REPLICA, TENSOR
from srpo_jax.learner.sharding import bytes_per_device
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.build_engine import (
    cache_budget,
    engine_settings,
    engine_shapes,
    recipe_line,
    settings_mesh,
)


@dataclass(frozen=True)
class AbstractEngine:
    """An engine's programs on the devices of one host, and the memory of a device during rollout.

    Attributes:
        programs: Not compiled yet.
        replicas: Data-parallel copies.
        tensor: Tensor-parallel devices of a replica.
        tokens: Capacity of a replica's KV cache.
        kept: Bytes that stay of the learner: parameters, moments, reference.
        weights: Bytes of the engine's copy of the weights.
        cache: Bytes of the KV cache.
    """

    programs: EnginePrograms
    replicas: int
    tensor: int
    tokens: int
    kept: Mapping[str, int]
    weights: int
    cache: int

    def compile(self) -> dict[str, ProgramReport]:
        """Compiles prefill and decode.

        Raises:
            OutOfMemory: One of them alone needs more than a device has.
        """
        programs = self.programs
        arguments = programs.weights, programs.state
        decode = programs.decode.lower(*arguments, programs.plan, top=False)
        return {
            "prefill": compiled_report(
                "prefill", programs.prefill.lower(*arguments, programs.pages)
            ),
            "decode": compiled_report("decode", decode),
        }

    def phase(self, reports: Mapping[str, ProgramReport]) -> Phase:
        """What is on a device together during rollout."""
        scratch = max(report.scratch for report in reports.values())
        parts = {"engine weights": self.weights, "cache": self.cache, "temporaries": scratch}
        return Phase("rollout", {**self.kept, **parts})


def abstract_engine(
    recipe: Recipe,
    architecture: Architecture,
    devices: Sequence[jax.Device],
    resident: Mapping[str, int],
    usable: float,
) -> AbstractEngine:
    """The recipe's engine on a host's devices.

    Args:
        recipe: The recipe.
        architecture: Of its model.
        devices: Of one host.
        resident: Bytes of the learner on a device, as ``AbstractUpdate.resident``.
        usable: Bytes of a device.

    Raises:
        RecipeError: These devices do not form the mesh, or their attention does not support the
            model.
        OutOfMemory: The KV cache cannot hold one call.
    """
    config = architecture.config
    graphdef, params = abstract_params(config, jnp.dtype(recipe.model.param_dtype))
    num_params = sum(a.size for a in jax.tree.leaves(params))
    settings = engine_settings(recipe)
    try:
        mesh = settings_mesh(settings, config, num_params, devices, usable)
    except ValueError as error:
        raise RecipeError(recipe_line(error)) from None
    tensor, dtype = mesh.shape[TENSOR], settings.dtype
    kept = {k: v for k, v in resident.items() if k not in ("gradient sums", "batch")}
    free = usable - sum(kept.values()) - num_params * dtype.itemsize // tensor
    platform = devices[0].platform
    shapes = engine_shapes(settings, platform)
    tokens, one = cache_budget(settings, config, tensor, shapes, free), shapes.request_pages
    if tokens < one * shapes.page:
        raise OutOfMemory(
            f"rollout: beside weights and learner the KV cache holds {tokens} tokens, one call "
            f"needs {one * shapes.page}"
        )
    try:
        programs = engine_programs(
            config, graphdef, params, mesh, cache_attention_on(platform), shapes,
            pages=tokens // shapes.page + 1, vocab_size=architecture.tokenizer_ids, stop_ids=(0,),
            burst=settings.burst, dtype=dtype,
        )  # fmt: skip
    except ValueError as error:
        raise RecipeError(recipe_line(error)) from None
    return AbstractEngine(
        programs, mesh.shape[REPLICA], tensor, tokens, kept,
        weights=bytes_per_device(programs.weights), cache=bytes_per_device(programs.state.cache),
    )  # fmt: skip
