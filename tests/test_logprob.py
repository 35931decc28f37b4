"""Chunked log-probs against a plain log_softmax: values, gradients, and what is never made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from srpo_jax.logprob import scaled_logits, token_logps

B, T, D, V, REAL = 3, 9, 5, 37, 31


def case(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(dtype)
    kernel = rng.normal(size=(D, V)).astype(dtype)
    return hidden, rng.integers(0, REAL, (B, T)).astype(np.int32), kernel


def plain(hidden, tokens, kernel, temperature, vocab_size):
    """All logits at once, over the real vocabulary only; float64 where the inputs are."""
    logits = (hidden[:, :-1] @ kernel[:, :vocab_size]) / temperature
    logps = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


# 24 scored tokens: chunks that divide them, that do not, one token, and more than all of them.
@pytest.mark.parametrize("chunk", [1, 7, 8, 24, 1000])
def test_values_and_gradients_are_the_plain_ones_whatever_the_chunk(chunk):
    with jax.enable_x64(True):
        hidden, tokens, kernel = case(np.float64)
        w = np.random.default_rng(1).normal(size=(2, B, T))

        def chunked(hidden, kernel):
            return token_logps(
                hidden, tokens, kernel, temperature=0.7, vocab_size=REAL, chunk=chunk,
                with_entropy=True,
            )  # fmt: skip

        def total(scores):
            return lambda *args: sum(jnp.sum(c * x) for c, x in zip(w, scores(*args), strict=True))

        def expected(hidden, kernel):
            return plain(hidden, tokens, kernel, 0.7, REAL)

        np.testing.assert_allclose(chunked(hidden, kernel), expected(hidden, kernel), rtol=1e-12)
        for got, want in zip(
            jax.grad(total(chunked), (0, 1))(hidden, kernel),
            jax.grad(total(expected), (0, 1))(hidden, kernel),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
            assert got.dtype == np.float64


def test_the_vocabularys_tail_has_no_weight_and_no_gradient():
    hidden, tokens, kernel = case()

    def logps(kernel):
        return token_logps(hidden, tokens, kernel, temperature=1.0, vocab_size=REAL)[0]

    huge = kernel.copy()
    huge[:, REAL:] = 1e4
    np.testing.assert_array_equal(logps(huge), logps(kernel))
    grad = jax.grad(lambda k: logps(k).sum())(kernel)
    assert not np.asarray(grad[:, REAL:]).any() and np.asarray(grad[:, :REAL]).all()


def test_the_first_token_scores_zero_and_entropy_is_zero_unless_asked_for():
    logp, entropy = token_logps(*case(), temperature=1.0, vocab_size=V)
    assert not np.asarray(logp[:, 0]).any() and np.asarray(logp[:, 1:] < 0).all()
    assert not np.asarray(entropy).any()


def test_bfloat16_hidden_states_are_scored_in_float32():
    hidden, tokens, kernel = case()
    low = jnp.asarray(hidden, jnp.bfloat16)
    logp, _ = token_logps(low, tokens, kernel, temperature=1.0, vocab_size=V)
    assert logp.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(kernel, jnp.bfloat16), np.float32)
    want, _ = plain(np.asarray(low, np.float32), tokens, rounded, 1.0, V)
    np.testing.assert_allclose(logp, want, atol=1e-5)


def test_a_temperature_for_each_row_scales_that_row():
    hidden, _, kernel = case()
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)
    got = scaled_logits(hidden[:, 0], kernel, temperature=temperatures, vocab_size=V)
    np.testing.assert_allclose(got, (hidden[:, 0] @ kernel) / temperatures[:, None], rtol=1e-5)


def shapes_in(jaxpr):
    """Every shape that a jaxpr makes, inside its loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_more_than_a_chunk_of_logits_exists_forward_or_backward(with_entropy):
    hidden, tokens, kernel = case()

    def largest(chunk):
        def total(hidden, kernel):
            scores = token_logps(
                hidden, tokens, kernel, temperature=1.0, vocab_size=REAL, chunk=chunk,
                with_entropy=with_entropy,
            )  # fmt: skip
            return sum(x.sum() for x in scores)

        jaxpr = jax.make_jaxpr(jax.value_and_grad(total, (0, 1)))(hidden, kernel).jaxpr
        return max(int(np.prod(shape)) for shape in shapes_in(jaxpr) if V in shape)

    assert D < 8  # the head's own gradient [D, V] stays below a chunk of logits
    assert largest(8) == 8 * V
    assert largest(24) == 24 * V
