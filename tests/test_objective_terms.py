"""The objective's parts on numbers computed by hand: log-ratios, clip, reductions, diagnostics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from srpo_jax.objective import count_skipped, setwise_objective
from srpo_jax.objective_config import (
    LOSS_REDUCTIONS,
    MEMBER_SCORES,
    LossReduction,
    ObjectiveConfig,
)
from srpo_jax.objective_terms import (
    MAX_LOG_RATIO,
    Counts,
    clipped_surrogate,
    event_layout,
    event_log_ratio,
    log_ratios,
    member_log_ratio,
    policy_gradient_surrogate,
    reduce_surrogate,
)
from srpo_jax.recipe.recipe import parse_recipe
from srpo_jax.recipe.yaml import parse_yaml
from tests.test_config import MINIMAL

# Event 0 has rows 0 to 2 of 3, 1 and 2 tokens, event 1 row 3 of 2 tokens; event 2 misses a member,
# and row 5 is padding.
MASK = np.array([[1, 1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
TOKENS = np.where(MASK, [[0.1], [0.2], [0.3], [-0.4], [9.0], [9.0]], 0.0)
BATCH = event_layout(MASK, np.array([0, 0, 0, 1, 2, 3]), np.array([3, 1, 2]))
MASKED = jnp.where(BATCH.token_valid, TOKENS, 0)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


# ---- memberships ---------------------------------------------------------------------------------


def test_only_complete_events_count():
    assert BATCH.valid.tolist() == [True, True, False]
    assert BATCH.row_valid.tolist() == [True, True, True, True, False, False]
    assert BATCH.row_tokens.tolist() == [3, 1, 2, 2, 0, 0]
    assert BATCH.event_tokens.tolist() == [6, 2, 0]
    assert [int(n) for n in BATCH.counts] == [2, 4, 8]


def test_sums_and_spreads_leave_padding_out():
    assert BATCH.over_events(jnp.array([1, 2, 3, 4, 5, 6])).tolist() == [6, 4, 5]
    assert BATCH.to_rows(jnp.array([7, 8, 9])).tolist() == [7, 7, 7, 8, 9, 0]
    packed = event_layout(
        np.ones((1, 4), bool), np.array([0, 0]), np.array([2]), token_row=np.array([[0, 1, 1, 2]])
    )
    assert packed.over_rows(jnp.array([[1, 2, 3, 4]])).tolist() == [1, 5]
    assert packed.to_tokens(jnp.array([5, 6])).tolist() == [[5, 6, 6, 0]]


# ---- log-ratios ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "score, members, slopes",
    [
        ("sum", [0.3, 0.2, 0.6, -0.8, 0, 0], [1, 1, 1, 1]),
        ("mean", [0.1, 0.2, 0.3, -0.4, 0, 0], [1 / 3, 1, 1 / 2, 1 / 2]),
    ],
)
def test_a_members_log_ratio_is_the_sum_or_mean_over_its_tokens(score, members, slopes):
    close(member_log_ratio(MASKED, BATCH, score), members)
    grad = jax.grad(lambda x: member_log_ratio(x, BATCH, score)[:4].sum())(MASKED)
    close(grad[:4], np.broadcast_to(np.array(slopes)[:, None], (4, 3)))


@pytest.mark.parametrize("reduction, scale", [("sqrt", 3**-0.5), ("sum", 1.0), ("mean", 1 / 3)])
def test_an_events_log_ratio_is_its_members_sum_times_a_function_of_k(reduction, scale):
    members = jnp.array([0.3, 0.2, 0.6, -0.8, 0.5, 0.5])
    close(event_log_ratio(members, BATCH, reduction), [1.1 * scale, -0.8, 0])
    grad = jax.grad(lambda x: event_log_ratio(x, BATCH, reduction).sum())(members)
    close(grad, [scale, scale, scale, 1, 0, 0])


def test_log_ratios_hold_all_three_units():
    ratios = log_ratios(MASKED, BATCH, ObjectiveConfig())
    close(ratios.token, MASKED)
    close(ratios.member, [0.3, 0.2, 0.6, -0.8, 0, 0])
    close(ratios.event, [1.1 / np.sqrt(3), -0.8, 0])


# ---- the surrogate of a unit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, value, slope, clipped",
    [
        (1.5, 2.0, 2.4, 0.0, True),  # 1.2 * 2
        (1.1, 2.0, 2.2, 2.2, False),
        (0.5, 2.0, 1.0, 1.0, False),
        (0.5, -2.0, -1.6, 0.0, True),  # 0.8 * -2
        (1.5, -2.0, -3.0, -3.0, False),
        (4.0, -2.0, -6.0, 0.0, True),  # the dual clip at 3
        (4.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate_and_its_gradient(ratio, advantage, value, slope, clipped):
    def surrogate(x):
        out = clipped_surrogate(x, jnp.float32(advantage), jnp.bool_(True), dual_clip=3.0)
        return out.value, out

    (got, out), grad = jax.value_and_grad(surrogate, has_aux=True)(jnp.float32(np.log(ratio)))
    close([got, grad, out.ratio], [value, slope, ratio])
    assert bool(out.clipped) == clipped


def test_bounds_of_the_clip_are_its_arguments():
    x, all_valid = jnp.log(jnp.array([0.9, 1.5])), jnp.array([True, True])
    out = clipped_surrogate(x, jnp.array([-1.0, 1.0]), all_valid, clip_low=0.05, clip_high=0.4)
    close(out.value, [-0.95, 1.4])


@pytest.mark.parametrize("log_ratio", [MAX_LOG_RATIO + 1, np.inf, -np.inf])
def test_a_ratio_out_of_range_is_held_and_has_no_gradient(log_ratio):
    def value(x):
        return clipped_surrogate(x, jnp.float32(-1), jnp.bool_(True)).value

    held = 0.8 if log_ratio < 0 else np.exp(MAX_LOG_RATIO)
    got, grad = jax.value_and_grad(value)(jnp.float32(log_ratio))
    np.testing.assert_allclose(got, -held, rtol=1e-6)
    assert float(grad) == 0.0


def test_units_that_do_not_count_are_neither_valued_nor_clipped():
    out = clipped_surrogate(jnp.array([np.inf, 9.0]), jnp.ones(2), jnp.zeros(2, bool))
    assert out.value.tolist() == [0, 0] and not out.clipped.any()


def test_a_policy_gradient_weighs_log_probs_by_advantages():
    score, advantage = jnp.array([-2.0, -3.0, np.nan]), jnp.array([0.5, -1.0, 0.0])

    def total(score):
        out = policy_gradient_surrogate(score, jnp.zeros(3), advantage, jnp.ones(3, bool))
        return out.value.sum(), out

    (value, out), grad = jax.value_and_grad(total, has_aux=True)(score)
    close([value, *grad], [-1.0 + 3.0, 0.5, -1.0, 0.0])
    assert out.ratio.tolist() == [1, 1, 1] and not out.clipped.any()


# ---- the reduction -------------------------------------------------------------------------------

EVENT, ROW = [2.0, -4.0, 0.0], [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]
OF_TOKENS = {"ratio_unit": "token"}
OF_MEMBERS = {"ratio_unit": "member"}


@pytest.mark.parametrize(
    "switches, surrogate, want",
    [
        ({"loss_reduction": "event"}, EVENT, (2 - 4) / 2),
        ({"loss_reduction": "member"}, EVENT, (3 * 2 - 4) / 4),
        ({"loss_reduction": "token"}, EVENT, (6 * 2 - 2 * 4) / 8),
        ({"loss_reduction": "token_ratio"}, EVENT, (6 * 2 - 2 * 4) / 8),
        (OF_MEMBERS | {"loss_reduction": "event"}, ROW, ((1 + 2 + 3) / 3 + 4) / 2),
        (OF_MEMBERS | {"loss_reduction": "member"}, ROW, 10 / 4),
        (OF_MEMBERS | {"loss_reduction": "token"}, ROW, (3 * 1 + 1 * 2 + 2 * 3 + 2 * 4) / 8),
        # Tokens of one row share its value here: 3, 1, 2 and 2 of them.
        (OF_TOKENS | {"loss_reduction": "event"}, ROW, ((3 + 2 + 6) / 6 + 8 / 2) / 2),
        (OF_TOKENS | {"loss_reduction": "token"}, ROW, (3 + 2 + 6 + 8) / 8),
        (OF_TOKENS | {"loss_reduction": "sequence_mean"}, ROW, 10 / 4),
        (OF_TOKENS | {"loss_reduction": "constant_length", "length": 5}, ROW, 19 / 5 / 4),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_what_weighs_one_in_the_average(switches, surrogate, want):
    config = ObjectiveConfig(**switches)
    units = jnp.array(surrogate)
    if config.unit.name == "token":
        units = jnp.where(BATCH.token_valid, units[:, None], 0)
    close(reduce_surrogate(units, BATCH, BATCH.counts, config), want)


def test_token_ratio_divides_each_events_gradient_by_its_tokens():
    def slopes(name):
        config = ObjectiveConfig(loss_reduction=name)
        return jax.grad(lambda x: reduce_surrogate(x, BATCH, BATCH.counts, config))(
            jnp.array(EVENT)
        )

    close(slopes("token"), [6 / 8, 2 / 8, 0])
    close(slopes("token_ratio"), [1 / 8, 1 / 8, 0])


def test_divisors_are_those_given_and_none_gives_zero():
    config, units = ObjectiveConfig(), jnp.array(EVENT)
    close(reduce_surrogate(units, BATCH, Counts(8, 0, 0), config), -2 / 8)
    value, grad = jax.value_and_grad(reduce_surrogate)(units, BATCH, Counts(0, 0, 0), config)
    assert float(value) == 0.0 and not grad.any()


def test_a_loss_reduction_or_a_member_score_is_one_entry_of_a_table(monkeypatch):
    """Weights K^2 over |B|, and the square of the sum: the recipe and the objective know both."""
    entry = LossReduction("events", {"event": lambda batch, config: batch.k**2})
    monkeypatch.setitem(LOSS_REDUCTIONS, "square", entry)
    monkeypatch.setitem(MEMBER_SCORES, "square", lambda total, tokens: total**2)
    changes = ["objective.loss_reduction=square", "objective.member_score=square"]
    recipe = parse_recipe(parse_yaml(MINIMAL, "minimal"), changes)
    assert parse_recipe(parse_yaml(recipe.dump(), "dump")) == recipe
    loss, metrics = setwise_objective(
        current_logp=np.array([[0.3], [0.2], [0.1]], np.float32),
        old_logp=np.zeros((3, 1), np.float32),
        loss_mask=np.ones((3, 1), bool),
        row_event=np.array([0, 0, 1]),
        event_size=np.array([2, 1]),
        event_advantage=np.array([1.0, 1.0], np.float32),
        config=recipe.objective_config(),
    )
    first, second = (0.09 + 0.04) / np.sqrt(2), 0.01
    close(metrics.log_ratio, [first, second])
    close(loss, -(4 * np.exp(first) + np.exp(second)) / 2)
    with pytest.raises(ValueError, match="does not go with ratio_unit 'token'; those that do:"):
        ObjectiveConfig(ratio_unit="token", loss_reduction="square")


# ---- diagnostics ---------------------------------------------------------------------------------


def objective(log_ratios, advantages, config):
    """Single-token events with these log-ratios."""
    count = len(log_ratios)
    return setwise_objective(
        current_logp=np.array(log_ratios, np.float32)[:, None],
        old_logp=np.zeros((count, 1), np.float32),
        loss_mask=np.ones((count, 1), bool),
        row_event=np.arange(count),
        event_size=np.ones(count, np.int32),
        event_advantage=np.array(advantages, np.float32),
        num_events=6,
        num_members=6,
        num_tokens=6,
        config=config,
    )[1]


@pytest.mark.parametrize("unit", ["event", "member", "token"])
def test_metrics_count_events_without_an_advantage(unit):
    """Ratios 1.5, 0.5 and, without an advantage, 4: only the first is clipped."""
    config = ObjectiveConfig(ratio_unit=unit, loss_reduction="event")
    log_ratios = np.log([1.5, 0.5, 4.0])
    metrics = objective(log_ratios, [1.0, 1.0, 0.0], config)
    close([metrics.ratio_mean, metrics.ratio_min, metrics.ratio_max], [2.0, 0.5, 4.0])
    close([metrics.clip_fraction, metrics.zero_advantage_fraction], [1 / 3, 1 / 3])
    close(metrics.approx_kl, np.mean(np.exp(log_ratios) - 1 - log_ratios))
    assert (int(metrics.num_events), int(metrics.live_events)) == (3, 2)


@pytest.mark.parametrize("unit, units", [("event", 3), ("member", 4), ("token", 7)])
def test_what_is_left_out_counts_as_unclipped_and_without_advantage(unit, units):
    """One event of two members and five tokens in all is left out of a call of two."""
    config = ObjectiveConfig(ratio_unit=unit, loss_reduction="event")
    call = objective(np.log([1.5, 0.5]), [1.0, 1.0], config)
    whole = count_skipped(call, Counts(1, 2, 5), config)
    assert [int(n) for n in (whole.num_events, whole.num_tokens, whole.num_units)] == [3, 7, units]
    close([whole.clip_fraction, whole.zero_advantage_fraction], [1 / units, 1 / 3])
    close(whole.mean_k, 4 / 3)
    for name in ("loss", "ratio_mean", "ratio_min", "ratio_max", "approx_kl"):
        close(getattr(whole, name), getattr(call, name))
