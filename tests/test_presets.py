"""What a recipe changes of its presets, as the start of a run says it."""

from __future__ import annotations

import pytest

from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_workflow, keywords_of, workflow_class
from srpo_jax.recipe.presets import preset_changes
from srpo_jax.recipe.recipe import Recipe, WorkflowConfig, parse_recipe

MINIMAL = {
    "name": "tiny",
    "model": "some/model",
    "workflow": "math",
    "tasks": {"train": {"name": "arithmetic", "size": 8}},
    "rollout": {
        "tasks_per_step": 2, "group_size": 2, "prompt_tokens": 64, "response_tokens": 16,
        "slots": 4,
    },
    "optimizer": {"lr": 1e-6},
    "learner": {"micro_batch_rows": 4},
    "trainer": {"steps": 3},
}  # fmt: skip


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(MINIMAL, overrides)


DIFFERENCES = [
    ([], None),
    (["objective.clip_eps=0.2", "advantage.invalid_penalty=0.3", "workflow.args.solvers=5"], None),
    (["objective.preset=dr_grpo", "rollout.response_tokens=20"], None),
    (["objective.clip_low=0.1"], "objective: srpo, but clip_low 0.1 (preset 0.2)"),
    (
        ["objective.preset=gspo", "objective.clip_eps=3e-4"],
        "objective: gspo, but clip_high 0.0003 (preset 0.0004)",
    ),
    (
        ["objective.preset=dr_mas", "objective.dual_clip=null", "advantage.group=[task]"],
        "objective: dr_mas, but dual_clip null (preset 3.0); "
        "advantage: dr_mas, but group [task] (preset [task, role])",
    ),
    (
        ["objective.preset=dr_grpo", "objective.length=77"],
        "objective: dr_grpo, but length 77 (preset 4096)",
    ),
    (["workflow.args={preset: dr_mas, rounds: 2, verifier: true}"], None),
    (
        ["workflow.args={preset: dr_mas, rounds: 3, prompt_style: short}"],
        "workflow: dr_mas, but rounds 3 (preset 2), prompt_style short (preset full)",
    ),
]


@pytest.mark.parametrize("overrides, line", DIFFERENCES)
def test_what_differs_from_a_preset_is_one_line(overrides, line):
    assert preset_changes(recipe(*overrides)) == line


def test_a_workflow_from_python_is_not_compared():
    assert preset_changes(recipe("workflow={path: nowhere.py:Team}"), own_workflow=True) is None


@pytest.mark.parametrize("preset", ["dr_max", "[1]", "{a: 1}", "3"])
def test_a_preset_that_is_none_is_left_to_the_workflow(preset):
    """Which is built next and refuses it in one line."""
    wrong = recipe(f"workflow.args={{preset: {preset}, solvers: 2}}")
    assert preset_changes(wrong) is None
    with pytest.raises(RecipeError, match=r"workflow\.args: preset must be one of dr_mas, single"):
        build_workflow(wrong)


@pytest.mark.parametrize("table", ["('a', 'b')", "{'a': 1}", "None"])
def test_presets_of_a_users_class_may_mean_something_else(table, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"class Team:\n    roles = ('a',)\n    PRESETS = {table}\n"
        "    def __init__(self, preset): pass\n"
        "    async def run(self, task, team): pass\n"
    )
    path = f"{tmp_path}/mine.py:Team"
    assert preset_changes(recipe(f"workflow={{path: '{path}', args: {{preset: a}}}}")) is None


@pytest.mark.parametrize("name", ["math", "search"])
def test_a_workflows_presets_are_those_of_its_constructor(name):
    cls = workflow_class(WorkflowConfig(name=name))
    assert "dr_mas" in cls.PRESETS
    for args in cls.PRESETS.values():
        assert args.keys() <= keywords_of(cls).keys()
