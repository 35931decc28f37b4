"""What a refused recipe says: the key path, what is wrong with it, and the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from envs.text_files import short


class RecipeError(ValueError):
    """A recipe, sweep or plugin that cannot be used: one line with what, where, what is near.

    Attributes:
        exit_code: of a command that ends with it.
    """

    exit_code = 2


def describe(value: Any) -> str:
    """A value with its kind, for messages: ``'1e-6' (text)``; long ones are cut."""
    kinds = {str: "text", bool: "true/false", int: "whole number", float: "number"}
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{short(value)} ({kinds.get(type(value), type(value).__name__)})"


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for an unknown word: ``did you mean `x`?``, or the list of what there is."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"there is: {', '.join(choices)}" if choices else "there is none"


def first_problem(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first problem of a validation as one line: key path, what is wrong, what is near.

    Args:
        error: what pydantic found; unknown keys come before all else.
        schema: the section that was validated, whose keys are the candidates for the nearest one.
    """
    problem = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    keys = [str(key) for key in problem["loc"]]
    path, value = ".".join(keys), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key, {_nearest_key(keys, schema)}"
        case "missing":
            return f"{path}: this key is missing"
        case "int_type" | "int_from_float":
            message = "must be a whole number"
        case "float_type":
            message = "must be a number"
        case "bool_type":
            message = "must be true or false"
        case "list_type":
            message = "must be a list"
        case "string_type":
            message = "must be text"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "must be a section of keys"
        case "value_error":
            return f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
        case "literal_error" if isinstance(value, str):
            choices = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            return f"{path}: must be one of {', '.join(choices)}, got {short(value)}"
        case _:
            message = problem["msg"].replace("Input should be", "must be")
    return f"{path}: {message}, got {describe(value)}"


def _nearest_key(keys: list[str], schema: type[BaseModel]) -> str:
    """The valid key nearest to an unknown one: the same word elsewhere, a sibling, any other."""
    paths = list(_key_paths(schema))
    parent, word = ".".join(keys[:-1]), keys[-1]
    siblings = [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == parent]
    elsewhere = {path.rpartition(".")[2]: path for path in reversed(paths)}
    if word not in elsewhere and (close := difflib.get_close_matches(word, siblings, n=1)):
        return f"did you mean `{'.'.join([*keys[:-1], close[0]])}`?"
    if close := difflib.get_close_matches(word, elsewhere, n=1):
        return f"did you mean `{elsewhere[close[0]]}`?"
    return f"`{parent or 'the recipe'}` has: {', '.join(siblings)}"


def _key_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _key_paths(kind, f"{prefix}{name}.")
