"""The commands: ``python -m launch.NAME``, or ``srpo NAME``."""

from srpo_jax.__main__ import check_packages

check_packages()
