"""Recipe files as mappings: a base under a recipe, ``key.path=value`` overrides on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envs.text_files import short
from srpo_jax.recipe.errors import RecipeError, describe
from srpo_jax.recipe.yaml import MAX_DEPTH, parse_yaml, read_yaml


def read_with_base(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe file's content over that of the recipe that it names as ``base``, and so on."""
    content = read_yaml(path)
    if path.resolve() in seen:
        raise RecipeError(f"{path}: `base` leads back to this file")
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base: a file name is due, got {describe(base)}")
    return _merge(read_with_base(path.parent / base, (*seen, path.resolve())), content)


# Keys that say what kind of thing a section is: with another kind the base's section is dropped.
_KINDS = {"workflow": ("name", "path"), "retriever": ("kind",), "tasks.train": (), "tasks.eval": ()}
_SHORT = {"model": "path", "workflow": "name"}


def _merge(base: dict[str, Any], change: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``change`` over ``base``, mapping by mapping. Task sets are replaced whole."""
    merged = dict(base)
    for key, value in change.items():
        path = prefix + str(key)
        old = merged.get(key)
        if path in _SHORT:
            old, value = (
                {_SHORT[path]: side} if isinstance(side, str) else side for side in (old, value)
            )
        kinds = _KINDS.get(path, ())
        if isinstance(old, dict) and isinstance(value, dict):
            other_kind = path.startswith("tasks.") or any(
                kind in value and value[kind] != old.get(kind) for kind in kinds
            )
            if not other_kind:
                value = _merge(old, value, path + ".")
        merged[key] = value
    return merged


def with_override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """The content with one ``key.path=value``, the value read as YAML. Raises RecipeError."""
    key, equals, text = override.partition("=")
    parts, where = key.split("."), f"override {short(override)}"
    if not equals or not all(parts):
        raise RecipeError(f"{where}: key.path=value is due")
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
        if parts[0] in _SHORT and isinstance(old, str):
            old = {_SHORT[parts[0]]: old}
        value = _with_value(old, parts[1:], value, where)
    return {**content, parts[0]: value}


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key paths to values; an empty section stays as it is."""
    values = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
