"""What a run compiles before its first step: the optimiser's state, and the engine's weights from
the learner's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from models.known_configs import Architecture
from models.qwen import abstract_params
from srpo_jax.compile_check.report import ProgramReport, compiled_report
from srpo_jax.compile_check.update import AbstractUpdate
from srpo_jax.engine.layout import engine_mesh
from srpo_jax.engine.weight_sync import split_stack, sync_programs, tree_sources
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.build_engine import EngineSettings


def init_report(recipe: Recipe, update: AbstractUpdate) -> ProgramReport:
    """Compiles the program that makes the optimiser's state.

    Raises:
        OutOfMemory: It alone needs more than a device has.
    """
    optimizer = make_optimizer(recipe.optimizer, recipe.total_updates)
    state = update.state
    where = jax.tree.map(lambda x: x.sharding, state.opt_state)
    init = jax.jit(optimizer.init, out_shardings=where)
    return compiled_report("init", init.lower(state.params))


def sync_reports(
    architecture: Architecture,
    update: AbstractUpdate,
    settings: EngineSettings,
    devices: Sequence[jax.Device],
) -> dict[str, ProgramReport]:
    """Compiles the sync of all engines, those of every host together.

    Args:
        architecture: Of the model.
        update: Whose parameters the engines get.
        settings: Of the engines; their mesh is set.
        devices: The learner's.

    Returns:
        The programs of one layer and of the vocabulary; the first runs once for each layer.

    Raises:
        OutOfMemory: One of them alone needs more than a device has.
    """
    params = update.state.params
    graphdef, _ = abstract_params(architecture.config, jnp.float32)
    assert settings.mesh is not None
    mesh = engine_mesh(devices, replicas=-1, tensor=settings.mesh["tensor"])
    programs = sync_programs(architecture.config, graphdef, params, mesh, settings.dtype)
    stack, others = split_stack(params)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    layer = programs.layer.lower(stack, index, sources=tree_sources(stack))
    rest = programs.vocabulary.lower(others, sources=tree_sources(others))
    return {
        "sync of a layer": compiled_report("sync of a layer", layer),
        "sync of the vocabulary": compiled_report("sync of the vocabulary", rest),
    }
