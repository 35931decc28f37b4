"""Builds what a run consists of from its recipe: model, learner, engine, workflow, tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs.workflow import Task, Workflow
from models.attention.select import attention_on
from models.checkpoint_files import stored_dtypes
from models.config import CheckpointError, ModelConfig
from models.convert import load_config, load_hf, save_hf
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Engine
from srpo_jax.engine.remote import RemoteEngine
from srpo_jax.learner.batch import ShapeMemory
from srpo_jax.learner.learner import Learner
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import LearnerSettings
from srpo_jax.learner.sharding import batch_shards, make_mesh
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_reward, build_workflow, check_reward, check_workflow
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.recipe.tasks import TaskStream, check_prompts, task_sets
from srpo_jax.rollout.rollout import Rollout, SamplingConfig
from srpo_jax.run.build_engine import local_engine, remote_engine


class NonFiniteGradients(RuntimeError):
    """More updates were skipped for non-finite gradients than learner.max_nonfinite allows."""

    exit_code = 1


@dataclass
class Parts:
    """The parts of one run. ``learner`` and ``stream`` are None where nothing is trained; only
    then can the engine be a remote one."""

    recipe: Recipe
    config: ModelConfig
    tokenizer: ChatTokenizer
    engine: Engine | RemoteEngine
    rollout: Rollout
    benchmarks: dict[str, Sequence[Task]]
    train_sampling: SamplingConfig
    eval_sampling: SamplingConfig
    learner: Learner | None = None
    stream: TaskStream | None = None
    needs_gate: bool = True
    grad_norms: list[float] = field(default_factory=list)
    nonfinite: int = 0  # updates in a row that were skipped
    dropping: int = 0  # and those that went without some of their events
    shapes: ShapeMemory = field(default_factory=ShapeMemory)
    export_dtype: Any = None

    def sync(self) -> None:
        """Gives the learner's weights to the engine; the version counts applied updates."""
        self.engine.set_weights(self.learner.params, int(self.learner.state.updates))

    def compile_count(self) -> int:
        return self.learner.compile_count() + self.engine.compile_count()

    def count_nonfinite(self, reports: Sequence[dict[str, Any]]) -> None:
        """Raises NonFiniteGradients once too many updates in a row were skipped for a gradient that
        is not finite, or went without events whose log-probs are not."""
        limit = self.recipe.learner.max_nonfinite
        for report in reports:
            skipped = not np.isfinite(report["grad_norm"])
            self.nonfinite = self.nonfinite + 1 if skipped else 0
            dropped = int(report["nonfinite_events"])
            self.dropping = self.dropping + 1 if dropped else 0
            if self.nonfinite > limit:
                raise NonFiniteGradients(
                    f"{self.nonfinite} updates in a row had gradients that are not finite "
                    f"(learner.max_nonfinite is {limit}): all were skipped, and the parameters are "
                    "those before them"
                )
            if self.dropping > limit:
                raise NonFiniteGradients(
                    f"{self.dropping} updates in a row dropped events whose log-probs are "
                    f"not finite, the last {dropped} (learner.max_nonfinite is {limit}); the other "
                    "events were trained"
                )

    def export(self, folder: Path) -> None:
        """Writes the current policy as a Hugging Face folder."""
        save_hf(
            self.learner.model(), folder, self.config,
            tokenizer_from=self.tokenizer.folder, dtype=self.export_dtype, overwrite=True,
        )  # fmt: skip


def build_parts(
    recipe: Recipe,
    *,
    workflow: Workflow | None = None,
    reward: Callable[..., Any] | None = None,
    train: bool = True,
    starting: Callable[[str], None] = lambda what: None,
    check: Callable[[], None] = lambda: None,
) -> Parts:
    """Loads and checks everything that a run needs, cheap checks first.

    ``starting`` is told what comes next; ``check`` is called between these parts and while episodes
    run: what it raises abandons them.

    Raises RecipeError, DataError or CheckpointError, each one line that names what is wrong.
    """
    if train and recipe.rollout.remote is not None:
        raise RecipeError(
            "rollout.remote: training samples with the learner's own weights; leave it out, or "
            "evaluate with launch.evaluate"
        )

    def begin(what: str) -> None:
        check()
        starting(what)

    begin("reading tasks")
    workflow = build_workflow(recipe) if workflow is None else check_workflow(workflow)
    reward = build_reward(recipe) if reward is None else check_reward(reward)
    sets = task_sets(recipe, train=train)
    rollout = recipe.rollout
    begin(f"loading model {recipe.model.path}")
    mesh = None if rollout.remote else make_mesh(**recipe.learner.mesh.model_dump())
    if train:
        check_mesh(recipe, mesh)
    if rollout.remote:
        config = load_config(recipe.model.path, revision=recipe.model.revision, weights=False)
    else:
        model, config = load_hf(
            recipe.model.path, dtype=jnp.dtype(recipe.model.param_dtype), mesh=mesh,
            revision=recipe.model.revision,
        )  # fmt: skip
    tokenizer = ChatTokenizer(recipe.model.path, revision=recipe.model.revision)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{recipe.model.path}: the tokenizer has {tokenizer.vocab_size} ids, the model embeds "
            f"{config.vocab_size}"
        )
    longest = rollout.prompt_tokens + rollout.response_tokens
    if longest > config.max_position:
        raise RecipeError(
            f"rollout.prompt_tokens + rollout.response_tokens is {longest}, but "
            f"{recipe.model.path} was made for {config.max_position} positions"
        )
    check_prompts(sets, tokenizer.count_text, rollout.prompt_tokens)
    learner = None
    if train:
        begin("building learner")
        learner = Learner(
            model, make_optimizer(recipe.optimizer, recipe.total_updates),
            mesh=mesh, settings=learner_settings(recipe, tokenizer.vocab_size),
        )  # fmt: skip
    begin("building engine")  # after the learner, whose memory is not free
    engine = (
        remote_engine(recipe, tokenizer)
        if rollout.remote
        else local_engine(recipe, model, tokenizer, mesh)
    )
    common = {
        "prompt_tokens": rollout.prompt_tokens, "response_tokens": rollout.response_tokens,
        "thinking": rollout.thinking, "stop_strings": tuple(rollout.stop_strings),
        "episode_seconds": rollout.episode_seconds, "tool_seconds": rollout.tool_seconds,
        "queue_seconds": rollout.queue_seconds,
    }  # fmt: skip
    evaluation = recipe.evaluation
    return Parts(
        recipe=recipe, config=config, tokenizer=tokenizer, engine=engine,
        rollout=Rollout(engine, tokenizer, workflow, reward=reward, check=check),
        benchmarks=sets.benchmarks,
        train_sampling=SamplingConfig(temperature=rollout.temperature, **common),
        eval_sampling=SamplingConfig(
            temperature=evaluation.temperature, top_p=evaluation.top_p, top_k=evaluation.top_k,
            **common,
        ),
        learner=learner,
        stream=TaskStream(sets.train, rollout.tasks_per_step, recipe.seed) if train else None,
        export_dtype=export_dtype(recipe, tokenizer.folder) if train else None,
    )  # fmt: skip


def export_dtype(recipe: Recipe, folder: Path) -> str | dict[str, np.dtype]:
    """The recipe's, else what each tensor has in the checkpoint ``folder``, read before a run that
    this folder may not outlast."""
    return recipe.model.export_dtype or stored_dtypes(folder)


def learner_settings(recipe: Recipe, vocab_size: int) -> LearnerSettings:
    """What the recipe says about the computation of an update."""
    return LearnerSettings(
        objective=recipe.objective_config(), vocab_size=vocab_size,
        temperature=recipe.rollout.temperature, dtype=jnp.dtype(recipe.model.dtype),
        remat=recipe.learner.remat, attention=recipe.learner.attention,
        logprob_chunk=recipe.learner.logprob_chunk,
    )  # fmt: skip


def check_mesh(recipe: Recipe, mesh: Mesh) -> None:
    """Raises RecipeError where the learner's mesh does not divide its micro-batches, or the recipe
    insists on a kernel that its devices lack."""
    if recipe.learner.micro_batch_rows % batch_shards(mesh):
        raise RecipeError(
            f"learner.micro_batch_rows is {recipe.learner.micro_batch_rows}, not a multiple of the "
            f"{batch_shards(mesh)} devices of the data and fsdp axes"
        )
    try:
        attention_on(mesh, recipe.learner.attention)
    except ValueError as error:
        raise RecipeError(f"learner.attention: {error}") from None
