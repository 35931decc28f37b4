"""The table of built-in workflows and task sets: every entry loads, and a new one is one entry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from envs.built_in import GENERATED, TASK_SETS, WORKFLOWS, load


@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_entry_names_what_is_there(name):
    entry = WORKFLOWS[name]
    targets = [entry.workflow, entry.read_tasks, entry.script, entry.teacher]
    targets += [entry.rewrite] if entry.rewrite else []
    assert all(callable(load(target)) for target in targets)
    assert all(entry.example) and len(entry.example) == 2


def test_task_sets_are_builders():
    assert all(callable(load(target)) for target in [*TASK_SETS.values(), GENERATED])


def test_another_workflow_and_task_set_are_one_entry_each():
    """In a process of its own: recipes read the table when they are imported."""
    code = """
import dataclasses, sys, types
import envs.built_in as table
from envs.workflow import Outcome, Score, Task

class Echo:
    roles = ("echo",)
    async def run(self, task, team):
        return Outcome("", score=Score(1.0, True))

module = types.ModuleType("mine")
module.Echo = Echo
module.numbers = lambda name, *, data_dir, split, seed, size: [Task("1", split, name)][:size]
sys.modules["mine"] = module
math = table.WORKFLOWS["math"]
table.WORKFLOWS["echo"] = dataclasses.replace(math, workflow="mine:Echo")
table.TASK_SETS["numbers"] = "mine:numbers"

from srpo_jax.recipe import parse_recipe
from srpo_jax.recipe.plugins import build_workflow
from srpo_jax.recipe.tasks import task_sets
recipe = parse_recipe({
    "name": "x", "model": "some/model", "workflow": "echo", "tasks": {"train": "numbers"},
    "rollout": {"tasks_per_step": 2, "group_size": 2, "prompt_tokens": 64, "response_tokens": 16,
                "slots": 4},
    "optimizer": {"lr": 1e-6}, "learner": {"micro_batch_rows": 4}, "trainer": {"steps": 3},
})
print(type(build_workflow(recipe)).__name__, task_sets(recipe).train[0])
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("Echo Task(id='1', prompt='train', answer='numbers'"), done.stderr
