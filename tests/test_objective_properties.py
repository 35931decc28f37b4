"""What must hold of the objective on any batch: invariances, splits, the three-step update."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.objective import ObjectiveConfig, setwise_objective
from tests.objective_cases import compiled
from tests.objective_oracle import Ragged, packed, padded, random_events

SRPO = ObjectiveConfig()
# One preset for every way through the objective; the rest differ from these in constants only.
KINDS = ("srpo", "srpo_token_reduced", "dr_grpo", "dr_mas", "gspo", "magrpo", "reinforce")
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=10, deadline=None)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def objective(args, config=SRPO, **totals):
    """Loss, gradient and metrics as numpy."""
    return jax.device_get(compiled(**args, config=config, **totals))


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))


@few
@given(SEEDS)
def test_single_member_events_are_a_sequence_level_clipped_ratio(seed):
    events = random_events(np.random.default_rng(seed), sizes=[1] * 6)
    args = padded(events)
    old, mask = args["old_logp"][:6], args["loss_mask"][:6]
    advantage = np.array([e.advantage for e in events])
    results = [
        objective(args, ObjectiveConfig(set_reduction=reduction))
        for reduction in ("sqrt", "sum", "mean")
    ]

    def sequence_level(current):
        gap = jnp.where(mask, current - old, 0.0)
        ratio = jnp.exp(jnp.sum(gap, axis=1))
        return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))

    loss, grad = jax.value_and_grad(sequence_level)(jnp.asarray(args["current_logp"][:6]))
    for value, got, _ in results:
        np.testing.assert_allclose(value, loss, rtol=1e-12)
        np.testing.assert_allclose(got[:6], grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("preset", KINDS)
@few
@given(SEEDS)
def test_order_and_padding_do_not_matter(preset, seed):
    config = ObjectiveConfig.preset(preset)
    rng = np.random.default_rng(seed)
    events = random_events(rng)
    args = padded(events)
    loss, grad, _ = objective(args, config)
    rows, slots = rng.permutation(16), rng.permutation(8)
    moved = {name: args[name][rows] for name in ("current_logp", "old_logp", "loss_mask")}
    place = np.argsort(slots)  # where each event slot went
    moved["row_event"] = np.append(place, 8)[args["row_event"][rows]]
    moved |= {name: args[name][slots] for name in ("event_size", "event_advantage")}
    other, moved_grad, _ = objective(moved, config)
    np.testing.assert_allclose(other, loss, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(moved_grad, grad[rows], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("preset", KINDS)
def test_more_padding_and_the_packed_layout_change_nothing(preset):
    config = ObjectiveConfig.preset(preset)
    events = random_events(np.random.default_rng(11))
    tight = padded(events, rows=11, width=6, slots=5)
    loss, grad, _ = objective(tight, config)
    expected = grad[tight["loss_mask"]]
    for args in (padded(events), packed(events)):
        other, other_grad, _ = objective(args, config)
        np.testing.assert_allclose(other, loss, rtol=1e-12)
        np.testing.assert_allclose(other_grad[args["loss_mask"]], expected, rtol=1e-11, atol=1e-15)
        assert np.all(other_grad[~args["loss_mask"]] == 0.0)


@few
@given(SEEDS)
def test_at_the_behaviour_policy_the_value_is_the_mean_advantage_and_the_gradient_lives(seed):
    events = random_events(np.random.default_rng(seed))
    for event in events:
        event.current = [x.copy() for x in event.old]
    args = padded(events)
    loss, grad, metrics = objective(args)
    np.testing.assert_array_equal(metrics.ratio[:5], np.ones(5))
    np.testing.assert_allclose(-loss, np.mean([e.advantage for e in events]), rtol=1e-12)
    weight = np.repeat([-e.advantage / np.sqrt(e.k) / 5 for e in events], [e.k for e in events])
    expected = np.where(args["loss_mask"][:11], weight[:, None], 0.0)
    np.testing.assert_allclose(grad[:11], expected, rtol=1e-12)


@few
@given(SEEDS)
def test_a_clipped_event_gives_no_gradient_to_any_member(seed):
    events = random_events(np.random.default_rng(seed), spread=0.4)
    args = padded(events)
    _, grad, metrics = objective(args)
    for e, event in enumerate(events):
        rows = grad[args["row_event"] == e]
        log_ratio = sum(gap.sum() for gap in event.gaps()) / np.sqrt(event.k)
        ratio, a = np.exp(log_ratio), event.advantage
        clipped = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        assert bool(metrics.clipped[e]) == clipped
        if clipped or a == 0:
            assert np.all(rows == 0.0)
        else:
            assert np.all(np.any(rows != 0.0, axis=1))


@pytest.mark.parametrize("preset", KINDS)
@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3, 4]])
def test_any_split_into_micro_batches_gives_the_full_gradient(preset, cuts):
    config = ObjectiveConfig.preset(preset, kl_coef=0.05, kl_estimator="k2")
    events = random_events(np.random.default_rng(5))

    def with_reference(args):
        return {**args, "reference_logp": np.where(args["loss_mask"], -1.0, np.nan)}

    full = with_reference(padded(events))
    loss, grad, _ = objective(full, config)
    totals = {
        "num_events": 5,
        "num_members": sum(e.k for e in events),
        "num_tokens": sum(e.tokens for e in events),
    }
    losses, grads = 0.0, []
    bounds = [0, *cuts, 5]
    for start, end in pairwise(bounds):
        args = with_reference(padded(events[start:end]))
        part, part_grad, _ = objective(args, config, **totals)
        losses += part
        grads.append(part_grad[args["loss_mask"]])
    np.testing.assert_allclose(losses, loss, rtol=1e-12)
    assert relative(np.concatenate(grads), grad[full["loss_mask"]]) < 1e-12


def test_removing_a_member_drops_its_event_and_lowers_the_count_by_one():
    events = random_events(np.random.default_rng(2))
    args = padded(events)
    shrunk = {**args, "row_event": args["row_event"].copy()}
    shrunk["row_event"][1] = 8  # one of the three members of event 0
    loss, grad, metrics = objective(shrunk)
    rest, rest_grad, _ = objective(padded(events[1:]))
    assert int(metrics.num_events) == 4
    np.testing.assert_allclose(loss, rest, rtol=1e-12)
    assert np.all(grad[:3] == 0.0)
    np.testing.assert_allclose(grad[3:11], rest_grad[:8], rtol=1e-12)


def linear_softmax(rng, rows, width, features=6, vocab=9):
    """A toy policy: (parameters, log-prob function of them, one old log-prob array)."""
    inputs = rng.normal(size=(rows, width, features))
    tokens = rng.integers(0, vocab, (rows, width))
    weights = rng.normal(size=(features, vocab)) * 0.3

    def logps(weights):
        scores = jax.nn.log_softmax(jnp.asarray(inputs) @ weights)
        return jnp.take_along_axis(scores, tokens[..., None], -1)[..., 0]

    moved = weights + rng.normal(size=weights.shape) * 0.05
    return jnp.asarray(moved), logps, logps(weights)


@pytest.mark.parametrize("preset", KINDS)
def test_three_step_update_equals_one_autograd(preset):
    config = ObjectiveConfig.preset(preset)
    args = padded(random_events(np.random.default_rng(4)))
    weights, logps, old = linear_softmax(np.random.default_rng(9), 16, 7)

    def loss_of(logp):
        rest = [args[n] for n in ("loss_mask", "row_event", "event_size", "event_advantage")]
        return setwise_objective(logp, old, *rest, config=config)[0]

    whole = jax.grad(lambda w: loss_of(logps(w)))(weights)
    token_weights = jax.grad(loss_of)(logps(weights))
    part_gradient = jax.grad(lambda w, part: jnp.sum(token_weights[part] * logps(w)[part]))
    steps = jnp.zeros_like(weights)
    for part in np.split(np.arange(16), 4):  # rows of one event fall into different parts
        steps += part_gradient(weights, part)
    assert np.linalg.norm(whole) > 0
    assert relative(steps, whole) < 1e-12


@pytest.mark.parametrize("preset", KINDS)
def test_three_step_update_for_two_models_that_share_events(preset):
    config = ObjectiveConfig.preset(preset)
    args = padded(random_events(np.random.default_rng(4)))
    first, first_logps, first_old = linear_softmax(np.random.default_rng(1), 16, 7)
    second, second_logps, second_old = linear_softmax(np.random.default_rng(2), 16, 7, features=3)
    owner = (np.arange(16) % 2 == 0)[:, None]  # alternate rows: every event of K > 1 is shared
    old = jnp.where(owner, first_old, second_old)

    def loss_of(logp):
        rest = [args[n] for n in ("loss_mask", "row_event", "event_size", "event_advantage")]
        return setwise_objective(logp, old, *rest, config=config)[0]

    def joined(a, b):
        return jnp.where(owner, first_logps(a), second_logps(b))

    whole = jax.grad(lambda a, b: loss_of(joined(a, b)), argnums=(0, 1))(first, second)
    token_weights = jax.grad(loss_of)(joined(first, second))
    alone = (
        jax.grad(lambda a: jnp.sum(jnp.where(owner, token_weights, 0) * first_logps(a)))(first),
        jax.grad(lambda b: jnp.sum(jnp.where(owner, 0, token_weights) * second_logps(b)))(second),
    )
    for got, expected in zip(alone, whole, strict=True):
        assert np.linalg.norm(expected) > 0
        assert relative(got, expected) < 1e-12


def test_one_clip_joins_members_of_both_models():
    # Member 0 alone would be inside the clip; its partner moves the event out of it.
    event = Ragged(1.0, [np.array([-0.95]), np.array([-0.5])], [np.array([-1.0]), np.array([-1.0])])
    _, grad, metrics = objective(padded([event]))
    assert bool(metrics.clipped[0])
    assert np.all(grad == 0.0)


@pytest.mark.parametrize("reduction, power", [("sqrt", 0), ("sum", 1), ("mean", -1)])
def test_variance_of_the_event_log_ratio_over_independent_members(reduction, power):
    rng, rows, deviation = np.random.default_rng(0), 16000, 0.1
    args = {
        "current_logp": rng.normal(0.0, deviation, (rows, 1)),
        "old_logp": np.zeros((rows, 1)),
        "loss_mask": np.ones((rows, 1), bool),
        "event_advantage": np.ones(rows),
    }
    for k in (1, 2, 4, 8):
        count = rows // k
        args["row_event"] = np.repeat(np.arange(count), k)
        args["event_size"] = np.where(np.arange(rows) < count, k, 0)
        *_, metrics = objective(args, ObjectiveConfig(set_reduction=reduction))
        variance = np.var(metrics.log_ratio[:count])
        np.testing.assert_allclose(variance, deviation**2 * k**power, rtol=0.12)
