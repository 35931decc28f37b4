"""Chunked log-probs against a plain log_softmax: values, gradients, and what is never made."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from srpo_jax.learner import logprob
from srpo_jax.learner.logprob import (
    Vocabulary,
    chunk_tokens,
    token_gradients,
    token_scores,
)
from srpo_jax.learner.sharding import make_mesh

B, T, D, V, REAL = 8, 6, 5, 37, 31  # V divides by neither 2 nor 4
MESHES = [(1, 1, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4)]

NONE = np.zeros((B, T), bool)
ALL = np.ones((B, T), bool)
RAGGED = NONE.copy()  # the first half of the batch has no masked token, the rest 3, 5, 1 and 2
RAGGED[4, 2:5] = RAGGED[5, 1:] = RAGGED[6, 5] = RAGGED[7, [1, 4]] = True
FIRST = RAGGED.copy()
FIRST[:, 0] = True


def case(dtype=np.float32, seed=0):
    """Hidden states [B, T, D], tokens [B, T], the head [V, D], and weights [2, B, T]."""
    rng = np.random.default_rng(seed)
    hidden, head, weights = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, T, D), (V, D), (2, B, T))
    )
    return hidden, jnp.asarray(rng.integers(0, REAL, (B, T)), jnp.int32), head, weights


def scores_of(*args):
    *arrays, vocab_axis, how = args
    return jax.jit(lambda *a: token_scores(*a, vocab_axis, how))(*arrays)


def gradients_of(*args):
    *arrays, vocab_axis, how = args
    return jax.jit(lambda *a: token_gradients(*a, vocab_axis, how))(*arrays)


def laid_out(head, vocab_axis):
    return head if vocab_axis == 0 else head.T


@jax.jit
def plain(hidden, tokens, mask, head, temperature):
    """All logits at once, over the real vocabulary only: [2, B, T] log-probs and entropies."""
    logps = jax.nn.log_softmax(hidden[:, :-1] @ head[:REAL].T / temperature)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    scores = jnp.pad(jnp.stack([chosen, entropy]), ((0, 0), (0, 0), (1, 0)))
    return jnp.where(mask, scores, 0)


@jax.jit
def plain_gradients(hidden, tokens, mask, weights, head, temperature):
    def total(hidden, head):
        return (jnp.stack(weights) * plain(hidden, tokens, mask, head, temperature)).sum()

    return jax.grad(total, (0, 1))(hidden, head)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def check(hidden, tokens, mask, weights, head, vocab_axis, how):
    """Both functions against the plain ones, in float64."""
    args = (hidden, tokens, jnp.asarray(mask))
    kernel = laid_out(head, vocab_axis)
    scores = scores_of(*args, kernel, vocab_axis, how)
    again, d_hidden, d_head = gradients_of(*args, *weights, kernel, vocab_axis, how)
    jax.block_until_ready((scores, again, d_hidden, d_head))
    # The plain functions are computed on one device.
    args, weights, head = jax.tree.map(
        lambda x: jnp.asarray(jax.device_get(x)), (args, weights, head)
    )
    want = plain(*args, head, how.temperature)
    for got in (scores, again):
        close(np.stack(got), want)
    grads = plain_gradients(*args, weights, head, how.temperature)
    close(d_hidden, grads[0])
    close(d_head, laid_out(grads[1], vocab_axis))
    assert {x.dtype for x in (*scores, *again, d_hidden, d_head)} == {np.dtype(np.float64)}


# 11 masked tokens: one at a time, chunks that do not divide them, and more than all of them. The
# head's gradient comes in five blocks of 8 ids, the last of which overlaps the fourth.
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 8, 24, 1000])
def test_values_and_gradients_are_the_plain_ones(chunk, vocab_axis, monkeypatch):
    monkeypatch.setattr(logprob, "CPU_BLOCK_BYTES", 4 * D * 8)
    with jax.enable_x64(True):
        hidden, tokens, head, weights = case(np.float64)
        how = Vocabulary(REAL, 0.7, chunk, with_entropy=True)
        check(hidden, tokens, RAGGED, weights, head, vocab_axis, how)


@pytest.mark.parametrize("mask", [NONE, ALL, FIRST], ids=["none", "all", "first"])
@pytest.mark.parametrize("chunk", [7, 40])  # all: 40 tokens, for the first of a row is not scored
def test_any_mask_will_do_and_first_tokens_score_zero(chunk, mask):
    with jax.enable_x64(True):
        hidden, tokens, head, weights = case(np.float64)
        how = Vocabulary(REAL, 1.3, chunk, with_entropy=True)
        check(hidden, tokens, mask, weights, head, 0, how)
        scores = scores_of(hidden, tokens, jnp.asarray(mask), head, 0, how)
        assert not np.asarray(scores)[:, :, 0].any()


@pytest.mark.parametrize(("chunk", "vocab_axis"), [(3, 0), (1000, 1)])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_changes_nothing(shape, chunk, vocab_axis):
    mesh = make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.enable_x64(True):
        hidden, tokens, head, weights = case(np.float64)
        hidden, tokens, mask = jax.device_put((hidden, tokens, RAGGED), rows)
        weights = tuple(jax.device_put(w, rows) for w in weights)
        how = Vocabulary(REAL, 0.7, chunk, with_entropy=True, mesh=mesh)
        check(hidden, tokens, mask, weights, jax.device_put(head, whole), vocab_axis, how)


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_the_vocabularys_tail_has_no_weight_and_no_gradient(vocab_axis):
    hidden, tokens, head, weights = case()
    how = Vocabulary(REAL, with_entropy=True)

    def of(head):
        return gradients_of(
            hidden, tokens, jnp.asarray(RAGGED), *weights, laid_out(head, vocab_axis), vocab_axis,
            how,
        )  # fmt: skip

    usual = of(head)
    huge = of(head.at[REAL:].set(1e4))
    jax.tree.map(np.testing.assert_array_equal, huge, usual)
    d_head = np.asarray(laid_out(usual[2], vocab_axis))
    assert not d_head[REAL:].any() and d_head[:REAL].all()


def test_entropies_are_zero_and_weigh_nothing_unless_asked_for():
    hidden, tokens, head, (w_logp, w_entropy) = case()
    args = (hidden, tokens, jnp.asarray(RAGGED))
    got, *grads = gradients_of(*args, w_logp, w_entropy, head, 0, Vocabulary(REAL))
    assert not np.asarray(got.entropy).any() and (np.asarray(got.logp)[RAGGED] < 0).all()
    logps_alone = plain_gradients(*args, (w_logp, 0 * w_entropy), head, 1.0)
    for x, want in zip(grads, logps_alone, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


def test_ids_whose_probability_is_zero_add_nothing_to_entropies():
    """Logits a, 0, -1e4 and -inf: the first two share everything, p = e^a / (1 + e^a)."""
    a = 0.5
    head = jnp.array([[0, a], [0, 0], [0, -1e4], [-1e20, 0]], jnp.float32)
    hidden = jnp.broadcast_to(jnp.array([1e20, 1], jnp.float32), (1, 2, 2))
    one = jnp.ones((1, 2), jnp.float32)
    scores, d_hidden, d_head = gradients_of(
        hidden, jnp.zeros((1, 2), jnp.int32), one > 0, 0 * one, one, head, 0,
        Vocabulary(4, with_entropy=True),
    )  # fmt: skip
    p = np.exp(a) / (1 + np.exp(a))
    slope = -a * p * (1 - p)  # of the entropy, by a
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose(scores.entropy, [[0, entropy]], rtol=1e-5)
    np.testing.assert_allclose(d_hidden, [[[0, a * slope], [0, 0]]], rtol=1e-5)
    by_logit = np.array([slope, -slope, 0, 0])
    np.testing.assert_allclose(d_head[:, 1], by_logit, rtol=1e-5)
    np.testing.assert_allclose(d_head[:, 0], 1e20 * by_logit, rtol=1e-5)


def test_bfloat16_hidden_states_are_scored_in_float32():
    hidden, tokens, head, weights = case()
    args = (hidden.astype(jnp.bfloat16), tokens, jnp.asarray(RAGGED))
    how = Vocabulary(REAL, with_entropy=True)
    scores, d_hidden, d_head = gradients_of(*args, *weights, head, 0, how)
    assert {x.dtype for x in scores} == {np.dtype(np.float32)}
    assert d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (hidden, head)]
    want = plain(rounded[0], *args[1:], rounded[1], 1.0)
    np.testing.assert_allclose(np.stack(scores), want, atol=1e-5)
    grads = plain_gradients(rounded[0], *args[1:], weights, rounded[1], 1.0)
    for got, expected in zip((d_hidden, d_head), grads, strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.01 * largest)


@pytest.mark.parametrize("shape", [None, (1, 4, 1)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_states_that_score_nothing_are_not_seen(bad, shape):
    hidden, tokens, head, weights = case()
    scoring = np.roll(RAGGED, -1, axis=1)  # the state before a masked token
    how = Vocabulary(REAL, chunk=8, with_entropy=True, mesh=shape and make_mesh(*shape))

    def of(hidden):
        return jax.block_until_ready(
            gradients_of(hidden, tokens, jnp.asarray(RAGGED), *weights, head, 0, how)
        )

    usual = of(hidden)
    jax.tree.map(
        np.testing.assert_array_equal, of(jnp.where(scoring[..., None], hidden, bad)), usual
    )
    d_hidden = np.asarray(usual[1])
    assert d_hidden[scoring].all() and not d_hidden[~scoring].any()


@pytest.mark.parametrize(
    ("vocab", "platform", "tokens"),
    # 32 MiB are 2^23 logits, 512 MiB 2^27
    [(64, "cpu", 1024), (32768, "cpu", 256), (151936, "cpu", 128), (151936, "gpu", 512)],
)
def test_chunks_fit_their_budget(vocab, platform, tokens):
    assert chunk_tokens(vocab, platform) == tokens


def compiled_gradients(vocab, width, tokens, vocab_axis, dtype=jnp.float32):
    """``token_gradients`` of a micro-batch of eight sequences, from shapes alone."""
    rows = (8, tokens // 8)
    shape = (vocab, width) if vocab_axis == 0 else (width, vocab)
    floats, ids, mask = (
        jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.float32, jnp.int32, bool)
    )
    how = Vocabulary(vocab - 267, with_entropy=True)
    return (
        jax.jit(lambda *args: token_gradients(*args, vocab_axis, how))
        .lower(
            jax.ShapeDtypeStruct((*rows, width), dtype), ids, mask, floats, floats,
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )
        .compile()
    )  # fmt: skip


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("width", [64, 512, 1024])
def test_a_large_vocabulary_takes_little_beyond_the_head_and_its_gradient(width, vocab_axis):
    vocab, tokens = 151_936, 8_192
    program = compiled_gradients(vocab, width, tokens, vocab_axis)
    memory = program.memory_analysis()
    head = vocab * width * 4
    logits = chunk_tokens(vocab, "cpu") * vocab * 4
    extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - head
    assert logits < extra < 0.3 * 2**30
    sizes = [
        np.prod([int(n) for n in shape.split(",")], dtype=np.int64)
        for shape in re.findall(r"\[([\d,]+)\]", program.as_text())
        if str(vocab) in shape.split(",")
    ]
    assert max(sizes) == max(head, logits) // 4  # a chunk of logits, never [tokens, vocab]
