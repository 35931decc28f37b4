"""What a recipe changes of the presets that it names, in one line for the start of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from inspect import Parameter
from typing import Any

from srpo_jax.advantage import AdvantageConfig
from srpo_jax.objective_config import ObjectiveConfig
from srpo_jax.recipe.plugins import keywords_of, workflow_class
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.recipe.yaml import inline_yaml


def preset_changes(recipe: Recipe, *, own_workflow: bool = False) -> str | None:
    """What differs from the presets of the objective, the advantage and the workflow.

    Args:
        recipe: a checked recipe.
        own_workflow: the run gets a workflow from its caller: the recipe's is not looked at.

    Returns:
        ``objective: srpo, but clip_low 0.1 (preset 0.2); workflow: ...``, or None where every
        switch is as its preset has it. What no preset sets is no difference:
        ``advantage.invalid_penalty``, and a ``length`` that follows ``rollout.response_tokens``.

    Raises:
        RecipeError: the workflow's file cannot be loaded.
    """
    name, said = recipe.objective.preset, recipe.objective.changes()
    unset = () if "length" in said else ("length",)
    parts = [
        _part("objective", name, recipe.objective_config(), ObjectiveConfig.preset(name), unset),
        _part(
            "advantage", name, recipe.advantage_config(), AdvantageConfig.preset(name),
            ("invalid_penalty",),
        ),
        None if own_workflow else _workflow_part(recipe),
    ]  # fmt: skip
    return "; ".join(filter(None, parts)) or None


def _part(
    section: str,
    preset: str,
    config: ObjectiveConfig | AdvantageConfig,
    of_preset: ObjectiveConfig | AdvantageConfig,
    skipped: Iterable[str],
) -> str | None:
    values = {key: value for key, value in asdict(config).items() if key not in skipped}
    return _line(section, preset, values, asdict(of_preset))


def _workflow_part(recipe: Recipe) -> str | None:
    args = dict(recipe.workflow.args)
    preset = args.pop("preset", None)
    if preset is None:
        return None
    cls = workflow_class(recipe.workflow, recipe.folder)
    table = getattr(cls, "PRESETS", None)  # a user's own class may mean something else by it
    of_preset = table.get(str(preset)) if isinstance(table, Mapping) else None
    if not isinstance(of_preset, Mapping):  # a name that is none is refused when it is built
        return None
    defaults = {k: v for k, v in (keywords_of(cls) or {}).items() if v is not Parameter.empty}
    return _line("workflow", preset, args, {**defaults, **of_preset})


def _line(
    section: str, preset: str, values: Mapping[str, Any], of_preset: Mapping[str, Any]
) -> str | None:
    changes = [
        f"{key} {_shown(value)} (preset {_shown(of_preset[key])})"
        for key, value in values.items()
        if key in of_preset and value != of_preset[key]
    ]
    return f"{section}: {preset}, but {', '.join(changes)}" if changes else None


def _shown(value: Any) -> str:
    return inline_yaml(list(value) if isinstance(value, tuple) else value)
