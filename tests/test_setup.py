"""``make setup``: when the virtual environment is kept, filled again, or made anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands for a Python: makes an environment of one file, whose pip writes down what it was asked.
FAKE = f"""#!/bin/bash
here=$(dirname "$0")
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo made >> made ;;
  "-m pip install "*) [ ! -e fail ] || exit 1; echo filled >> made ;;
  *pip*) [ -e "$here/no-pip" ] && exit 1; ;;&
  *) if [ -e "$here/old" ]; then set -- -c "import sys; sys.version_info = (3, 10); ${{2}}"; fi
     exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with the Makefile, a fake Python and a finished set-up."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text("jax\n")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dev.txt").write_text("pytest\n")
    (tmp_path / "python").write_text(FAKE)
    (tmp_path / "python").chmod(0o755)
    assert setup(tmp_path).returncode == 0
    assert done(tmp_path) == ["made", "filled"]
    return tmp_path


def setup(clone: Path, python: str | None = "python") -> subprocess.CompletedProcess:
    chosen = [f"PYTHON={clone / python}"] if python else []
    # As a user calls it, also where these tests are themselves a make's: no flags of that one.
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        ["make", "setup", *chosen], cwd=clone, env=env, capture_output=True, text=True, timeout=60
    )


def done(clone: Path) -> list[str]:
    """What was done since the last call."""
    path = clone / "made"
    lines = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_a_finished_setup_is_kept(clone):
    assert setup(clone).stdout == "" and done(clone) == []
    assert setup(clone, None).returncode == 0 and done(clone) == []


@pytest.mark.parametrize("file", ["requirements.txt", "requirements/dev.txt"])
def test_other_requirements_are_installed_into_it(clone, file):
    (clone / file).write_text("jax\nflax\n")
    assert setup(clone).returncode == 0 and done(clone) == ["filled"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda venv: (venv / "bin/no-pip").touch(),
        lambda venv: (venv / "bin/old").touch(),
        lambda venv: (venv / "bin/python").unlink(),
        lambda venv: (venv / "requirements.installed").unlink(),
        lambda venv: shutil.rmtree(venv),
        lambda venv: (shutil.rmtree(venv), venv.write_text("a file")),
        lambda venv: (shutil.rmtree(venv), venv.symlink_to("nowhere")),
    ],
    ids=["no pip", "Python 3.10", "no Python", "not finished", "none", "a file", "a dead link"],
)
def test_an_environment_that_cannot_be_used_is_made_anew(clone, damage):
    damage(clone / ".venv")
    assert setup(clone).returncode == 0
    assert done(clone) == ["made", "filled"]
    assert setup(clone).returncode == 0 and done(clone) == []


def test_an_interrupted_installation_is_begun_anew(clone):
    (clone / "requirements.txt").write_text("jax\nflax\n")
    (clone / "fail").touch()
    assert setup(clone).returncode != 0
    (clone / "fail").unlink()
    (clone / "requirements.txt").write_text("jax\n")
    assert setup(clone).returncode == 0 and done(clone) == ["made", "filled"]


def test_a_python_that_does_not_fit_is_refused(clone):
    (clone / "elsewhere").mkdir()
    shutil.copy(clone / "python", clone / "elsewhere")
    (clone / "elsewhere/old").touch()
    result = setup(clone, "elsewhere/python")
    assert result.returncode != 0 and "is not Python 3.11, 3.12 or 3.13" in result.stderr
    assert done(clone) == []
