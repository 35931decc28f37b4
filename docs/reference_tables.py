"""Fills the reference pages from the code when the documentation is built (an MkDocs hook).

A page asks for a table with a comment of its own line, for instance ``<!-- table: presets -->``.
"""

from __future__ import annotations

import html
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

_PLACE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts each table where its comment stands. An unknown name fails the build."""
    return _PLACE.sub(lambda match: TABLES[match.group(1)](), markdown)


def recipe_keys() -> str:
    """Every section of a recipe with its keys, types and defaults, from the schema."""
    from srpo_jax.recipe.recipe import Recipe

    return "\n\n".join(_section(Recipe, ""))


def presets() -> str:
    """The switches of every preset: those of the objective, then those of the advantage."""
    from srpo_jax.advantage import AdvantageConfig
    from srpo_jax.objective_config import PRESETS, ObjectiveConfig

    blocks = []
    for title, half, config in (
        ("Objective", 0, ObjectiveConfig),
        ("Advantage", 1, AdvantageConfig),
    ):
        defaults = {field.name: field.default for field in fields(config)}
        changed = [n for n in defaults if any(n in preset[half] for preset in PRESETS.values())]
        rows = [
            [_name(name), *(_code(preset[half].get(key, defaults[key])) for key in changed)]
            for name, preset in PRESETS.items()
        ]
        blocks.append(f"## {title}\n\n" + _table(["preset", *changed], rows))
    return "\n\n".join(blocks)


def metrics() -> str:
    """Every logged figure with its unit and meaning."""
    from srpo_jax.run.metric_names import METRICS

    rows = [[_name(metric.name), metric.unit, metric.meaning] for metric in METRICS]
    return _table(["name", "unit", "meaning"], rows)


def _section(model: type[BaseModel], path: str) -> Iterator[str]:
    inner = []
    rows = []
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        own, repeated = _models(field.annotation)
        inner += [(sub, f"{key}.NAME." if repeated else f"{key}.") for sub in own]
        default = "required" if field.is_required() else _default(field)
        kind = typing.Annotated[field.annotation, *field.metadata, None]
        rows.append([_name(key), _type(kind), default])
    title = path.removesuffix(".") or "The recipe"
    yield f"## {title}\n\n{inspect.getdoc(model)}\n\n" + _table(["key", "type", "default"], rows)
    for sub, where in inner:
        yield from _section(sub, where)


def _default(field: Any) -> str:
    value = field.default
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "its own defaults"
    return _code(value)


def _models(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The sections inside a type, and whether they stand under names of the user's."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation], False
    found: list[type[BaseModel]] = []
    for arg in typing.get_args(annotation):
        found += _models(arg)[0]
    return found, typing.get_origin(annotation) is dict


def _type(annotation: Any) -> str:
    from srpo_jax.recipe.switches import OneOf

    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Literal:
        return ", ".join(_code(arg) for arg in args)
    if origin is typing.Annotated:
        choices = [mark for mark in args[1:] if isinstance(mark, OneOf)]
        return ", ".join(map(_code, choices[0].names())) if choices else _type(args[0])
    if origin in (list, tuple):
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"names to {_type(args[1])}"
    if args:
        return " or ".join(_type(arg) for arg in args)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    if annotation is Any:
        return "anything"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true, false"}[
        annotation.__name__
    ]


def _name(name: str) -> str:
    """A name as code, which a narrow screen breaks after its separators alone."""
    return "<code>" + re.sub(r"([./_])", r"\1<wbr>", html.escape(name)) + "</code>"


def _code(value: Any) -> str:
    if isinstance(value, tuple | list):
        text = "[" + ", ".join(map(str, value)) + "]"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = "null" if value is None else str(value)
    return f"`{text}`"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


TABLES: dict[str, Callable[[], str]] = {
    "recipe_keys": recipe_keys,
    "presets": presets,
    "metrics": metrics,
}
