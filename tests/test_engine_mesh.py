"""The engine on meshes of replicas and tensor-parallel devices against one device."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from models.convert import load_hf
from models.qwen import split_params
from models.tiny import tiny_config
from srpo_jax.engine.layout import check_tensor, engine_mesh, key_head_copies
from srpo_jax.learner.sharding import AXES
from tests.engine_cases import bits, checkpoint, make_engine, new_request
from tests.make_golden import GOLDEN

# Replicas, tensor.
MESHES = [(4, 1), pytest.param(1, 2, marks=pytest.mark.slow), (2, 2), (1, 4)]
MODELS = ["qwen3_tied", "qwen2_untied"]


def on_mesh(parts, replicas, tensor, **options):
    devices = jax.devices()[: replicas * tensor]
    mesh = engine_mesh(devices, replicas=replicas, tensor=tensor)
    return make_engine(parts, mesh=mesh, **options)


def mixed_requests():
    """Shared prompts, greedy and truncated sampling among them, more than there are slots for."""
    settings = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}]
    lengths = [5, 20, 33, 64, 20, 48]
    return [
        new_request(i % 5, lengths[i % 6], 9 + i % 8, top_logps=3, **settings[i % 4])
        for i in range(26)
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    parts = checkpoint(request.param)
    return parts, make_engine(parts).run(mixed_requests())


@pytest.mark.parametrize("replicas, tensor", MESHES)
def test_results_are_those_of_one_device(model, replicas, tensor):
    parts, expected = model
    engine = on_mesh(parts, replicas, tensor)
    for done, one in zip(engine.run(mixed_requests()), expected, strict=True):
        if tensor == 1:
            assert bits(done) == bits(one)
        assert (done.ids, done.stop_reason) == (one.ids, one.stop_reason)
        np.testing.assert_allclose(done.logps, one.logps, atol=1e-5)
        np.testing.assert_array_equal(done.top_ids, one.top_ids)
        np.testing.assert_allclose(done.top_logps, one.top_logps, atol=1e-5)


def test_bits_on_a_mesh_do_not_depend_on_order_or_company():
    engine = on_mesh(checkpoint("qwen3_tied"), 2, 2)
    requests = mixed_requests()
    expected = engine.run(requests)
    compiled = engine.compile_count()
    for order in (range(25, -1, -1), [7], [3, 21, 4]):
        for i, done in zip(order, engine.run([requests[i] for i in order]), strict=True):
            assert bits(done) == bits(expected[i])
    assert engine.compile_count() == compiled


def test_weights_come_from_the_learners_mesh_and_are_split():
    parts = checkpoint("qwen3_tied")
    expected = make_engine(parts).run(mixed_requests()[:6])
    grid = np.array(jax.devices()[:4]).reshape(1, 2, 2)
    model, _ = load_hf(
        GOLDEN / "qwen3_tied", mesh=Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
    )
    _, params = split_params(model)
    engine = on_mesh(parts, 2, 2)
    engine.set_weights(params, 1)
    for done, one in zip(engine.run(mixed_requests()[:6]), expected, strict=True):
        assert done.ids == one.ids and done.version == 1
    layer = engine._weights.layers[0]
    for module, axis in ((layer.q_proj, 1), (layer.o_proj, 0)):
        kernel = module.kernel[...]
        assert kernel.addressable_shards[0].data.shape[axis] * 2 == kernel.shape[axis]


class TestPlacement:
    def test_requests_spread_over_idle_replicas(self):
        engine = on_mesh(checkpoint("qwen3_tied"), 4, 1)
        for i in range(4):
            engine.submit(new_request(i, 30, max_tokens=40))
        engine.step()
        assert [len(r.running) for r in engine._replicas] == [1, 1, 1, 1]
        for uid in range(4):
            engine.cancel(uid)
        assert engine.idle

    def test_a_prompt_stays_where_it_is_stored(self):
        engine = on_mesh(checkpoint("qwen3_tied"), 2, 1, slots=8)
        requests = [new_request(i % 2, 40, max_tokens=8) for i in range(8)]
        engine.run(requests)
        assert engine.stats["prefill_tokens"] == 2 * 39  # each prompt once, on one replica

    def test_a_popular_prompt_is_computed_again_where_slots_are_free(self):
        engine = on_mesh(checkpoint("qwen3_tied"), 2, 1, slots=8)
        engine.run([new_request(0, 40, max_tokens=8) for _ in range(16)])
        assert engine.stats["prefill_tokens"] == 2 * 39
        assert engine.stats["decode_steps"] < 16  # one round: both replicas were full

    def test_waiting_requests_all_end(self):
        engine = on_mesh(checkpoint("qwen3_tied"), 2, 2, budget_tokens=7 * 16)
        done = engine.run([new_request(i, 40, max_tokens=6) for i in range(60)])
        assert [len(d.ids) for d in done] == [6] * 60
        assert all(r.store.available == 7 for r in engine._replicas)


class TestErrors:
    def test_sizes_that_do_not_make_the_devices(self):
        with pytest.raises(ValueError, match="replicas 3 x tensor 1 does not make 4 devices"):
            engine_mesh(jax.devices()[:4], replicas=3)
        with pytest.raises(ValueError, match="where tensor is one of 1, 2, 4"):
            engine_mesh(jax.devices()[:4], replicas=-1, tensor=3)

    def test_heads_that_do_not_divide(self):
        config = tiny_config(vocab_size=64)
        with pytest.raises(ValueError, match=r"tensor 3 does not divide .* the nearest that does"):
            check_tensor(config, 3)


@pytest.mark.parametrize(
    "heads, kv_heads, tensor, copies",
    [(32, 8, 4, 1), (32, 8, 16, 2), (16, 2, 8, 4), (28, 4, 4, 1), (12, 6, 4, 2), (14, 2, 7, 7)],
)
def test_key_heads_are_copied_as_little_as_may_be(heads, kv_heads, tensor, copies):
    config = replace(tiny_config(vocab_size=64), num_heads=heads, num_kv_heads=kv_heads)
    assert key_head_copies(config, tensor) == copies
    stored = kv_heads * copies
    assert stored % tensor == 0
    own = heads // tensor
    for device in range(tensor):  # its query heads find their key heads among its own
        mine = set(range(device * stored // tensor, (device + 1) * stored // tensor))
        assert {n // (heads // stored) for n in range(device * own, (device + 1) * own)} <= mine
