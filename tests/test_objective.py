"""The objective on hand-computed cases: values, gradients, masking, numerics, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from srpo_jax.objective import MAX_LOG_RATIO, ObjectiveConfig, setwise_objective
from srpo_jax.objective_config import KL_ESTIMATORS, PRESETS, SET_REDUCTIONS
from srpo_jax.recipe.recipe import parse_recipe
from srpo_jax.recipe.yaml import parse_yaml
from tests.objective_cases import compiled
from tests.objective_oracle import (
    OTHER_ORACLES,
    PRESET_ORACLES,
    Ragged,
    gradient,
    padded,
    random_events,
)
from tests.recipe_cases import MINIMAL

SRPO = ObjectiveConfig()


# Small cases are padded to one shape, so that each config compiles once: argument -> (shape, fill).
ROWS, WIDTH, SLOTS = 6, 11, 4
PADDING = {
    **dict.fromkeys(("current_logp", "old_logp", "reference_logp"), ((ROWS, WIDTH), np.nan)),
    "entropy": ((ROWS, WIDTH), np.nan),
    "loss_mask": ((ROWS, WIDTH), 0),
    "row_event": ((ROWS,), SLOTS),
    "row_advantage": ((ROWS,), np.nan),
    "event_size": ((SLOTS,), 0),
    "event_advantage": ((SLOTS,), np.nan),
    "event_valid": ((SLOTS,), False),
}


def run(**args):
    """Loss, gradient and metrics as numpy, of the case padded and cut back."""
    rows, width = args["current_logp"].shape
    slots = len(args["event_size"])
    for name, (shape, fill) in PADDING.items():
        if args.get(name) is not None:
            given = np.asarray(args[name])
            args[name] = np.full(shape, fill, given.dtype)
            args[name][tuple(map(slice, given.shape))] = given
    loss, grad, metrics = jax.device_get(compiled(**args))
    per_event = {name: getattr(metrics, name)[:slots] for name in ("log_ratio", "ratio", "clipped")}
    return loss, grad[:rows, :width], metrics._replace(**per_event)


def rows_of(log_ratios, mask=None, sizes=None, advantages=None, dtype=np.float32):
    """Arguments for given token log-ratios [R, T] (old log-probs 0)."""
    current = np.asarray(log_ratios, dtype)
    sizes = [1] * len(current) if sizes is None else sizes
    return {
        "current_logp": current,
        "old_logp": np.zeros_like(current),
        "loss_mask": np.ones(current.shape, bool) if mask is None else np.asarray(mask, bool),
        "row_event": np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
        "event_size": np.asarray(sizes, np.int32),
        "event_advantage": np.asarray(advantages, dtype),
    }


TWO_MEMBERS = {
    "log_ratios": [[0.1, -0.2, 0.3], [0.05, 0.05, 99.0]],
    "mask": [[1, 1, 1], [1, 1, 0]],
    "sizes": [2],
}


def test_event_ratio_is_the_exponential_of_the_masked_sum_over_root_k():
    loss, grad, metrics = run(**rows_of(**TWO_MEMBERS, advantages=[1.0]), config=SRPO)
    np.testing.assert_allclose(metrics.log_ratio, [0.21213203435596423], rtol=1e-6)
    np.testing.assert_allclose(metrics.ratio, [1.2363111098437876], rtol=1e-6)
    np.testing.assert_allclose(loss, -1.2, rtol=1e-6)
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))
    assert metrics.clipped.tolist() == [True]

    loss, grad, metrics = run(**rows_of(**TWO_MEMBERS, advantages=[-1.0]), config=SRPO)
    np.testing.assert_allclose(loss, 1.2363111098437876, rtol=1e-6)
    weight = 1.2363111098437876 / np.sqrt(2)
    np.testing.assert_allclose(grad, weight * np.array([[1, 1, 1], [1, 1, 0]]), rtol=1e-6)
    assert metrics.clipped.tolist() == [False]


def test_other_reductions_give_the_values_known_as_mistakes():
    args = rows_of(**TWO_MEMBERS, advantages=[-1.0])
    wrong = {
        ObjectiveConfig(set_reduction="sum"): 1.3498588075760032,
        ObjectiveConfig(set_reduction="mean"): 1.161834242728283,
        ObjectiveConfig(member_score="mean"): 1.0859941026305944,
        ObjectiveConfig(ratio_unit="member", loss_reduction="member"): 1.1632868381179087,
    }
    for config, value in wrong.items():
        np.testing.assert_allclose(run(**args, config=config)[0], value, rtol=1e-6)


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope, clipped",
    [
        (1.5, 1, -1.2, 0.0, True),
        (0.5, 1, -0.5, -0.5, False),
        (1.5, -1, 1.5, 1.5, False),
        (0.5, -1, 0.8, 0.0, True),
    ],
)
def test_clip_quadrants(ratio, advantage, loss, slope, clipped):
    args = rows_of([[np.log(ratio)]], advantages=[advantage])
    value, grad, metrics = run(**args, config=SRPO)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(grad, [[slope]], rtol=1e-6)
    assert metrics.clipped.tolist() == [clipped]
    assert float(metrics.clip_fraction) == float(clipped)


def test_clip_fraction_counts_active_rows_only():
    log_ratios = np.log([[1.5], [0.5], [1.5], [0.5]])
    *_, metrics = run(**rows_of(log_ratios, advantages=[1, 1, -1, -1]), config=SRPO)
    assert metrics.clipped.tolist() == [True, False, False, True]
    assert float(metrics.clip_fraction) == 0.5
    np.testing.assert_allclose(
        [metrics.ratio_min, metrics.ratio_mean, metrics.ratio_max], [0.5, 1.0, 1.5], rtol=1e-6
    )


def test_first_step_has_value_zero_and_a_gradient():
    args = rows_of([[0.0], [0.0], [0.0]], sizes=[2, 1], advantages=[1.0, -1.0])
    loss, grad, _ = run(**args, config=SRPO)
    assert float(loss) == 0.0
    np.testing.assert_allclose(grad[:, 0], [-0.35355339, -0.35355339, 0.5], rtol=1e-6)


def test_mean_is_over_events_not_rows_or_tokens():
    mask = np.zeros((4, 10), bool)
    mask[:3], mask[3, :2] = True, True
    args = rows_of(np.zeros((4, 10)), mask=mask, sizes=[3, 1], advantages=[1.0, -2.0])
    loss, grad, metrics = run(**args, config=SRPO)
    assert float(loss) == 0.5
    np.testing.assert_allclose(grad[0, 0], -0.5 / np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(grad[3], [1.0, 1.0] + [0.0] * 8, rtol=1e-6)
    assert (int(metrics.num_events), int(metrics.num_tokens)) == (2, 32)
    assert float(metrics.mean_k) == 2.0
    by_member = ObjectiveConfig(loss_reduction="member")
    by_token = ObjectiveConfig(loss_reduction="token")
    assert float(run(**args, config=by_member)[0]) == -0.25
    assert float(run(**args, config=by_token)[0]) == -0.8125


@pytest.mark.parametrize("parts", [[4], [3, 1], [2, 2], [1, 1, 1, 1]])
def test_micro_batches_with_the_global_divisor_add_up(parts):
    advantages = np.array([-1.0, -2.0, -3.0, -10.0], np.float32)
    losses, grads = [], []
    for part in np.split(np.arange(4), np.cumsum(parts)[:-1]):
        args = rows_of(np.zeros((len(part), 1)), advantages=advantages[part])
        loss, grad, _ = run(**args, config=SRPO, num_events=4)
        losses.append(float(loss))
        grads.append(grad)
    assert sum(losses) == 4.0
    np.testing.assert_allclose(np.concatenate(grads)[:, 0], -advantages / 4, rtol=1e-6)


@pytest.mark.parametrize("preset", ["srpo", "grpo", "gspo"])
def test_overflowing_ratio_behind_a_clip_has_zero_gradient(preset):
    config = ObjectiveConfig.preset(preset)
    loss, grad, metrics = run(**rows_of([[200.0]], advantages=[1.0]), config=config)
    np.testing.assert_allclose(loss, -(1 + config.clip_high), rtol=1e-6)
    assert grad.tolist() == [[0.0]]
    assert int(metrics.clamped_events) == 1
    assert all(np.isfinite(x).all() for x in metrics)

    loss, grad, _ = run(**rows_of([[-200.0]], advantages=[1.0]), config=config)
    assert abs(float(loss)) < 1e-8 and abs(float(grad[0, 0])) < 1e-8


def test_beyond_the_limit_the_exponent_is_held_and_counted():
    inside, outside = MAX_LOG_RATIO - 0.5, MAX_LOG_RATIO + 0.5
    args = rows_of([[inside], [outside], [np.inf]], advantages=[-1.0, -1.0, -1.0])
    loss, grad, metrics = run(**args, config=SRPO)
    top = np.exp(MAX_LOG_RATIO)
    np.testing.assert_allclose(loss, (np.exp(inside) + 2 * top) / 3, rtol=1e-5)
    np.testing.assert_allclose(grad[:, 0], [np.exp(inside) / 3, 0.0, 0.0], rtol=1e-5)
    assert int(metrics.clamped_events) == 2


@pytest.mark.parametrize("log_ratio", [0.0, 1.0, 1e4, np.inf, np.nan])
@pytest.mark.parametrize("preset", ["srpo", "grpo", "gspo", "dr_mas", "magrpo"])
def test_zero_advantage_contributes_exactly_nothing(log_ratio, preset):
    args = rows_of([[log_ratio], [0.1]], advantages=[0.0, 1.0])
    loss, grad, metrics = run(**args, config=ObjectiveConfig.preset(preset))
    alone = rows_of([[0.0], [0.1]], advantages=[0.0, 1.0])
    assert float(loss) == float(run(**alone, config=ObjectiveConfig.preset(preset))[0]) != 0.0
    assert grad[0].tolist() == [0.0]
    assert float(metrics.zero_advantage_fraction) == 0.5


@pytest.mark.parametrize("preset", ["srpo", "dr_grpo", "gspo", "magrpo", "reinforce", "with_kl"])
def test_masked_positions_have_no_effect_at_all(preset):
    config = (
        ObjectiveConfig(kl_coef=0.1, entropy_coef=0.1)
        if preset == "with_kl"
        else ObjectiveConfig.preset(preset)
    )
    base = rows_of(**TWO_MEMBERS, advantages=[-1.0])
    results = []
    for fill in (0.0, 1e4, -1e4, np.nan, np.inf):
        args = {name: value.copy() for name, value in base.items()}
        extra = {name: np.full((2, 3), 0.3, np.float32) for name in ("reference_logp", "entropy")}
        for name in ("current_logp", "old_logp"):
            args[name][1, 2] = fill
        for value in extra.values():
            value[1, 2] = fill
        loss, grad, metrics = run(**args, **extra, config=config)
        assert np.isfinite(grad).all() and float(grad[1, 2]) == 0.0
        results.append(jax.tree.map(np.asarray, (loss, grad, metrics)))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_masked_positions_have_no_effect_without_the_compilers_help(fill):
    # XLA turns a product with a mask into a select: op by op the product would keep the NaN.
    args = rows_of(**TWO_MEMBERS, advantages=[-1.0])
    for name in ("current_logp", "old_logp"):
        args[name][1, 2] = fill
    current = args.pop("current_logp")
    with jax.disable_jit():
        value, grad = jax.value_and_grad(lambda x: setwise_objective(x, **args)[0])(current)
    np.testing.assert_allclose(value, 1.2363111098437876, rtol=1e-6)
    assert np.isfinite(grad).all() and float(grad[1, 2]) == 0.0


@pytest.mark.parametrize("preset", ["srpo", "srpo_token_reduced", "grpo", "gspo", "magrpo"])
def test_a_batch_without_complete_events_is_zero_and_finite(preset):
    args = rows_of([[np.nan], [3.0]], advantages=[np.nan, 1.0])
    loss, grad, metrics = run(
        **args, event_valid=np.zeros(2, bool), config=ObjectiveConfig.preset(preset)
    )
    assert float(loss) == 0.0 and grad.tolist() == [[0.0], [0.0]]
    assert all(np.isfinite(x).all() for x in metrics)
    assert (int(metrics.num_events), int(metrics.num_tokens)) == (0, 0)
    assert float(metrics.ratio_min) == float(metrics.ratio_max) == 1.0


def test_a_global_divisor_of_zero_gives_zero():
    args = rows_of([[0.3]], advantages=[1.0])
    loss, grad, _ = run(**args, num_events=0, config=SRPO)
    assert float(loss) == 0.0 and grad.tolist() == [[0.0]]


def test_observations_carry_no_loss_and_generated_tokens_do():
    # prompt 3, generated 2, observation 4, generated 2
    mask = np.repeat([0, 1, 0, 1], [3, 2, 4, 2]).astype(bool)[None]
    base = rows_of(np.zeros((1, 11)), mask=mask, advantages=[1.0])
    changed = []
    for t in range(11):
        args = {**base, "current_logp": base["current_logp"].copy()}
        args["current_logp"][0, t] += 0.7
        *_, metrics = run(**args, config=SRPO)
        if float(metrics.log_ratio[0]) != 0.0:
            np.testing.assert_allclose(metrics.log_ratio[0], 0.7, rtol=1e-6)
            changed.append(t)
    assert changed == [3, 4, 9, 10]


def test_an_event_with_a_missing_member_leaves_numerator_and_denominator():
    args = rows_of(np.zeros((5, 1)), sizes=[2, 1, 2], advantages=[-1.0, -3.0, -100.0])
    args["event_size"] = np.array([2, 1, 3], np.int32)
    for valid in (None, np.array([True, True, False])):
        loss, grad, metrics = run(**args, event_valid=valid, config=SRPO)
        assert float(loss) == 2.0
        assert int(metrics.num_events) == 2
        assert grad[3:, 0].tolist() == [0.0, 0.0]
        np.testing.assert_allclose(grad[:3, 0], [0.5 / 2**0.5, 0.5 / 2**0.5, 1.5], rtol=1e-6)


def test_dual_clip_bounds_the_ratio_of_negative_advantages():
    config = ObjectiveConfig(dual_clip=3.0)
    args = rows_of(np.log([[2.9], [3.1], [3.1]]), advantages=[-1.0, -1.0, 1.0])
    loss, grad, metrics = run(**args, config=config)
    np.testing.assert_allclose(loss, (2.9 + 3.0 - 1.2) / 3, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [2.9 / 3, 0.0, 0.0], rtol=1e-6)
    assert metrics.clipped.tolist() == [False, True, True]


@pytest.mark.parametrize(
    "estimator, value, slope, slope_at_0",
    [
        ("k2", 0.125, 0.5, 0.0),
        ("k3", np.exp(-0.5) - 0.5, 1 - np.exp(-0.5), 0.0),
    ],
)
def test_kl_is_averaged_over_generated_tokens(estimator, value, slope, slope_at_0):
    args = rows_of(np.zeros((2, 2)), mask=[[1, 1], [1, 0]], advantages=[0.0, 0.0])
    config = ObjectiveConfig(kl_coef=0.1, kl_estimator=estimator)
    reference = np.array([[-0.5, 0.0], [0.0, 7.0]], np.float32)
    loss, grad, metrics = run(**args, reference_logp=reference, config=config)
    np.testing.assert_allclose(loss, 0.1 * value / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics.kl, value / 3, rtol=1e-5)
    slopes = np.array([[slope, slope_at_0], [slope_at_0, 0.0]])
    np.testing.assert_allclose(grad, 0.1 / 3 * slopes, rtol=1e-5, atol=1e-8)
    divided = run(**args, reference_logp=reference, num_tokens=6, config=config)[0]
    np.testing.assert_allclose(divided, 0.1 * value / 6, rtol=1e-5)


def test_the_k1_estimator_is_a_value_to_watch_and_no_penalty():
    args = rows_of(np.zeros((1, 2)), advantages=[0.0])
    reference = np.array([[-0.5, 0.25]], np.float32)
    config = ObjectiveConfig(kl_estimator="k1")
    loss, grad, metrics = run(**args, reference_logp=reference, config=config)
    assert float(loss) == 0 and not grad.any() and float(metrics.kl) == 0.125


def test_entropy_bonus_lowers_the_loss_and_has_its_own_gradient():
    args = rows_of(np.zeros((1, 3)), mask=[[1, 1, 0]], advantages=[0.0])
    config = ObjectiveConfig(entropy_coef=0.5)
    entropy = jnp.array([[1.0, 2.0, 9.0]])
    loss, grad = jax.jit(
        jax.value_and_grad(lambda h: setwise_objective(**args, entropy=h, config=config)[0])
    )(entropy)
    assert float(loss) == -0.75
    assert grad.tolist() == [[-0.25, -0.25, 0.0]]


def test_approx_kl_is_k3_over_generated_tokens():
    args = rows_of([[0.5, 9.0], [-0.5, 0.0]], mask=[[1, 0], [1, 1]], advantages=[1.0, 1.0])
    *_, metrics = run(**args, config=SRPO)
    expected = (np.exp(0.5) - 1.5 + np.exp(-0.5) - 0.5) / 3
    np.testing.assert_allclose(metrics.approx_kl, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "switches, oracle",
    [*PRESET_ORACLES.items(), *OTHER_ORACLES],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_value_and_gradient_against_the_oracle(switches, oracle):
    if isinstance(switches, str):
        config = ObjectiveConfig.preset(switches)
    else:
        config = ObjectiveConfig(**switches)
    events = random_events(np.random.default_rng(7), spread=0.3)
    args = padded(events)
    with jax.enable_x64(True):
        loss, grad, metrics = jax.device_get(compiled(**args, config=config))
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, oracle(events), rtol=1e-12)
    expected = np.concatenate(gradient(oracle, events))
    np.testing.assert_allclose(grad[args["loss_mask"]], expected, rtol=1e-6, atol=1e-10)
    assert np.linalg.norm(expected) > 0 and np.all(grad[~args["loss_mask"]] == 0.0)
    assert metrics.clipped.dtype == np.bool_ and metrics.log_ratio.shape == (8,)


def test_every_preset_has_an_oracle():
    assert set(PRESET_ORACLES) == set(PRESETS)


def test_token_ratio_has_the_value_of_token_and_each_events_gradient_over_its_tokens():
    events = random_events(np.random.default_rng(3), spread=0.1)
    args = padded(events)
    with jax.enable_x64(True):
        by_token, by_ratio = (
            jax.device_get(compiled(**args, config=ObjectiveConfig(loss_reduction=reduction)))
            for reduction in ("token", "token_ratio")
        )
    np.testing.assert_allclose(by_ratio[0], by_token[0], rtol=1e-14)
    tokens = np.repeat([e.tokens for e in events], [e.k for e in events])[:, None]
    count = len(tokens)
    assert np.linalg.norm(by_ratio[1]) > 0
    np.testing.assert_allclose(by_ratio[1][:count], by_token[1][:count] / tokens, rtol=1e-12)


def test_row_advantages_replace_those_of_the_event():
    args = rows_of(np.zeros((3, 2)), sizes=[2, 1], advantages=[5.0, 5.0])
    row_advantage = np.array([1.0, -2.0, 0.5], np.float32)
    config = ObjectiveConfig.preset("dr_mas")
    loss, grad, metrics = run(**args, row_advantage=row_advantage, config=config)
    np.testing.assert_allclose(loss, 1.0 / 6, rtol=1e-6)
    np.testing.assert_allclose(grad, np.outer(-row_advantage / 6, [1, 1]), rtol=1e-6)
    assert float(metrics.zero_advantage_fraction) == 0.0
    with pytest.raises(ValueError, match="share one advantage"):
        run(**args, row_advantage=row_advantage, config=SRPO)


def test_low_precision_inputs_are_computed_in_float32():
    args = rows_of([[0.1, 0.2]], advantages=[1.0])
    for name in ("current_logp", "old_logp"):
        args[name] = jnp.asarray(args[name], jnp.bfloat16)
    loss, grad, _ = run(**args, config=SRPO)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16


def test_integer_masks_count_as_masks():
    args = rows_of(**TWO_MEMBERS, advantages=[-1.0])
    by_bool = run(**args, config=SRPO)[1]
    args["loss_mask"] = args["loss_mask"].astype(np.int32)
    np.testing.assert_array_equal(run(**args, config=SRPO)[1], by_bool)


@pytest.mark.parametrize(
    "name, bad",
    [
        ("old_logp", np.zeros((2, 4), np.float32)),
        ("current_logp", np.zeros((2,), np.float32)),
        ("current_logp", np.zeros((2, 3), np.int32)),
        ("loss_mask", np.ones((3, 2), bool)),
        ("loss_mask", np.ones((2, 3), np.float32)),
        ("row_event", np.zeros(3, np.int32)),
        ("row_event", np.zeros(2, np.float32)),
        ("event_size", np.array([[2]], np.int32)),
        ("event_advantage", np.zeros(2, np.float32)),
        ("event_valid", np.ones(2, bool)),
        ("event_valid", np.ones(1, np.int32)),
        ("token_row", np.zeros((2, 2), np.int32)),
        ("reference_logp", np.zeros((3, 3), np.float32)),
        ("entropy", np.zeros((2, 2), np.float32)),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(name, bad):
    args = rows_of(**TWO_MEMBERS, advantages=[1.0])
    with pytest.raises(AssertionError):
        setwise_objective(**{**args, name: bad})


def test_missing_arguments_are_named():
    args = rows_of(**TWO_MEMBERS, advantages=[1.0])
    with pytest.raises(ValueError, match="reference_logp"):
        setwise_objective(**args, config=ObjectiveConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="entropy"):
        setwise_objective(**args, config=ObjectiveConfig(entropy_coef=0.1))


@pytest.mark.parametrize(
    "switches, hint",
    [
        ({"ratio_unit": "events"}, "did you mean 'event'"),
        (
            {"ratio_unit": "token", "loss_reduction": "member"},
            "event, token, sequence_mean, constant_length",
        ),
        ({"loss_reduction": "sequence_mean"}, "event, member, token, token_ratio"),
        ({"ratio_unit": "member", "loss_reduction": "member", "set_reduction": "sum"}, "'sqrt'"),
        ({"ratio_unit": "token", "loss_reduction": "token", "member_score": "mean"}, "'sum'"),
        ({"length": 100}, "constant_length"),
        ({"ratio_unit": "token", "loss_reduction": "constant_length", "length": 0}, "at least 1"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "more than 1"),
        ({"ratio_unit": "none", "dual_clip": 3.0}, "dual_clip"),
        ({"kl_coef": float("nan")}, "kl_coef"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "'k1' is no penalty"),
        ({"ratio_unit": "none", "clip_low": 0.1}, "bound a ratio"),
        ({"ratio_unit": "none", "clip_high": 0.3}, "bound a ratio"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(switches, hint):
    with pytest.raises(ValueError, match=hint):
        ObjectiveConfig(**switches)


def test_presets_take_overrides_and_name_the_nearest():
    assert ObjectiveConfig.preset("srpo", clip_high=0.3) == ObjectiveConfig(clip_high=0.3)
    assert ObjectiveConfig.preset("dr_grpo", length=800).length == 800
    with pytest.raises(ValueError, match="did you mean 'srpo_sum'"):
        ObjectiveConfig.preset("srpo_summ")
    with pytest.raises(ValueError, match="did you mean 'clip_low'"):
        ObjectiveConfig.preset("srpo", clip_lo=0.1)


def test_an_empty_response_counts_as_a_member():
    events = [Ragged(-1.0, [np.array([-1.0, -1.2])], [np.array([-1.0, -1.0])])]
    args = padded(events, rows=2, width=3, slots=1)
    args["row_event"][:] = 0
    args["event_size"][:] = 2
    loss, *_ = run(**args, config=SRPO)
    np.testing.assert_allclose(loss, np.exp(-0.2 / np.sqrt(2)), rtol=1e-6)


def test_a_set_reduction_or_a_kl_estimator_is_one_entry_of_a_table(monkeypatch):
    """Two members with log-ratios 0.1 and 0.3: their sum over K^2 is 0.1. The recipe knows it."""
    monkeypatch.setitem(SET_REDUCTIONS, "square", lambda k: k**-2.0)
    monkeypatch.setitem(KL_ESTIMATORS, "abs", lambda d, exp: abs(d))
    content = parse_yaml(MINIMAL, "minimal")
    changes = ["objective.set_reduction=square", "objective.kl_estimator=abs"]
    recipe = parse_recipe(content, [*changes, "objective.kl_coef=0.5"])
    config = recipe.objective_config()
    assert (config.set_reduction, config.kl_estimator) == ("square", "abs")
    assert parse_recipe(parse_yaml(recipe.dump(), "dump")) == recipe
    loss, _, metrics = run(
        current_logp=np.array([[0.1], [0.3]], np.float32),
        old_logp=np.zeros((2, 1), np.float32),
        reference_logp=np.array([[0.3], [0.3]], np.float32),
        loss_mask=np.ones((2, 1), bool),
        row_event=np.array([0, 0]),
        event_size=np.array([2]),
        event_advantage=np.array([1.0], np.float32),
        config=config,
    )
    np.testing.assert_allclose(metrics.log_ratio, [0.1], rtol=1e-6)
    np.testing.assert_allclose(metrics.kl, 0.1, rtol=1e-6)
    np.testing.assert_allclose(loss, -np.exp(0.1) + 0.5 * 0.1, rtol=1e-6)
