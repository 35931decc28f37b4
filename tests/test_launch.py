"""Commands as users call them: exit codes, one-line errors, episodes, reports, rehearsals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch import report, show
from launch.cli import entry, visible
from launch.evaluate import results_tables
from srpo_jax.evaluation import BenchmarkResult, EpisodeCost
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.logs import EpisodeWriter, MetricLogger
from tests.process_cases import python

ROOT = Path(__file__).resolve().parent.parent


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A command as a user outside the clone starts it."""
    return python("-m", *arguments, cwd=cwd, COLUMNS="200")


# ---- exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised, code, said",
    [
        (RecipeError("a: b\nc"), 2, "error: a: b c\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file\n"),
        (FileExistsError(17, "File exists", "runs/a"), 2, "error: runs/a: File exists\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: Permission denied\n"),
        (
            OSError(40, "Too many levels of symbolic links", "x"),
            2,
            "error: x: Too many levels of symbolic links\n",
        ),
        (OSError(28, "No space left on device", "x"), 1, "error: x: No space left on device\n"),
        (ConnectionResetError(104, "reset"), 1, "error: [Errno 104] reset\n"),
        (type("OwnError", (Exception,), {"exit_code": 1})("late"), 1, "error: late\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_known_errors_are_one_line(capsys, raised, code, said):
    def command():
        raise raised

    with pytest.raises(SystemExit) as exit_:
        entry(command)
    assert exit_.value.code == code
    assert capsys.readouterr().err == said


def test_a_defect_keeps_its_traceback():
    def command():
        return [][1]

    with pytest.raises(IndexError):
        entry(command)


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (75, 75)])
def test_a_commands_own_code(returned, code):
    with pytest.raises(SystemExit) as exit_:
        entry(lambda: returned)
    assert exit_.value.code == code


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["launch.train", "none.yaml"], "error: none.yaml: no such file"),
        (["launch.train"], "error: recipe: missing; for example: python -m"),
        (
            ["launch.train", str(ROOT / "configs/math_smollm2_cpu.yaml"), "optimizer.lrr=1"],
            "optimizer.lrr: unknown key, did you mean `optimizer.lr`?",
        ),
        (["launch.show", "nowhere"], "error: nowhere: no episodes kept here"),
        (["launch.report", "nowhere"], "error: nowhere/metrics.jsonl: no such file"),
        (["launch.rehearse", "maths"], "my_team.py:MyWorkflow, got 'maths': did"),
    ],
)
def test_bad_input_is_code_2_and_one_line(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


# ---- show ----------------------------------------------------------------------------------------


def member(**changes) -> dict:
    return {
        "role": "solver_1",
        "prompt": "What is [bold]1+1[/bold]?",
        "response": "two \x1b[31mred\x1b[0m \\boxed{2}",
        "prompt_tokens": 7,
        "response_tokens": 5,
        "stop_reason": "stop",
        "well_formed": True,
        "malformed": None,
    } | changes


def episode(identity: str, **changes) -> dict:
    event = {
        "id": f"{identity}/0",
        "type": "solve",
        "turn": 0,
        "state_id": "abc",
        "state": "State()",
        "expected": 2,
        "advantage": -0.5,
        "members": [member(), member(role="solver_2", well_formed=False, malformed="box")],
    }
    return {
        "id": identity,
        "step": 4,
        "task": {"id": "t/0", "prompt": "1+1?", "answer": ["2"]},
        "reward": 1.0,
        "correct": True,
        "failure": None,
        "detail": "",
        "events": [event],
        "outcome": {"response": "[/] \\boxed{2}"},
        "cost": {"tokens": 10.0},
    } | changes


def test_show_prints_what_was_said_and_nothing_else(tmp_path, capsys):
    EpisodeWriter(tmp_path).write(4, [episode("s3-t0-r0"), episode("s3-t0-r1")])
    assert show.main([str(tmp_path), "--episode", "s3-t0-r1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "two \\x1b[31mred\\x1b[0m \\boxed{2}" in text
    assert "What is [bold]1+1[/bold]?" in text and "[/] \\boxed{2}" in text
    for part in ("K=2", "advantage -0.5000", "malformed: box", "reward 1  correct", "tokens 10"):
        assert part in text


def test_show_lists_a_step(tmp_path, capsys):
    writer = EpisodeWriter(tmp_path)
    writer.write(3, [episode("old")])
    failed = {"reward": None, "correct": None, "outcome": None, "cost": {}, "failure": "retrieval"}
    writer.write(4, [episode("s3-t0-r0"), episode("s3-t0-r1", **failed)])
    show.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "s3-t0-r0" in text and "s3-t0-r1" in text and "failed" in text and "old" not in text
    show.main([str(tmp_path), "--step", "3"])
    assert "old" in capsys.readouterr().out
    show.main([str(tmp_path), "--episode", "s3-t0-r1"])
    assert "failed: retrieval" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="no episode 's3-t0-r9', did you mean"):
        show.main([str(tmp_path), "--episode", "s3-t0-r9"])
    with pytest.raises(RecipeError, match="no episodes of step 9; kept: 3, 4"):
        show.main([str(tmp_path), "--step", "9"])


def test_visible_text():
    assert visible("a\tb\nc é 数 🙂") == "a\tb\nc é 数 🙂"
    assert visible("\x1b[2J\r\x07\x9b") == "\\x1b[2J\\r\\x07\\x9b"
    assert visible("\u202e \ud800") == "\\u202e \\ud800"


# ---- report --------------------------------------------------------------------------------------


def test_report_tables_and_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, slope in (("a", 1.0), ("b", 2.0)):
        logger = MetricLogger(name)
        for step in range(20):
            logger.log(step, {"reward/mean": slope * step, "eval/macro/avg": 0.5})
        logger.close()
    assert report.main(["a", "b", "--metrics", "reward/*"]) == 0
    text = capsys.readouterr().out
    # The first and last tenth of 20 values: (0 + 1) / 2 and (18 + 19) / 2, then twice that.
    assert "0.5 -> 18.5" in text and "1 -> 37" in text and "a (step 19)" in text
    assert "eval/macro" not in text
    assert [path.name for path in Path("report").iterdir()] == ["reward.png"]
    assert Path("report/reward.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RecipeError, match="no metric matches zzz"):
        report.main(["a", "--metrics", "zzz"])


def test_steps_on_the_axis_are_whole_numbers(tmp_path, monkeypatch):
    seen = []

    def look(figure, path, **_):
        figure.canvas.draw()
        seen.extend(
            tick for axis in figure.axes if axis.axison
            for tick in axis.get_xticks() if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]
        )  # fmt: skip

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", look)
    for steps in ([3], [0, 1, 2], [1, 4], range(300), [10**6, 10**6 + 1]):
        rows = [{"step": step, "a$b$": 0.5 * step} for step in steps]
        report.draw_curves({"run$x$": rows}, ["a$b$"], tmp_path)
        assert seen and all(tick == round(tick) for tick in seen)
        seen.clear()


def test_a_metric_without_a_value_has_no_average():
    rows = [{"step": 1, "reward": None, "loss": 2.0}]
    console = Console(width=120, record=True)
    console.print(report.comparison_table({"a": rows, "b": [{"step": 1}]}, ["reward", "loss"]))
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
        if "│" in line
    ]
    assert cells == [["reward", "no value", "not logged"], ["loss", "2 -> 2", "not logged"]]


def test_runs_of_one_name_are_told_apart():
    assert report.run_labels(["x/a", "y/b/"]) == ["a", "b"]
    assert report.run_labels(["x/a", "y/a"]) == ["x/a", "y/a"]


# ---- evaluate ------------------------------------------------------------------------------------


def test_evaluation_table():
    costs = [[EpisodeCost(tokens=10, calls=2, tools=1, events=1, seconds=0.5)] * 2] * 2
    one = BenchmarkResult(np.array([[1, 0], [0, 0]], bool), costs)
    two = BenchmarkResult(np.ones((2, 2), bool), costs, failed=1)
    console = Console(width=200, record=True)
    console.print(results_tables({"one": one, "two": two}, "title"))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
        if "│" in line
    ]
    # one: Avg over tasks 0.5, 0: 25 with error 25; Pass 1, 0: 50 with error 50.
    assert rows[0] == ["one", "2", "25.0 ± 25.0", "50.0 ± 50.0", "0"]
    assert rows[1] == ["two", "2", "100.0 ± 0.0", "100.0 ± 0.0", "1"]
    assert rows[2] == ["macro", "", "62.5 ± 12.5", "75.0 ± 25.0", ""]
    assert rows[3] == ["one", "10", "2", "1", "2", "5", "2.5e+04", "0.5", "0.5"]


# ---- rehearse ------------------------------------------------------------------------------------

MY_TEAM = """
from dataclasses import dataclass, replace
from envs.workflow import Outcome, Prompt, Score

@dataclass(frozen=True)
class State:
    problem: str
    notes: tuple = ()

class Pair:
    def __init__(self, greeting="Hello"):
        self.roles = ("left", "right")
        self.greeting = greeting

    def prompt(self, role, state):
        return Prompt("You are " + role + ".", (self.greeting, " ", state.problem))

    async def run(self, task, team):
        state = State(task.prompt)
        notes = await team.act("note", state, roles=self.roles, render=self.prompt)
        if "bad" in notes[1].text:
            team.malformed(notes[1], "it says bad")
        state = replace(state, notes=tuple(note.text for note in notes))
        return Outcome(notes[0].text, state)

    async def reward(self, task, outcome, team):
        correct = outcome.response == task.answer
        return Score(float(correct), correct)
"""


@pytest.fixture
def my_team(tmp_path):
    (tmp_path / "my_team.py").write_text(MY_TEAM)
    return tmp_path


def test_rehearse_a_users_workflow_outside_the_clone(my_team):
    (my_team / "said.json").write_text(json.dumps({"left": ["42"], "right": ["bad \x1b[0m"]}))
    done = run(
        my_team, "launch.rehearse", "my_team.py:Pair", "--task", "6*7?", "--answer", "42",
        "--arg", "greeting=Hi", "--replies", "said.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "Hi 6*7?" in out and "You are right." in out and "malformed: it says bad" in out
    assert "note  K=2" in out and "1 events, all event-atomic" in out and "reward: 1" in out
    assert "\x1b" not in out and "bad \\x1b[0m" in out


def test_rehearse_needs_no_replies(my_team):
    done = run(my_team, "launch.rehearse", "my_team.py:Pair")
    assert done.returncode == 0 and "(a placeholder for what left says)" in done.stdout


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["my_team.py:Pai"], 2, "my_team.py has no 'Pai': did you mean `Pair`?"),
        (["my_team.py:Pair", "--arg", "greetin=1"], 2, "did you mean `greeting`?"),
        (["my_team.py:Pair", "--arg", "greeting"], 2, "--arg must be KEY=VALUE, got 'greeting'"),
        (["my_team.py:Pair", "--replies", "none.json"], 2, "none.json"),
        (["my_team.py:Pair", "--replies", "my_team.py"], 2, "my_team.py:2: not JSON"),
        (["my_team.py:Pair", "--replies", "short.json"], 1, "no reply left for 'right'"),
    ],
)
def test_rehearse_errors(my_team, arguments, code, message):
    (my_team / "short.json").write_text('{"left": ["42"]}')
    done = run(my_team, "launch.rehearse", *arguments)
    assert done.returncode == code and message in done.stderr + done.stdout


@pytest.mark.parametrize(
    "arguments, events",
    [
        (["math"], ["solve  K=3", "verify  K=1", "aggregate  K=1"]),
        (["math", "--arg", "router=true"], ["route  K=1", "solve  K=3", "verify", "aggregate"]),
        (["math", "--arg", "preset=single"], ["solve  K=1"]),
        (["search", "--arg", "workers=2"], ["route  K=1", "search  K=2", "verify  K=1", "answer"]),
    ],
)
def test_rehearse_the_built_in_workflows(tmp_path, arguments, events):
    done = run(tmp_path, "launch.rehearse", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    audit = done.stdout.split("event audit\n")[1]
    found = [line.split("  ", 1)[1] for line in audit.splitlines() if line.startswith("event ")]
    assert all(got.startswith(wanted) for got, wanted in zip(found, events, strict=True))
    assert "reward: 1" in done.stdout
