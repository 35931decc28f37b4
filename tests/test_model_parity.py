"""Our decoder's logits against those of transformers: stored ones, and live ones where torch is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.convert import load_hf
from tests.make_golden import CASES, GOLDEN, example_batch, random_model, reference_logits

TOLERANCE = 1e-4


def our_logits(model, tokens, positions, mask) -> np.ndarray:
    inputs = (jnp.asarray(array, jnp.int32) for array in (tokens, positions, mask))
    return np.asarray(_logits(model, *inputs))


@jax.jit
def _logits(model, tokens, positions, segment_ids):
    return model.logits(model(tokens, positions, segment_ids))


@pytest.fixture(params=CASES, scope="module")
def golden(request):
    folder = GOLDEN / request.param
    expected = np.load(folder / "expected.npz")
    model, _ = load_hf(folder, dtype=jnp.float32)
    return model, *(expected[key] for key in ("tokens", "positions", "mask", "logits"))


def test_stored_logits(golden):
    model, tokens, positions, mask, logits = golden
    assert mask[0, 0] == 0 and positions.max() > 300 and len(tokens) == 2
    ours = our_logits(model, tokens, positions, mask)
    assert ours.dtype == np.float32 and ours.shape == logits.shape
    np.testing.assert_allclose(ours[mask], logits[mask], rtol=0, atol=TOLERANCE)


def test_the_comparison_can_fail(golden):
    """Other positions, or a row that sees its padding, give other logits."""
    model, tokens, positions, mask, logits = golden
    contiguous = np.cumsum(mask, axis=1)
    moved = our_logits(model, tokens, contiguous, mask)
    assert np.abs(moved[mask] - logits[mask]).max() > 0.1
    unmasked = our_logits(model, tokens, positions, np.ones_like(mask))
    assert np.abs(unmasked[mask] - logits[mask]).max() > 0.1


def test_rows_equal_their_unpadded_runs(golden):
    model, tokens, positions, mask, _ = golden
    together = our_logits(model, tokens, positions, mask)
    for row, keep in enumerate(mask):
        inputs = [array[row : row + 1, keep] for array in (tokens, positions, mask)]
        alone = our_logits(model, *inputs)
        np.testing.assert_allclose(alone[0], together[row, keep], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_live_transformers(name, tmp_path):
    pytest.importorskip("torch")
    family, options = CASES[name]
    reference = random_model(family, options, seed=100)
    reference.save_pretrained(tmp_path / "source")
    model, _ = load_hf(tmp_path / "source", dtype=jnp.float32)
    tokens, positions, mask = example_batch(seed=100, length=21)
    expected = reference_logits(reference, tokens, positions, mask)
    ours = our_logits(model, tokens, positions, mask)
    np.testing.assert_allclose(ours[mask], expected[mask], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_we_write(name, tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from models.convert import save_hf

    model, _ = load_hf(GOLDEN / name, dtype=jnp.float32)
    save_hf(model, tmp_path / "ours")
    reference, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = np.load(GOLDEN / name / "expected.npz")
    tokens, positions, mask = (expected[key] for key in ("tokens", "positions", "mask"))
    logits = reference_logits(reference, tokens, positions, mask)
    np.testing.assert_allclose(logits[mask], expected["logits"][mask], rtol=0, atol=TOLERANCE)
