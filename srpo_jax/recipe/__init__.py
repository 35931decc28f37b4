"""YAML to a checked recipe, and what it names: plugins and task sets. Loads no jax."""

from srpo_jax.recipe.recipe import Recipe, RecipeError, load_recipe, parse_recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "parse_recipe"]
