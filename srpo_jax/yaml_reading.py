"""YAML as recipes need it: ``1e-6`` is a number, ``010`` is not eight, a key appears once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class RecipeError(ValueError):
    """A recipe, sweep or plugin that cannot be used: one line with what, where, what is near."""

    exit_code = 2


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers, plus yes/no/on/off as booleans. Dates stay text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} appears twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_NUMBERS = {
    # A leading zero ("010") fits neither form: it stays text, and a number field refuses it.
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.)(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in resolvers
        if tag not in _NUMBERS and tag != "tag:yaml.org,2002:timestamp"
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _first) in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def parse_yaml(text: str, where: str) -> Any:
    """Reads one YAML document. Raises RecipeError naming ``where`` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{where}{line}: {' '.join(problem.split())}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a file that holds one mapping. Raises RecipeError when it cannot be read or is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a mapping of keys is due, got {describe(content)}")
    return content


def describe(value: Any) -> str:
    """A value with its kind, for messages: ``'1e-6' (text)``."""
    kinds = {str: "text", bool: "true/false", int: "whole number", float: "number"}
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"


class _Dumper(yaml.SafeDumper):
    """Quotes whatever text :class:`_Loader` would take for something else; lists in one line."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def inline_yaml(value: Any) -> str:
    """A value as one line of YAML, as a ``key.path=value`` override takes it."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def dump_yaml(content: dict[str, Any]) -> str:
    """The mapping as YAML text that :func:`parse_yaml` reads back to the same values."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
