"""Recipe files as mappings: a base under a recipe, ``key.path=value`` overrides on top.

Each of these levels applies its preset first and then its own keys: a level that names a preset
drops what the levels below it say about the switches that the preset sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.text_files import short
from srpo_jax.recipe.errors import RecipeError, describe
from srpo_jax.recipe.paths import find
from srpo_jax.recipe.yaml import MAX_DEPTH, parse_yaml, read_yaml


def read_with_base(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe file's content over that of the recipe that it names as ``base``, and so on.

    Args:
        path: the recipe file.
        seen: the files that led here.

    Raises:
        RecipeError: a file cannot be read, or a ``base`` leads back to a file that named it.
    """
    content = read_level(path)
    if path.resolve() in seen:
        raise RecipeError(f"{path}: `base` leads back to this file")
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base: must be a file name, got {describe(base)}")
    try:
        lower = read_with_base(find(base, path.parent), (*seen, path.resolve()))
    except RecipeError as error:
        raise RecipeError(f"{path}: base: {error}") from None
    return _merge(_below(lower, content), content)


def read_level(path: Path) -> dict[str, Any]:
    """A recipe file's own content, without that of its base.

    Raises:
        RecipeError: the file cannot be read, or holds no mapping.
    """
    content = read_yaml(path)
    objective = content.get("objective")
    if isinstance(objective, dict) and objective.keys() >= _EARLIER_DUMP:
        # Runs used to save every switch, null where the preset's value holds.
        content["objective"] = {k: v for k, v in objective.items() if v is not None}
    return content


_EARLIER_DUMP = {
    *("preset", "clip_eps", "ratio_unit", "set_reduction", "member_score", "loss_reduction"),
    *("length", "clip_low", "clip_high", "dual_clip", "kl_coef", "kl_estimator", "entropy_coef"),
    "sampler_cap",
}
# Keys that say what kind of thing a section is: with another kind the section below is dropped.
_KINDS = {"workflow": ("name", "path"), "retriever": ("kind",)}
_SHORT = {"model": "path", "workflow": "name"}


def _long(section: str, value: Any) -> Any:
    """A section without its shorthand: ``workflow: math`` is ``workflow: {name: math}``."""
    return {_SHORT[section]: value} if section in _SHORT and isinstance(value, str) else value


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    value = _long(name, content.get(name))
    return value if isinstance(value, dict) else {}


def _below(lower: dict[str, Any], level: dict[str, Any]) -> dict[str, Any]:
    """What is left of ``lower`` under a level that may name a preset or another kind of thing."""
    lower = dict(lower)
    for name, kinds in _KINDS.items():
        old, new = _section(lower, name), _section(level, name)
        if old and any(kind in new and new[kind] != old.get(kind) for kind in kinds):
            del lower[name]
    args = _section(level, "workflow").get("args")
    if isinstance(args, dict) and "preset" in args and (old := _section(lower, "workflow")):
        lower["workflow"] = {**old, "args": {}}
    objective, old = _section(level, "objective"), _section(lower, "objective")
    if "preset" in objective:
        lower.pop("objective", None)
        if advantage := _section(lower, "advantage"):
            # No preset sets the penalty: it belongs to the environment.
            lower["advantage"] = {k: v for k, v in advantage.items() if k == "invalid_penalty"}
    elif old:
        lower["objective"] = _other_clip(old, objective)
    return lower


def _other_clip(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``old`` objective keys under ``new`` ones, which may say the clip in the other spelling."""
    sides = ("clip_low", "clip_high")
    if "clip_eps" in new:
        return {key: value for key, value in old.items() if key not in sides}
    if "clip_eps" in old and any(side in new for side in sides):
        old = dict(old)
        return dict.fromkeys(sides, old.pop("clip_eps")) | old
    return old


def _merge(base: dict[str, Any], change: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``change`` over ``base``, mapping by mapping. Task sets are replaced whole."""
    merged = dict(base)
    for key, value in change.items():
        path = prefix + str(key)
        old, value = _long(path, merged.get(key)), _long(path, value)
        if isinstance(old, dict) and isinstance(value, dict) and not path.startswith("tasks."):
            value = _merge(old, value, path + ".")
        merged[key] = value
    return merged


def with_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The content under the command line's ``key.path=value``, values read as YAML.

    The overrides are one level, whatever their order: a whole section comes before its keys; of one
    key said twice the last holds.

    Args:
        content: that of a recipe, its bases included.
        overrides: texts ``key.path=value``.

    Raises:
        RecipeError: a text is no override, or its path leads through what is no section.
    """
    ordered = sorted(overrides, key=lambda text: text.partition("=")[0].count("."))
    level: dict[str, Any] = {}
    for override in ordered:
        level = apply_override(level, override)
    content = _below(content, level)
    for override in ordered:
        content = apply_override(content, override)
    return content


def apply_override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """The content with one ``key.path=value``; errors as in :func:`with_overrides`."""
    key, equals, text = override.partition("=")
    parts, where = key.split("."), f"override {short(override)}"
    if not equals or not all(parts):
        raise RecipeError(f"{where}: must be key.path=value")
    if len(parts) > MAX_DEPTH:
        raise RecipeError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    return _with_value(content, parts, parse_yaml(text, where), where)


def _with_value(content: Any, parts: list[str], value: Any, where: str) -> dict[str, Any]:
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: `{parts[0]}` lies under {describe(content)}, not a section")
    old = content.get(parts[0])
    if len(parts) > 1:
        value = _with_value(_long(parts[0], old), parts[1:], value, where)
    return {**content, parts[0]: value}


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key paths to values; an empty section stays as it is."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
