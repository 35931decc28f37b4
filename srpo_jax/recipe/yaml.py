"""YAML as recipes need it: ``1e-6`` is a number, ``010`` is not eight, a key appears once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from envs.text_files import check_file, short
from srpo_jax.recipe.errors import RecipeError, describe

MAX_DEPTH = 50  # levels of a recipe
_MAX_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers, plus yes/no/on/off as booleans. Dates stay text."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # refuses half of a surrogate pair, which no file takes
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"this cannot be read as {kind}", node) from None
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # !!set 3
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key is text, not a list or a mapping", key_node)
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise _problem(f"the key {short(key_node.value)} appears twice", key_node)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _problem(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _check_size(root: yaml.Node) -> None:
    """Refuses what has no end or grows without bound once its aliases are written out."""
    stack, count = [(root, 1)], 0
    while stack:
        node, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _problem(f"nested deeper than {MAX_DEPTH} levels", node)
        if count > _MAX_NODES:
            raise _problem(f"more than {_MAX_NODES:,} values, aliases written out", node)
        if isinstance(node, yaml.MappingNode):
            stack += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(part, depth + 1) for part in node.value]


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
    """Reads one YAML document.

    Args:
        text: the document.
        where: names it in errors.

    Raises:
        RecipeError: it is no YAML, or no value that a recipe takes; the line is named.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise RecipeError(f"{where}: nested deeper than {MAX_DEPTH} levels") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{where}:{line}: the character {error.character:#x} is not text"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{place}: {' '.join(problem.split())}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a file that holds one mapping.

    Raises:
        RecipeError: the file cannot be read, is not UTF-8, or holds something else.
    """
    try:
        check_file(path)
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise RecipeError(str(error)) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise RecipeError(f"{path}:{line}: not UTF-8: byte {byte:#04x}") from None
    mapping = parse_yaml(text, str(path))
    if not isinstance(mapping, dict):
        raise RecipeError(f"{path}: must be a mapping of keys, got {describe(mapping)}")
    return mapping


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
