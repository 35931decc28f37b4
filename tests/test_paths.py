"""Where paths of recipes and of the command line lead, and what is never taken for a hub name."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.quickstart import RECIPES
from models.hub import is_hub_name
from srpo_jax.recipe import paths
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.paths import find, find_file, find_model
from srpo_jax.recipe.recipe import load_recipe
from srpo_jax.recipe.tasks import task_sets

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
name: mine
model: {model}
workflow: {{path: team.py:Team}}
tasks: {{train: {{path: tasks.jsonl}}}}
rollout: {{tasks_per_step: 1, group_size: 2, prompt_tokens: 8, response_tokens: 8, slots: 2}}
optimizer: {{lr: 1e-6}}
learner: {{micro_batch_rows: 1}}
trainer: {{steps: 1}}
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three places where a path is looked up: beside the recipe, here, and in the package."""
    for name in ("beside", "here", "package"):
        (tmp_path / name / "configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(paths, "_BUNDLE", tmp_path / "package")
    return tmp_path


def test_the_order_is_beside_the_recipe_then_here_then_the_package(folders):
    for place in ("package", "here", "beside"):
        (folders / place / "configs/a.yaml").write_text("")
        found = find_file("configs/a.yaml", folders / "beside")
        assert found == (folders / place / "configs/a.yaml").resolve()
    assert find("configs/a.yaml") == Path("configs/a.yaml")  # as it was typed


def test_of_the_package_only_recipes_and_checkpoints_are_found(folders):
    (folders / "package" / "models").mkdir()
    (folders / "package/models/a.py").write_text("")
    with pytest.raises(RecipeError, match=r"^models/a.py: no such file$"):
        find("models/a.py")


def test_a_missing_file_says_where_it_was_looked_for(folders):
    with pytest.raises(RecipeError) as error:
        find("configs/b.yaml", folders / "beside")
    assert str(error.value) == (
        f"configs/b.yaml: no such file (looked for {folders}/beside/configs/b.yaml, "
        f"configs/b.yaml, {folders}/package/configs/b.yaml)"
    )


@pytest.mark.parametrize(
    "path, message",
    [
        ("b.yaml", "b.yaml: no such file"),
        ("configs", "configs: must be a file, got a folder"),
        ("a\0b", "a\0b: "),
        ("/dev/null", "/dev/null: must be a file, got a special file"),
        ("~nobody-of-this-name/a", "~nobody-of-this-name/a: no such file"),
    ],
)
def test_what_is_no_file(folders, path, message):
    with pytest.raises(RecipeError) as error:
        find(path)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "./a/b", "../a", "/a/b", "~/a", "~", "a", "a/b/c", "a/", "configs/quick", "assets/tiny",
        "runs/mine", "data/smollm2", "checkpoints/a", "team/run.yaml", "team/code.py",
        "team/tasks.jsonl", "",
    ],
)  # fmt: skip
def test_what_looks_like_a_path_is_no_hub_name(folders, text):
    assert not is_hub_name(text)
    if text not in ("~", "", "../a"):
        with pytest.raises(RecipeError, match=r"no such folder"):
            find_model(text)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "a-b/c_d.e", "HuggingFaceTB/SmolLM2-135M"])
def test_hub_names(folders, name):
    assert is_hub_name(name) and find_model(name, folders / "beside") == name


def test_a_local_folder_wins_over_a_hub_name(folders):
    (folders / "beside/Qwen/Qwen3-4B").mkdir(parents=True)
    assert find_model("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert find_model("Qwen/Qwen3-4B", folders / "beside") == f"{folders}/beside/Qwen/Qwen3-4B"


def test_all_paths_of_a_recipe_are_looked_up_alike(folders):
    (folders / "beside/recipe.yaml").write_text(RECIPE.format(model="tiny/one"))
    (folders / "here/team.py").write_text("")
    (folders / "beside/tasks.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    recipe = load_recipe(folders / "beside/recipe.yaml")
    assert recipe.checkpoint == "tiny/one"
    assert find_file("team.py", recipe.folder) == (folders / "here/team.py").resolve()
    assert task_sets(recipe).train[0].prompt == "1+1?"
    (folders / "beside/tiny/one").mkdir(parents=True)
    assert recipe.checkpoint == f"{folders}/beside/tiny/one"


def test_a_missing_model_names_its_key(folders):
    (folders / "beside/recipe.yaml").write_text(RECIPE.format(model="./one"))
    with pytest.raises(RecipeError) as error:
        _ = load_recipe(folders / "beside/recipe.yaml").checkpoint
    assert (
        str(error.value)
        == f"model.path: ./one: no such folder (looked for {folders}/beside/one, one)"
    )


def test_a_base_recipe_is_looked_up_too(folders):
    (folders / "package/configs/base.yaml").write_text(RECIPE.format(model="a/b"))
    (folders / "here/own.yaml").write_text("base: configs/base.yaml\nname: own\n")
    assert load_recipe("own.yaml").name == "own"
    (folders / "here/own.yaml").write_text("base: configs/none.yaml\n")
    with pytest.raises(RecipeError, match=r"^own.yaml: base: configs/none.yaml: no such file \("):
        load_recipe("own.yaml")


@pytest.mark.parametrize("path", RECIPES)
def test_recipes_of_the_package_load_from_any_folder(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path)
    assert Path(recipe.checkpoint) == ROOT / "assets/tiny_team"
    assert not recipe.run_dir.is_absolute()  # runs go to the working folder


def test_a_run_goes_on_where_its_model_is_named_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPES[0])
    saved = tmp_path / "recipe.yaml"
    named = [f"model.path={ROOT / 'assets/tiny_team'}"]
    saved.write_text(load_recipe(RECIPES[0], named).dump())
    assert recipe.first_difference(saved) is None
    saved.write_text(load_recipe(RECIPES[0], ["model.path=some/other"]).dump())
    assert "model.path is" in recipe.first_difference(saved)
