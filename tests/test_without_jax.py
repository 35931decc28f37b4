"""What never imports jax: recipes and their errors, every command's help, reading runs.

Each in a new process that looks at ``sys.modules``: a module is loaded once, and an earlier test
may have loaded jax.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.compile_check import LIBTPU_ENVIRONMENT
from launch.srpo import COMMANDS
from srpo_jax.run.logs import EpisodeWriter, MetricLogger

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SWEEPS = sorted(path.stem for path in (ROOT / "configs/sweeps").glob("*.yaml"))
JAX = ("jax", "jaxlib", "flax", "optax", "chex", "orbax")


def outcome(code: str, cwd: Path = ROOT) -> tuple[str, str]:
    """What a piece of Python prints and says on stderr. Fails where it has loaded jax."""
    code = (
        f"import sys\ntry:\n{code}\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"loaded = set({JAX}) & set(sys.modules)\nassert not loaded, loaded"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_process_that_loads_jax_is_found():
    with pytest.raises(AssertionError, match="'jax'"):
        outcome("    import jax")


def test_the_workflow_protocol():
    outcome("    import envs.workflow, envs.audit, launch.cli")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name):
    said, _ = outcome(
        "    from srpo_jax.recipe import load_recipe\n"
        "    from srpo_jax.recipe.presets import preset_changes\n"
        f"    recipe = load_recipe('configs/{name}.yaml')\n"
        "    print(recipe.name, preset_changes(recipe))"
    )
    assert said == f"{name} None\n"


def test_what_is_wrong_with_a_recipe():
    said, _ = outcome(
        "    from srpo_jax.recipe import RecipeError, load_recipe\n"
        "    changes = ('objective.preset=spro', 'optimizer.lrr=1', 'model=3', '=', 'base=x')\n"
        "    for change in changes:\n"
        "        try: load_recipe('configs/quickstart_math.yaml', [change])\n"
        "        except RecipeError as error: print(error)"
    )
    assert len(said.splitlines()) == 5 and "did you mean 'srpo'" in said


@pytest.mark.parametrize("command", [*COMMANDS, None])
def test_help(command, tmp_path):
    """As ``python -m launch.COMMAND`` and as ``srpo COMMAND``."""
    arguments = ["--help"] if command is None else [command, "--help"]
    said, _ = outcome(
        f"    sys.argv = ['srpo', *{arguments}]\n    from srpo_jax.__main__ import run\n    run()",
        tmp_path,
    )
    assert said.startswith("usage: srpo ")
    if command is not None:
        assert f"example:\n  srpo {command} " in said
        said, _ = outcome(f"    from launch.{command} import main\n    main(['--help'])", tmp_path)
        assert said.startswith(f"usage: python -m launch.{command} ")
        assert f"example:\n  python -m launch.{command} " in said


@pytest.mark.parametrize("name", SWEEPS)
def test_the_commands_of_a_sweep(name, tmp_path):
    said, _ = outcome(
        "    from launch.sweep import main\n"
        f"    main(['{ROOT}/configs/sweeps/{name}.yaml', '--dry-run'])",
        tmp_path,
    )
    assert said.startswith("python -m launch.train ")


def test_a_run_is_shown_and_reported(tmp_path):
    logger = MetricLogger(tmp_path)
    logger.log(1, {"reward/mean": 0.5})
    logger.close()
    record = {
        "id": "s0-t0-r0", "step": 1, "task": {"id": "t", "prompt": "1+1?", "answer": ["2"]},
        "reward": 1.0, "correct": True, "events": [], "outcome": None, "cost": {},
    }  # fmt: skip
    EpisodeWriter(tmp_path).write(1, [record])
    said, _ = outcome(
        "    from launch import report, show\n"
        f"    show.main([{str(tmp_path)!r}])\n"
        f"    show.main([{str(tmp_path)!r}, '--episode', 's0-t0-r0'])\n"
        f"    report.main([{str(tmp_path)!r}])",
        tmp_path,
    )
    assert "reward 1  correct" in said and "0.5 -> 0.5" in said
    assert (tmp_path / "report/reward.png").exists()


def test_libtpu_is_silenced_before_jax_is_in():
    """In a new process, which ends where jax would be imported first."""
    code = """
import os, sys
from importlib.abc import MetaPathFinder
from launch.compile_check import LIBTPU_ENVIRONMENT, main

class Watch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "libtpu"):
            unset = [n for n, v in LIBTPU_ENVIRONMENT.items() if os.environ.get(n) != v]
            sys.exit(f"{name} is imported, {unset} are not set")

sys.meta_path.insert(0, Watch())
main(["configs/quickstart_math.yaml", "--topology", "v5e:2x2"])
"""
    env = {k: v for k, v in os.environ.items() if k not in LIBTPU_ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stderr == "jax is imported, [] are not set\n"
