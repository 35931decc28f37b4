"""The import direction launch -> srpo_jax -> models, envs, and the size of files."""

from __future__ import annotations

import ast
import subprocess
import sys
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


@pytest.mark.parametrize("package", [*ALLOWED, "tests"])
def test_files_stay_readable(package):
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(package)
        if (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert not long


def test_the_workflow_protocol_loads_without_jax():
    code = (
        "import sys, envs.workflow, srpo_jax.recipe.recipe, launch.cli\n"
        f"print(*sorted({JAX!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
