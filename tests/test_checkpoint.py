"""Checkpoints: the same bits back, on the mesh they came from, and which ones are kept."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from srpo_jax.checkpoint import Checkpoints, write_json
from srpo_jax.config import OptimizerConfig
from srpo_jax.optimizer import make_optimizer
from srpo_jax.sharding import make_mesh
from tests.learner_cases import batch_of, bit_equal, events_of, host, make_learner, tiny_model


def learner_on(mesh, seed=0, param_dtype=jnp.float32):
    config = OptimizerConfig(lr=1e-2, moment_dtype="bfloat16", schedule="cosine", warmup_steps=1)
    return make_learner(
        tiny_model(seed, param_dtype), mesh=mesh, optimizer=make_optimizer(config, 10)
    )


@pytest.mark.multidevice
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit_where_it_was(tmp_path, param_dtype):
    """bfloat16 moments and parameters and the counters included, each with its own sharding."""
    mesh = make_mesh(1, 2, 2)
    trained = learner_on(mesh, param_dtype=param_dtype)
    trained.update([batch_of()])
    jax.block_until_ready(trained.state)
    assert np.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(trained.state.opt_state)}
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    checkpoints.save(7, trained.state, {"best_score": 0.1 + 0.2})
    checkpoints.close()

    other = learner_on(mesh, seed=1, param_dtype=param_dtype)
    again = Checkpoints(tmp_path / "c", keep=2)
    assert again.latest == 7
    state, meta = again.load(7, other.state)
    again.close()
    assert meta == {"best_score": 0.1 + 0.2}
    assert jax.tree.structure(state) == jax.tree.structure(trained.state)
    assert bit_equal(state, trained.state) and not bit_equal(state, other.state)
    same = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, trained.state
    )
    assert all(jax.tree.leaves(same))

    other.state = state  # goes on exactly as the one that was saved
    more = [batch_of(events_of(seed=3))]
    norms = [float(learner.update(more)[0]["grad_norm"]) for learner in (trained, other)]
    assert norms[0] == norms[1] and bit_equal(trained.state, other.state)


@pytest.mark.multidevice
def test_a_state_loads_onto_another_mesh(tmp_path):
    trained = learner_on(make_mesh(1, 4, 1))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained.state, {})
    single = learner_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]), seed=1)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=1)
    state, _ = checkpoints.load(1, single.state)
    checkpoints.close()
    assert bit_equal(state, trained.state)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {1}


def test_updates_that_donate_the_state_do_not_reach_into_a_save_in_progress(tmp_path):
    learner = learner_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    learner.update([batch_of()])
    checkpoints = Checkpoints(tmp_path, keep=3)
    saved = {}
    for step in (1, 2, 3):
        saved[step] = host(learner.state)
        checkpoints.save(step, learner.state, {})
        learner.update([batch_of(events_of(seed=step))])
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, state in saved.items():
        assert bit_equal(checkpoints.load(step, learner.state)[0], state)
    checkpoints.close()


def test_the_newest_are_kept_and_a_step_can_be_saved_again(tmp_path):
    like = {"x": jnp.zeros(3)}
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.latest is None
    for step in (1, 5, 9):
        checkpoints.save(step, {"x": jnp.full(3, float(step))}, {"step": step})
    checkpoints.close()
    kept = sorted(p.name for p in (tmp_path / "a" / "b").iterdir() if p.name.isdigit())
    assert kept == ["5", "9"]
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    assert checkpoints.latest == 9
    state, meta = checkpoints.load(5, like)
    np.testing.assert_array_equal(state["x"], np.full(3, 5.0))
    assert meta == {"step": 5}
    checkpoints.save(9, {"x": jnp.full(3, -1.0)}, {"step": -9})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=2)
    state, meta = checkpoints.load(9, like)
    assert float(state["x"][0]) == -1.0 and meta == {"step": -9}
    checkpoints.close()


def test_a_checkpoint_that_a_kill_cut_short_is_never_seen(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(5, {"x": jnp.ones(3)}, {})
    checkpoints.close()
    shutil.copytree(tmp_path / "5", tmp_path / "9.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest == 5
    checkpoints.save(9, {"x": jnp.zeros(3)}, {})
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5", "9"]


def test_json_files_appear_whole(tmp_path):
    path = tmp_path / "done.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["done.json"]
