"""Every command with bad input: one line that names what is wrong, and exit code 2."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
import zstandard

from launch.cli import entry
from srpo_jax.run.logs import EpisodeWriter, MetricLogger
from tests.process_cases import python
from tests.test_launch import episode

COMMANDS = {
    "train": "recipe", "show": "run", "report": "runs", "sweep": "sweep", "rehearse": "workflow",
    "convert": "direction, source, target", "prepare_data": "what, target", "warm_start": "target",
    "serve": "MODEL_OR_RECIPE", "serve_retriever": "CORPUS", "compile_check": "recipe, --topology",
}  # fmt: skip
NESTED = "[" * 100_000


def call(capsys, command: str, *arguments: object) -> tuple[int, str]:
    """A command's exit code and what it says on stderr, which is one line."""
    main = importlib.import_module(f"launch.{command}").main
    with pytest.raises(SystemExit) as exit_:
        entry(lambda: main([str(argument) for argument in arguments]))
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n"), said
    return exit_.value.code, said.removeprefix("error: ").rstrip()


def refusal(capsys, command: str, *arguments: object) -> str:
    code, said = call(capsys, command, *arguments)
    assert code == 2
    return said


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder: with a run, a file, a link to itself and an empty folder."""
    monkeypatch.chdir(tmp_path)
    EpisodeWriter("run").write(4, [episode("s3-t0-r0")])
    logger = MetricLogger("run")
    logger.log(4, {"reward/mean": 1.0})
    logger.close()
    Path("file").write_text("text")
    Path("loop").symlink_to("loop")
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_arguments_names_them_and_an_example(capsys, command):
    said = refusal(capsys, command)
    example = f"{COMMANDS[command]}: missing; for example: python -m launch.{command} "
    assert said.startswith(example) and len(said) > len(example)


@pytest.mark.parametrize("path", ["nowhere", "file", "loop", "empty", "file/below", "x" * 300])
@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("report",),
        ("train",),
        ("sweep",),
        ("convert", "to-flax"),
        ("convert", "to-hf"),
        ("compile_check", "--topology", "v5e:4x4"),
        ("rehearse", "math", "--checkpoint"),
        ("rehearse", "math", "--replies"),
        ("rehearse", "search", "--corpus"),
        ("prepare_data", "smollm2", "target", "--package"),
        ("warm_start", "target", "--recipes"),
    ],
    ids=" ".join,
)
def test_paths_that_hold_nothing_of_the_kind(folder, capsys, command, path):
    name, *arguments = command
    target = ["new"] if name == "convert" else []
    said = refusal(capsys, name, *arguments, path, *target)
    assert path in said
    assert not Path("target").exists() and not Path("new").exists()


def test_a_run_folder_without_permission(folder, capsys, monkeypatch):
    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "run/metrics.jsonl" in refusal(capsys, "report", "run")
    assert "run/episodes/step_000004.jsonl.zst" in refusal(capsys, "show", "run")


def test_a_full_disk_is_one_line_and_no_input(folder, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "report")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    code, said = call(capsys, "report", "run")
    assert code == 1 and "No space left on device" in said


# ---- show ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, says",
    [
        ({"events": None}, "events: Input should be a valid list"),
        ({"events": [{"type": "solve"}]}, "events.0.turn: Field required"),
        ({"task": {"id": 3}}, "task.id: Input should be a valid string"),
        ({"reward": "high"}, "reward: Input should be a valid number"),
        ({"cost": {"tokens": None}}, "cost.tokens: Input should be a valid number"),
        ({"outcome": ["x"]}, "outcome: Input should be a valid dictionary"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--episode", "a"]])
def test_records_that_are_no_episodes(folder, capsys, change, says, options):
    EpisodeWriter("run").write(5, [episode("a", **change)])
    said = refusal(capsys, "show", "run", *options)
    assert said.startswith(f"run: episode 'a' is no episode's record ({says}")


def test_foreign_files_of_a_run_are_named(folder, capsys):
    path = Path("run/episodes/step_000007.jsonl.zst")
    path.write_bytes(zstandard.compress(b"{}\n")[:-2])
    assert refusal(capsys, "show", "run").startswith(f"{path}: damaged")
    assert refusal(capsys, "show", "run", "--episode", "x").startswith(f"{path}: damaged")
    Path("run/metrics.jsonl").write_text("garbage\n")
    assert refusal(capsys, "report", "run").startswith("run/metrics.jsonl:1: not JSON")


def test_reading_a_run_does_not_load_jax(folder):
    code = (
        "import sys; from launch import report, show, sweep\n"
        "show.main(['run']); show.main(['run', '--episode', 's3-t0-r0']); report.main(['run'])\n"
        "assert not {'jax', 'transformers'} & set(sys.modules)"
    )
    done = python("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr


# ---- report --------------------------------------------------------------------------------------


def test_reports_about_nothing(folder, capsys):
    assert refusal(capsys, "report", "run", "run") == "run: this run is given twice"
    said = refusal(capsys, "report", "run", "--metrics", "reward/maen")
    assert said == "no metric matches reward/maen: did you mean `reward/mean`?"
    Path("run/metrics.jsonl").write_text("")
    assert refusal(capsys, "report", "run") == "run: nothing was logged yet"
    assert not Path("report").exists()


def test_a_file_where_the_curves_should_be(folder, capsys):
    assert "file" in refusal(capsys, "report", "run", "--out", "file")


# ---- rehearse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["maths"], "the workflow must be math, search or my_team.py:MyWorkflow, got 'maths': "
                    "did you mean `math`?"),
        (["quiz"], "there is: math, search"),
        (["math", "--prompt-tokens", "0"], "--prompt-tokens must be at least 1, got 0"),
        (["math", "--temperature", "nan"], "--temperature must be positive, got nan"),
        (["math", "--temperature", "-1"], "--temperature must be positive, got -1"),
        (["math", "--replies", "latin"], "latin: not JSON"),
        (["math", "--replies", "nested"], "nested: not JSON"),
        (["math", "--replies", "digits"], "digits: not JSON"),
        (["math", "--replies", "number"], "number: must be {role: [outputs]} or a list of outputs"),
    ],
)  # fmt: skip
def test_rehearsals_that_cannot_begin(folder, capsys, arguments, says):
    Path("latin").write_bytes(b'["\xe9"]')
    Path("nested").write_text(NESTED)
    Path("digits").write_text("[" + "9" * 5000 + "]")
    Path("number").write_text("3")
    assert says in refusal(capsys, "rehearse", *arguments)


# ---- warm_start, convert -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["new", "--lr", "inf"], "--lr must be positive, got inf"),
        (["new", "--tokens", "inf"], "--tokens must be at least 327680 (40 steps)"),
        (["new", "--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["new", "--init", "nowhere"], "nowhere: no such folder"),
        (["file/new"], "file/new: nothing can be written into"),
    ],
)
def test_warm_starts_that_could_not_end_are_refused_before_any_work(
    folder, capsys, monkeypatch, arguments, says
):
    root = Path(__file__).parents[1]
    recipes = [str(root / "configs" / f"quickstart_{name}.yaml") for name in ("math", "search")]
    monkeypatch.setattr("launch.warm_start.warm_start", None)
    assert says in refusal(capsys, "warm_start", *arguments, "--recipes", *recipes)


@pytest.mark.parametrize(
    "recipe", ["model: x", "model: {path: 3}", "- a", "a: [", NESTED, "", json.dumps({"a": 1})]
)
def test_a_run_folder_with_another_recipe_is_not_exported(folder, capsys, recipe):
    Path("run/recipe.yaml").write_text(recipe)
    os.makedirs("run/checkpoints/3")
    assert "run/recipe.yaml" in refusal(capsys, "convert", "to-hf", "run", "new")
    assert not Path("new").exists()
