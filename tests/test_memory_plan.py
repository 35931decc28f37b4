"""What a run holds on its devices, as planned from shapes, against the arrays that are there."""

from __future__ import annotations

import gc

import jax
import pytest

from srpo_jax import trainer
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run import build as run_parts
from srpo_jax.run.build import build_evaluation_parts, build_parts
from srpo_jax.run.build_engine import token_bytes
from srpo_jax.run.memory_plan import plan_memory
from tests.run_cases import noisy_reward, tiny_recipe

SMALL = 64 * 1024  # not planned: counters, slots, sampling settings, workspaces of the cache


def live_bytes(known: set[int] = frozenset()) -> int:
    """Bytes of all arrays that are alive, those of ``known`` left out."""
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if id(a) not in known)


@pytest.fixture
def before():
    """Arrays that other tests left behind."""
    gc.collect()
    return {id(a) for a in jax.live_arrays()}


def planned(recipe, parts, **options):
    devices = list(parts.engine._mesh.devices.flat)
    mesh = parts.learner.mesh if hasattr(parts, "learner") else make_mesh(1, devices=devices)
    return plan_memory(recipe, parts.config, mesh, devices, 2**33, **options)


def phases(plan):
    return {phase.name: phase.total for phase in plan.phases}


@pytest.mark.usefixtures("single_device")
@pytest.mark.parametrize("changes", [(), ("objective.kl_coef=0.1",)], ids=["plain", "reference"])
def test_a_start_holds_what_was_planned_and_no_copy_more(tmp_path, before, changes):
    recipe = tiny_recipe(tmp_path, *changes)
    noted = []
    parts = build_parts(recipe, reward=noisy_reward, note=noted.append)
    plan = planned(recipe, parts)
    assert abs(live_bytes(before) - phases(plan)["sync"]) < SMALL
    trainer.sample_step(parts, 0, trainer.RunProgress(0, 0, None))
    cache = plan.cache_tokens * token_bytes(parts.config, 1, 4)
    assert dict(plan.phases[2].parts)["KV cache"] == cache
    page = parts.engine._shapes.page
    assert parts.engine._state.cache[0].v.shape[0] == plan.cache_tokens // page + 1
    (line,) = noted
    assert line.startswith("memory of each device") and "rollout" in line and "\n" not in line


@pytest.mark.usefixtures("single_device")
def test_an_evaluation_keeps_no_copy_of_what_it_loaded(tmp_path, before):
    recipe = tiny_recipe(tmp_path)
    parts = build_evaluation_parts(recipe)
    weights = dict(planned(recipe, parts, trains=False).phases[1].parts)["engine weights"]
    assert abs(live_bytes(before) - weights) < SMALL


@pytest.mark.usefixtures("single_device")
def test_a_resume_holds_neither_a_second_state_nor_an_engine(tmp_path, before, monkeypatch):
    recipe = tiny_recipe(tmp_path, "evaluation.every=0", "trainer.steps=1")
    assert trainer.run(recipe, reward=noisy_reward) == trainer.DONE
    gc.collect()
    known = before | {id(a) for a in jax.live_arrays()}
    held = []
    load = trainer.Checkpoints.load

    def measured(self, step, like):
        held.append(live_bytes(known))
        return load(self, step, like)

    monkeypatch.setattr(trainer.Checkpoints, "load", measured)
    longer = tiny_recipe(tmp_path, "evaluation.every=0", "trainer.steps=2")
    assert trainer.run(longer, reward=noisy_reward) == trainer.DONE
    assert held and held[0] < SMALL


def test_what_cannot_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    loaded = []
    monkeypatch.setattr(run_parts, "free_bytes", lambda devices: 100_000)
    monkeypatch.setattr(run_parts, "load_hf", lambda *args, **kwargs: loaded.append(1))
    with pytest.raises(RecipeError) as caught:
        build_parts(recipe, reward=noisy_reward)
    message = str(caught.value)
    assert message.startswith("memory: ") and "97.7 KiB" not in message and "\n" not in message
    assert "parameters" in message and "moments" in message and not loaded


@pytest.mark.usefixtures("single_device")
def test_a_cache_below_one_request_is_refused(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    parts = build_parts(recipe, reward=noisy_reward)
    plan = planned(recipe, parts)
    just = max(phases(plan)[name] for name in ("sync", "update")) + 10_000
    monkeypatch.setattr(run_parts, "free_bytes", lambda devices: just)
    with pytest.raises(RecipeError, match=r"^memory: beside the other parts the KV cache holds"):
        build_parts(recipe, reward=noisy_reward)
