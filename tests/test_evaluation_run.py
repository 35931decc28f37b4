"""Evaluations on their own: recipes without training keys, and folders that keep what was found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch import show
from launch.evaluate import main
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.files import flat
from srpo_jax.rollout.rollout import Rollout
from srpo_jax.run.evaluation_folder import (
    check_folder,
    evaluate_and_keep,
    evaluation_recipe,
    model_content,
)
from srpo_jax.run.folder import RunFolderBusy, locked
from srpo_jax.run.logs import read_episodes, read_verdicts
from srpo_jax.trainer import run
from tests.run_cases import EVAL_EPISODES, noisy_reward, recipe_content, tiny_recipe
from tests.test_bad_input import refusal

pytestmark = pytest.mark.usefixtures("one_device_here")


@pytest.fixture
def content(tmp_path):
    """A recipe that says nothing about training."""
    content = recipe_content(tmp_path)
    for key in ("optimizer", "learner", "trainer"):
        del content[key]
    del content["tasks"]["train"]
    for key in ("tasks_per_step", "group_size"):
        del content["rollout"][key]
    return content


# ---- recipes -------------------------------------------------------------------------------------


def test_a_recipe_for_evaluation_needs_no_training_keys(content):
    recipe = evaluation_recipe(content, ["evaluation.samples=3"])
    assert recipe.evaluation.samples == 3 and recipe.run_dir == Path("runs/tiny_eval")
    with pytest.raises(RecipeError, match=r"tasks\.eval names no benchmark"):
        evaluation_recipe(content | {"tasks": {}, "evaluation": {}})
    with pytest.raises(RecipeError, match=r"optimizer\.lrr: unknown key"):
        evaluation_recipe(content, ["optimizer.lrr=1"])
    with pytest.raises(RecipeError, match=r"rollout\.slots: this key is missing"):
        content["rollout"].pop("slots")
        evaluation_recipe(content)


def test_what_concerns_training_alone_makes_no_other_evaluation(content, tmp_path):
    plain = evaluation_recipe(content)
    trained = evaluation_recipe(
        recipe_content(tmp_path), ["optimizer.lr=3", "objective.preset=grpo", "trainer.steps=9"]
    )
    differing = {
        key
        for key, value in flat(plain.model_dump()).items()
        if flat(trained.model_dump()).get(key) != value
    }
    assert differing <= {
        "rollout.tasks_per_step", "rollout.group_size", "learner.micro_batch_rows",
        "learner.updates_per_batch", "learner.remat",
    }  # fmt: skip


def test_a_model_and_tasks_are_a_recipe():
    made = model_content("runs/math/model", ["arithmetic", "data/sums.jsonl:7", "my.py:make"],
                         "math", 4, 512)  # fmt: skip
    recipe = evaluation_recipe(made)
    assert recipe.name == "math-model" and recipe.workflow.name == "math"
    assert recipe.rollout.prompt_tokens + recipe.rollout.response_tokens == 512
    sets = recipe.tasks.eval
    assert (sets["arithmetic"].name, sets["arithmetic"].size) == ("arithmetic", 64)
    assert (sets["sums"].path, sets["sums"].size) == ("data/sums.jsonl", 7)
    assert (sets["my"].path, sets["my"].size) == ("my.py:make", None)

    made = model_content("Qwen/Qwen3-4B", ["factbook"], "search", 2, 40_960)
    recipe = evaluation_recipe(made)
    assert recipe.name == "Qwen-Qwen3-4B" and recipe.retriever.corpus == "factbook"
    assert recipe.rollout.prompt_tokens + recipe.rollout.response_tokens == 2048
    made = model_content("x", ["arithmetic"], "team.py:Mine", 2, 99)
    assert evaluation_recipe(made).workflow.path == "team.py:Mine"
    with pytest.raises(RecipeError, match="two of them are named sums"):
        model_content("x", ["a/sums.jsonl", "b/sums.jsonl:3"], "math", 4, 512)


# ---- folders -------------------------------------------------------------------------------------


def evaluate(content, *overrides, out=None):
    recipe = evaluation_recipe(content, overrides, folder=Path.cwd(), out=out)
    return evaluate_and_keep(recipe, Console(quiet=True))


def test_the_folder_holds_figures_verdicts_and_episodes(content, capsys):
    results = evaluate(content, out="kept")
    found = json.loads(Path("kept/evaluation.json").read_text())
    row = found["benchmarks"]["sums"]
    assert found["finished"] and found["model"] == content["model"] and found["seconds"] > 0
    assert (row["tasks"], row["samples"]) == (2, 2) and row["avg"] == results["sums"].avg
    assert found["macro"]["avg"] == row["avg"]
    np.testing.assert_array_equal(read_verdicts("kept")[0]["sums"], results["sums"].correct)
    episodes = list(read_episodes("kept", 0))
    assert len(episodes) == EVAL_EPISODES
    correct = [bool(episode["correct"]) for episode in episodes]
    assert correct == results["sums"].correct.reshape(-1).tolist()
    assert show.main(["kept", "--episode", episodes[0]["id"]]) == 0
    assert episodes[0]["task"]["prompt"] in capsys.readouterr().out
    # The same evaluation again, such as after a kill, gives the same.
    Path("kept/evaluation.json").write_text('{"finished": false}')
    again = evaluate(content, out="kept")
    np.testing.assert_array_equal(again["sums"].correct, results["sums"].correct)
    assert json.loads(Path("kept/evaluation.json").read_text())["finished"]


def test_an_evaluation_of_something_else_is_never_written_over(content, monkeypatch):
    evaluate(content, out="kept")
    before = {p: p.read_bytes() for p in Path("kept").rglob("*") if p.is_file()}
    monkeypatch.setattr(Rollout, "run", None)  # nothing is sampled
    with pytest.raises(RecipeError, match=r"holds another evaluation \(evaluation\.samples is 2"):
        evaluate(content, "evaluation.samples=3", out="kept")
    path = Path(content["model"]) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecipeError, match=r"model\.safetensors .* set --out to another folder"):
        evaluate(content, out="kept")
    after = {p: p.read_bytes() for p in Path("kept").rglob("*") if p.is_file()}
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed <= {"run.lock"}


def test_folders_that_hold_no_evaluation_are_refused(content, tmp_path):
    run(tiny_recipe(tmp_path, "trainer.steps=0", "evaluation.every=0"), reward=noisy_reward)
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    for out, says in (
        ("run", "holds something that is no evaluation"),
        ("file", "a folder is due here"),
        ("link", "a folder is due here"),
    ):
        with pytest.raises(RecipeError, match=f"{out}: {says}.*give another --out"):
            check_folder(evaluation_recipe(content, out=out))


def test_one_process_evaluates_into_a_folder(content):
    Path("kept").mkdir()
    Path("kept/evaluation.json").write_text("{}")
    with locked(Path("kept")), pytest.raises(RunFolderBusy, match="or set another --out"):
        evaluate(content, out="kept")


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_evaluates_a_model_without_a_recipe(content, capsys):
    arguments = [
        "--model", content["model"], "--tasks", "sums.jsonl:2", "--samples", "2",
        "rollout.prompt_tokens=96", "rollout.response_tokens=6", "workflow.args.solvers=2",
        "workflow.args.prompt_style=short",
    ]  # fmt: skip
    assert main([*arguments, "--out", "kept"]) == 0
    said = capsys.readouterr()
    assert "Avg@2" in said.out and "figures: kept/evaluation.json" in said.out
    assert "episodes of sums: python -m launch.show kept" in said.out
    assert "loading model" in said.err
    assert show.main(["kept"]) == 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "RECIPE or --model: missing; for example: python -m launch.evaluate --model "),
        (["--model", "m"], "--tasks: missing; for example"),
        (["x.yaml", "--model", "checkpoint", "--tasks", "a"], "leave out --model"),
        (["x.yaml", "--tasks", "a"], "--tasks belongs to --model"),
        (["x.yaml", "--workflow", "math"], "--workflow belongs to --model"),
        (["x.yaml"], "x.yaml: no such file"),
        (["x.yaml", "--samples", "many"], "argument --samples: invalid int value: 'many'"),
        (["a=1"], "RECIPE or --model: missing"),
        (["--model", "nowhere", "--tasks", "a"], "nowhere: no such folder"),
        (["--model", "checkpoint", "--tasks", "a", "trainer.out=x"], "give that of the evaluation"),
        (["--model", "checkpoint", "--tasks", "a", "--workflow", "maths"], "search, got 'maths'"),
        (["--model", "checkpoint", "--tasks", "sums.jsonl:0"], "tasks.eval.sums.size: must be gr"),
        (["--model", "checkpoint", "--tasks", "sums.jsonl", "rolout.slots=1"], "rollout"),
    ],
)
def test_commands_that_evaluate_nothing(content, capsys, arguments, says):
    assert says in refusal(capsys, "evaluate", *arguments)
    assert not Path("runs").exists()
