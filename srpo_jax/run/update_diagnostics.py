"""Figures of an update's events: quantiles of the ratio, and eq. 5's variance and covariance.

Host-side numpy over what an update returns. Events with ``event_size`` 0 and rows of no event
(padding) are left out, and so is every group with a single event: it has no spread to speak of.
"""

from __future__ import annotations

import numpy as np

QUANTILES = (5, 50, 95)  # per cent


def update_diagnostics(
    log_ratio: np.ndarray,
    event_size: np.ndarray,
    event_tokens: np.ndarray,
    member_log_ratio: np.ndarray,
    row_event: np.ndarray,
) -> dict[str, float]:
    """Both groups of figures by name.

    Args:
        log_ratio: [E] floating, L_e.
        event_size: [E] integer, K_e; 0 leaves the event out.
        event_tokens: [E] integer, generated tokens of all its members.
        member_log_ratio: [R] floating, l_j.
        row_event: [R] integer, the event of each member; padding rows hold E.
    """
    return ratio_quantiles(log_ratio, event_size, event_tokens) | member_covariance(
        member_log_ratio, row_event, event_size
    )


def ratio_quantiles(
    log_ratio: np.ndarray, event_size: np.ndarray, event_tokens: np.ndarray
) -> dict[str, float]:
    """Quantiles of the event ratio exp(L_e), by cardinality and by length.

    Arguments are those of ``update_diagnostics``.

    Returns:
        ``update/ratio_k3_p50``: the median over the events of 3 members.
        ``update/ratio_tokens_128_p95``: the 95 % quantile over events of 128 to 255 tokens.
    """
    real = event_size > 0
    # The bound keeps exp finite: beyond it the objective holds the exponent as well.
    ratio = np.exp(np.clip(log_ratio[real].astype(np.float64), -20, 20))
    size = event_size[real]
    # frexp gives tokens = m * 2**e with 0.5 <= m < 1: exact powers of two fall into their own bin.
    floor = 2 ** (np.frexp(np.maximum(event_tokens[real], 1))[1] - 1)
    figures = {}
    for name, group in (("k", size), ("tokens_", floor)):
        for value in np.unique(group):
            of_group = ratio[group == value]
            if len(of_group) > 1:
                for q, x in zip(QUANTILES, np.percentile(of_group, QUANTILES), strict=True):
                    figures[f"update/ratio_{name}{value}_p{q:02d}"] = float(x)
    return figures


def member_covariance(
    member_log_ratio: np.ndarray, row_event: np.ndarray, event_size: np.ndarray
) -> dict[str, float]:
    """The two terms of Var(L_e) = sigma^2 + (2/K) sum_{i<j} Cov(l_i, l_j), for every K > 1.

    ``update/member_var_k3`` and ``update/member_cov_k3``, over the events of 3 members. The first
    is the mean over member positions of the sample variance (n - 1) at that position; the second
    is the sample variance of L_e = K^(-1/2) sum_j l_j less the first, which is the sum over the
    off-diagonal of the sample covariance matrix over K. Both are unbiased for independent events,
    whether or not the members are exchangeable, and add up to the variance of L_e exactly.
    Arguments are those of ``update_diagnostics``.
    """
    num_events = len(event_size)
    rows = np.bincount(row_event, minlength=num_events + 1)[:num_events]
    first = np.cumsum(rows) - rows
    ordered = member_log_ratio[np.argsort(row_event, kind="stable")].astype(np.float64)
    figures = {}
    for k in np.unique(event_size[event_size > 1]):
        complete = (event_size == k) & (rows == k)
        if complete.sum() < 2:
            continue
        members = ordered[first[complete][:, None] + np.arange(k)]  # [events, K]
        member_var = members.var(axis=0, ddof=1).mean()
        event_var = (members.sum(axis=1) / np.sqrt(k)).var(ddof=1)
        figures[f"update/member_var_k{k}"] = float(member_var)
        figures[f"update/member_cov_k{k}"] = float(event_var - member_var)
    return figures
