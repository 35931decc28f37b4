"""A run killed in the middle of a step and started again equals the straight run, bit for bit.

The engine's and the loop's random numbers are functions of the request and the step, so there is no
generator state to lose; what a checkpoint holds is the train state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from srpo_jax.recipe.yaml import dump_yaml
from srpo_jax.run.logs import read_metrics
from tests.run_cases import left_behind, recipe_content

ROOT = Path(__file__).parents[1]

# A user's reward that ends its process once: in the step after the one named in `deadly`, when that
# step's checkpoint lies there whole.
REWARD = """
import os, signal, time
from pathlib import Path

from envs.workflow import Score

HERE = Path(__file__).parent
calls = []

def reward(task, outcome):
    deadly = HERE / "deadly"
    if deadly.exists():
        step, run = deadly.read_text().split("\\n")
        if (Path(run) / "episodes" / f"step_{int(step):06d}.jsonl.zst").exists():
            calls.append(1)
        if len(calls) == 6:  # past the evaluation's four episodes
            until = time.monotonic() + 20
            while not (Path(run) / "checkpoints" / step).exists() and time.monotonic() < until:
                time.sleep(0.01)
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    value = sum(map(ord, outcome.response)) % 5 / 4
    return Score(value, correct=value == 1)
"""


def train(folder: Path, *overrides: str) -> int:
    """``launch.train`` in a process of its own with one device; its exit code."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "launch.train", str(folder / "recipe.yaml"), *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
def test_killed_in_step_3_of_6_and_run_again(tmp_path):
    content = recipe_content(tmp_path)
    content["reward"] = str(tmp_path / "reward.py:reward")
    content["trainer"] |= {"steps": 6, "checkpoint_every": 2}
    # The place in a schedule is that of the updates before the checkpoint, not of the process.
    content["optimizer"] |= {"schedule": "cosine", "warmup_steps": 3}
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(content))
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train(tmp_path, f"trainer.out={straight}") == 0

    (tmp_path / "deadly").write_text(f"2\n{resumed}")
    assert train(tmp_path, f"trainer.out={resumed}") == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(resumed)] == [0, 1, 2]
    assert (resumed / "checkpoints" / "2").is_dir() and not (resumed / "done.json").exists()
    first = read_metrics(resumed)
    assert train(tmp_path, f"trainer.out={resumed}") == 0
    assert read_metrics(resumed)[:3] == first  # steps 1 and 2 were not run again

    left = left_behind(straight)
    assert left_behind(resumed) == left
    assert [row["step"] for row in left["metrics"]] == list(range(7))
    assert all(row["update/grad_norm"] > 0 for row in left["metrics"] if row["step"])
    rates = [row["update/lr"] for row in left["metrics"] if row["step"]]
    assert rates[0] < rates[1] > rates[2] > rates[3] > rates[4] > rates[5] > 0
    assert list(left["episodes"]) == [1, 2, 3, 4, 5, 6]
    assert left["weights"] != (tmp_path / "checkpoint/model.safetensors").read_bytes()
