"""The documentation: its examples run, the README shows them, its links lead somewhere."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from envs.workflow import ScriptedTeam, Task
from srpo_jax import trainer
from srpo_jax.recipe import load_recipe
from srpo_jax.recipe.plugins import load_object
from srpo_jax.run.logs import read_metrics
from tests.process_cases import python

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_shows_the_example_team_as_it_is():
    assert (EXAMPLES / "adders.py").read_text().strip() in (ROOT / "README.md").read_text()


def test_the_tutorial_includes_every_example():
    """In the spelling that the page's extension reads; a line that it does not read is shown."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text().splitlines()
    for example in sorted(EXAMPLES.glob("*.*")):
        assert f'--8<-- "docs/examples/{example.name}"' in tutorial


@pytest.mark.slow
def test_the_example_trains(tmp_path, monkeypatch):
    """On all devices: the other whole runs of the tests use one."""
    monkeypatch.chdir(ROOT)
    changes = (
        "trainer.steps=1", "evaluation.every=1", "rollout.tasks_per_step=8", "rollout.slots=8",
        "rollout.group_size=4", "learner.micro_batch_rows=4", "tasks.eval.sums.size=2",
        f"trainer.out={tmp_path}/run",
    )  # fmt: skip
    recipe = load_recipe(EXAMPLES / "adders.yaml", changes)
    said = io.StringIO()
    assert trainer.run(recipe, console=Console(file=said, width=200)) == trainer.DONE
    assert "one update a batch: every ratio is 1, so the clip cannot act" in said.getvalue()
    (row,) = read_metrics(tmp_path / "run")[-1:]
    assert (row["events/k_1"], row["events/k_2"]) == (32, 32) and row["eval/sums/failed"] == 0


def test_the_example_runs_with_given_outputs():
    team = ScriptedTeam([r"\boxed{13}", r"\boxed{14}", r"\boxed{14}"])
    task = Task("t", "3+4+2+5", "14")
    outcome = asyncio.run(load_object(f"{EXAMPLES}/adders.py:Adders")().run(task, team))
    assert [(call.type, len(call.roles)) for call in team.calls] == [("solve", 2), ("decide", 1)]
    assert team.calls[1].prompts[0].text() == "3+4+2+5\nA 13\nB 14"
    reward = load_object(f"{EXAMPLES}/boxed_sum.py:reward")
    assert reward(task, outcome).correct


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_drawing_is_what_its_script_draws(tmp_path):
    script = (ROOT / "docs" / "draw_event.py").read_text()
    (tmp_path / "draw_event.py").write_text(script)
    assert python(str(tmp_path / "draw_event.py")).returncode == 0
    drawn = (tmp_path / "event.svg").read_bytes()
    assert drawn == (ROOT / "docs" / "event.svg").read_bytes()


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--version"], 0, "srpo_jax 0.1.0"),
        (["--help"], 0, "compile_check"),
        ([], 2, "usage: srpo COMMAND"),
        (["trian"], 2, "did you mean 'train'?"),
        (["compile-check", "--help"], 0, "--topology"),
        (["train"], 2, "recipe"),
    ],
)
def test_one_name_for_all_commands(arguments, code, said):
    done = python("-m", "launch.srpo", *arguments)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True)
    assert "Traceback" not in done.stderr
