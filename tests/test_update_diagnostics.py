"""Quantiles of the event ratio, and the covariance term of eq. 5 on members of known covariance."""

from __future__ import annotations

import numpy as np
import pytest

from srpo_jax.run.update_diagnostics import member_covariance, ratio_quantiles, update_diagnostics


def rows_of(events):
    """(member_log_ratio [R], row_event [R], event_size [E]) of lists of members."""
    return (
        np.concatenate([np.asarray(e, np.float32) for e in events]),
        np.repeat(np.arange(len(events)), [len(e) for e in events]).astype(np.int32),
        np.array([len(e) for e in events], np.int32),
    )


def covariance(members):
    """Figures of ``members`` [events, K]."""
    k = members.shape[1]
    figures = member_covariance(*rows_of(members))
    assert set(figures) == {f"update/member_var_k{k}", f"update/member_cov_k{k}"}
    return figures[f"update/member_var_k{k}"], figures[f"update/member_cov_k{k}"]


# ---- quantiles -----------------------------------------------------------------------------------


def test_quantiles_by_k_and_by_length():
    """Five events of K = 3 have the ratios 1..5: quantiles by linear interpolation."""
    ratio = np.array([3, 1, 5, 2, 4, 10, 20], np.float32)
    size = np.array([3, 3, 3, 3, 3, 1, 1], np.int32)
    tokens = np.array([128, 255, 130, 200, 256, 511, 300], np.int32)
    got = ratio_quantiles(np.log(ratio), size, tokens)
    want = {
        "update/ratio_k3_p05": 1.2, "update/ratio_k3_p50": 3, "update/ratio_k3_p95": 4.8,
        "update/ratio_k1_p05": 10.5, "update/ratio_k1_p50": 15, "update/ratio_k1_p95": 19.5,
        # 3, 1, 5, 2 and 4, 10, 20
        "update/ratio_tokens_128_p05": 1.15, "update/ratio_tokens_128_p50": 2.5,
        "update/ratio_tokens_128_p95": 4.7,
        "update/ratio_tokens_256_p05": 4.6, "update/ratio_tokens_256_p50": 10,
        "update/ratio_tokens_256_p95": 19,
    }  # fmt: skip
    assert got == pytest.approx(want, rel=1e-6)
    assert all(type(x) is float for x in got.values())


def test_every_power_of_two_starts_a_length_bin():
    tokens = np.repeat([0, 1, 2, 3, 4, 7, 8, 2**15 - 1, 2**15], 2)
    got = ratio_quantiles(np.zeros(18), np.ones(18, int), tokens)
    bins = {name.split("_")[2] for name in got if "tokens" in name}
    assert bins == {"1", "2", "4", "8", "16384", "32768"}


def test_a_huge_log_ratio_stays_finite():
    got = ratio_quantiles(np.array([1e4, 1e4, -1e4]), np.ones(3, int), np.array([9, 9, 9]))
    assert got["update/ratio_k1_p95"] == pytest.approx(np.exp(20))


# ---- covariance ----------------------------------------------------------------------------------


def test_two_members_by_hand():
    """Variances 4 and 7 -> 5.5; covariance (2 + 0 - 4) / 2 = -1, and 2/K times that is -1."""
    var, cov = covariance(np.array([[1, 2], [3, 6], [5, 1]]))
    assert (var, cov) == (pytest.approx(5.5), pytest.approx(-1.0))


def test_three_members_by_hand():
    """Two events: the covariance matrix is d d^T / 2 with d = (2, 4, -2): variances 2, 8, 2;
    covariances 4, -2, -4, so that 2/3 of their sum is -4/3. L differs by 4/sqrt(3): 8/3 in all."""
    var, cov = covariance(np.array([[0, 0, 0], [2, 4, -2]]))
    assert (var, cov) == (pytest.approx(4.0), pytest.approx(-4 / 3))
    assert var + cov == pytest.approx(8 / 3)


def members_of(rho, k, events, sigma=0.3, mean=0.0, seed=0):
    """[events, K] normal members of variance sigma^2 and pairwise correlation rho >= 0."""
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(size=(events, 1)), rng.normal(size=(events, k))
    return sigma * (np.sqrt(rho) * shared + np.sqrt(1 - rho) * own) + mean


@pytest.mark.parametrize("rho", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_members_of_known_covariance(k, rho):
    """Equal correlations give (K - 1) rho sigma^2, whatever the means of the positions."""
    events, sigma = 40_000, 0.3
    means = np.linspace(-4, 7, k)
    var, cov = covariance(members_of(rho, k, events, sigma, means))
    # The standard error of a sample variance is sqrt(2 / n) of it.
    spread = np.sqrt(2 / events) * sigma**2
    assert abs(var - sigma**2) < 4 * spread
    assert abs(cov - (k - 1) * rho * sigma**2) < 4 * spread * (2 + (k - 1) * rho)


def test_two_events_are_enough_for_no_bias():
    """The mean over many batches of two events; dividing by n would give half of both figures."""
    members = members_of(0.5, 3, 2 * 4000, sigma=1.0, mean=5.0).reshape(4000, 2, 3)
    var, cov = np.mean([covariance(batch) for batch in members], axis=0)
    np.testing.assert_allclose([var, cov], [1.0, 1.0], atol=0.1)


# ---- what is left out ----------------------------------------------------------------------------


def mixed():
    """Events of K = 2, 3, 1 in turn, their rows, and their other arrays."""
    rng = np.random.default_rng(3)
    members, row_event, size = rows_of([rng.normal(0, 0.1, k) for k in (2, 3, 1) * 4])
    event = np.add.reduceat(members, np.cumsum(size) - size) / np.sqrt(size)
    return event, size, rng.integers(1, 90, len(size)), members, row_event


def test_each_k_has_figures_of_its_own():
    event, size, tokens, members, row_event = mixed()
    figures = update_diagnostics(event, size, tokens, members, row_event)
    for k in (2, 3):
        rows = members[np.repeat(size, size) == k].reshape(-1, k)
        pair = figures[f"update/member_var_k{k}"], figures[f"update/member_cov_k{k}"]
        assert pair == pytest.approx(covariance(rows))
        assert sum(pair) == pytest.approx(event[size == k].var(ddof=1), rel=1e-5)
    assert "update/member_var_k1" not in figures and "update/ratio_k1_p50" in figures
    assert np.isfinite(list(figures.values())).all()


def test_padding_and_the_order_of_rows_between_events_change_nothing():
    event, size, tokens, members, row_event = mixed()
    want = update_diagnostics(event, size, tokens, members, row_event)
    order = np.argsort(np.arange(len(members)) - 100 * row_event, kind="stable")  # events backwards
    got = update_diagnostics(
        np.append(event, [7.0, 8.0]),
        np.append(size, [0, 0]),
        np.append(tokens, [0, 0]),
        np.append(members[order], [5.0, 6.0, 9.0]),
        np.append(row_event[order], [len(size) + 2] * 3),
    )
    assert got == pytest.approx(want)


def test_an_event_that_is_left_out_leaves_with_its_rows():
    event, size, tokens, members, row_event = mixed()
    without = np.where(np.arange(len(size)) == 1, 0, size)
    keep, rows = np.arange(len(size)) != 1, row_event != 1
    got = update_diagnostics(event, without, tokens, members, row_event)
    renumbered = np.cumsum(keep)[row_event[rows]] - 1
    want = update_diagnostics(event[keep], size[keep], tokens[keep], members[rows], renumbered)
    assert got == want


def test_an_event_without_all_of_its_rows_has_no_covariance():
    _, size, _, members, row_event = mixed()
    missing = np.flatnonzero(row_event == 1)[-1]
    got = member_covariance(np.delete(members, missing), np.delete(row_event, missing), size)
    without = np.where(np.arange(len(size)) == 1, 0, size)
    assert got == member_covariance(members, row_event, without)


@pytest.mark.filterwarnings("error")
def test_single_events_and_empty_batches_give_no_figures():
    none = np.zeros(0, int)
    assert update_diagnostics(np.zeros(0), none, none, np.zeros(0), none) == {}
    two = np.zeros(2, int)
    padding = update_diagnostics(np.zeros(2), two, two, np.zeros(3), np.full(3, 2))
    assert padding == {}
    members, row_event, size = rows_of([[0.1], [0.2, 0.3], [0.4, 0.5, 0.6]])
    tokens = np.array([1, 10, 100])
    assert update_diagnostics(np.zeros(3), size, tokens, members, row_event) == {}
