"""The import direction launch -> srpo_jax -> models, envs, and the size of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What each package may import of the project.
ALLOWED = {
    "launch": {"launch", "srpo_jax", "models", "envs"},
    "srpo_jax": {"srpo_jax", "models", "envs"},
    "models": {"models"},
    "envs": {"envs"},
    "benchmarks": {"benchmarks", "launch", "srpo_jax", "models", "envs"},
}
JAX = {"jax", "jaxlib", "flax", "optax", "chex", "orbax"}
LONGEST_FILE = 600


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level names of all absolute imports, at any depth of the code, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0], node.lineno


def offences(package: str, source: str, name: str) -> list[str]:
    forbidden = set(ALLOWED) - ALLOWED[package]
    if package == "envs":
        forbidden |= JAX
    return [
        f"{name}:{line} imports {module}"
        for module, line in imports(ast.parse(source))
        if module in forbidden
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package):
    found = []
    for path in sources(package):
        found += offences(package, path.read_text(), str(path.relative_to(ROOT)))
    assert not found


@pytest.mark.parametrize(
    "package, source",
    [
        ("envs", "def f():\n    import jax.numpy as jnp"),
        ("envs", "from models.qwen import Qwen"),
        ("models", "from envs import workflow"),
        ("models", "import srpo_jax.learner.batch"),
        ("srpo_jax", "from launch.cli import entry"),
    ],
)
def test_the_scan_finds_an_offence(package, source):
    assert len(offences(package, source, "x.py")) == 1


# What the folders inside srpo_jax may not import: they serve the run, and do not know of it.
SERVANTS = ("recipe", "learner", "engine", "rollout")
ABOVE = ("run", "trainer", "warm_start", "compile_check")
MOST_SIDE_BY_SIDE = 10


def modules() -> dict[str, ast.Module]:
    """Every module of the four packages, by its dotted name."""
    found = {}
    for package in ("launch", "srpo_jax", "models", "envs"):
        for path in sources(package):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules each one imports, at any depth of its code."""
    edges = {}
    for name, tree in trees.items():
        wanted = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    wanted.add(inner if inner in trees else node.module)
        edges[name] = (wanted & trees.keys()) - {name}
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules that are left when all that import nothing of the rest are taken away."""
    left = dict(edges)
    while free := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_through_others():
    assert circle(graph(modules())) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_what_serves_a_run_does_not_import_it():
    upward = [
        f"{name} imports {other}"
        for name, wanted in graph(modules()).items()
        for other in wanted
        if name.split(".")[:1] == ["srpo_jax"]
        and name.split(".")[1:2] in [[part] for part in SERVANTS]
        and other.split(".")[1:2] in [[part] for part in ABOVE]
        and other.startswith("srpo_jax.")
    ]
    assert not upward


def test_few_files_stand_side_by_side():
    assert len(list((ROOT / "srpo_jax").glob("*.py"))) <= MOST_SIDE_BY_SIDE


@pytest.mark.parametrize("package", [*ALLOWED, "tests"])
def test_files_stay_readable(package):
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(package)
        if (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert not long
