"""What a wheel holds, that it works in a folder with nothing else, and packages that hide ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = sysconfig.get_path("purelib")


def start(cwd: Path, *command: str, **env: str) -> subprocess.CompletedProcess:
    """A command of this Python in another folder, without the repository on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**kept, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


# ---- requirements --------------------------------------------------------------------------------


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("#", "")]


def test_one_file_of_ranges_brings_the_tests_tools_too():
    *run_time, last = lines("requirements.txt")
    assert last == "-r requirements/dev.txt"
    assert not any(line.startswith(("-", "pytest", "ruff", "mypy")) for line in run_time)
    assert all("<" in line or ">" in line for line in run_time + lines("requirements/dev.txt"))
    names = {line.partition(">")[0] for line in lines("requirements/dev.txt")}
    assert {"pytest", "pytest-xdist", "hypothesis", "ruff", "mypy"} <= names


def test_every_extra_has_its_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["tool"]["hatch"]["metadata"]["hooks"]["requirements_txt"]
    assert extras["optional-dependencies"] == {
        name: [f"requirements/{name}.txt"] for name in ("tpu", "cuda", "docs", "dev")
    }
    assert all(lines(file) for (file,) in extras["optional-dependencies"].values())
    no_extra = {"test-all"}  # for `make test-all`, which installs into .venv
    files = {path.stem for path in (ROOT / "requirements").iterdir()}
    assert files - no_extra == {"tpu", "cuda", "docs", "dev"}


# ---- the wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of an unpacked wheel of this repository."""
    pytest.importorskip("hatchling", reason="needs requirements/dev.txt as it is now: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    done = start(
        ROOT, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(folder), str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_the_packages_recipes_and_checkpoint(installed):
    folders = ("srpo_jax", "models", "envs", "launch", "configs", "assets")
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    data = ("configs/", "assets/")
    due = {f"srpo_jax/bundled/{name}" if name.startswith(data) else name for name in tracked}
    info = {name for name in files if ".dist-info/" in name}
    assert files - info == due and any(name.startswith("srpo_jax/bundled/") for name in due)
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if "Requires-Dist" in line]
    plain = [line for line in required if "extra ==" not in line]
    assert len(plain) == len(lines("requirements.txt")) - 1
    assert any("pytest" in line and "'dev'" in line for line in required)
    (entries,) = installed.glob("*.dist-info/entry_points.txt")
    assert "srpo = srpo_jax.__main__:run" in entries.read_text()


@pytest.mark.slow
def test_the_unpacked_wheel_works_in_an_empty_folder(installed, tmp_path):
    code = """
import srpo_jax, launch, models
from pathlib import Path
from launch.quickstart import RECIPES
from models.checkpoint_files import read_config
from srpo_jax.recipe import load_recipe
for path in RECIPES:
    recipe = load_recipe(path)
    assert read_config(Path(recipe.checkpoint)).model_type == "qwen3"
    print(recipe.checkpoint)
print(srpo_jax.__version__, srpo_jax.__file__)
"""
    done = start(tmp_path, "-c", code, PYTHONPATH=f"{installed}{os.pathsep}{SITE}")
    assert done.returncode == 0, done.stderr
    *checkpoints, version = done.stdout.splitlines()
    assert checkpoints == [str(installed / "srpo_jax/bundled/assets/tiny_team")] * 2
    assert version == f"0.1.0 {installed / 'srpo_jax/__init__.py'}"
    done = start(
        tmp_path, "-m", "srpo_jax", "sweep", "configs/sweeps/set_reduction.yaml", "--dry-run",
        PYTHONPATH=str(installed),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(installed / "srpo_jax/bundled/configs/quickstart_search.yaml") in done.stdout
    assert list(tmp_path.iterdir()) == []


# ---- packages that hide ours ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["envs", "models"])
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_working_folder_with_a_package_of_one_of_our_names(tmp_path, name, kind):
    file = tmp_path / name / "__init__.py" if kind == "package" else tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    for arguments in (["-m", "launch.train", "x.yaml"], ["-m", "srpo_jax", "--version"]):
        done = start(tmp_path, *arguments, PYTHONPATH=str(ROOT))
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            f"error: {file} hides the package `{name}` of srpo_jax: rename it, start in another "
            "folder, or take its folder off PYTHONPATH\n"
        )


def test_a_path_with_a_package_launch(tmp_path):
    """As ``srpo`` is started, which does not look into the working folder itself."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/__init__.py").write_text("raise SystemExit('theirs')")
    script = tmp_path / "srpo"
    script.write_text("from srpo_jax.__main__ import run\nrun()")
    ours, theirs = str(ROOT), str(tmp_path)
    done = start(tmp_path, str(script), "--version", PYTHONPATH=f"{theirs}{os.pathsep}{ours}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/launch/__init__.py hides the package")
    script = tmp_path / "bin/srpo"
    script.parent.mkdir()
    (tmp_path / "srpo").rename(script)
    done = start(tmp_path, str(script), "--version", PYTHONPATH=ours)
    assert done.returncode == 0 and done.stdout == "srpo_jax 0.1.0\n"


def test_a_folder_of_environments_hides_nothing(tmp_path):
    """A folder ``envs`` without Python files, as people keep virtual environments in."""
    (tmp_path / "envs").mkdir()
    done = start(tmp_path, "-m", "launch.train", PYTHONPATH=str(ROOT))
    assert done.returncode == 2 and done.stderr.startswith("error: recipe: missing")
