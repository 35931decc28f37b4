"""A run's folder: who may use it, for which recipe, and with which files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from launch.cli import exit_code, message
from srpo_jax import trainer
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.yaml import dump_yaml
from srpo_jax.run.folder import RunFolderBusy, digest, locked, record_run
from tests.run_cases import left_behind, noisy_reward, tiny_recipe

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("one_device_here")


def run(recipe, text=None):
    console = Console(quiet=True) if text is None else Console(file=text, width=300)
    return trainer.run(recipe, reward=noisy_reward, console=console)


# ---- one process at a time -----------------------------------------------------------------------

HOLDER = """
import sys, time
from dataclasses import asdict
from pathlib import Path
from srpo_jax.run.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_one_ends_however_it_ends(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        said = rf"run is in use by process {holder.pid} on {os.uname().nodename} since 20\d\d-"
        with pytest.raises(RunFolderBusy, match=said) as caught:
            run(tiny_recipe(tmp_path))
        assert "\n" not in str(caught.value) and exit_code(caught.value) == 2
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked(tmp_path / "run"), pytest.raises(RunFolderBusy, match=f"process {os.getpid()} on"):
        with locked(tmp_path / "run"):
            pass
    with locked(tmp_path / "run"):
        pass


# ---- one recipe ----------------------------------------------------------------------------------


def test_a_recipe_saved_before_a_key_was_there_resumes_with_its_default(tmp_path):
    recipe = tiny_recipe(tmp_path)
    saved = recipe.model_dump()
    del saved["learner"]["role_norms_every"], saved["evaluation"]["seed"], saved["retriever"]
    old = tmp_path / "recipe.yaml"
    old.write_text(dump_yaml(saved))
    assert recipe.first_difference(old) is None
    other = tiny_recipe(tmp_path, "learner.role_norms_every=2")
    assert other.first_difference(old) == "learner.role_norms_every is 0 there and 2 here"


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "must be a mapping of keys, got nothing"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"name: tiny\n", "model: this key is missing"),
        (b"[1, 2]", "must be a mapping of keys, got a list"),
    ],
    ids=["empty", "no text", "half", "foreign"],
)
def test_a_truncated_or_foreign_recipe_in_a_run_folder_is_named(tmp_path, content, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=rf"run/recipe\.yaml.*{said}"):
        run(tiny_recipe(tmp_path))


@pytest.mark.parametrize("name", ["checkpoints", "best", "episodes", "evaluations", "tb", "model"])
def test_a_file_where_a_folder_of_the_run_should_be(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("a file")
    with pytest.raises(RecipeError, match=f"run/{name}: a folder of the run is due here"):
        run(tiny_recipe(tmp_path))


def test_other_things_in_the_place_of_the_run_are_refused_before_any_work(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match="run/model: the run's model is due here"):
        run(tiny_recipe(tmp_path))
    (tmp_path / "a_file").write_text("")
    for out in ("a_file", "a_file/run"):
        with pytest.raises(OSError) as caught:
            run(tiny_recipe(tmp_path, f"trainer.out={tmp_path / out}"))
        assert exit_code(caught.value) == 2
        assert message(caught.value).startswith(f"{tmp_path / out}: ")


# ---- the files that a recipe names ---------------------------------------------------------------


def test_a_resume_with_other_files_says_which(tmp_path):
    recipe = tiny_recipe(tmp_path, "trainer.steps=1", "evaluation.every=0")
    assert run(recipe) == trainer.DONE
    before = left_behind(tmp_path / "run")
    tasks, weights = tmp_path / "sums.jsonl", tmp_path / "checkpoint" / "model.safetensors"
    for path, key in ((tasks, "tasks.train"), (weights, "model/model.safetensors")):
        data = path.read_bytes()
        path.write_bytes(data[:-3] + b" " + data[-3:] if path == tasks else flipped(data))
        with pytest.raises(RecipeError) as caught:
            run(recipe)
        assert f"{path} ({key}) is not the file that the run in" in str(caught.value)
        path.write_bytes(data)
    assert run(recipe) == trainer.DONE and left_behind(tmp_path / "run") == before


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


USER = """
from envs.workflow import Task

def tasks():
    return [Task("a", "2 + 3", "5"), Task("b", "4 + 4", "8")]

def reward(task, outcome):
    return len(outcome.response) % 3 / 2
"""


def test_a_users_code_is_among_the_files_of_a_run(tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    overrides = ("tasks.train=mine.py:tasks", "reward=mine.py:reward")
    recipe = tiny_recipe(tmp_path, *overrides)
    (tmp_path / "run").mkdir()
    record_run(recipe, tmp_path / "checkpoint")
    files = json.loads((tmp_path / "run" / "files.json").read_text())
    names = {name for name in files if not name.startswith("model/")}
    assert names == {"tasks.train", "tasks.eval.sums", "reward"}
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} < files.keys()
    (tmp_path / "mine.py").write_text(USER.replace("% 3", "% 4"))
    with pytest.raises(RecipeError, match=r"mine\.py \((tasks\.train|reward)\) is not the file"):
        record_run(recipe, tmp_path / "checkpoint")
    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "run" / "files.json").write_text('["foreign"]')
    with pytest.raises(RecipeError, match=r"files\.json: no list of files"):
        record_run(recipe, tmp_path / "checkpoint")


def test_a_digest_sees_any_change_of_a_small_file_and_other_weights_in_a_large_one(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x" * 3_000_000)
    first = digest(small)
    small.write_bytes(b"x" * 2_999_999 + b"y")
    assert digest(small) != first
    with open(large, "wb") as file:
        file.truncate(100 << 20)
    first = digest(large)
    for place in (0, (100 << 20) - 1):
        with open(large, "r+b") as file:
            file.seek(place)
            file.write(b"y")
        assert digest(large) != first
        first = digest(large)


# ---- what a resumed run says ---------------------------------------------------------------------


def test_a_target_below_the_checkpoint_is_said_and_the_record_says_the_true_step(tmp_path):
    options = ("evaluation.every=0", "trainer.checkpoint_every=0")
    assert run(tiny_recipe(tmp_path, "trainer.steps=2", *options)) == trainer.DONE
    before = left_behind(tmp_path / "run")
    text = io.StringIO()
    assert run(tiny_recipe(tmp_path, "trainer.steps=1", *options), text) == trainer.DONE
    assert "the run is at step 2 already, past trainer.steps 1\n" in text.getvalue()
    assert "resumed at step 2\n" in text.getvalue()
    assert json.loads((tmp_path / "run" / "done.json").read_text()) == {"step": 2}
    assert left_behind(tmp_path / "run") == before


def test_padded_sizes_and_the_window_of_gradient_norms_come_back_with_a_checkpoint(
    tmp_path, monkeypatch
):
    """A large batch in the first step pads all later ones; sums over them depend on it."""
    plain, seen = trainer.update_step, []

    def large_at_first(parts, step, *rest):
        if step == 0:
            parts.shapes.rows = 96
        metrics = plain(parts, step, *rest)
        seen.append((step, asdict(parts.shapes), list(parts.grad_norms)))
        return metrics

    monkeypatch.setattr(trainer, "update_step", large_at_first)
    options = ("evaluation.every=0", "trainer.checkpoint_every=0")
    assert run(tiny_recipe(tmp_path, "trainer.steps=1", *options)) == trainer.DONE
    assert run(tiny_recipe(tmp_path, "trainer.steps=3", *options)) == trainer.DONE
    resumed, seen[:] = list(seen), []
    out = f"trainer.out={tmp_path / 'straight'}"
    assert run(tiny_recipe(tmp_path, "trainer.steps=3", out, *options)) == trainer.DONE
    assert seen == resumed and [step for step, *_ in seen] == [0, 1, 2]
    assert seen[-1][1]["rows"] == 96 and len(seen[-1][2]) == 3
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "straight")
