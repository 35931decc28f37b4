"""What each device holds in every phase of a run, from shapes alone: before anything is allocated.

Programs need workspaces beside this, which only compiling them tells (``launch.compile_check``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.config import ModelConfig
from models.qwen import abstract_params
from srpo_jax.engine.layout import REPLICA, TENSOR
from srpo_jax.engine.weight_sync import sync_programs
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import state_shardings
from srpo_jax.learner.sharding import bytes_per_device
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.build_engine import (
    EngineSettings,
    cache_budget,
    engine_settings,
    engine_shapes,
    recipe_line,
    settings_mesh,
    token_bytes,
)

GIB = 2**30
GRADIENT_SUMS = "gradient sums"  # of the learner's parts the one that only an update holds


@dataclass(frozen=True)
class Phase:
    """What is on a device together in one phase of a run: bytes by part."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What a run holds.

    Attributes:
        phases: Each with its parts on one device, workspaces left out.
        usable: Bytes of a device (None: nobody says).
        engine: What sizes the engine: its mesh and the capacity of its KV cache are set.
        request_tokens: What one request takes of it at most.
        cache_is_set: Whether the recipe says the cache's capacity, not what is free.
    """

    phases: tuple[Phase, ...]
    usable: int | None
    engine: EngineSettings
    request_tokens: int
    cache_is_set: bool

    @property
    def cache_tokens(self) -> int:
        """Tokens of a replica's KV cache."""
        return self.engine.cache_tokens or 0

    @property
    def largest(self) -> Phase:
        """The phase that holds the most."""
        return max(self.phases, key=lambda phase: phase.total)

    def check(self) -> None:
        """Raises RecipeError where a phase cannot fit, or a cache not hold one request."""
        if self.usable is None:
            return
        worst = self.largest
        if worst.total > self.usable:
            raise RecipeError(
                f"memory: {worst.name} needs {_size(worst.total)} of each device, which has "
                f"{_size(self.usable)}: {_parts(worst)}; split the model over more devices "
                "(learner.mesh.fsdp), or take optimizer.moment_dtype bfloat16 or a smaller model"
            )
        if self.cache_tokens < self.request_tokens and not self.cache_is_set:
            raise RecipeError(
                f"memory: beside the other parts the KV cache holds {self.cache_tokens:,} tokens, "
                f"one request needs {self.request_tokens:,}; {_parts(worst)}"
            )

    def __str__(self) -> str:
        """One line: every phase, and the parts of the largest."""
        limit = "" if self.usable is None else f", of {_size(self.usable)}"
        largest = self.largest
        phases = ", ".join(
            f"{p.name} {_size(p.total)}" + (f" ({_parts(p)})" if p is largest else "")
            for p in self.phases
        )
        return (
            f"memory of each device{limit}: {phases}; workspaces come on top; the KV cache holds "
            f"{self.cache_tokens:,} tokens a replica"
        )


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _parts(phase: Phase) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in phase.parts.items())


def learner_memory(recipe: Recipe, config: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Bytes of the learner's parts on one device: parameters, moments, the frozen reference where
    the objective has one, and the gradient sums of an update."""
    dtype = jnp.dtype(recipe.model.param_dtype)
    optimizer = make_optimizer(recipe.optimizer, recipe.total_updates)
    _, params = abstract_params(config, dtype)
    where = state_shardings(mesh, params, optimizer).state

    def size(tree, shardings):
        return bytes_per_device(
            jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
            )
        )

    parameters = size(params, where.params)
    parts = {
        "parameters": parameters,
        "moments": size(jax.eval_shape(optimizer.init, params), where.opt_state),
    }
    if recipe.objective_config().kl_coef:
        parts["reference"] = parameters
    sums = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )
    return parts | {GRADIENT_SUMS: size(sums, where.params)}


def plan_memory(
    recipe: Recipe,
    config: ModelConfig,
    mesh: Mesh,
    devices: Sequence[jax.Device],
    usable: int | None,
    *,
    trains: bool = True,
) -> MemoryPlan:
    """The plan of a recipe.

    Args:
        recipe: The run's.
        config: The model's.
        mesh: The learner's, or the one that an evaluation loads the model on.
        devices: The engine's: those of one process.
        usable: Bytes of a device that nothing holds yet (None: nobody says).
        trains: Whether there is a learner beside the engine.

    Raises:
        RecipeError: The engine's mesh does not make the devices or divide the model.
    """
    settings = engine_settings(recipe)
    graphdef, params = abstract_params(config, jnp.dtype(recipe.model.param_dtype))
    num_params = sum(a.size for a in jax.tree.leaves(params))
    memory = None if devices[0].platform == "cpu" else usable
    try:
        engine = settings_mesh(settings, config, num_params, devices, memory)
    except ValueError as error:
        raise RecipeError(recipe_line(error)) from None
    tensor = engine.shape[TENSOR]
    weights = {
        "engine weights": bytes_per_device(
            sync_programs(config, graphdef, params, engine, settings.dtype).weights
        )
    }
    parts = learner_memory(recipe, config, mesh)
    kept = {name: size for name, size in parts.items() if name != GRADIENT_SUMS}
    loaded = {"loaded model": parts["parameters"]}
    if not trains:
        kept = {}
    shapes = engine_shapes(settings, devices[0].platform)
    free = None if usable is None else usable - sum(kept.values()) - sum(weights.values())
    tokens = cache_budget(settings, config, tensor, shapes, free)
    cache = {"KV cache": tokens * token_bytes(config, tensor, settings.dtype.itemsize)}
    rollout = Phase("rollout", kept | weights | cache)
    phases: tuple[Phase, ...] = (
        Phase("init", kept), Phase("sync", kept | weights), rollout,
        Phase("update", parts), Phase("resume", kept),
    )  # fmt: skip
    if not trains:
        phases = Phase("init", loaded | weights), rollout
    sized = replace(
        settings, cache_tokens=tokens, mesh={"replicas": engine.shape[REPLICA], "tensor": tensor}
    )
    return MemoryPlan(
        phases, usable, sized, request_tokens=shapes.request_pages * shapes.page,
        cache_is_set=settings.cache_tokens is not None,
    )  # fmt: skip
