"""``srpo COMMAND ...``, which is ``python -m srpo_jax COMMAND ...``: the commands of ``launch``.

Started from here, and not from ``launch``, because the name srpo_jax is nobody else's: ``launch``,
``models`` and ``envs`` are common names, and what Python finds first may be somebody else's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]  # the folder of srpo_jax and of the packages beside it
_BESIDE = ("launch", "models", "envs")
_BAD_INPUT = 2  # as launch.cli has it, which cannot be imported yet


def hidden_package() -> str | None:
    """One line about another package that Python would import in place of ours; None: there is
    none."""
    for name in _BESIDE:
        spec = importlib.util.find_spec(name)
        ours = HOME / name / "__init__.py"
        if spec is None:
            return f"{ours.parent}: this package of srpo_jax is not there: install srpo_jax again"
        found = Path(spec.origin or ".")  # none: a folder without Python files, and ours is gone
        if found.resolve() != ours:
            return (
                f"{found} hides the package `{name}` of srpo_jax: rename it, start in another "
                "folder, or take its folder off PYTHONPATH"
            )
    return None


def check_packages() -> None:
    """Ends the process with one line and exit code 2 where another package hides one of ours."""
    if (problem := hidden_package()) is not None:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(_BAD_INPUT)


def run() -> None:
    """The console script."""
    check_packages()
    importlib.import_module("launch.srpo").run()  # by name: srpo_jax does not depend on launch


if __name__ == "__main__":
    run()
