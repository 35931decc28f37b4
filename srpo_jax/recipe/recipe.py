"""Recipes: one YAML file says everything about a run. Unknown keys and wrong types are errors.

A recipe may name a ``base:`` recipe, whose values it changes; ``key.path=value`` overrides come
last. The order is defaults, base, recipe, command line, and each of them applies its preset first
and then its own keys, so that a preset chosen over a base is the whole preset.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from envs.built_in import WORKFLOWS
from models.attention.forms import ATTENTION_FORMS, AUTO
from models.remat import REMAT_POLICIES
from srpo_jax.advantage import AdvantageConfig
from srpo_jax.objective_config import ObjectiveConfig
from srpo_jax.recipe.errors import RecipeError, first_problem
from srpo_jax.recipe.files import flat, read_level, read_with_base, with_overrides
from srpo_jax.recipe.paths import find, find_model
from srpo_jax.recipe.sections import (
    Count,
    Dtype,
    Fraction,
    LocalPath,
    NonNegative,
    NonNegativeInt,
    Positive,
    RetrieverConfig,
    RolloutConfig,
    Section,
)
from srpo_jax.recipe.switches import Changes, key_of, of_switches
from srpo_jax.recipe.yaml import dump_yaml

__all__ = ["Recipe", "RecipeError", "TaskSet", "load_recipe", "parse_recipe"]


class ModelSection(Section):
    """A checkpoint: a Hugging Face folder or hub name; ``model: some/name`` is short for it.

    ``dtype`` is that of the computation, ``param_dtype`` of the trained parameters, and
    ``export_dtype`` of the run's ``model/`` (None: every tensor as the checkpoint has it).
    """

    path: LocalPath
    revision: str | None = None
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class WorkflowConfig(Section):
    """A built-in workflow by ``name``, or a user's class by ``path: my_team.py:MyWorkflow``."""

    name: Annotated[str, key_of(lambda: WORKFLOWS)] | None = None
    path: LocalPath | None = None
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> WorkflowConfig:
        if (self.name is None) == (self.path is None):
            names = ", ".join(WORKFLOWS)
            raise ValueError(f"give either `name` ({names}) or `path` (my_team.py:MyWorkflow)")
        return self


class RewardConfig(Section):
    """A user's reward: ``path: file.py:function``."""

    path: LocalPath

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class TaskSet(Section):
    """Tasks by built-in ``name``, or by ``path``: a .jsonl or .parquet file, or ``my.py:function``.

    ``size`` caps the number of tasks (None: all). ``args`` go to the builder.
    """

    name: str | None = None
    path: LocalPath | None = None
    split: str | None = None
    seed: int = 0
    size: Count | None = None
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            is_path = value.endswith((".jsonl", ".parquet")) or ".py:" in value or ":/" in value
            return {"path" if is_path else "name": value}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> TaskSet:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either `name` or `path`")
        return self


class TasksConfig(Section):
    """Training tasks, and one task set for each benchmark of the evaluation."""

    train: TaskSet
    eval: dict[str, TaskSet] = {}


@of_switches(ObjectiveConfig)
class ObjectiveSection(Changes):
    """A preset, and what to change of it. A preset sets every switch: chosen over a base, it drops
    the base's changes, those of the ``advantage`` section included.

    ``dual_clip: null`` and ``sampler_cap: null`` turn off what the preset turns on; null leaves any
    other switch to the preset.
    ``clip_eps`` is short for equal ``clip_low`` and ``clip_high``. ``length`` is the constant of
    ``constant_length``; left out, it is the recipe's ``rollout.response_tokens``.
    """

    own = frozenset({"preset"})

    preset: str = "srpo"
    clip_eps: Positive | None = None

    @model_validator(mode="after")
    def _one_clip(self) -> ObjectiveSection:
        sides = (getattr(self, side) for side in ("clip_low", "clip_high"))
        if self.clip_eps is not None and any(side is not None for side in sides):
            raise ValueError("`clip_eps` sets both sides: leave out `clip_low` and `clip_high`")
        return self

    def changes(self) -> dict[str, Any]:
        changes, eps = super().changes(), self.clip_eps
        return changes if eps is None else changes | {"clip_low": eps, "clip_high": eps}


@of_switches(AdvantageConfig)
class AdvantageSection(Changes):
    """What to change of the preset's advantage estimator.

    ``invalid_penalty`` belongs to no preset: it is taken off an event's return for its malformed
    members (0.1 Math, 0.01 Search in the SRPO paper).
    """

    own = frozenset({"invalid_penalty"})

    invalid_penalty: NonNegative = 0.1


class OptimizerConfig(Section):
    """``lr`` is the peak rate; over ``warmup_steps`` optimiser steps it rises in equal parts, from
    ``lr / warmup_steps`` at the first to ``lr`` at the last.

    A schedule ends at ``min_lr_ratio * lr``. ``muon``: the layers' matrices by Muon, all else by
    AdamW, at the same ``lr``. ``moment_dtype`` holds for every moment.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive
    weight_decay: NonNegative = 0.01
    decay_embedding: bool = True
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    grad_clip: Positive | None = 1.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: Fraction = 0.0
    moment_dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _min_lr(self) -> OptimizerConfig:
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError("min_lr_ratio needs `schedule: cosine` or `linear`")
        if self.muon_momentum != 0.95 and self.name != "muon":
            raise ValueError("muon_momentum needs `name: muon`")
        return self


class MeshConfig(Section):
    """Devices per axis of the learner's mesh; one of them may be -1: the rest."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    @model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"axis sizes must be at least 1, or one of them -1, got {list(sizes)}")
        return self


class LearnerConfig(Section):
    """How an update runs. A rollout batch is split into ``updates_per_batch`` event-atomic
    mini-batches, one optimiser step each, gone through ``epochs`` times.

    ``micro_batch_rows`` sequences are computed at a time. Rows are packed into sequences of
    ``sequence_tokens``; None: every row is a sequence of its own. ``remat``: what of a layer is
    stored for its backward pass. ``logprob_chunk``: tokens at a time in the vocabulary projection,
    on each device (None: by the platform). ``role_norms_every``: steps between measurements of the
    gradient norm of each role, a backward pass more for each (0: never).
    """

    micro_batch_rows: Count
    sequence_tokens: Count | None = None
    updates_per_batch: Count = 1
    epochs: Count = 1
    mesh: MeshConfig = MeshConfig()
    remat: Annotated[str, key_of(lambda: REMAT_POLICIES)] = "full"
    attention: Annotated[str, key_of(lambda: (AUTO, *ATTENTION_FORMS))] = AUTO
    logprob_chunk: Count | None = None
    role_norms_every: NonNegativeInt = 0
    max_nonfinite: NonNegativeInt = 3


class EvaluationConfig(Section):
    """Evaluation every so many steps (0: never). ``tasks`` caps each benchmark (None: all)."""

    every: NonNegativeInt = 0
    samples: Count = 16
    temperature: NonNegative = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: NonNegativeInt = 0
    tasks: Count | None = None
    seed: int = 0


class TrainerConfig(Section):
    """Length of the run and what it leaves in ``out`` (default: runs/NAME). A checkpoint is saved
    every so many steps (0: none but these), after the first step, at the end, and when the run is
    stopped."""

    steps: NonNegativeInt
    checkpoint_every: NonNegativeInt = 50
    keep: Count = 2
    out: LocalPath | None = None
    dump_episodes: bool = True
    resume: bool = True


class Recipe(Section):
    """A whole run. ``folder``: where the recipe file lies; its paths are looked up there first."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: int = 0
    model: ModelSection
    workflow: WorkflowConfig
    reward: RewardConfig | None = None
    tasks: TasksConfig
    retriever: RetrieverConfig | None = None
    rollout: RolloutConfig
    objective: ObjectiveSection = ObjectiveSection()
    advantage: AdvantageSection = AdvantageSection()
    optimizer: OptimizerConfig
    learner: LearnerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig
    _folder: Path | None = PrivateAttr(default=None)

    @field_validator("seed")
    @classmethod
    def _seed_range(cls, value: int) -> int:
        if not 0 <= value < 2**32:
            raise ValueError(f"must be in 0 .. 2**32 - 1, got {value}")
        return value

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if (name := self.workflow.name) is not None:
            if WORKFLOWS[name].retriever and self.retriever is None:
                raise ValueError(f"the {name} workflow needs a `retriever` section")
            if not WORKFLOWS[name].retriever and self.retriever is not None:
                raise ValueError(f"the {name} workflow takes no `retriever`")
        episodes = self.rollout.tasks_per_step * self.rollout.group_size
        if self.learner.updates_per_batch > episodes:
            raise ValueError(
                f"learner.updates_per_batch is {self.learner.updates_per_batch}, more than the "
                f"{episodes} episodes of a step"
            )
        if self.rollout.truncated == "penalise" and not self.advantage.invalid_penalty:
            raise ValueError(
                "rollout.truncated is penalise, but advantage.invalid_penalty is 0: no penalty"
            )
        updates, warmup = self.total_updates, self.optimizer.warmup_steps
        if updates and warmup > 1 and warmup >= updates:
            raise ValueError(
                f"optimizer.warmup_steps is {warmup}, but the run has {updates} optimiser steps in "
                "all (trainer.steps x learner.updates_per_batch x learner.epochs)"
            )
        if self.evaluation.every and not self.tasks.eval:
            raise ValueError("evaluation.every needs at least one benchmark under tasks.eval")
        return self

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the whole run, if none is skipped."""
        return self.trainer.steps * self.learner.updates_per_batch * self.learner.epochs

    @property
    def folder(self) -> Path:
        return self._folder or Path.cwd()

    @property
    def checkpoint(self) -> str:
        """The local folder, or else the hub name, that ``model.path`` leads to.

        Raises:
            RecipeError: there is no such folder, and the path is no hub name.
        """
        try:
            return find_model(self.model.path, self.folder)
        except RecipeError as error:
            raise RecipeError(f"model.path: {error}") from None

    @property
    def run_dir(self) -> Path:
        out = self.trainer.out
        return Path(out).expanduser() if out else Path("runs") / self.name

    def dump(self) -> str:
        """The recipe as YAML text, every value said; it loads back to an equal recipe."""
        return dump_yaml(self.model_dump())

    def first_difference(self, saved: Path) -> str | None:
        """The first setting in which this recipe is another run than the one in ``saved``.

        What the ``trainer`` section says may change between a run and its resumption, but not the
        target step of a learning-rate schedule that depends on it.

        Args:
            saved: a file that :meth:`dump` was written to.

        Returns:
            The key and both values, or None where it is the same run.

        Raises:
            RecipeError: ``saved`` holds no recipe.
        """
        content = read_level(saved)
        try:
            # A key that the recipe's own version did not have yet has its default there too.
            theirs = Recipe.model_validate(content)._in_force(self.folder)
        except ValidationError as error:
            raise RecipeError(f"{saved}: {first_problem(error, Recipe)}") from None
        except RecipeError as error:
            raise RecipeError(f"{saved}: {error}") from None
        mine = self._in_force(self.folder)
        for key in {**mine, **theirs}:
            if key.startswith("trainer.") and not (
                key == "trainer.steps" and self.optimizer.schedule != "constant"
            ):
                continue
            if mine.get(key) != theirs.get(key):
                return f"{key} is {theirs.get(key)!r} there and {mine.get(key)!r} here"
        return None

    def _in_force(self, folder: Path) -> dict[str, Any]:
        """Key paths to values; of the objective and the advantage, every switch that holds, and of
        the model the place that its path leads to from a recipe in ``folder``."""
        switches = {
            "objective": asdict(self.objective_config()),
            "advantage": asdict(self.advantage_config()),
        }
        values = flat(self.model_dump() | switches)
        with contextlib.suppress(RecipeError):  # it is gone: as it is written, then
            found = find_model(self.model.path, folder)
            values["model.path"] = os.path.realpath(found) if os.path.isdir(found) else found
        return values

    def objective_config(self) -> ObjectiveConfig:
        """The preset's objective with the recipe's changes.

        Raises:
            RecipeError: switches contradict each other, or the number of updates of a batch.
        """
        name, changes = self.objective.preset, self.objective.changes()
        try:
            config = ObjectiveConfig.preset(name, **changes)
            if config.loss_reduction == "constant_length" and "length" not in changes:
                changes["length"] = self.rollout.response_tokens
                config = ObjectiveConfig.preset(name, **changes)
            self._check_objective(config, changes)
        except ValueError as error:
            raise RecipeError(f"objective: {error}") from None
        return config

    def _check_objective(self, config: ObjectiveConfig, changes: dict[str, Any]) -> None:
        """Raises ValueError for a change that cannot act, though its value may be the default."""
        updates = self.learner.updates_per_batch * self.learner.epochs
        if config.ratio_unit == "none" and updates > 1:
            raise ValueError(
                f"{self.objective.preset!r} with ratio_unit 'none' takes one update of a batch: "
                f"after it the policy is another one than sampled; here it takes {updates} "
                "(learner.updates_per_batch x learner.epochs)"
            )
        if config.ratio_unit == "none" and changes.keys() & {"clip_low", "clip_high"}:
            raise ValueError("a clip bounds a ratio; ratio_unit 'none' has none: leave it out")
        if "kl_estimator" in changes and not config.kl_coef:
            raise ValueError("kl_estimator acts with kl_coef, which is 0: leave it out")
        if "length" in changes and config.loss_reduction != "constant_length":
            raise ValueError("length acts with loss_reduction 'constant_length': leave it out")

    def advantage_config(self) -> AdvantageConfig:
        """The preset's advantage estimator with the recipe's changes.

        Raises:
            RecipeError: switches contradict each other.
        """
        changes = self.advantage.changes()
        if "group" in changes:
            changes["group"] = tuple(changes["group"])
        try:
            config = AdvantageConfig.preset(self.objective.preset, **changes)
            if "std" in changes and config.scale == "none":
                raise ValueError("std acts with scale 'std', not with 'none': leave it out")
        except ValueError as error:
            raise RecipeError(f"advantage: {error}") from None
        return config


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, merges and checks a recipe file.

    Args:
        path: looked up in the working folder, then among the recipes of the package.
        overrides: changes ``key.path=value``, which come last.

    Raises:
        RecipeError: one line that names the file, the key path and the nearest valid key.
    """
    file = find(path)
    return parse_recipe(read_with_base(file), overrides, where=str(path), folder=file.parent)


def parse_recipe(
    content: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "recipe",
    folder: Path | None = None,
) -> Recipe:
    """Checks a recipe given as a mapping.

    Args:
        content: keys and values, without ``base``.
        overrides: changes ``key.path=value``.
        where: names the recipe in errors.
        folder: where paths are looked up first; None: the working folder.

    Raises:
        RecipeError: one line that names the key path and the nearest valid key.
    """
    content = with_overrides(content, overrides)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{where}: {first_problem(error, Recipe)}") from None
    recipe._folder = folder.resolve() if folder else None
    try:
        recipe.objective_config()
        recipe.advantage_config()
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return recipe
