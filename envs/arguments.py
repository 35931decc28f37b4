"""Checks of the arguments that a built-in workflow is made with, in one dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_arguments(
    values: Mapping[str, Any],
    *,
    counts: tuple[str, ...],
    choices: Mapping[str, tuple[str, ...]],
) -> None:
    """Refuses arguments of a wrong kind; what is in neither list must be true or false.

    Args:
        values: The arguments by name.
        counts: Those that are whole numbers of at least 1.
        choices: What those that are words may be.

    Raises:
        ValueError: One line that names the argument, what it must be and what it is.
    """
    for name, value in values.items():
        if name in counts:
            fits, due = type(value) is int and value >= 1, "a whole number of at least 1"
        elif name in choices:
            fits, due = value in choices[name], f"one of {', '.join(choices[name])}"
        else:  # a text "no" would be true
            fits, due = isinstance(value, bool), "true or false"
        if not fits:
            raise ValueError(f"{name} must be {due}, got {value!r}")


def preset_arguments(presets: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The arguments of a preset. Raises ValueError naming those that there are."""
    if not isinstance(name, str) or name not in presets:  # a list is no key of a table
        raise ValueError(f"preset must be one of {', '.join(presets)}, got {name!r}")
    return presets[name]
