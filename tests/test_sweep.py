"""Sweeps: distinct folders, honest statuses, reruns of unfinished members, the table over seeds."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from launch.sweep import (
    FAILED,
    SweepMember,
    load_sweep,
    main,
    plan,
    run_local,
    run_sweep,
    seed_table,
)
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_workflow
from srpo_jax.recipe.recipe import load_recipe
from tests.recipe_cases import MINIMAL


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Writes a sweep file beside a recipe; gives its plan."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(MINIMAL)
    (tmp_path / "sweeps").mkdir()

    def make(text: str) -> tuple[Path, list[SweepMember]]:
        path = Path("sweeps/my_sweep.yaml")
        path.write_text("recipe: ../tiny.yaml\n" + text)
        return plan(path, load_sweep(path))

    return make


GRID = "grid: {optimizer.lr: [1e-6, 3e-6]}\nseeds: [0, 1]\nmetric: reward"


class Trainer:
    """Stands for the training command: it finishes, raises at step 1, or ends early with code 0."""

    def __init__(self, **behaviour: str):
        self.behaviour = behaviour
        self.ran: list[str] = []

    def __call__(self, member: SweepMember) -> int:
        self.ran.append(member.name)
        how = self.behaviour.get(f"run{len(self.ran)}", "finish")
        step = {"finish": member.target, "early": member.target - 1, "raise": None}[how]
        with open(member.out / "metrics.jsonl", "w") as file:
            for n in range(1, (step or 1) + 1):
                file.write(json.dumps({"step": n, "reward": n + len(self.ran)}) + "\n")
        if step is not None:
            (member.out / "done.json").write_text(json.dumps({"step": step}))
        return int(how == "raise")


def statuses(out: Path) -> list[str]:
    record = json.loads((out / "sweep.json").read_text())
    return [member["status"] for member in record["members"].values()]


def test_public_case_s34(sweep):
    """Four runs in four folders; the second raises at step 1; only that one runs again."""
    out, members = sweep(GRID)
    assert len(members) == 4 and len({member.out for member in members}) == 4
    trainer = Trainer(run2="raise")
    assert run_sweep(out, members, "reward", trainer) == FAILED
    assert statuses(out) == ["ok", "failed", "ok", "ok"]
    assert trainer.ran == [member.name for member in members]

    again = Trainer()
    assert run_sweep(out, members, "reward", again) == 0
    assert again.ran == [members[1].name]
    assert statuses(out) == ["ok"] * 4


def test_an_early_end_with_code_0_is_a_failure(sweep):
    out, members = sweep(GRID)
    assert run_sweep(out, members, "reward", Trainer(run3="early")) == FAILED
    record = json.loads((out / "sweep.json").read_text())["members"][members[2].name]
    assert (record["status"], record["step"], record["target"]) == ("failed", 2, 3)
    assert "exit code 0, finished at step 2, target 3" in record["detail"]


def test_a_higher_target_runs_the_members_on(sweep):
    out, members = sweep(GRID)
    assert run_sweep(out, members, "reward", Trainer()) == 0
    _, longer = sweep(GRID + "\nset: {trainer.steps: 5}")
    trainer = Trainer()
    assert run_sweep(out, longer, "reward", trainer) == 0
    assert len(trainer.ran) == 4


def test_runs_of_another_recipe_are_not_taken_for_members(sweep):
    _, members = sweep(GRID)
    for member in members:
        member.out.mkdir(parents=True)
        recipe = load_recipe(member.recipe, member.overrides)
        (member.out / "recipe.yaml").write_text(recipe.dump())
    assert len(sweep(GRID)[1]) == 4
    with pytest.raises(RecipeError, match=r"rollout\.slots is 4 there and 8 here"):
        sweep(GRID + "\nset: {rollout.slots: 8}")


def test_members_are_recipes(sweep):
    out, members = sweep(
        "grid: {objective.set_reduction: [sqrt, sum], optimizer.lr: [1e-6]}\nseeds: [3]\n"
        "set: {trainer.steps: 7, advantage.group: [task]}"
    )
    assert out == Path("runs/my_sweep")
    assert [m.name for m in members] == [
        "set_reduction-sqrt_lr-1e-06_seed-3",
        "set_reduction-sum_lr-1e-06_seed-3",
    ]
    recipe = load_recipe(members[1].recipe, members[1].overrides)
    assert (recipe.objective.set_reduction, recipe.optimizer.lr, recipe.seed) == ("sum", 1e-6, 3)
    assert recipe.advantage.group == ["task"] and recipe.run_dir == members[1].out
    assert members[1].target == 7
    assert members[1].setting == "objective.set_reduction=sum,optimizer.lr=1e-06"


def test_a_members_preset_comes_before_its_keys_and_over_the_recipe(sweep):
    recipe = Path("tiny.yaml")
    recipe.write_text(
        MINIMAL.replace("workflow: math", "workflow: {name: math, args: {solvers: 5, rounds: 3}}")
        + "objective: {preset: gspo, clip_low: 0.1}\nadvantage: {scale: none}\n"
    )
    _, members = sweep(
        "grid: {objective.preset: [srpo, dr_mas], workflow.args.preset: [dr_mas, null]}\n"
        "set: {objective.dual_clip: null, objective.clip_high: 0.4, workflow.args.rounds: 4}"
    )
    loaded = [load_recipe(member.recipe, member.overrides) for member in members]
    configs = [r.objective_config() for r in loaded]
    assert [c.ratio_unit for c in configs] == ["event", "event", "token", "token"]
    assert {(c.clip_low, c.clip_high, c.dual_clip) for c in configs} == {(0.2, 0.4, None)}
    assert {r.advantage_config().scale for r in loaded} == {"std"}
    # The recipe's five solvers belong to no preset, null included.
    assert [build_workflow(r).solvers for r in loaded] == [1, 3, 1, 3]
    assert {build_workflow(r).rounds for r in loaded} == {4}


def test_equal_last_words_keep_their_path(sweep):
    _, members = sweep("grid: {seed: [1], evaluation.seed: [2, 3]}")
    assert [m.name for m in members] == ["seed-1_evaluation.seed-2", "seed-1_evaluation.seed-3"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("grid: {optimizer.lrr: [1]}", "optimizer.lrr: unknown key, did you mean `optimizer.lr`?"),
        ("grid: {optimizer.lr: [1e-6, 1e-6]}", "two members would share the folder lr-1e-06"),
        ("grid: {optimizer.lr: []}", "grid.optimizer.lr: this list is empty"),
        ("grid: {optimizer.lr: 1}", "grid.optimizer.lr: must be a list"),
        ("sedes: [1]", "sedes: unknown key, did you mean `seeds`?"),
        ("seeds: [1.5]", "seeds.0: must be a whole number"),
        ("set: {trainer.out: mine}", "trainer.out: the sweep sets it; its own folder is `out`"),
        (
            "grid: {optimizer.lr: [1]}\nset: {optimizer.lr: 2}",
            "optimizer.lr: in `grid` and in `set`",
        ),
        ("grid: {seed: [1]}\nseeds: [2]", "seed: `seeds` sets it too"),
    ],
)
def test_bad_sweeps_run_nothing(sweep, text, message):
    with pytest.raises(RecipeError) as caught:
        sweep(text)
    assert message in str(caught.value)
    assert not Path("runs").exists()


def test_dry_run_prints_and_leaves_nothing(sweep, capsys):
    sweep(GRID)
    assert main(["sweeps/my_sweep.yaml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1] == (
        "python -m launch.train tiny.yaml optimizer.lr=1.0e-06 seed=1 "
        "trainer.out=runs/my_sweep/lr-1e-06_seed-1"
    )
    assert not Path("runs").exists()


def test_the_table_has_mean_and_sample_deviation():
    console = Console(width=80, record=True)
    console.print(seed_table({"a": [1.0, 2.0, 3.0], "b": [5.0]}, "reward"))
    text = console.export_text()
    assert [line.split("│")[1:5] for line in text.splitlines() if "│" in line] == [
        [" a       ", " 2.0000 ", " 1.0000 ", "     3 "],
        [" b       ", " 5.0000 ", "      - ", "     1 "],
    ]


def test_a_metric_that_no_run_has_is_said(sweep, capsys):
    out, members = sweep(GRID)
    assert run_sweep(out, members, "rewrad", Trainer()) == 0
    text = capsys.readouterr().out
    assert "no finished run has a value of rewrad, did you mean `reward`?" in text
    assert text.count("no value") == 2 and "nan" not in text and "0.0000" not in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "3"}', "\xff", "[" * 100_000])
def test_a_foreign_record_is_said_before_anything_runs(sweep, content):
    _, members = sweep(GRID)
    members[2].out.mkdir(parents=True)
    (members[2].out / "done.json").write_text(content, encoding="latin-1")
    with pytest.raises(RecipeError, match=r"done\.json: not the record of a finished run"):
        sweep(GRID)


def test_the_reason_of_a_failed_member_is_said_and_the_rest_runs(sweep, capsys):
    """Such as: another process, or the child that a killed sweep left, still has the run folder."""
    out, members = sweep(GRID)

    class Refused(Trainer):
        def __call__(self, member: SweepMember) -> int:
            if member is not members[1]:
                return super().__call__(member)
            with open(member.out / "train.log", "a") as log:
                log.write("step 1\nerror: runs/x is in use by process 7\n")
            return 2

    (members[1].out).mkdir(parents=True)
    (members[1].out / "train.log").write_text("error: of an earlier try\n")
    assert run_sweep(out, members, "reward", Refused()) == FAILED
    assert statuses(out) == ["ok", "failed", "ok", "ok"]
    text = " ".join(capsys.readouterr().out.split())
    assert "failed, error: runs/x is in use by process 7 (exit code 2, no finished" in text
    assert run_sweep(out, members, "reward", Trainer(run1="raise")) == FAILED
    assert "failed, exit code 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("code", [75, -signal.SIGINT, -signal.SIGTERM])
def test_a_stopped_member_stops_the_sweep(sweep, code, capsys):
    out, members = sweep(GRID)
    ran = []
    assert run_sweep(out, members, "reward", lambda m: ran.append(m) or code) == 75
    assert ran == members[:1] and "the same command goes on" in capsys.readouterr().out
    assert run_sweep(out, members, "reward", Trainer()) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_the_member_that_runs(sweep, monkeypatch, number):
    """The member gets the signal once, and the sweep waits until it has ended in its own way."""
    _, (member, *_) = sweep(GRID)
    member.out.mkdir(parents=True)
    child = (
        "import signal, sys, time\n"
        "got = []\n"
        f"signal.signal({int(number)}, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.5); sys.exit(70 + len(got))"
    )
    waiting = threading.Thread(target=signal_when_ready, args=(member.out / "train.log", number))
    waiting.start()
    monkeypatch.setattr(SweepMember, "command", [sys.executable, "-c", child])
    before = signal.getsignal(signal.SIGTERM)
    assert run_local(member) == 71
    waiting.join()
    assert signal.getsignal(signal.SIGTERM) == before


def signal_when_ready(log: Path, number: int) -> None:
    while not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def test_the_real_command_is_started_and_its_output_kept(sweep):
    """A recipe whose checkpoint is missing: the child fails, and its log says why."""
    _, (member,) = sweep("set: {model: no/such/folder, model.revision: null}")
    member.out.mkdir(parents=True)
    assert run_local(member) != 0
    assert "no/such/folder" in (member.out / "train.log").read_text()
