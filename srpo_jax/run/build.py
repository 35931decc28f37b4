"""Builds what a run consists of from its recipe: model, learner, engine, workflow, tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs.workflow import Task, Workflow
from models.attention.select import attention_on
from models.checkpoint_files import stored_dtypes
from models.config import CheckpointError, ModelConfig
from models.convert import load_config, load_hf, save_hf
from models.qwen import Qwen
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Engine
from srpo_jax.engine.async_engine import AsyncEngine, EngineThread
from srpo_jax.engine.remote import RemoteEngine
from srpo_jax.learner.batch import ShapeMemory
from srpo_jax.learner.learner import Learner
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import LearnerSettings
from srpo_jax.learner.sharding import batch_shards, make_mesh
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_reward, build_workflow, check_reward, check_workflow
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.recipe.tasks import RecipeTasks, TaskStream, check_prompts, task_sets
from srpo_jax.rollout.rollout import Rollout, SamplingConfig
from srpo_jax.run.build_engine import free_bytes, local_engine, remote_engine
from srpo_jax.run.memory_plan import MemoryPlan, plan_memory
from srpo_jax.run.processes import Processes


class NonFiniteGradients(RuntimeError):
    """More updates were skipped for non-finite gradients than learner.max_nonfinite allows."""

    exit_code = 1


@dataclass
class EvaluationParts:
    """What evaluates a policy. Only where nothing is trained can the engine be a remote one.

    Attributes:
        recipe: What the parts were built from.
        config: The model's sizes.
        tokenizer: The model's.
        engine: Samples, and is stepped by ``rollout``.
        processes: Of the run; each has an engine on its own devices.
        rollout: Runs episodes of the recipe's workflow.
        benchmarks: The tasks of each, by its name.
        eval_sampling: How an evaluation samples.
    """

    recipe: Recipe
    config: ModelConfig
    tokenizer: ChatTokenizer
    engine: Engine | RemoteEngine
    rollout: Rollout
    benchmarks: dict[str, Sequence[Task]]
    eval_sampling: SamplingConfig
    processes: Processes


@dataclass
class Parts(EvaluationParts):
    """The parts of a run that trains.

    Attributes:
        engine: A local one: the learner's weights are given to it after every update.
        train_sampling: How a training step samples.
        learner: Updates the parameters.
        stream: The training tasks of each step.
        export_dtype: What exported tensors have: one name, or a dtype for each tensor.
        needs_gate: Whether the learner's log-probs are still to be compared with the engine's.
        grad_norms: ``update/grad_norm`` of the last CV_WINDOW steps that have one.
        nonfinite: Updates in a row that were skipped.
        dropping: Updates in a row that went without some of their events.
        shapes: Batch shapes that were compiled so far.
    """

    engine: Engine
    train_sampling: SamplingConfig
    learner: Learner
    stream: TaskStream
    export_dtype: str | dict[str, np.dtype]
    needs_gate: bool = True
    grad_norms: list[float] = field(default_factory=list)
    nonfinite: int = 0
    dropping: int = 0
    shapes: ShapeMemory = field(default_factory=ShapeMemory)

    def sync(self) -> None:
        """Gives the learner's weights to the engine; the version counts applied updates."""
        self.engine.set_weights(self.learner.params, int(self.learner.state.updates))

    def compile_count(self) -> int:
        """Programs that learner and engine have compiled so far."""
        return self.learner.compile_count() + self.engine.compile_count()

    def count_nonfinite(self, reports: Sequence[dict[str, Any]]) -> None:
        """Counts updates that were skipped, or that went without some of their events, in a row.

        Args:
            reports: What the learner returned for each of the step's updates.

        Raises:
            NonFiniteGradients: More than learner.max_nonfinite in a row were skipped for a gradient
                that is not finite, or dropped events whose log-probs are not.
        """
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
    starting: Callable[[str], None] = lambda what: None,
    note: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
    processes: Processes | None = None,
) -> Parts:
    """Loads and checks everything that training needs, cheap checks first.

    Args:
        recipe: The run's.
        workflow: Instead of the recipe's own.
        reward: Instead of the recipe's own.
        starting: Told what comes next, for a progress display.
        note: Told the memory plan, before anything is allocated.
        check: Called between these parts and while episodes run: what it raises abandons them.
        processes: Of the run (None: those that jax knows).

    Raises:
        RecipeError: A key does not fit the machine, the model or the tasks; one line.
        DataError: A file of tasks cannot be used.
        CheckpointError: The model cannot be loaded.
    """
    if recipe.rollout.remote is not None:
        raise RecipeError(
            "rollout.remote: training samples with the learner's own weights; leave it out, or "
            "evaluate with launch.evaluate"
        )
    begin = _beginner(starting, check)
    processes = processes or Processes()
    begin("reading tasks")
    workflow = build_workflow(recipe) if workflow is None else check_workflow(workflow)
    reward = build_reward(recipe) if reward is None else check_reward(reward)
    sets = task_sets(recipe)
    mesh = make_mesh(**recipe.learner.mesh.model_dump())
    check_mesh(recipe, mesh)
    plan = _memory_plan(recipe, mesh, note, processes)
    begin(f"loading model {recipe.model.path}")
    model, config = _load_model(recipe, mesh)
    tokenizer = _load_tokenizer(recipe, config, sets)
    begin("building learner")
    learner = Learner(
        model, make_optimizer(recipe.optimizer, recipe.total_updates),
        mesh=mesh, settings=learner_settings(recipe, tokenizer.vocab_size),
    )  # fmt: skip
    begin("building engine")
    engine = local_engine(plan.engine, model, tokenizer, own_devices(mesh))
    return Parts(
        recipe=recipe, config=config, tokenizer=tokenizer, engine=engine,
        rollout=Rollout(EngineThread(engine), tokenizer, workflow, reward=reward, check=check),
        benchmarks=sets.benchmarks,
        train_sampling=_sampling(recipe, temperature=recipe.rollout.temperature),
        eval_sampling=_eval_sampling(recipe),
        processes=processes,
        learner=learner,
        stream=TaskStream(sets.train, recipe.rollout.tasks_per_step, recipe.seed),
        export_dtype=export_dtype(recipe, tokenizer.folder),
    )  # fmt: skip


def build_evaluation_parts(
    recipe: Recipe,
    *,
    starting: Callable[[str], None] = lambda what: None,
    note: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
    processes: Processes | None = None,
) -> EvaluationParts:
    """Loads and checks everything that an evaluation needs.

    Args:
        recipe: The evaluation's.
        starting: As of ``build_parts``.
        note: As of ``build_parts``; likewise ``processes``.
        check: As of ``build_parts``.

    Raises:
        RemoteEngineError: The server of ``rollout.remote`` does not answer as it must.
        RecipeError: As of ``build_parts``; likewise DataError and CheckpointError.
    """
    begin = _beginner(starting, check)
    processes = processes or Processes()
    begin("reading tasks")
    workflow, reward = build_workflow(recipe), build_reward(recipe)
    sets = task_sets(recipe, train=False)
    begin(f"loading model {recipe.model.path}")
    engine: Engine | RemoteEngine
    sampler: AsyncEngine
    if recipe.rollout.remote is not None:
        config = load_config(recipe.checkpoint, revision=recipe.model.revision, weights=False)
        tokenizer = _load_tokenizer(recipe, config, sets)
        begin("building engine")
        engine = sampler = remote_engine(recipe.rollout.remote, tokenizer)
    else:
        mesh = make_mesh(**recipe.learner.mesh.model_dump())
        plan = _memory_plan(recipe, mesh, note, processes, trains=False)
        model, config = _load_model(recipe, mesh)
        tokenizer = _load_tokenizer(recipe, config, sets)
        begin("building engine")
        engine = local_engine(plan.engine, model, tokenizer, own_devices(mesh))
        sampler = EngineThread(engine)
    return EvaluationParts(
        recipe=recipe, config=config, tokenizer=tokenizer, engine=engine,
        rollout=Rollout(sampler, tokenizer, workflow, reward=reward, check=check),
        benchmarks=sets.benchmarks, eval_sampling=_eval_sampling(recipe), processes=processes,
    )  # fmt: skip


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that belong to this process: those of its engine."""
    return [d for d in mesh.devices.flat if d.process_index == jax.process_index()]


def _beginner(starting: Callable[[str], None], check: Callable[[], None]) -> Callable[[str], None]:
    def begin(what: str) -> None:
        check()
        starting(what)

    return begin


def _memory_plan(
    recipe: Recipe,
    mesh: Mesh,
    note: Callable[[str], None],
    processes: Processes,
    *,
    trains: bool = True,
) -> MemoryPlan:
    """What the run will hold on each device, noted, once it is known to fit.

    Raises:
        RecipeError: It does not fit.
    """
    config = load_config(recipe.checkpoint, revision=recipe.model.revision, weights=False)
    devices = own_devices(mesh)
    usable = processes.least(free_bytes(devices))  # the same plan everywhere
    plan = plan_memory(recipe, config, mesh, devices, usable, trains=trains)
    note(str(plan))
    plan.check()
    return plan


def _load_model(recipe: Recipe, mesh: Mesh) -> tuple[Qwen, ModelConfig]:
    return load_hf(
        recipe.checkpoint, dtype=jnp.dtype(recipe.model.param_dtype), mesh=mesh,
        revision=recipe.model.revision,
    )  # fmt: skip


def _load_tokenizer(recipe: Recipe, config: ModelConfig, sets: RecipeTasks) -> ChatTokenizer:
    """The model's, once it, the recipe's lengths and the prompts of its tasks fit each other."""
    tokenizer = ChatTokenizer(recipe.checkpoint, revision=recipe.model.revision)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{recipe.model.path}: the tokenizer has {tokenizer.vocab_size} ids, the model embeds "
            f"{config.vocab_size}"
        )
    rollout = recipe.rollout
    longest = rollout.prompt_tokens + rollout.response_tokens
    if longest > config.max_position:
        raise RecipeError(
            f"rollout.prompt_tokens + rollout.response_tokens is {longest}, but "
            f"{recipe.model.path} was made for {config.max_position} positions"
        )
    check_prompts(sets, tokenizer.count_text, rollout.prompt_tokens)
    return tokenizer


def _sampling(
    recipe: Recipe, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> SamplingConfig:
    rollout = recipe.rollout
    return SamplingConfig(
        prompt_tokens=rollout.prompt_tokens, response_tokens=rollout.response_tokens,
        temperature=temperature, top_p=top_p, top_k=top_k, thinking=rollout.thinking,
        stop_strings=tuple(rollout.stop_strings), episode_seconds=rollout.episode_seconds,
        tool_seconds=rollout.tool_seconds, queue_seconds=rollout.queue_seconds,
    )  # fmt: skip


def _eval_sampling(recipe: Recipe) -> SamplingConfig:
    evaluation = recipe.evaluation
    return _sampling(
        recipe, temperature=evaluation.temperature, top_p=evaluation.top_p, top_k=evaluation.top_k
    )


def export_dtype(recipe: Recipe, folder: Path) -> str | dict[str, np.dtype]:
    """What exported tensors have: the recipe's dtype, else each tensor's own in the checkpoint.

    It is read before the run, which the checkpoint's folder may not outlast.
    """
    return recipe.model.export_dtype or stored_dtypes(folder)


def learner_settings(recipe: Recipe, vocab_size: int) -> LearnerSettings:
    """What the recipe says about the computation of an update.

    Args:
        recipe: The run's.
        vocab_size: Number of ids of the tokenizer; logits beyond them take no part.
    """
    return LearnerSettings(
        objective=recipe.objective_config(), vocab_size=vocab_size,
        temperature=recipe.rollout.temperature, dtype=jnp.dtype(recipe.model.dtype),
        remat=recipe.learner.remat, attention=recipe.learner.attention,
        logprob_chunk=recipe.learner.logprob_chunk,
    )  # fmt: skip


def check_mesh(recipe: Recipe, mesh: Mesh) -> None:
    """Checks that the learner's mesh can compute its micro-batches.

    Raises:
        RecipeError: It does not divide them, or the recipe insists on a kernel that its devices
            lack.
    """
    if recipe.learner.micro_batch_rows % batch_shards(mesh):
        raise RecipeError(
            f"learner.micro_batch_rows is {recipe.learner.micro_batch_rows}, not a multiple of the "
            f"{batch_shards(mesh)} devices of the data and fsdp axes"
        )
    try:
        attention_on(mesh, recipe.learner.attention)
    except ValueError as error:
        raise RecipeError(f"learner.attention: {error}") from None
