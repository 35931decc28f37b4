"""Advantages: group statistics by hand, event records, presets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.advantage import (
    AdvantageConfig,
    event_advantages,
    event_return,
    group_advantages,
    row_advantages,
)
from srpo_jax.events import Event, Member
from srpo_jax.objective_config import PRESETS, ObjectiveConfig


def event(reward, roles=("solver",), *, missing=0, malformed=(), **fields):
    """An event record; ``missing`` of its last members are not there."""
    fields = {"episode": "e0", "task": "t0", "type": "solve", "turn": 0, **fields}
    members = tuple(
        Member(
            role, "policy", 0, [1], [2], np.zeros(1, np.float32),
            well_formed=i not in malformed, index=i,
        )
        for i, role in enumerate(roles[: len(roles) - missing])
    )  # fmt: skip
    return Event(
        id="e", state_id="s", expected=len(roles), members=members, reward=reward, **fields
    )


def test_eq_6_by_hand():
    got = group_advantages([1.0, 0.0, 0.0, 1.0, 3.0, 1.0], list("aaaabb"))
    half = 0.5 / (0.5 + 1e-6)
    one = 1.0 / (1.0 + 1e-6)
    np.testing.assert_allclose(got, [half, -half, -half, half, one, -one], rtol=1e-12)


def test_sample_std_and_centring_only():
    returns, groups = [1.0, 0.0, 0.0, 3.0], ["a"] * 4  # mean 1, squares 0 + 1 + 1 + 4
    sample = group_advantages(returns, groups, std="sample")
    np.testing.assert_allclose(sample, np.array([0, -1, -1, 2]) / (2**0.5 + 1e-6), rtol=1e-12)
    population = group_advantages(returns, groups)
    np.testing.assert_allclose(population, np.array([0, -1, -1, 2]) / (1.5**0.5 + 1e-6), rtol=1e-12)
    assert group_advantages(returns, groups, scale="none").tolist() == [0.0, -1.0, -1.0, 2.0]


@pytest.mark.parametrize("value, count", [(0.7, 10), (0.35, 7), (0.3, 6), (1.0, 4), (0.0, 5)])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_returns_give_exactly_zero(value, count, scale, dtype):
    got = group_advantages(np.full(count, value, dtype), ["g"] * count, scale=scale)
    assert got.dtype == dtype
    assert got.tolist() == [0.0] * count


def test_a_return_alone_in_its_group_gets_zero_or_stays():
    assert group_advantages([1.0, 0.0, 1.0], [0, 1, 2]).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages([1.0, 0.0, 1.0], [0, 1, 2], std="sample").tolist() == [0.0, 0.0, 0.0]
    raw = group_advantages([0.7, 5.0, 6.0], ["x", "y", "y"], singleton="raw", scale="none")
    assert raw.tolist() == [0.7, -0.5, 0.5]


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    got = group_advantages([1.0, 2.0, 6.0], [0, 0, 0], scale="none", leave_one_out=True)
    np.testing.assert_allclose(got, [1 - 4, 2 - 3.5, 6 - 1.5], rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_returns_are_left_out(bad):
    got = group_advantages([1.0, bad, 0.0, bad], ["a", "a", "a", "b"], scale="none")
    assert got.tolist() == [0.5, 0.0, -0.5, 0.0]


def test_a_scale_floor_holds_a_small_spread_down():
    returns = [1.0, 1.0, 1.0, 1.0, 0.99]
    free = group_advantages(returns, [0] * 5)
    np.testing.assert_allclose(free, [0.5, 0.5, 0.5, 0.5, -2.0], rtol=1e-3)
    floored = group_advantages(returns, [0] * 5, scale_floor=0.1)
    np.testing.assert_allclose(floored, [0.02, 0.02, 0.02, 0.02, -0.08], rtol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.7, 1.0])), max_size=20),
    st.booleans(),
)
def test_groups_are_centred_bounded_and_alone(pairs, float32):
    groups = [g for g, _ in pairs]
    returns = np.array([r for _, r in pairs], np.float32 if float32 else np.float64)
    got = group_advantages(returns, groups)
    assert np.isfinite(got).all()
    for key in set(groups):
        here = np.array([g == key for g in groups])
        n = here.sum()
        assert abs(got[here].sum()) < 1e-4
        assert np.all(np.abs(got[here]) <= np.sqrt(n - 1) + 1e-5)
        np.testing.assert_array_equal(group_advantages(returns[here], [0] * n), got[here])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="must be"):
        group_advantages([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="did you mean 'population'"):
        group_advantages([1.0], ["a"], std="populations")


def test_an_event_counts_once_whatever_its_cardinality():
    events = [
        event(1.0, ("a", "b", "c"), episode="e0"),
        event(0.0, ("a",), episode="e1"),
    ]
    advantages, stats = event_advantages(events, AdvantageConfig(scale="none"))
    assert advantages.tolist() == [0.5, -0.5]
    assert stats["zero_advantage_fraction"] == 0.0
    scaled, _ = event_advantages(events)
    np.testing.assert_allclose(scaled, [1.0, -1.0], rtol=1e-5)
    rows, _ = row_advantages(events, AdvantageConfig(scale="none"))
    assert [row.tolist() for row in rows] == [[0.5, 0.5, 0.5], [-0.5]]


def test_groups_are_task_and_event_type():
    events = [
        event(1.0, episode="e0"),
        event(0.0, episode="e1"),
        event(1.0, episode="e0", type="verify", turn=1),
        event(1.0, episode="e1", type="verify", turn=1),
        event(1.0, episode="e2", task="t1"),
    ]
    advantages, stats = event_advantages(events)
    np.testing.assert_allclose(advantages, [1.0, -1.0, 0.0, 0.0, 0.0], rtol=1e-5)
    assert stats == {
        "zero_advantage_fraction": 0.6,
        "groups": 3.0,
        "singleton_groups": 1.0,
        "equal_groups": 1.0,
        "penalty_only_groups": 0.0,
        "nonfinite_returns": 0.0,
    }
    by_task, _ = event_advantages(events, AdvantageConfig(group=("task",), scale="none"))
    assert by_task.tolist() == [0.25, -0.75, 0.25, 0.25, 0.0]
    by_turn, _ = event_advantages(events, AdvantageConfig(group=("turn",), scale="none"))
    np.testing.assert_allclose(by_turn, [1 / 3, -2 / 3, 0.0, 0.0, 1 / 3])


def test_two_slots_of_a_step_with_one_task_stay_apart():
    """An epoch's boundary inside a step brings a task twice; neither copy has any contrast."""
    copies = [event(reward, slot=slot) for slot, reward in ((0, 1.0), (1, 0.0)) for _ in range(4)]
    advantages, stats = event_advantages(copies)
    assert advantages.tolist() == [0.0] * 8
    assert stats["groups"] == stats["equal_groups"] == 2
    for statistics in ("episodes", "rows"):
        config = AdvantageConfig(statistics=statistics)
        assert not np.any(event_advantages(copies, config)[0])


def test_isolated_groups_are_reported():
    events = [event(r, task=f"t{i}") for i, r in enumerate([1.0, 0.0, 1.0])]
    advantages, stats = event_advantages(events)
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert stats["zero_advantage_fraction"] == 1.0 and stats["singleton_groups"] == 3.0


def test_incomplete_events_take_no_part():
    events = [
        event(1.0, ("a", "b"), episode="e0"),
        event(0.0, ("a", "b"), episode="e1"),
        event(90.0, ("a", "b", "c"), episode="e2", missing=1),
    ]
    advantages, stats = event_advantages(events, AdvantageConfig(scale="none"))
    assert advantages.tolist() == [0.5, -0.5, 0.0]
    assert stats["zero_advantage_fraction"] == 0.0 and stats["groups"] == 1.0


def test_non_finite_rewards_are_counted():
    events = [event(1.0), event(0.0), event(float("nan"))]
    advantages, stats = event_advantages(events, AdvantageConfig(scale="none"))
    assert advantages.tolist() == [0.5, -0.5, 0.0]
    assert stats["nonfinite_returns"] == 1.0


def test_only_the_events_own_malformed_members_are_penalised():
    config = AdvantageConfig(scale="none", invalid_penalty=0.4)
    events = [
        event(1.0, ("a", "b"), episode="e0", malformed=(1,)),
        event(1.0, ("a", "b"), episode="e1"),
        event(1.0, ("v",), episode="e0", type="verify", turn=1),
        event(1.0, ("v",), episode="e1", type="verify", turn=1),
    ]
    assert event_return(events[0], 0.4) == 0.8
    advantages, stats = event_advantages(events, config)
    np.testing.assert_allclose(advantages, [-0.1, 0.1, 0.0, 0.0])
    assert stats["penalty_only_groups"] == 1.0
    assert event_advantages(events, AdvantageConfig())[1]["penalty_only_groups"] == 0.0


def test_episode_statistics_count_an_episode_once():
    # Three events of a success against one of a failure: over events the mean would be 0.75.
    events = [
        *(event(1.0, episode="e0", turn=turn) for turn in range(3)),
        event(0.0, episode="e1"),
    ]
    config = AdvantageConfig(group=("task",), statistics="episodes", scale="none")
    assert event_advantages(events, config)[0].tolist() == [0.5, 0.5, 0.5, -0.5]
    by_event = AdvantageConfig(group=("task",), scale="none")
    assert event_advantages(events, by_event)[0].tolist() == [0.25, 0.25, 0.25, -0.75]


def test_episode_returns_are_the_mean_over_rows_after_penalties():
    events = [
        event(1.0, ("a", "b", "c"), episode="e0", malformed=(0,)),
        event(1.0, ("v",), episode="e0", turn=1),
        event(0.0, ("v",), episode="e1"),
    ]
    config = AdvantageConfig(
        group=("task",), statistics="episodes", scale="none", invalid_penalty=0.4
    )
    # Episode 0: (0.6 + 1 + 1 + 1) / 4 = 0.9
    np.testing.assert_allclose(event_advantages(events, config)[0], [0.45, 0.45, -0.45])


def test_equal_episodes_of_different_length_stay_equal():
    events = [event(0.7, ("a",) * k, episode=f"e{k}") for k in (1, 3, 6, 10)]
    config = AdvantageConfig.preset("grpo")
    assert event_advantages(events, config)[0].tolist() == [0.0] * 4


def test_dr_mas_keeps_the_roles_apart():
    config = AdvantageConfig.preset("dr_mas", invalid_penalty=0.5)
    events = [
        event(1.0, ("solver", "critic"), episode="e0", malformed=(1,)),
        event(0.0, ("solver", "critic"), episode="e1"),
        event(0.7, ("planner",), episode="e2"),
    ]
    rows, stats = row_advantages(events, config)
    # solver: 1, 0 (mean 0.5); critic: 0.5, 0 (mean 0.25); sample std of a pair is |a - b| / sqrt 2
    unit = 1 / 2**0.5
    np.testing.assert_allclose(rows[0], [unit, unit], rtol=1e-5)
    np.testing.assert_allclose(rows[1], [-unit, -unit], rtol=1e-5)
    assert rows[2].tolist() == [0.7]
    assert stats["groups"] == 3.0 and stats["singleton_groups"] == 1.0
    means, _ = event_advantages(events, config)
    np.testing.assert_allclose(means, [unit, -unit, 0.7], rtol=1e-5)

    centred = AdvantageConfig.preset("dr_mas", invalid_penalty=0.5, scale="none")
    rows, _ = row_advantages(events, centred)
    assert [row.tolist() for row in rows] == [[0.5, 0.25], [-0.5, -0.25], [0.7]]


def test_every_preset_sets_objective_and_advantage():
    for name in PRESETS:
        assert isinstance(ObjectiveConfig.preset(name), ObjectiveConfig)
        assert isinstance(AdvantageConfig.preset(name), AdvantageConfig)
        hash(AdvantageConfig.preset(name))
    assert AdvantageConfig.preset("srpo") == AdvantageConfig()
    assert AdvantageConfig.preset("dr_mas") == AdvantageConfig(
        group=("task", "role"), statistics="rows", std="sample", singleton="raw"
    )
    assert AdvantageConfig.preset("rloo").leave_one_out


@pytest.mark.parametrize(
    "switches, hint",
    [
        ({"group": ("tasks",)}, "did you mean 'task'"),
        ({"statistics": "event"}, "did you mean 'events'"),
        ({"scale": "None"}, "did you mean 'none'"),
        ({"scale_floor": -1.0}, "scale_floor"),
        ({"invalid_penalty": float("inf")}, "invalid_penalty"),
        ({"scale": "none", "scale_floor": 0.1}, "scale_floor"),
    ],
)
def test_nonsense_is_refused(switches, hint):
    with pytest.raises(ValueError, match=hint):
        AdvantageConfig(**switches)


def test_unknown_presets_and_switches_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'dr_mas'"):
        AdvantageConfig.preset("drmas")
    with pytest.raises(ValueError, match="did you mean 'singleton'"):
        AdvantageConfig.preset("srpo", singletons="raw")


def test_no_events():
    advantages, stats = event_advantages([])
    assert advantages.shape == (0,) and np.isnan(stats["zero_advantage_fraction"])
