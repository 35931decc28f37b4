"""The setwise objective: importance ratios, clipping and loss reduction over decision events.

One function, :func:`setwise_objective`, covers SRPO (arXiv 2609.08452, eq. 3, 4 and 7) and the
token, sequence and policy-gradient objectives it is compared with: :class:`ObjectiveConfig` holds
the switches, and a preset names one point of the family.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from srpo_jax.objective_config import KL_ESTIMATORS, SET_REDUCTIONS, ObjectiveConfig

# Beyond this |log-ratio| the exponent is held and its gradient is zero.
MAX_LOG_RATIO = 20.0
SRPO = ObjectiveConfig()


class ObjectiveMetrics(NamedTuple):
    """Diagnostics of one call, without gradient. Scalars unless a shape is given.

    Units are what carries the ratio (events for SRPO); only complete events are counted.
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

    current_logp, old_logp  [S, T] floating; differentiable in current_logp
    loss_mask               [S, T] bool or integer: the generated tokens. Other positions may hold
                            anything, NaN and infinities included
    row_event               [R] integer, the event of each member output; padding rows hold E
    event_size              [E] integer, K_e; 0 for padding events
    event_advantage         [E] floating
    event_valid             [E] bool, complete events; None: all. An event whose rows in this call
                            are not event_size many is left out in any case
    token_row               [S, T] integer, the row of each token, padding R; None: row = sequence
    reference_logp, entropy, sampler_logp   [S, T] floating, needed where kl_coef, entropy_coef,
                            sampler_cap is set
    row_advantage           [R] floating, replaces event_advantage for member and token ratios
                            (estimators that tell the members of one event apart)
    num_events, num_tokens, num_members   divisors over the whole mini-batch of an optimiser step;
                            None: counted from this call. With the global ones, the losses of
                            micro-batches (whole events each) add up to the full loss

    Computes in ``promote_types(dtype of the log-probs, float32)``. A batch without a complete event
    has loss 0 and gradient 0. Raises AssertionError (chex) on wrong shapes or dtypes, ValueError
    where the config needs an argument that is missing.
    """
    current, row_event, event_size = map(jnp.asarray, (current_logp, row_event, event_size))
    chex.assert_rank([current, row_event, event_size], [2, 1, 1])
    arrays = {"current": current, "old": jnp.asarray(old_logp)}
    for coef, name, given in (
        (config.kl_coef, "reference_logp", reference_logp),
        (config.entropy_coef, "entropy", entropy),
        (config.sampler_cap, "sampler_logp", sampler_logp),
    ):
        if given is not None:
            arrays[name] = jnp.asarray(given)
        elif coef:
            raise ValueError(f"the objective needs {name}, since its coefficient is {coef:g}")
    chex.assert_shape([*arrays.values(), jnp.asarray(loss_mask)], current.shape)
    chex.assert_type(list(arrays.values()), float)
    dtype = jnp.promote_types(jnp.promote_types(current.dtype, arrays["old"].dtype), jnp.float32)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    batch = _layout(loss_mask, row_event, event_size, event_valid, token_row, dtype)
    event_adv, row_adv = _advantages(batch, event_advantage, row_advantage, config)

    # Masked before anything else sees it: a product with a mask would keep NaN and inf.
    gap = jnp.where(batch.token_valid, arrays["current"] - arrays["old"], 0)
    set_scale = SET_REDUCTIONS[config.set_reduction](batch.k)

    def by_unit(gap):
        """Log-ratios of tokens -> of members and of events."""
        member = batch.over_rows(gap)
        if config.member_score == "mean":
            member /= jnp.maximum(batch.row_tokens, 1)
        event = jnp.where(batch.valid, set_scale * batch.over_events(member), 0)
        return {"event": event, "member": member, "token": gap}

    units = by_unit(gap)
    event_log_ratio, member_log_ratio = units["event"], units["member"]
    level = config.level
    log_ratio = units[level]
    valid, advantage = {
        "event": (batch.valid, event_adv),
        "member": (batch.row_valid, row_adv),
        "token": (batch.token_valid, batch.to_tokens(row_adv)),
    }[level]
    if config.ratio_unit == "none":
        score = jnp.where(batch.token_valid, arrays["current"], 0)
        score = score if level == "token" else batch.over_rows(score)
        score = set_scale * batch.over_events(score) if level == "event" else score
        alive = valid & (advantage != 0)
        surrogate = jnp.where(alive, jnp.where(alive, score, 0) * advantage, 0)
        ratio, clipped = _bounded_exp(jax.lax.stop_gradient(log_ratio)), jnp.zeros_like(valid)
    else:
        surrogate, ratio, clipped = _clipped_surrogate(log_ratio, advantage, valid, config)

    sampler_weight, truncated = jnp.ones_like(log_ratio), jnp.zeros_like(valid)
    if config.sampler_cap is not None:
        drift = jnp.where(batch.token_valid, arrays["old"] - arrays["sampler_logp"], 0)
        sampler_weight = _bounded_exp(jax.lax.stop_gradient(by_unit(drift)[level]))
        truncated = valid & (sampler_weight > config.sampler_cap)
        sampler_weight = jnp.minimum(sampler_weight, config.sampler_cap)
        surrogate *= sampler_weight

    divisors = _Counts(
        batch.counts.events if num_events is None else num_events,
        batch.counts.members if num_members is None else num_members,
        batch.counts.tokens if num_tokens is None else num_tokens,
    )
    if config.loss_reduction == "token_ratio":
        tokens = {"event": batch.event_tokens, "member": batch.row_tokens}[level]
        held = jax.lax.stop_gradient(surrogate)
        surrogate = held + (surrogate - held) / jnp.maximum(tokens, 1)
    weight, divisor = _reduction(batch, divisors, config)
    objective = _ratio(jnp.sum(weight * surrogate), divisor, dtype)
    loss = -objective

    kl = mean_entropy = jnp.zeros((), dtype)
    if reference_logp is not None:
        distance = jnp.where(batch.token_valid, arrays["current"] - arrays["reference_logp"], 0)
        kl_of_tokens = KL_ESTIMATORS[config.kl_estimator](distance, _bounded_exp)
        kl = _ratio(jnp.sum(kl_of_tokens), divisors.tokens, dtype)
    if entropy is not None:
        total = jnp.sum(jnp.where(batch.token_valid, arrays["entropy"], 0))
        mean_entropy = _ratio(total, divisors.tokens, dtype)
    if config.kl_coef:
        loss += config.kl_coef * kl
    if config.entropy_coef:
        loss -= config.entropy_coef * mean_entropy

    num_units = jnp.sum(valid, dtype=jnp.int32)
    some = num_units > 0
    live_events = jnp.sum(event_adv != 0, dtype=jnp.int32)
    clamped = valid & (jnp.abs(log_ratio) > MAX_LOG_RATIO)
    ratio_sum = jnp.sum(jnp.where(valid, ratio, 0))
    count = batch.counts
    metrics = ObjectiveMetrics(
        loss=loss,
        surrogate=objective,
        kl=kl,
        entropy=mean_entropy,
        ratio_mean=jnp.where(some, _ratio(ratio_sum, num_units, dtype), 1),
        ratio_min=jnp.where(some, jnp.min(ratio, initial=jnp.inf, where=valid), 1),
        ratio_max=jnp.where(some, jnp.max(ratio, initial=0, where=valid), 1),
        clip_fraction=_ratio(jnp.sum(clipped), num_units, dtype),
        approx_kl=_ratio(jnp.sum(KL_ESTIMATORS["k3"](-gap, _bounded_exp)), count.tokens, dtype),
        zero_advantage_fraction=_ratio(count.events - live_events, count.events, dtype),
        num_events=count.events,
        num_tokens=count.tokens,
        num_units=num_units,
        live_events=live_events,
        clamped_events=jnp.sum(batch.any_of_event(clamped, level), dtype=jnp.int32),
        mean_k=_ratio(count.members, count.events, dtype),
        log_ratio=event_log_ratio,
        ratio=_bounded_exp(event_log_ratio),
        clipped=batch.any_of_event(clipped, level),
        event_valid=batch.valid,
        member_log_ratio=member_log_ratio,
        sampler_weight_mean=jnp.where(
            some, _ratio(jnp.sum(jnp.where(valid, sampler_weight, 0)), num_units, dtype), 1
        ),
        sampler_truncated=_ratio(jnp.sum(truncated), num_units, dtype),
    )
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


class _Counts(NamedTuple):
    events: chex.Numeric
    members: chex.Numeric
    tokens: chex.Numeric


class _Layout(NamedTuple):
    """Which row a token belongs to, and which event a row; only complete events count."""

    token_row: jax.Array | None  # [S, T]; None: row = sequence
    row_event: jax.Array  # [R]
    k: jax.Array  # [E] floating, at least 1
    valid: jax.Array  # [E] bool
    row_valid: jax.Array  # [R] bool
    token_valid: jax.Array  # [S, T] bool
    row_tokens: jax.Array  # [R] int32
    event_tokens: jax.Array  # [E] int32
    counts: _Counts

    def over_rows(self, x: jax.Array) -> jax.Array:
        return _over_rows(x, self.token_row, len(self.row_event))

    def over_events(self, x: jax.Array) -> jax.Array:
        return _over_events(x, self.row_event, len(self.k))

    def to_rows(self, x: jax.Array) -> jax.Array:
        return _padded_take(x, self.row_event)

    def to_tokens(self, x: jax.Array) -> jax.Array:
        return _to_tokens(x, self.token_row)

    def any_of_event(self, flag: jax.Array, level: str) -> jax.Array:
        """Unit flags -> [E] bool: whether any unit of the event has it."""
        total = flag.astype(jnp.int32)
        if level == "token":
            total = self.over_rows(total)
        return (total if level == "event" else self.over_events(total)) > 0


def _layout(loss_mask, row_event, event_size, event_valid, token_row, dtype) -> _Layout:
    mask, size = jnp.asarray(loss_mask), event_size
    num_rows, num_events = len(row_event), len(size)
    chex.assert_type([row_event, size], int)
    if mask.dtype != jnp.bool_:
        chex.assert_type(mask, int)
        mask = mask != 0
    if token_row is None:
        chex.assert_shape(row_event, mask.shape[:1])
    else:
        token_row = jnp.asarray(token_row)
        chex.assert_shape(token_row, mask.shape)
        chex.assert_type(token_row, int)
    valid = (size > 0) & (
        _over_events(jnp.ones(num_rows, jnp.int32), row_event, num_events) == size
    )
    if event_valid is not None:
        event_valid = jnp.asarray(event_valid)
        chex.assert_shape(event_valid, size.shape)
        chex.assert_type(event_valid, bool)
        valid &= event_valid
    row_valid = _padded_take(valid, row_event)
    token_valid = mask & _to_tokens(row_valid, token_row)
    row_tokens = _over_rows(token_valid.astype(jnp.int32), token_row, num_rows)
    event_tokens = _over_events(row_tokens, row_event, num_events)
    count = _Counts(
        events=jnp.sum(valid, dtype=jnp.int32),
        members=jnp.sum(jnp.where(valid, size, 0), dtype=jnp.int32),
        tokens=jnp.sum(event_tokens, dtype=jnp.int32),
    )
    k = jnp.maximum(size, 1).astype(dtype)
    return _Layout(
        token_row, row_event, k, valid, row_valid, token_valid, row_tokens, event_tokens, count
    )


def _advantages(batch: _Layout, event_advantage, row_advantage, config):
    """([E], [R]) advantages, 0 outside complete events. With ``row_advantage`` the first only says
    where an event has any."""
    event_adv, dtype = jnp.asarray(event_advantage), batch.k.dtype
    chex.assert_shape(event_adv, batch.k.shape)
    chex.assert_type(event_adv, float)
    event_adv = jnp.where(batch.valid, event_adv.astype(dtype), 0)
    if row_advantage is None:
        return event_adv, batch.to_rows(event_adv)
    if config.level == "event":
        raise ValueError("row_advantage: the members of an event share one advantage here")
    row_adv = jnp.asarray(row_advantage)
    chex.assert_shape(row_adv, batch.row_event.shape)
    chex.assert_type(row_adv, float)
    row_adv = jnp.where(batch.row_valid, row_adv.astype(dtype), 0)
    return batch.over_events(jnp.abs(row_adv)), row_adv


def _reduction(batch: _Layout, divisors: _Counts, config: ObjectiveConfig):
    """(weight of each unit's surrogate, divisor of their sum)."""
    dtype, level = batch.k.dtype, config.level

    def one_over(count: jax.Array) -> jax.Array:
        return 1 / jnp.maximum(count, 1).astype(dtype)

    if config.loss_reduction == "event":
        weight = {
            "event": lambda: 1.0,
            "member": lambda: batch.to_rows(1 / batch.k),
            "token": lambda: batch.to_tokens(batch.to_rows(one_over(batch.event_tokens))),
        }[level]()
        return weight, divisors.events
    if config.loss_reduction in ("token", "token_ratio"):
        weight = {"event": batch.event_tokens, "member": batch.row_tokens, "token": 1}[level]
        return jnp.asarray(weight, dtype), divisors.tokens
    if config.loss_reduction == "member":
        return (batch.k if level == "event" else 1.0), divisors.members
    if config.loss_reduction == "sequence_mean":
        return batch.to_tokens(one_over(batch.row_tokens)), divisors.members
    return 1 / config.length, divisors.members


def _over_rows(x: jax.Array, token_row: jax.Array | None, num_rows: int) -> jax.Array:
    """[S, T] -> [R]: sums over the tokens of each row."""
    if token_row is None:
        return jnp.sum(x, axis=1)
    return jax.ops.segment_sum(x.reshape(-1), token_row.reshape(-1), num_rows + 1)[:num_rows]


def _over_events(x: jax.Array, row_event: jax.Array, num_events: int) -> jax.Array:
    """[R] -> [E]: sums over the rows of each event; the padding id falls into a slot cut off."""
    return jax.ops.segment_sum(x, row_event, num_events + 1)[:num_events]


def _padded_take(x: jax.Array, ids: jax.Array) -> jax.Array:
    """x[ids], 0 or False for the padding id."""
    return jnp.concatenate([x, jnp.zeros(1, x.dtype)])[ids]


def _to_tokens(x: jax.Array, token_row: jax.Array | None) -> jax.Array:
    """[R] -> [S, T], or [S, 1] where row = sequence."""
    return x[:, None] if token_row is None else _padded_take(x, token_row)


def _clipped_surrogate(
    log_ratio: jax.Array, advantage: jax.Array, valid: jax.Array, config: ObjectiveConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(min(rho A, clip(rho) A), rho, whether clipped) per unit, any shape.

    The branch is chosen on held values and the dead entries are replaced before ``exp``: an
    overflowing ratio behind a clip, or beside a zero advantage, would give inf * 0 on the way back.
    """
    held = jax.lax.stop_gradient(log_ratio)
    ratio = _bounded_exp(held)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bound = jnp.where(advantage > 0, high, low).astype(ratio.dtype)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    if config.dual_clip is not None:
        beyond = (advantage < 0) & (ratio > config.dual_clip)
        bound = jnp.where(beyond, config.dual_clip, bound).astype(ratio.dtype)
        clipped |= beyond
    clipped &= valid
    counts = valid & (advantage != 0)
    alive = counts & ~clipped & ~(jnp.abs(held) > MAX_LOG_RATIO)
    constant = jnp.where(counts, jnp.where(clipped, bound, ratio) * advantage, 0)
    surrogate = jnp.where(alive, jnp.exp(jnp.where(alive, log_ratio, 0)) * advantage, constant)
    return surrogate, ratio, clipped


def _bounded_exp(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _ratio(total: chex.Numeric, count: chex.Numeric, dtype: Any) -> jax.Array:
    """total / count; 0, with gradient 0, where the count is 0."""
    total, count = jnp.asarray(total, dtype), jnp.asarray(count, dtype)
    some = count > 0
    return jnp.where(some, total / jnp.where(some, count, 1), 0)
