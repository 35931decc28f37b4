"""The table of metrics against what runs log."""

from __future__ import annotations

import pytest
from rich.console import Console

from srpo_jax import trainer
from srpo_jax.run.logs import read_metrics
from srpo_jax.run.metric_names import METRICS, find_metric
from tests.run_cases import noisy_reward, tiny_recipe


def test_every_figure_of_a_run_is_described(tmp_path, single_device):
    recipe = tiny_recipe(tmp_path, "trainer.steps=2", "learner.role_norms_every=1")
    assert trainer.run(recipe, reward=noisy_reward, console=Console(quiet=True)) == trainer.DONE
    names = {name for row in read_metrics(recipe.run_dir) for name in row}
    assert {"update/grad_norm", "eval/sums/avg", "cost/tokens", "update/ratio_k2_p50"} <= names
    assert [name for name in sorted(names) if find_metric(name) is None] == []


@pytest.mark.parametrize(
    "name, line",
    [
        ("events/k_3", "events/k_K"),
        ("update/ratio_k3_p05", "update/ratio_kK_pQ"),
        ("update/ratio_tokens_128_p95", "update/ratio_tokens_N_pQ"),
        ("update/grad_norm_cv", "update/grad_norm_cv"),
        ("update/grad_norm_solver", "update/grad_norm_ROLE"),
        ("eval/macro/pass", "eval/NAME/pass"),
        ("time/rollout", "time/NAME"),
        ("events/k_x", None),
        ("reward/median", None),
    ],
)
def test_a_name_finds_its_line(name, line):
    found = find_metric(name)
    assert (found and found.name) == line


def test_no_line_stands_twice():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
