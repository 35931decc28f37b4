"""The programs of a recipe's update with arguments of shapes alone, to compile without a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.known_configs import Architecture
from models.qwen import abstract_params
from srpo_jax.compile_check.report import TEMPORARIES, ProgramReport, compiled_report
from srpo_jax.learner.logprob import TokenScores, chunk_tokens
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import (
    Accumulated,
    EventArrays,
    LearnerPrograms,
    TokenArrays,
    TokenWeights,
    TrainState,
    build_learner_programs,
    state_shardings,
)
from srpo_jax.learner.sharding import batch_shards, bytes_per_device
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.build import check_mesh, learner_settings
from srpo_jax.run.memory_plan import GRADIENT_SUMS, Phase, learner_memory

# The micro-batches that a step's token arrays are sized for: they are small, and the programs'
# code does not depend on their number.
MICRO_BATCHES = 64


@dataclass(frozen=True)
class AbstractUpdate:
    """An update's programs, their arguments as ShapeDtypeStructs, and what stays between them.

    Attributes:
        programs: Not compiled yet.
        arguments: By program.
        state: The train state.
        resident: Bytes on one device: parameters, moments, gradient sums, batch, and the frozen
            reference where the objective has one.
        chunks: Token chunks of the vocabulary stage of one micro-batch, if every token carries
            loss.
        num_params: Elements of the parameters.
    """

    programs: LearnerPrograms
    arguments: Mapping[str, tuple]
    state: TrainState
    resident: Mapping[str, int]
    chunks: int
    num_params: int

    def compile(self) -> dict[str, ProgramReport]:
        """Compiles each program; collectives are those of one micro-batch.

        Raises:
            OutOfMemory: One of them alone needs more than a device has.
        """
        reports = {}
        for name, arguments in self.arguments.items():
            # Open loops: over the micro-batches, and in it over the chunks of tokens with loss.
            lowered = getattr(self.programs, name).lower(*arguments)
            reports[name] = compiled_report(name, lowered, (1, self.chunks))
        return reports

    def phases(self, reports: Mapping[str, ProgramReport]) -> list[Phase]:
        """What is on a device while each program runs; of the engine nothing is kept in an update.

        Args:
            reports: From ``compile``.
        """
        phases = []
        for name, report in reports.items():
            parts = dict(self.resident) | {TEMPORARIES: report.scratch}
            if name not in ("accumulate", "apply"):
                del parts[GRADIENT_SUMS]
            phases.append(Phase(f"update: {name}", parts))
        return phases


def sequence_length(recipe: Recipe) -> int:
    """Tokens of a training sequence: packed, or one call of maximal length."""
    rollout = recipe.rollout
    return max(recipe.learner.sequence_tokens or 0, rollout.prompt_tokens + rollout.response_tokens)


def abstract_update(recipe: Recipe, architecture: Architecture, mesh: Mesh) -> AbstractUpdate:
    """The update of a recipe on a mesh.

    Args:
        recipe: The recipe.
        architecture: Of its model.
        mesh: Axes (data, fsdp, tensor); its devices need not be there.

    Raises:
        RecipeError: Its rows do not divide over the mesh, or its attention is another platform's.
    """
    check_mesh(recipe, mesh)
    S, T, shards = recipe.learner.micro_batch_rows, sequence_length(recipe), batch_shards(mesh)
    config = architecture.config
    settings = learner_settings(recipe, architecture.tokenizer_ids)
    optimizer = make_optimizer(recipe.optimizer, recipe.total_updates)
    graphdef, params = abstract_params(config, jnp.dtype(recipe.model.param_dtype))
    where = state_shardings(mesh, params, optimizer)
    acc_dtype = jnp.promote_types(settings.dtype, jnp.float32)

    def array(kind, shape=(), sharding=where.whole):
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)

    def placed(tree, shardings):
        return jax.tree.map(lambda x, s: array(x.dtype, x.shape, s), tree, shardings)

    def per_token(kind):
        return array(kind, (MICRO_BATCHES, S, T), where.tokens)

    def per_row(kind):
        return array(kind, (MICRO_BATCHES * S,))

    int32, float32 = jnp.int32, jnp.float32
    state = TrainState(
        placed(params, where.state.params),
        placed(jax.eval_shape(optimizer.init, params), where.state.opt_state),
        array(int32),
    )
    sums = Accumulated(
        jax.tree.map(
            lambda p: array(jnp.promote_types(p.dtype, float32), p.shape, p.sharding), state.params
        ),
        array(acc_dtype), array(acc_dtype),
    )  # fmt: skip
    tokens = TokenArrays(
        *map(per_token, (int32, int32, int32, jnp.bool_, float32, int32))
    )  # fmt: skip
    events = EventArrays(
        row_event=per_row(int32), row_advantage=per_row(float32), row_role=per_row(int32),
        event_size=per_row(int32), event_advantage=per_row(float32), skipped=array(int32, (3,)),
    )  # fmt: skip
    scores = TokenScores(per_token(acc_dtype), per_token(acc_dtype))
    weights = TokenWeights(per_token(acc_dtype), per_token(acc_dtype), per_token(jnp.bool_))
    has_reference = bool(settings.objective.kl_coef)
    resident = learner_memory(recipe, config, mesh) | {
        "batch": bytes_per_device((tokens, scores, weights)),
    }
    platform = mesh.devices.flat[0].platform
    chunk = settings.logprob_chunk or chunk_tokens(config.vocab_size, platform)
    return AbstractUpdate(
        programs=build_learner_programs(graphdef, optimizer, mesh, settings, where),
        arguments={
            "score": (state.params, tokens, array(int32)),
            "weigh": (scores, scores.logp, scores.logp if has_reference else None, tokens, events),
            "accumulate": (state.params, tokens, weights, array(int32)),
            "apply": (state, sums, array(int32)),
        },
        state=state,
        resident=resident,
        chunks=-(-(S // shards) * T // chunk),
        num_params=sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
    )
