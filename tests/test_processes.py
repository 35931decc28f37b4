"""One run in several processes on the CPU, joined over loopback: the same run as in one."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from launch.local import run_processes
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.logs import read_episodes, read_metrics
from srpo_jax.run.processes import COORDINATOR, COUNT, INDEX, Processes, join_processes
from tests.test_signals import ROOT, write_recipe

LAYOUTS = [(1, 1), (1, 4), (2, 2), (4, 1)]  # processes, devices of each
STEPS = 3
# Times, and what is counted apart in every process.
OWN = ("time/", "compiles")


def train(recipe: str, count: int, devices: int, *overrides: str) -> subprocess.CompletedProcess:
    """``launch.train`` in ``count`` processes."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [
        sys.executable, "-m", "launch.local", "--processes", str(count), "--devices", str(devices),
        "--", sys.executable, "-m", "launch.train", recipe, *overrides,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=500, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def responses(out: Path, step: int) -> dict[str, list[str]]:
    """The texts of every episode of a step, by its id."""
    return {
        episode["id"]: [m["response"] for event in episode["events"] for m in event["members"]]
        for episode in read_episodes(out, step)
    }


def figures(out: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in read_metrics(out)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("processes"), steps=STEPS)


@pytest.fixture(scope="module")
def runs(recipe):
    """The folder of the run in each layout, made when first asked for."""
    made = {}

    def run(count: int, devices: int, *overrides: str) -> Path:
        key = count, devices, *overrides
        if key not in made:
            made[key] = Path(recipe).parent / f"out{len(made)}"
            ended = train(recipe, count, devices, f"trainer.out={made[key]}", *overrides)
            assert ended.returncode == 0, ended.stdout
        return made[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("count, devices", LAYOUTS[1:])
def test_every_layout_samples_the_same_and_trains_the_same(runs, count, devices):
    one, other = runs(1, 1), runs(count, devices)
    assert responses(other, 1) == responses(one, 1)
    for a, b in zip(figures(one), figures(other), strict=True):
        assert a.keys() == b.keys()
        same = responses(one, a["step"]) == responses(other, a["step"]) if a["step"] else True
        if not same:  # an id differs: from here on these are two runs
            assert a["step"] > 1
            break
        for name, value in a.items():
            if value is None:  # it is not finite
                assert b[name] is None
                continue
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.parametrize("count, devices", LAYOUTS[1:])
def test_without_a_change_of_weights_all_steps_sample_the_same(runs, count, devices):
    still = "optimizer.lr=1e-30", "evaluation.every=0"
    one, other = runs(1, 1, *still), runs(count, devices, *still)
    for step in range(1, STEPS + 1):
        assert responses(other, step) == responses(one, step)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_one_process_ends_all_with_its_cause(recipe, tmp_path, failing):
    """The reward of one process returns what ends a run."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n\ndef reward(task, outcome):\n"
        f"    return 0.5 if os.environ['{INDEX}'] == '{failing}' else 1\n"
    )
    started = time.monotonic()
    ended = train(recipe, 2, 1, f"trainer.out={tmp_path}/run", f"reward={path}:reward")
    assert ended.returncode != 0
    assert f"error: process {failing} on " in ended.stdout, ended.stdout
    assert ended.stdout.count("a bare reward is 0 or 1") == 2
    assert "Traceback" not in ended.stdout and "stack trace" not in ended.stdout
    assert time.monotonic() - started < 120


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on(recipe, runs, tmp_path, number):
    out = tmp_path / "run"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONUNBUFFERED"] = "1"
    child = subprocess.Popen(
        [sys.executable, "-m", "launch.local", "--processes", "2", "--devices", "2", "--",
         sys.executable, "-m", "launch.train", recipe, f"trainer.out={out}"],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seen = []
    for line in child.stdout:
        seen.append(line)
        if "step 1/" in line or "1/3" in line:
            break
    victims = subprocess.run(
        ["pgrep", "-f", f"launch.train {recipe} trainer.out={out}"], capture_output=True, text=True
    )
    trainers = [
        int(pid) for pid in victims.stdout.split()
        if b"launch.local" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    assert len(trainers) == 2, "".join(seen)
    os.kill(max(trainers), number)
    sent = time.monotonic()
    rest = child.stdout.read()
    code, took = child.wait(), time.monotonic() - sent
    if number == signal.SIGTERM:
        assert code == 75 and took < 10, (code, took, rest)
    else:
        assert code != 0 and took < 60, (code, took, rest)
    ended = train(recipe, 2, 2, f"trainer.out={out}")
    assert ended.returncode == 0, ended.stdout
    straight = runs(2, 2)
    assert responses(out, STEPS) == responses(straight, STEPS)
    model = "model/model.safetensors"
    assert (out / model).read_bytes() == (straight / model).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("count, devices", [(1, 1), (4, 1)])
def test_a_checkpoint_of_two_goes_on_in_another_layout(runs, tmp_path, recipe, count, devices):
    out = tmp_path / "run"
    ended = train(recipe, 2, 2, f"trainer.out={out}", "trainer.steps=1")
    assert ended.returncode == 0, ended.stdout
    ended = train(recipe, count, devices, f"trainer.out={out}")
    assert ended.returncode == 0, ended.stdout
    last, straight = figures(out)[-1], figures(runs(2, 2))[-1]
    if responses(out, STEPS) == responses(runs(2, 2), STEPS):
        assert last["update/loss"] == pytest.approx(straight["update/loss"], abs=1e-5)


def test_a_single_process_agrees_with_itself_and_shares_nothing():
    alone = Processes()
    assert (alone.index, alone.count, alone.first) == (0, 1, True)
    assert alone.agree("a|b") == ["a|b"]
    assert alone.gather({"x": np.arange(3)})[0]["x"].tolist() == [0, 1, 2]
    assert alone.least(5) == 5 and alone.least(None) is None
    names = [alone.new_counter() for _ in range(3)]
    assert len(set(names)) == 3


@pytest.mark.parametrize("given", list(itertools.product([None, 1], repeat=3)))
def test_the_options_go_together(given):
    coordinator, count, index = given
    if None in given and given != (None, None, None):
        with pytest.raises(RecipeError, match="--coordinator, --processes and --process go togeth"):
            join_processes(coordinator and "localhost:1", count, index)


def test_a_process_beyond_the_last_is_refused():
    with pytest.raises(RecipeError, match="--process must be from 0 to 1, got 2"):
        join_processes("localhost:1", 2, 2)


class TestLocal:
    def test_each_process_gets_its_place_and_its_lines_a_number(self, capfd):
        names = f"'{COORDINATOR}', '{COUNT}', '{INDEX}'"
        program = f"import os; print(*(os.environ[n] for n in ({names})))"
        assert run_processes([sys.executable, "-c", program], 2) == 0
        lines = sorted(capfd.readouterr().err.splitlines())
        (first, one), (second, two) = (line.split(" ", 1) for line in lines)
        assert (first, second) == ("[0]", "[1]")
        address, count, index = one.split()
        assert address.startswith("127.0.0.1:") and (count, index) == ("2", "0")
        assert two == f"{address} 2 1"

    def test_the_code_of_the_first_that_failed_and_no_process_left(self, monkeypatch):
        monkeypatch.setattr("launch.local.GRACE", 0.5)
        program = (
            f"import os, sys, time\nif os.environ['{INDEX}'] == '1': sys.exit(3)\ntime.sleep(60)"
        )
        started = time.monotonic()
        assert run_processes([sys.executable, "-c", program], 2) == 3
        assert time.monotonic() - started < 20

    def test_a_program_that_is_not_there_is_one_line(self):
        with pytest.raises(RecipeError, match=r"^no-such-program: No such file"):
            run_processes(["no-such-program"], 2)
