"""YAML to a checked recipe, and what it names: plugins and task sets. Loads no jax.

The names below are loaded when they are asked for: who reads a run's files needs the errors of a
recipe, but neither its schema nor what that imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srpo_jax.recipe.recipe import Recipe, RecipeError, load_recipe, parse_recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "parse_recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("srpo_jax.recipe.recipe"), name)
