"""The terms of the setwise objective as pure functions: log-ratios, clipped surrogate, reduction.

Source: arXiv 2609.08452, eq. 3, 4 and 7. A *unit* is what carries one ratio and one clip: the event
for SRPO, one member's output or one token for the objectives that it is compared with.

Shapes: S sequences of T tokens, R rows (one member's output each), E events. Ids at R and E are
padding: what they point to counts nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from srpo_jax.objective_config import (
    LOSS_REDUCTIONS,
    MEMBER_SCORES,
    SET_REDUCTIONS,
    ObjectiveConfig,
)

# Beyond this |log-ratio| the exponent is held and its gradient is zero.
MAX_LOG_RATIO = 20.0


class Counts(NamedTuple):
    """How many complete events there are, with how many members and generated tokens."""

    events: chex.Numeric
    members: chex.Numeric
    tokens: chex.Numeric


class EventLayout(NamedTuple):
    """The memberships of a batch, in which only complete events count.

    Attributes:
        token_row: [S, T] int, the row of each token; None: row = sequence.
        row_event: [R] int, the event of each row.
        k: [E] floating, the cardinality K_e, at least 1.
        valid: [E] bool, complete events.
        row_valid: [R] bool, the rows of complete events.
        token_valid: [S, T] bool, their generated tokens.
        row_tokens: [R] int32, generated tokens of each row.
        event_tokens: [E] int32, generated tokens of each event.
        counts: Of the complete events.
    """

    token_row: jax.Array | None
    row_event: jax.Array
    k: jax.Array
    valid: jax.Array
    row_valid: jax.Array
    token_valid: jax.Array
    row_tokens: jax.Array
    event_tokens: jax.Array
    counts: Counts

    def over_rows(self, x: jax.Array) -> jax.Array:
        """[S, T] -> [R]: sums over the tokens of each row."""
        return _over_rows(x, self.token_row, len(self.row_event))

    def over_events(self, x: jax.Array) -> jax.Array:
        """[R] -> [E]: sums over the rows of each event."""
        return _over_events(x, self.row_event, len(self.k))

    def to_rows(self, x: jax.Array) -> jax.Array:
        """[E] -> [R]: the value of each row's event; 0 for padding rows."""
        return _padded_take(x, self.row_event)

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """[R] -> [S, T], or [S, 1] where row = sequence: the value of each token's row."""
        return _to_tokens(x, self.token_row)


def event_layout(
    loss_mask: chex.Array,
    row_event: chex.Array,
    event_size: chex.Array,
    *,
    event_valid: chex.Array | None = None,
    token_row: chex.Array | None = None,
    dtype: Any = jnp.float32,
) -> EventLayout:
    """The memberships of a batch, checked.

    Args:
        loss_mask: [S, T] bool or int, the generated tokens.
        row_event: [R] int, the event of each row; E for padding rows.
        event_size: [E] int, K_e; 0 for padding events.
        event_valid: [E] bool, complete events; None: all. An event that has not ``event_size`` rows
            here is left out in any case.
        token_row: [S, T] int, the row of each token, R for padding; None: row = sequence (S = R).
        dtype: Of ``k``, floating.

    Raises:
        AssertionError: From chex, on a wrong shape or dtype.
    """
    mask, row_event, size = map(jnp.asarray, (loss_mask, row_event, event_size))
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
    counts = Counts(
        events=jnp.sum(valid, dtype=jnp.int32),
        members=jnp.sum(jnp.where(valid, size, 0), dtype=jnp.int32),
        tokens=jnp.sum(event_tokens, dtype=jnp.int32),
    )
    k = jnp.maximum(size, 1).astype(dtype)
    return EventLayout(
        token_row, row_event, k, valid, row_valid, token_valid, row_tokens, event_tokens, counts
    )


class LogRatios(NamedTuple):
    """The log-ratio of every unit that a ratio can belong to."""

    token: jax.Array  # [S, T]
    member: jax.Array  # [R]
    event: jax.Array  # [E]


class Surrogate(NamedTuple):
    """Per unit, any shape: what a unit adds to the objective J before the reduction."""

    value: jax.Array  # floating, differentiable
    ratio: jax.Array  # floating, rho without gradient, the exponent held at MAX_LOG_RATIO
    clipped: jax.Array  # bool, the clipped branch is active


def member_log_ratio(
    token_log_ratio: jax.Array, layout: EventLayout, member_score: str = "sum"
) -> jax.Array:
    """A member's log-ratio from its tokens' (eq. 3).

        l_j = sum over generated tokens u of (log q_cur - log q_old)

    Args:
        token_log_ratio: [S, T] floating, 0 wherever ``layout.token_valid`` is False.
        layout: The batch's memberships.
        member_score: A name of ``MEMBER_SCORES``: the sum, or the mean over the tokens.

    Returns:
        [R] floating; 0 for rows without a generated token.
    """
    return MEMBER_SCORES[member_score](layout.over_rows(token_log_ratio), layout.row_tokens)


def event_log_ratio(
    member_log_ratio: jax.Array, layout: EventLayout, set_reduction: str = "sqrt"
) -> jax.Array:
    """An event's log-ratio from its members' (eq. 4).

        L_e = K_e^(-1/2) * sum over members j of l_j

    Args:
        member_log_ratio: [R] floating.
        layout: The batch's memberships.
        set_reduction: A name of ``SET_REDUCTIONS``, the factor of the sum: ``sqrt`` is K^(-1/2).

    Returns:
        [E] floating; 0 for events that are not complete.
    """
    scale = SET_REDUCTIONS[set_reduction](layout.k)
    return jnp.where(layout.valid, scale * layout.over_events(member_log_ratio), 0)


def log_ratios(
    token_log_ratio: jax.Array, layout: EventLayout, config: ObjectiveConfig
) -> LogRatios:
    """The log-ratios of tokens [S, T] -> those of members and events too.

    ``token_log_ratio`` is 0 wherever ``layout.token_valid`` is False.
    """
    member = member_log_ratio(token_log_ratio, layout, config.member_score)
    event = event_log_ratio(member, layout, config.set_reduction)
    return LogRatios(token_log_ratio, member, event)


def clipped_surrogate(
    log_ratio: jax.Array,
    advantage: jax.Array,
    valid: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """The clipped surrogate of each unit (eq. 7).

        min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = exp(log_ratio)

    The branch is chosen on held values, and dead entries are replaced before ``exp``: an
    overflowing ratio behind a clip, or beside a zero advantage, would give inf * 0 on the way back.

    Args:
        log_ratio: Floating, any shape; differentiable. Beyond ``MAX_LOG_RATIO`` the exponent is
            held and the gradient is 0.
        advantage: Floating, of a shape that broadcasts with it. Where it is 0 the value is 0.
        valid: Bool; units that do not count have value 0 and are not clipped.
        clip_low: The ratio's bound below 1.
        clip_high: The ratio's bound above 1.
        dual_clip: None, or the bound c > 1 of the ratio where the advantage is negative.
    """
    held = jax.lax.stop_gradient(log_ratio)
    ratio = bounded_exp(held)
    low, high = 1 - clip_low, 1 + clip_high
    bound = jnp.where(advantage > 0, high, low).astype(ratio.dtype)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    if dual_clip is not None:
        beyond = (advantage < 0) & (ratio > dual_clip)
        bound = jnp.where(beyond, dual_clip, bound).astype(ratio.dtype)
        clipped |= beyond
    clipped &= valid
    counts = valid & (advantage != 0)
    alive = counts & ~clipped & ~(jnp.abs(held) > MAX_LOG_RATIO)
    constant = jnp.where(counts, jnp.where(clipped, bound, ratio) * advantage, 0)
    value = jnp.where(alive, jnp.exp(jnp.where(alive, log_ratio, 0)) * advantage, constant)
    return Surrogate(value, ratio, clipped)


def policy_gradient_surrogate(
    score: jax.Array, log_ratio: jax.Array, advantage: jax.Array, valid: jax.Array
) -> Surrogate:
    """The surrogate without a ratio: the log-prob of each unit times its advantage.

    Args:
        score: Floating, any shape, log q_cur summed as the unit's log-ratio is; differentiable.
        log_ratio: Of the same shape; only its ratio is reported.
        advantage: Floating, of a shape that broadcasts with it. Where it is 0 the value is 0.
        valid: Bool; units that do not count have value 0.
    """
    alive = valid & (advantage != 0)
    value = jnp.where(alive, jnp.where(alive, score, 0) * advantage, 0)
    ratio = bounded_exp(jax.lax.stop_gradient(log_ratio))
    return Surrogate(value, ratio, jnp.zeros_like(valid))


def reduce_surrogate(
    surrogate: jax.Array, layout: EventLayout, divisors: Counts, config: ObjectiveConfig
) -> jax.Array:
    """The objective J from the surrogates of its units, by ``config.loss_reduction``.

        J = sum over units of weight * surrogate, over the divisor

    For SRPO (``event``) the weight is 1 and the divisor |B|, the number of events.

    Args:
        surrogate: Floating, [E], [R] or [S, T] for the units of ``config.unit.name``.
        layout: The batch's memberships.
        divisors: Over the whole mini-batch of an optimiser step.
        config: The objective's switches.

    Returns:
        A scalar; 0, with gradient 0, where the divisor is 0.
    """
    reduction = LOSS_REDUCTIONS[config.loss_reduction]
    if reduction.gradient_over_tokens:
        tokens = config.unit.tokens(layout)
        held = jax.lax.stop_gradient(surrogate)
        surrogate = held + (surrogate - held) / jnp.maximum(tokens, 1)
    dtype = layout.k.dtype
    weight = jnp.asarray(reduction.weights[config.unit.name](layout, config), dtype)
    return ratio_of(jnp.sum(weight * surrogate), getattr(divisors, reduction.divisor), dtype)


def bounded_exp(x: jax.Array) -> jax.Array:
    """exp(x), the exponent held within +-MAX_LOG_RATIO."""
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def ratio_of(total: chex.Numeric, count: chex.Numeric, dtype: Any) -> jax.Array:
    """total / count; 0, with gradient 0, where the count is 0."""
    total, count = jnp.asarray(total, dtype), jnp.asarray(count, dtype)
    some = count > 0
    return jnp.where(some, total / jnp.where(some, count, 1), 0)


def _over_rows(x: jax.Array, token_row: jax.Array | None, num_rows: int) -> jax.Array:
    if token_row is None:
        return jnp.sum(x, axis=1)
    return jax.ops.segment_sum(x.reshape(-1), token_row.reshape(-1), num_rows + 1)[:num_rows]


def _over_events(x: jax.Array, row_event: jax.Array, num_events: int) -> jax.Array:
    # The padding id falls into a segment of its own, which is cut off.
    return jax.ops.segment_sum(x, row_event, num_events + 1)[:num_events]


def _padded_take(x: jax.Array, ids: jax.Array) -> jax.Array:
    """x[ids], 0 or False for the padding id."""
    return jnp.concatenate([x, jnp.zeros(1, x.dtype)])[ids]


def _to_tokens(x: jax.Array, token_row: jax.Array | None) -> jax.Array:
    return x[:, None] if token_row is None else _padded_take(x, token_row)
