"""A recipe for a whole run that takes seconds: a random two-layer model and a noisy reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envs.workflow import Score
from models.convert import save_hf
from srpo_jax.recipe.recipe import Recipe, parse_recipe
from srpo_jax.run.logs import episode_steps, read_episodes, read_metrics, read_verdicts
from tests.learner_cases import tiny_model

TOKENIZER = Path(__file__).parent / "data" / "tiny_tokenizer"
TASKS_PER_STEP, GROUP = 2, 3
EVAL_EPISODES = 4
SUMS = [("2 + 3", "5"), ("4 + 4", "8"), ("1 + 6", "7"), ("9 + 2", "11"), ("3 + 3", "6")]


def noisy_reward(task, outcome) -> Score:
    """A function of the sampled text, so that random outputs get different rewards."""
    reward = sum(map(ord, outcome.response)) % 5 / 4
    return Score(reward, correct=reward == 1)


def recipe_content(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint and tasks into ``folder`` and returns a Math recipe of three steps."""
    if not (folder / "checkpoint").exists():
        vocab = len(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]) + 24
        save_hf(tiny_model(vocab_size=vocab), folder / "checkpoint", tokenizer_from=TOKENIZER)
        rows = [json.dumps({"problem": p, "answer": a}) + "\n" for p, a in SUMS]
        (folder / "sums.jsonl").write_text("".join(rows))
    return {
        "name": "tiny",
        "seed": 3,
        "model": str(folder / "checkpoint"),
        "workflow": {
            "name": "math",
            "args": {
                "solvers": 2, "rounds": 2, "revision": "revise", "verify_last": False,
                "aggregator": False, "prompt_style": "short",
            },
        },
        "tasks": {
            "train": str(folder / "sums.jsonl"),
            "eval": {"sums": str(folder / "sums.jsonl")},
        },
        "rollout": {
            "tasks_per_step": TASKS_PER_STEP, "group_size": GROUP, "prompt_tokens": 96,
            "response_tokens": 6, "slots": 8, "burst": 4,
        },
        "optimizer": {"lr": 0.01, "warmup_steps": 1},
        "learner": {"micro_batch_rows": 8, "updates_per_batch": 2, "remat": "none"},
        "evaluation": {"every": 2, "samples": 2, "tasks": 2, "temperature": 1.0, "top_p": 0.9},
        "trainer": {"steps": 3, "checkpoint_every": 2, "out": str(folder / "run")},
    }  # fmt: skip


def tiny_recipe(folder: Path, *overrides: str) -> Recipe:
    return parse_recipe(recipe_content(folder), overrides, folder=folder)


def left_behind(folder: Path) -> dict[str, Any]:
    """All that a run leaves but for what time decides: two runs of one recipe leave the same."""
    return {
        "metrics": [
            {k: v for k, v in row.items() if not k.startswith("time/") and k != "compiles"}
            for row in read_metrics(folder)
        ],
        "episodes": {step: list(read_episodes(folder, step)) for step in episode_steps(folder)},
        "verdicts": {
            step: {name: verdicts.tolist() for name, verdicts in by_name.items()}
            for step, by_name in read_verdicts(folder).items()
        },
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "done": (folder / "done.json").read_text(),
    }
