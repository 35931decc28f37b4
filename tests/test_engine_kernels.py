"""The whole engine on the kernels of TPU and GPU, in the Pallas interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from models.attention.cache_gpu import gpu_cache_attention
from models.attention.cache_tpu import tpu_cache_attention
from srpo_jax.engine import engine as engine_module
from tests.engine_cases import bits, checkpoint, make_engine, new_request

# Head widths of 16 and pages of one tile; five requests of two prompts in four slots.
KERNELS = {"tpu": (tpu_cache_attention, 128), "gpu": (gpu_cache_attention, 16)}


@pytest.mark.parametrize("platform", KERNELS)
def test_an_engine_on_kernels_draws_the_same_tokens(platform, monkeypatch):
    attention, page = KERNELS[platform]
    parts = checkpoint("qwen3_tied")
    requests = [new_request(i % 2, 20, max_tokens=5, temperature=float(i > 0)) for i in range(5)]
    expected = make_engine(parts).run(requests)
    monkeypatch.setattr(engine_module, "cache_attention_on", lambda _: attention(interpret=True))
    engine = make_engine(parts, page=page)
    found = engine.run(requests)
    for done, one in zip(found, expected, strict=True):
        assert done.ids == one.ids
        np.testing.assert_allclose(done.logps, one.logps, atol=1e-5)
    assert [bits(done) for done in engine.run(requests[::-1])] == [bits(d) for d in found[::-1]]
