"""YAML to a checked recipe, and what it names: plugins and task sets. Loads no jax."""
