"""Draws: the inverse CDF, truncation, the scored distribution and the keys of the draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from srpo_jax.engine import sampling
from srpo_jax.engine.sampling import (
    BLOCK,
    row_uniforms,
    token_logits,
)
from srpo_jax.learner.logprob import Vocabulary, token_scores

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
inverse_cdf = jax.jit(sampling.inverse_cdf)
draw = jax.jit(sampling.draw)
least_kept = jax.jit(sampling.least_kept)


def ids_of(probs, uniforms):
    """The ids that one distribution gives for many uniforms."""
    probs = np.pad(np.asarray(probs, np.float32), (0, -len(probs) % BLOCK)).reshape(-1, BLOCK, 1)
    columns = jnp.broadcast_to(probs, (*probs.shape[:2], len(uniforms)))
    return np.asarray(inverse_cdf(columns, columns.sum(1), jnp.asarray(uniforms, jnp.float32)))


def sample(logits, uniform, *, greedy=False, top_p=1.0, top_k=0):
    logits = jnp.asarray(logits, jnp.float32)[:, None]
    token, logp, _ = draw(
        logits, jnp.array([uniform]), jnp.array([greedy]), jnp.array([top_p]), jnp.array([top_k])
    )
    return int(token[0]), float(logp[0])


@pytest.mark.parametrize("vocab", [5, 128, 300])
def test_evenly_spaced_uniforms_give_every_id_its_share(vocab):
    """n uniforms at (i + 0.5) / n hit an interval of length p n p times, give or take one."""
    probs = np.random.default_rng(vocab).gamma(0.3, size=vocab)
    probs[::7] = 0
    n = 20_000
    counts = np.bincount(ids_of(probs, (np.arange(n) + 0.5) / n), minlength=vocab)
    expected = n * probs / probs.sum()
    assert np.abs(counts - expected).max() < 1.1
    assert counts[probs == 0].sum() == 0


def test_random_uniforms_pass_a_chi_square_test():
    probs = np.random.default_rng(0).dirichlet(np.ones(200))
    n = 50_000
    uniforms = row_uniforms(jnp.broadcast_to(jnp.array([7, 9], jnp.uint32), (n, 2)), jnp.arange(n))
    counts = np.bincount(ids_of(probs, uniforms), minlength=200)
    chi_square = np.sum((counts - n * probs) ** 2 / (n * probs))
    assert chi_square < 199 + 5 * np.sqrt(2 * 199)  # five standard deviations


@pytest.mark.parametrize("vocab", [1, 127, 129, 260])
def test_the_ends_of_the_unit_interval(vocab):
    """u = 0 gives the first id of positive probability, u just below 1 the last one."""
    probs = np.random.default_rng(vocab).uniform(0.1, 1, vocab)
    assert ids_of(probs, [0.0, BELOW_ONE]).tolist() == [0, vocab - 1]
    probs[: vocab // 2] = 0
    probs[vocab // 2 + 1 :] = 0
    assert ids_of(probs, [0.0, 0.5, BELOW_ONE]).tolist() == [vocab // 2] * 3


def test_uniforms_that_hit_a_border():
    """A border belongs to the next id: intervals are closed below and open above."""
    assert ids_of([0.25, 0.0, 0.25, 0.5], [0.0, 0.25, 0.5, 0.75]).tolist() == [0, 2, 3, 3]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([40, 300]))
def test_never_an_id_of_zero_probability(seed, vocab):
    """Also not where the uniform falls on a border and the sums round either way."""
    rng = np.random.default_rng(seed)
    probs = rng.gamma(0.2, size=vocab).astype(np.float32)
    probs[rng.random(vocab) < 0.6] = 0
    probs[128:256] *= rng.random() < 0.5
    probs[rng.integers(vocab)] = 1
    borders = np.cumsum(probs) / probs.sum()
    steps = np.arange(-4, 5)[:, None] * np.float32(2**-24)
    near = np.clip((borders + steps).ravel(), 0, BELOW_ONE).astype(np.float32)
    assert probs[ids_of(probs, near)].min() > 0


S16 = [
    ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
    ([0.5, 0.3, 0.15, 0.05], 0.85, [0, 1, 2]),
    ([0.4, 0.3, 0.2, 0.1], 0.75, [0, 1, 2]),
    ([0.9, 0.1], 0.5, [0]),
    ([0.25, 0.25, 0.25, 0.25], 1.0, [0, 1, 2, 3]),
    ([0.05, 0.15, 0.3, 0.5], 0.6, [2, 3]),
]


def by_sorting(probs, top_p=1.0, top_k=0):
    """The plain reference: (whether each id of one distribution stays, the mass before it), in
    float64. A token stays while the mass strictly before it, in falling order, is below top_p and
    fewer than top_k tokens are; at least one stays. Ties go to the lower id."""
    probs = np.asarray(probs, np.float64) / np.sum(probs, dtype=np.float64)
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    stays = (before < top_p) | (top_p >= 1)
    stays &= (np.arange(len(probs)) < top_k) | (top_k <= 0)
    stays[0] = True
    found, mass = np.zeros(len(probs), bool), np.zeros(len(probs))
    found[order], mass[order] = stays, before
    return found, mass


def kept_rows(logits_BV, top_p, top_k):
    """Which ids of each row are drawn from, and their weights."""
    logits = np.asarray(logits_BV, np.float32)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % BLOCK)))
    blocks = jnp.asarray(padded.T.reshape(-1, BLOCK, len(logits)))
    total = blocks.sum(1).sum(0)
    least = least_kept(blocks, total, jnp.asarray(top_p, jnp.float32), jnp.asarray(top_k))
    return weights >= np.asarray(least)[:, None], weights


def kept(probs, top_p=1.0, top_k=0):
    with np.errstate(divide="ignore"):
        return np.flatnonzero(kept_rows([np.log(probs)], [top_p], [top_k])[0][0]).tolist()


@pytest.mark.parametrize("probs, top_p, expected", S16)
def test_top_p_keeps_the_token_that_crosses(probs, top_p, expected):
    assert kept(probs, top_p) == expected


def test_truncation_of_rows_is_their_own():
    logits = np.log([S16[0][0], S16[5][0], S16[4][0]])
    rows, _ = kept_rows(logits, [0.6, 0.6, 1.0], [0, 1, 0])
    assert [np.flatnonzero(row).tolist() for row in rows] == [[0, 1], [3], [0, 1, 2, 3]]


def test_top_k():
    assert kept([0.1, 0.4, 0.3, 0.2], top_k=2) == [1, 2]
    assert kept([0.1, 0.4, 0.3, 0.2], top_k=9) == [0, 1, 2, 3]
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=0.8, top_k=2) == [1, 2]
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=0.3, top_k=2) == [1]


def test_what_equals_the_last_token_that_stays_stays_too():
    assert kept([0.2, 0.3, 0.3, 0.2], top_k=1) == [1, 2]
    assert kept([0.2, 0.3, 0.3, 0.2], top_k=3) == [0, 1, 2, 3]
    assert kept([0.2, 0.3, 0.3, 0.2], top_p=0.5) == [1, 2]
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.1) == [0, 1, 2, 3]


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-6, 0.3])
def test_one_token_stays_at_any_top_p(top_p):
    assert kept([0.2, 0.5, 0.3], top_p=top_p) == [1]


def test_top_p_one_keeps_everything_of_a_large_vocabulary():
    probs = np.random.default_rng(1).dirichlet(np.full(5000, 0.05)).astype(np.float32)
    assert len(kept(probs)) == len(probs)


def check_kept(logits_BV, top_p, top_k):
    """Bisection keeps what sorting keeps, but for ties of the last one and tokens before which the
    mass is within 1e-6 of top_p."""
    rows, weights = kept_rows(logits_BV, top_p, top_k)
    for row, probs, p, k in zip(rows, weights, top_p, top_k, strict=True):
        expected, before = by_sorting(probs, float(np.float32(p)), k)
        last = probs[expected].min()
        differs = (row != expected) & (probs != last) & (np.abs(before - p) > 1e-6)
        assert not differs.any()
        assert row[probs.argmax()] and (row | ~expected | (np.abs(before - p) <= 1e-6)).all()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0]),
    st.sampled_from([None, 0.5]),
)
def test_bisection_keeps_what_sorting_keeps(seed, scale, grid):
    """Flat and peaked rows with cuts of their own, ties where the logits lie on a grid."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(4, 700))
    if grid is not None:
        logits = np.round(logits / grid) * grid
    top_p = rng.choice([1.0, 0.999, 0.95, 0.7, 0.2, 1e-4, float(rng.random())], 4)
    check_kept(logits, top_p, rng.choice([0, 0, 1, 5, 64, 699, 2000], 4))


@pytest.mark.parametrize("temperature", [0.2, 1.0, 10.0])
def test_bisection_of_a_large_vocabulary(temperature):
    """The sums of 151,936 weights are exact to the stated boundary, on flat rows too."""
    logits = 3 * np.random.default_rng(4).normal(size=(3, 151_936)) / temperature
    check_kept(logits, [0.95, 0.5, 0.999], [0, 0, 50])


def test_a_cut_draw_is_that_of_the_sorted_distribution():
    """Tokens by inverting the sums of what sorting keeps, log-probs of the whole distribution,
    in one batch with a greedy row and rows that cut nothing."""
    rng = np.random.default_rng(7)
    logits = np.asarray(2 * rng.normal(size=(6, 500)), np.float32)
    top_p = np.array([0.9, 0.3, 1.0, 0.6, 1.0, 0.5], np.float32)
    top_k = np.array([0, 0, 4, 20, 0, 0])
    greedy = np.array([False] * 5 + [True])
    for uniforms in rng.random((20, 6), np.float32):
        tokens, logps, _ = draw(
            jnp.asarray(logits.T), jnp.asarray(uniforms), jnp.asarray(greedy), jnp.asarray(top_p),
            jnp.asarray(top_k),
        )  # fmt: skip
        for row, token in enumerate(np.asarray(tokens)):
            probs = np.exp(logits[row].astype(np.float64))
            probs /= probs.sum()
            stays, _ = by_sorting(probs, float(top_p[row]), top_k[row])
            ends = np.cumsum(np.where(stays, probs, 0))
            low, high = (ends - np.where(stays, probs, 0))[token], ends[token]
            if greedy[row]:
                assert token == probs.argmax()
            else:
                assert stays[token]
                assert low - 1e-6 <= uniforms[row] * ends[-1] <= high + 1e-6
            assert float(logps[row]) == pytest.approx(np.log(probs[token]), abs=1e-5)


def test_no_step_sorts_the_vocabulary():
    """A sort of 151,936 ids takes longer than the rest of a decode step."""
    rows = jnp.zeros(2), jnp.zeros(2, bool), jnp.full(2, 0.9), jnp.full(2, 5)
    program = str(jax.make_jaxpr(sampling.draw)(jnp.zeros((300, 2)), *rows))
    assert "while[" in program or "scan[" in program
    assert "sort[" not in program and "top_k[" not in program


@pytest.mark.multidevice
def test_a_split_vocabulary_is_cut_like_a_whole_one():
    """Four devices of 256 ids each: the same tokens, log-probs but for rounding."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(9)
    logits = jnp.asarray(3 * rng.normal(size=(4 * 2 * BLOCK, 8)), jnp.float32)
    rows = (
        jnp.asarray(rng.random(8), jnp.float32), jnp.arange(8) == 7,
        jnp.asarray([0.95, 0.5, 1, 0.9, 1, 1e-6, 0.999, 0.2]),
        jnp.array([0, 0, 7, 30, 0, 0, 500, 0]),
    )  # fmt: skip
    split = jax.jit(
        jax.shard_map(
            lambda logits, *rows: sampling.draw(logits, *rows, axis="tensor"), mesh=mesh,
            in_specs=(P("tensor"), P(), P(), P(), P()), out_specs=P(), check_vma=False,
        )
    )  # fmt: skip
    tokens, logps, log_z = draw(logits, *rows)
    found = split(logits, *rows)
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_allclose(found[1], logps, atol=1e-5)
    np.testing.assert_allclose(found[2], log_z, atol=1e-5)


def test_rows_that_cut_nothing_have_the_bits_of_a_batch_without_cuts():
    rng = np.random.default_rng(8)
    logits, uniforms = jnp.asarray(rng.normal(size=(400, 8))), jnp.asarray(rng.random(8))
    off, none = jnp.zeros(8, bool), jnp.zeros(8, int)
    plain = draw(logits, uniforms, off, jnp.ones(8), none)
    mixed = draw(logits, uniforms, off, jnp.array([1, 0.5] * 4), none.at[1::4].set(3))
    for a, b in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])


def test_truncated_draws_report_the_log_prob_of_the_whole_distribution():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    drawn = {sample(logits, u, top_p=0.6) for u in np.linspace(0, BELOW_ONE, 50)}
    assert {token for token, _ in drawn} == {0, 1}
    for token, logp in drawn:
        assert logp == pytest.approx(logits[token], abs=1e-6)


def test_truncated_draws_share_the_mass_that_is_left():
    """Of 0.5 and 0.3, the first has 5/8."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert sample(logits, 5 / 8 - 1e-4, top_p=0.6)[0] == 0
    assert sample(logits, 5 / 8 + 1e-4, top_p=0.6)[0] == 1


def test_greedy_takes_the_argmax_and_its_log_prob():
    logits = [0.0, 2.0, 1.0]
    for uniform in (0.0, 0.5, BELOW_ONE):
        token, logp = sample(logits, uniform, greedy=True)
        assert token == 1
        assert logp == pytest.approx(-np.log(1 + np.exp(-2) + np.exp(-1)), abs=1e-6)


def test_temperature_scales_the_logits_before_the_softmax():
    """Case S17: a temperature of 0.5 and logits 2, 1, 0."""
    hidden, head = jnp.ones((1, 1)), jnp.array([[2.0, 1.0, 0.0]])
    logits = token_logits(hidden, head.T, jnp.array([0.5]), vocab_size=3)
    token, logp = sample(logits[:, 0], 0.0)
    assert token == 0
    assert logp == pytest.approx(-0.14293162849989915, abs=1e-6)
    both = jnp.ones((1, 2), bool)
    scored, _ = token_scores(
        jnp.ones((1, 2, 1)), jnp.array([[1, 0]]), both, head, 1, Vocabulary(3, temperature=0.5)
    )
    assert float(scored[0, 1]) == pytest.approx(logp, abs=1e-6)


def test_rows_past_the_tokenizer_are_neither_sampled_nor_scored():
    """Case S18: 16 embedding rows, 8 ids, and the largest logit at row 12."""
    head = jnp.zeros((1, 16)).at[0, 12].set(50.0).at[0, 3].set(1.0)
    logits = token_logits(jnp.ones((1, 1)), head.T, jnp.ones(1), vocab_size=8)[:, 0]
    tokens = {sample(logits, u)[0] for u in (0.0, 0.2, 0.5, 0.9, 0.9999, BELOW_ONE)}
    assert max(tokens) == 7 and 3 in tokens
    greedy, logp = sample(logits, 0.5, greedy=True)
    assert greedy == 3
    assert sample(logits, 0.999, top_k=5)[0] < 8
    both = jnp.ones((1, 2), bool)
    scored, _ = token_scores(jnp.ones((1, 2, 1)), jnp.array([[0, 3]]), both, head, 1, Vocabulary(8))
    expected = 1 - np.log(np.e + 7)
    assert logp == pytest.approx(expected, abs=1e-6)
    assert float(scored[0, 1]) == pytest.approx(expected, abs=1e-6)


def test_uniforms_depend_on_key_and_position_alone():
    keys = jnp.array([[1, 2], [3, 4], [1, 2], [2, 1]], jnp.uint32)
    both = np.asarray(row_uniforms(keys, jnp.array([5, 5, 6, 5])))
    assert len(set(both.tolist())) == 4
    assert np.all((both >= 0) & (both < 1))
    other_place = np.asarray(row_uniforms(keys[::-1], jnp.array([5, 6, 5, 5])))
    np.testing.assert_array_equal(other_place, both[::-1])
    alone = np.asarray(row_uniforms(keys[1:2], jnp.array([5])))
    np.testing.assert_array_equal(alone, both[1:2])


def test_uniforms_of_one_request_are_spread():
    keys = jnp.broadcast_to(jnp.array([11, 12], jnp.uint32), (4000, 2))
    counts, _ = np.histogram(row_uniforms(keys, jnp.arange(4000)), bins=10, range=(0, 1))
    assert counts.min() > 320 and counts.max() < 480
