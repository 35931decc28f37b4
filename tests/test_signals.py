"""SIGTERM, Ctrl-C and SIGKILL at every moment of a run in a process of its own: how soon it ends,
with which code, and that the same command then goes on to what the straight run leaves."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from srpo_jax.recipe.yaml import dump_yaml
from tests.moments import MOMENTS
from tests.run_cases import left_behind, recipe_content

ROOT = Path(__file__).parents[1]
REWARD = """
from envs.workflow import Score

def reward(task, outcome):
    value = sum(map(ord, outcome.response)) % 5 / 4
    return Score(value, correct=value == 1)
"""


@dataclass
class Ended:
    code: int
    seconds: float  # from the last signal to the end
    output: str


def start(folder: Path, *command: str) -> Ended:
    """A command's process with one device; its end."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, timeout=400, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    sent = re.findall(r"signal at ([\d.]+)", done.stdout)
    return Ended(done.returncode, time.time() - float(sent[-1]) if sent else 0.0, done.stdout)


def write_recipe(folder: Path, steps: int = 4) -> str:
    content = recipe_content(folder)
    content["reward"] = str(folder / "reward.py:reward")
    content["trainer"] |= {"steps": steps, "checkpoint_every": 3}
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(content))
    return str(path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A folder with a recipe and its run without any signal; what that run left."""
    folder = tmp_path_factory.mktemp("run")
    recipe = write_recipe(folder)
    ended = start(folder, "launch.train", recipe)
    assert ended.code == 0, ended.output
    return folder, recipe, left_behind(folder / "run")


def ends_as_the_straight_run(straight, out: Path) -> None:
    folder, recipe, left = straight
    ended = start(folder, "launch.train", recipe, f"trainer.out={out}")
    assert ended.code == 0, ended.output
    assert left_behind(out) == left
    for path in out.rglob("*"):
        assert not path.name.endswith((".partial", ".orbax-checkpoint-tmp")), path


CASES = [(moment, ("TERM", "INT")[n % 2]) for n, moment in enumerate(MOMENTS)]


@pytest.mark.slow
@pytest.mark.parametrize("moment, first", CASES)
def test_the_first_signal(straight, tmp_path, moment, first):
    folder, recipe, _ = straight
    out = tmp_path / "run"
    ended = start(folder, "tests.moments", moment, first, recipe, f"trainer.out={out}")
    # An export of no time is finished: there is nothing left to stop.
    assert ended.code == (0 if moment == "export" else 75), ended.output
    assert ended.seconds < 10 and "Traceback" not in ended.output
    if ended.code:
        assert ended.output.count("the same command resumes") == 1
    ends_as_the_straight_run(straight, out)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["model load", "first compile", "rollout", "save", "checksums"])
def test_a_second_signal_ends_at_once(straight, tmp_path, moment):
    folder, recipe, _ = straight
    out = tmp_path / "run"
    ended = start(folder, "tests.moments", moment, "INT,TERM", recipe, f"trainer.out={out}")
    assert ended.code == 75 and ended.seconds < 3, ended.output
    assert "Traceback" not in ended.output
    ends_as_the_straight_run(straight, out)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start-up", "save", "checksums", "sync", "export"])
def test_killed_at_a_moment(straight, tmp_path, moment):
    folder, recipe, _ = straight
    out = tmp_path / "run"
    ended = start(folder, "tests.moments", moment, "KILL", recipe, f"trainer.out={out}")
    assert ended.code == -signal.SIGKILL, ended.output
    ends_as_the_straight_run(straight, out)


@pytest.mark.slow
def test_killed_at_random(straight, tmp_path):
    """SRPO_TEST_KILLS kills, one after the other, each at any time of what is left of a run."""
    folder, recipe, _ = straight
    longer = [recipe, "trainer.steps=24"]
    began = time.monotonic()
    ended = start(folder, "launch.train", *longer, f"trainer.out={tmp_path / 'straight'}")
    seconds, left = time.monotonic() - began, left_behind(tmp_path / "straight")
    rng, killed, runs, reached = random.Random(0), 0, 0, []
    while killed < int(os.environ.get("SRPO_TEST_KILLS", "3")):
        out = tmp_path / f"run_{runs}"
        # Every other one while it trains, the rest while it starts, too.
        moment = f"+{rng.uniform(0, 4):.3f}" if killed % 2 else f"{rng.uniform(0, seconds):.3f}"
        command = [moment, "KILL", *longer, f"trainer.out={out}"]
        ended = start(folder, "tests.moments", *command)
        if ended.code == 0:  # done before it could be killed: the next one starts another run
            assert left_behind(out) == left
            runs += 1
            continue
        assert ended.code == -signal.SIGKILL, ended.output
        killed += 1
        reached.append(ended.output.count("\nstep "))
    ended = start(folder, "launch.train", *longer, f"trainer.out={out}")
    assert ended.code == 0 and left_behind(out) == left
    print(f"{killed} kills of {runs + 1} runs, {reached} steps after each start")


@pytest.mark.slow
def test_an_evaluation_is_abandoned_and_the_same_command_starts_it_again(straight, tmp_path):
    folder, recipe, _ = straight
    command = [sys.executable, "-m", "launch.evaluate", recipe, "--out", str(tmp_path / "out")]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        while "building engine" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said = process.stderr.read()
    assert process.returncode == 75 and time.monotonic() - began < 10, said
    assert said.endswith("stopped; the same command starts it again\n")
    done = start(folder, "launch.evaluate", recipe, "--out", str(tmp_path / "out"))
    assert done.code == 0, done.output
