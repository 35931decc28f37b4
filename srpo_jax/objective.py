"""The setwise objective: importance ratios, clipping and loss reduction over decision events.

One function, :func:`setwise_objective`, covers SRPO (arXiv 2609.08452, eq. 3, 4 and 7) and the
token, sequence and policy-gradient objectives it is compared with: :class:`ObjectiveConfig` holds
the switches, and a preset names one point of the family. Its parts are the functions of
``srpo_jax.objective_terms``; its diagnostics are those of :func:`objective_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from srpo_jax.objective_config import KL_ESTIMATORS, NO_RATIO, ObjectiveConfig
from srpo_jax.objective_terms import (
    MAX_LOG_RATIO,
    Counts,
    EventLayout,
    LogRatios,
    Surrogate,
    bounded_exp,
    clipped_surrogate,
    event_layout,
    log_ratios,
    policy_gradient_surrogate,
    ratio_of,
    reduce_surrogate,
)

SRPO = ObjectiveConfig()


class ObjectiveMetrics(NamedTuple):
    """Diagnostics of one call, without gradient. Scalars unless a shape is given.

    Units are what carries the ratio (events for SRPO). All complete events of the call are counted,
    those without an advantage included. See ``count_skipped`` for events that are left out of it.
    """

    loss: jax.Array
    surrogate: jax.Array  # J without the KL and entropy terms, over the divisor of the loss
    kl: jax.Array  # to the reference, mean over generated tokens; 0 without a reference
    entropy: jax.Array  # mean over generated tokens; 0 where none is given
    ratio_mean: jax.Array  # over units; 1 where there is none
    ratio_min: jax.Array
    ratio_max: jax.Array
    clip_fraction: jax.Array  # units whose clipped branch is active, over all units
    approx_kl: jax.Array  # mean over generated tokens of exp(d) - 1 - d, d = current - old
    zero_advantage_fraction: jax.Array  # of events
    num_events: jax.Array  # int32, complete events of this call
    num_tokens: jax.Array  # int32, their generated tokens
    num_units: jax.Array  # int32
    live_events: jax.Array  # int32, events with an advantage other than 0
    clamped_events: jax.Array  # int32, events with a unit beyond MAX_LOG_RATIO
    mean_k: jax.Array
    log_ratio: jax.Array  # [E] event log-ratio L_e; 0 where the event is not complete
    ratio: jax.Array  # [E] exp(L_e)
    clipped: jax.Array  # [E] bool, some unit of the event is on its clipped branch
    event_valid: jax.Array  # [E] bool, complete events of this call
    member_log_ratio: jax.Array  # [R] l_j; 0 for rows of other events
    sampler_weight_mean: jax.Array  # truncated sampler weight, over units; 1 where it is off
    sampler_truncated: jax.Array  # share of units whose sampler weight was cut


class LossTerms(NamedTuple):
    """What the loss is made of: scalars, differentiable."""

    loss: jax.Array
    surrogate: jax.Array
    kl: jax.Array
    entropy: jax.Array


class Units(NamedTuple):
    """The surrogates of a call before their reduction. Arrays per unit, any one shape."""

    log_ratio: jax.Array
    valid: jax.Array  # bool
    surrogate: Surrogate
    sampler_weight: jax.Array  # min(q_old / q_sampler, cap); 1 where it is off
    sampler_truncated: jax.Array  # bool, the cap was reached


def setwise_objective(
    current_logp: chex.Array,
    old_logp: chex.Array,
    loss_mask: chex.Array,
    row_event: chex.Array,
    event_size: chex.Array,
    event_advantage: chex.Array,
    *,
    event_valid: chex.Array | None = None,
    token_row: chex.Array | None = None,
    reference_logp: chex.Array | None = None,
    entropy: chex.Array | None = None,
    sampler_logp: chex.Array | None = None,
    row_advantage: chex.Array | None = None,
    num_events: chex.Numeric | None = None,
    num_tokens: chex.Numeric | None = None,
    num_members: chex.Numeric | None = None,
    config: ObjectiveConfig = SRPO,
) -> tuple[jax.Array, ObjectiveMetrics]:
    """Loss (to minimise) of a batch of decision events, and its diagnostics (eq. 3, 4, 7).

        l_j   = sum of log q_cur - log q_old over the generated tokens of member j
        rho_e = exp(K_e^(-1/2) * sum_j l_j)
        loss  = -(1/|B|) * sum_e min(rho_e A_e, clip(rho_e, 1 - clip_low, 1 + clip_high) A_e)

    Computes in ``promote_types(dtype of the log-probs, float32)``. With the divisors of the whole
    mini-batch, the losses of micro-batches (whole events each) add up to the full loss.

    Args:
        current_logp: [S, T] floating, log q_cur of each token; differentiable.
        old_logp: [S, T] floating, log q_old.
        loss_mask: [S, T] bool or int, the generated tokens. Other positions may hold anything, NaN
            and infinities included.
        row_event: [R] int, the event of each member output; padding rows hold E.
        event_size: [E] int, K_e; 0 for padding events.
        event_advantage: [E] floating.
        event_valid: [E] bool, complete events; None: all. An event whose rows in this call are not
            event_size many is left out in any case.
        token_row: [S, T] int, the row of each token, padding R; None: row = sequence.
        reference_logp: [S, T] floating, needed where ``kl_coef`` is set.
        entropy: [S, T] floating, needed where ``entropy_coef`` is set; differentiable.
        sampler_logp: [S, T] floating, needed where ``sampler_cap`` is set.
        row_advantage: [R] floating, replaces event_advantage for member and token ratios
            (estimators that tell the members of one event apart).
        num_events: |B| of the whole mini-batch of an optimiser step; None: counted from this call.
        num_tokens: Its generated tokens; None: counted from this call.
        num_members: Its member outputs; None: counted from this call.
        config: The switches; SRPO by default.

    Returns:
        (loss, metrics). A batch without a complete event has loss 0 and gradient 0.

    Raises:
        AssertionError: From chex, on a wrong shape or dtype.
        ValueError: Where the config needs an argument that is missing.
    """
    logps = _checked_logps(
        config, current_logp, old_logp, loss_mask, reference_logp, entropy, sampler_logp
    )
    dtype = logps["current"].dtype
    chex.assert_rank([row_event, event_size], [1, 1])
    layout = event_layout(
        loss_mask, row_event, event_size, event_valid=event_valid, token_row=token_row, dtype=dtype
    )
    event_adv, row_adv = _advantages(layout, event_advantage, row_advantage, config)
    divisors = Counts(
        layout.counts.events if num_events is None else num_events,
        layout.counts.members if num_members is None else num_members,
        layout.counts.tokens if num_tokens is None else num_tokens,
    )
    # Masked before anything else sees it: a product with a mask would keep NaN and inf.
    gap = jnp.where(layout.token_valid, logps["current"] - logps["old"], 0)
    ratios = log_ratios(gap, layout, config)
    advantage = config.unit.advantage(layout, event_adv, row_adv)
    units = _units(logps, ratios, advantage, layout, config)
    terms = _loss_terms(units, logps, layout, divisors, config)
    metrics = objective_metrics(terms, units, ratios, event_adv, layout, config)
    return terms.loss, metrics


def objective_metrics(
    terms: LossTerms,
    units: Units,
    ratios: LogRatios,
    event_advantage: jax.Array,
    layout: EventLayout,
    config: ObjectiveConfig,
) -> ObjectiveMetrics:
    """The diagnostics of a loss, over all complete events of ``layout``; no gradient passes.

    Args:
        terms: The loss and its terms, reported as they are.
        units: The surrogates before the reduction.
        ratios: Log-ratios of tokens, members and events.
        event_advantage: [E] floating; an event whose own is 0 counts as one without advantage.
        layout: The batch's memberships.
        config: The objective's switches.
    """
    terms, units, ratios, event_advantage = jax.lax.stop_gradient(
        (terms, units, ratios, event_advantage)
    )
    dtype, counts, valid = layout.k.dtype, layout.counts, units.valid
    _, ratio, clipped = units.surrogate
    num_units = jnp.sum(valid, dtype=jnp.int32)
    live_events = jnp.sum(event_advantage != 0, dtype=jnp.int32)
    clamped = valid & (jnp.abs(units.log_ratio) > MAX_LOG_RATIO)
    token_kl = KL_ESTIMATORS["k3"](-ratios.token, bounded_exp)

    def mean(x: jax.Array) -> jax.Array:
        """Over the units that count; 1 where there is none."""
        of_units = ratio_of(jnp.sum(jnp.where(valid, x, 0)), num_units, dtype)
        return jnp.where(num_units > 0, of_units, 1)

    def extreme(of: Callable[..., jax.Array], initial: float) -> jax.Array:
        return jnp.where(num_units > 0, of(ratio, initial=initial, where=valid), 1)

    return ObjectiveMetrics(
        loss=terms.loss,
        surrogate=terms.surrogate,
        kl=terms.kl,
        entropy=terms.entropy,
        ratio_mean=mean(ratio),
        ratio_min=extreme(jnp.min, jnp.inf),
        ratio_max=extreme(jnp.max, 0),
        clip_fraction=ratio_of(jnp.sum(clipped), num_units, dtype),
        approx_kl=ratio_of(jnp.sum(token_kl), counts.tokens, dtype),
        zero_advantage_fraction=ratio_of(counts.events - live_events, counts.events, dtype),
        num_events=counts.events,
        num_tokens=counts.tokens,
        num_units=num_units,
        live_events=live_events,
        clamped_events=jnp.sum(config.unit.any_of_event(layout, clamped), dtype=jnp.int32),
        mean_k=ratio_of(counts.members, counts.events, dtype),
        log_ratio=ratios.event,
        ratio=bounded_exp(ratios.event),
        clipped=config.unit.any_of_event(layout, clipped),
        event_valid=layout.valid,
        member_log_ratio=ratios.member,
        sampler_weight_mean=mean(units.sampler_weight),
        sampler_truncated=ratio_of(jnp.sum(units.sampler_truncated), num_units, dtype),
    )


def count_skipped(
    metrics: ObjectiveMetrics, skipped: Counts, config: ObjectiveConfig
) -> ObjectiveMetrics:
    """The metrics of a mini-batch of which a call has left out events for their zero advantage.

    What is known of such an event without its log-probs is counted in: its size and tokens, and
    that no unit of it is on a clipped branch. Its ratio is not known unless a forward pass is
    spent on it: the ratio's mean and extremes, ``approx_kl``, ``clamped_events`` and the sampler's
    figures stay those of the events in the call.

    Args:
        metrics: Of the call, whose loss was divided by the whole mini-batch's counts.
        skipped: The complete events that were left out, int.
        config: The objective's switches.
    """
    units = metrics.num_units + getattr(skipped, config.unit.counts)
    num_events = metrics.num_events + skipped.events

    def over(total, count):
        return total / jnp.maximum(count, 1)

    members = metrics.mean_k * metrics.num_events + skipped.members
    return metrics._replace(
        num_events=num_events,
        num_tokens=metrics.num_tokens + skipped.tokens,
        num_units=units,
        clip_fraction=over(metrics.clip_fraction * metrics.num_units, units),
        zero_advantage_fraction=over(num_events - metrics.live_events, num_events),
        mean_k=over(members, num_events),
    )


def _checked_logps(
    config: ObjectiveConfig, current, old, loss_mask, reference, entropy, sampler
) -> dict[str, jax.Array]:
    """The [S, T] floating arguments that are given, by name, in one dtype of at least float32."""
    arrays = {"current": jnp.asarray(current), "old": jnp.asarray(old)}
    for coef, name, given in (
        (config.kl_coef, "reference_logp", reference),
        (config.entropy_coef, "entropy", entropy),
        (config.sampler_cap, "sampler_logp", sampler),
    ):
        if given is not None:
            arrays[name] = jnp.asarray(given)
        elif coef:
            raise ValueError(f"the objective needs {name}, since its coefficient is {coef:g}")
    shape = arrays["current"].shape
    chex.assert_rank(arrays["current"], 2)
    chex.assert_shape([*arrays.values(), jnp.asarray(loss_mask)], shape)
    chex.assert_type(list(arrays.values()), float)
    both = jnp.promote_types(arrays["current"].dtype, arrays["old"].dtype)
    dtype = jnp.promote_types(both, jnp.float32)
    return {name: x.astype(dtype) for name, x in arrays.items()}


def _units(
    logps: dict[str, jax.Array],
    ratios: LogRatios,
    advantage: jax.Array,
    layout: EventLayout,
    config: ObjectiveConfig,
) -> Units:
    """The surrogate of every unit, weighted by the sampler's where that is on."""

    def of_units(tokens: jax.Array) -> jax.Array:
        """[S, T] log-probs, or differences of them, summed as the units' log-ratios are."""
        masked = jnp.where(layout.token_valid, tokens, 0)
        return getattr(log_ratios(masked, layout, config), config.unit.name)

    log_ratio, valid = getattr(ratios, config.unit.name), config.unit.valid(layout)
    if config.ratio_unit == NO_RATIO:
        score = of_units(logps["current"])
        surrogate = policy_gradient_surrogate(score, log_ratio, advantage, valid)
    else:
        surrogate = clipped_surrogate(
            log_ratio, advantage, valid,
            clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip,
        )  # fmt: skip
    weight, truncated = jnp.ones_like(log_ratio), jnp.zeros_like(valid)
    if config.sampler_cap is not None:
        drift = of_units(logps["old"] - logps["sampler_logp"])
        weight = bounded_exp(jax.lax.stop_gradient(drift))
        truncated = valid & (weight > config.sampler_cap)
        weight = jnp.minimum(weight, config.sampler_cap)
        surrogate = surrogate._replace(value=surrogate.value * weight)
    return Units(log_ratio, valid, surrogate, weight, truncated)


def _loss_terms(
    units: Units,
    logps: dict[str, jax.Array],
    layout: EventLayout,
    divisors: Counts,
    config: ObjectiveConfig,
) -> LossTerms:
    """loss = -J + kl_coef * KL - entropy_coef * entropy, the last two means over tokens."""
    dtype = layout.k.dtype
    objective = reduce_surrogate(units.surrogate.value, layout, divisors, config)
    loss, kl, entropy = -objective, jnp.zeros((), dtype), jnp.zeros((), dtype)
    if "reference_logp" in logps:
        distance = logps["current"] - logps["reference_logp"]
        distance = jnp.where(layout.token_valid, distance, 0)
        token_kl = KL_ESTIMATORS[config.kl_estimator](distance, bounded_exp)
        kl = ratio_of(jnp.sum(token_kl), divisors.tokens, dtype)
    if "entropy" in logps:
        total = jnp.sum(jnp.where(layout.token_valid, logps["entropy"], 0))
        entropy = ratio_of(total, divisors.tokens, dtype)
    if config.kl_coef:
        loss += config.kl_coef * kl
    if config.entropy_coef:
        loss -= config.entropy_coef * entropy
    return LossTerms(loss, objective, kl, entropy)


def _advantages(
    layout: EventLayout, event_advantage, row_advantage, config: ObjectiveConfig
) -> tuple[jax.Array, jax.Array]:
    """([E], [R]) advantages, 0 outside complete events. With ``row_advantage`` the first only says
    where an event has any."""
    event_adv, dtype = jnp.asarray(event_advantage), layout.k.dtype
    chex.assert_shape(event_adv, layout.k.shape)
    chex.assert_type(event_adv, float)
    event_adv = jnp.where(layout.valid, event_adv.astype(dtype), 0)
    if row_advantage is None:
        return event_adv, layout.to_rows(event_adv)
    if config.unit.name == "event":
        raise ValueError("row_advantage: the members of an event share one advantage here")
    row_adv = jnp.asarray(row_advantage)
    chex.assert_shape(row_adv, layout.row_event.shape)
    chex.assert_type(row_adv, float)
    row_adv = jnp.where(layout.row_valid, row_adv.astype(dtype), 0)
    return layout.over_events(jnp.abs(row_adv)), row_adv
