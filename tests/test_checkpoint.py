"""Checkpoints: the same bits back, on the mesh they came from, and which ones are kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.cli import exit_code
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.recipe.recipe import OptimizerConfig
from srpo_jax.run.checkpoint import CheckpointFailed, Checkpoints
from srpo_jax.run.files import write_json
from tests.learner_cases import batch_of, bit_equal, events_of, host, make_learner, tiny_model

OPTIMIZER = make_optimizer(
    OptimizerConfig(lr=1e-2, moment_dtype="bfloat16", schedule="cosine", warmup_steps=1), 10
)


def learner_on(mesh, seed=0, param_dtype=jnp.float32):
    return make_learner(tiny_model(seed, param_dtype), mesh=mesh, optimizer=OPTIMIZER)


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "param_dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16],
    ids=["float32", "bfloat16"],
)
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
    learner = make_learner()
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


def test_sixty_saves_leave_descriptors_and_threads_flat(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    used = []
    for step in range(1, 61):
        checkpoints.save(step, {"x": jnp.ones(3)}, {})
        if step % 10 == 0:
            checkpoints.wait()
            used.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    checkpoints.close()
    descriptors, threads = zip(*used, strict=True)
    assert max(descriptors) <= descriptors[0] + 3 and max(threads) <= threads[0] + 3


def test_a_save_that_failed_is_raised_by_the_next_call_in_one_line(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"x": jnp.ones(3)}, {})
    checkpoints.wait()

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("srpo_jax.run.checkpoint.write_json", full)
    checkpoints.save(2, {"x": jnp.ones(3)}, {})
    with pytest.raises(CheckpointFailed, match=r"/2: this checkpoint.*No space left") as caught:
        checkpoints.save(3, {"x": jnp.ones(3)}, {})
    assert "\n" not in str(caught.value) and exit_code(caught.value) == 1
    monkeypatch.undo()
    checkpoints.save(3, {"x": jnp.ones(3)}, {})
    checkpoints.close()


def test_what_the_system_says_is_found_in_the_messages_of_the_store(tmp_path):
    """Orbax raises a failed save again when it is closed; it was said once already."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints._checkpointer.close()

    class Full:
        def save_async(self, *args, **options):
            raise ValueError(
                'RESOURCE_EXHAUSTED: Failed writing: "a/long/path": Failed to write 69857 bytes to '
                "file 27: No space left on device [os_error_code='28']"
            )

        close = save_async

    checkpoints._checkpointer = Full()
    with pytest.raises(CheckpointFailed) as caught:
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
    assert str(caught.value) == (
        f"{tmp_path}/1: this checkpoint could not be saved: No space left on device; "
        "the ones before it are there"
    )
    checkpoints.close()


def test_a_disk_without_room_for_the_state_is_said_before_anything_is_written(
    tmp_path, monkeypatch
):
    checkpoints = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1999))
    with pytest.raises(CheckpointFailed, match=r"/1: this checkpoint.*: No space left on device"):
        checkpoints.save(1, {"x": jnp.ones(1000)}, {})  # 4,000 bytes
    assert not list(tmp_path.iterdir())
    checkpoints.close()


def saved(folder, *steps):
    checkpoints = Checkpoints(folder, keep=3)
    for step in steps:
        checkpoints.save(step, {"x": jnp.arange(100.0) * step}, {"step": step})
    checkpoints.close()


def array_file(folder, step):
    return max((folder / str(step) / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, said",
    [
        (flip_a_bit, "its checksum is not the one that was written with it"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its checksum is not"),
        (lambda path: path.unlink(), "this file is missing"),
    ],
    ids=["flipped bit", "cut short", "removed"],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, said):
    like = {"x": jnp.zeros(100)}
    saved(tmp_path, 3, 5, 9)
    damage(array_file(tmp_path, 9))
    told = []
    checkpoints = Checkpoints(tmp_path, keep=1)
    step, state, meta = checkpoints.load_newest(like, told.append)
    assert (step, meta) == (5, {"step": 5})
    np.testing.assert_array_equal(state["x"], np.arange(100.0) * 5)
    (text,) = told
    assert f"{tmp_path}/9/state/d/" in text and said in text and "\n" not in text
    # The damaged one is out of the way: it does not count among those that are kept.
    checkpoints.save(6, state, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, keep=1).latest == 6
    assert (tmp_path / "9.damaged").is_dir()


def test_a_checkpoint_without_checksums_is_used_if_it_loads(tmp_path):
    like = {"x": jnp.zeros(100)}
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / str(step) / "checksums.json").unlink()
    shutil.rmtree(tmp_path / "2" / "state" / "d")
    told = []
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load_newest(like, told.append)[0] == 1
    assert len(told) == 1 and f"{tmp_path}/2: cannot be read" in told[0]
    checkpoints.close()


def test_no_good_checkpoint_left_is_an_error_and_none_at_all_is_not(tmp_path):
    like = {"x": jnp.zeros(100)}
    # In a folder of its own: what Orbax does when it opens one goes on beside what follows, and
    # would take another's save for one that was cut short.
    empty = Checkpoints(tmp_path / "empty" / "checkpoints", keep=2)
    assert not empty.used
    empty.close()
    run = tmp_path / "run"
    saved(run / "checkpoints", 1)
    flip_a_bit(array_file(run / "checkpoints", 1))
    for _ in range(2):  # it does not start over by itself the next time either
        damaged = Checkpoints(run / "checkpoints", keep=2)
        assert damaged.used
        with pytest.raises(CheckpointFailed, match=rf"1\.damaged.*remove {run} to start over"):
            damaged.load_newest(like, lambda text: None)
