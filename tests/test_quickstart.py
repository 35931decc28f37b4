"""The quick start's table, and that the embedded checkpoint is what it is said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from launch.quickstart import RECIPES, before_after_table
from models.convert import load_hf
from models.tokenizer import ChatTokenizer
from srpo_jax.recipe.recipe import load_recipe
from srpo_jax.run.logs import read_verdicts, write_verdicts

ROOT = Path(__file__).parents[1]
ASSET = ROOT / "assets" / "tiny_team"


def test_the_embedded_checkpoint_is_small_and_loads():
    files = list(ASSET.iterdir())
    assert sum(f.stat().st_size for f in files) <= 4_000_000
    model, config = load_hf(ASSET, dtype=None)
    import jax

    assert sum(x.size for x in jax.tree.leaves(model)) <= 1_500_000
    assert config.model_type == "qwen3"
    assert ChatTokenizer(ASSET).vocab_size <= config.vocab_size


def test_recipes_of_the_quick_start_measure_enough():
    math, search = (load_recipe(ROOT / path) for path in RECIPES)
    assert math.tasks.eval["arithmetic"].size * math.evaluation.samples >= 128 * 8
    assert search.tasks.eval["factbook"].size * search.evaluation.samples >= 64 * 6
    assert (math.learner.updates_per_batch, search.learner.updates_per_batch) == (1, 2)
    assert math.rollout.prompt_tokens <= 96 and search.rollout.prompt_tokens <= 224


def test_the_table_pairs_the_first_and_the_last_verdicts(tmp_path):
    recipe = load_recipe(ROOT / RECIPES[0], [f"trainer.out={tmp_path}"])
    before = np.array([[0, 0], [1, 0], [1, 1]], bool)
    after = np.array([[1, 1], [1, 0], [1, 1]], bool)
    write_verdicts(tmp_path, 0, {"arithmetic": before})
    write_verdicts(tmp_path, 5, {"arithmetic": ~after})
    write_verdicts(tmp_path, 30, {"arithmetic": after})
    assert np.array_equal(read_verdicts(tmp_path)[30]["arithmetic"], after)
    console = Console(width=120, record=True)
    console.print(before_after_table([recipe], {recipe.name: 12.0}))
    text = console.export_text()
    # Differences by task 1, 0, 0: mean 1/3, standard error sqrt(1/3) / sqrt(3) = 1/3.
    for cell in ("0.500", "0.833", "+0.333 ± 0.333", "1.0", "12"):
        assert cell in text
