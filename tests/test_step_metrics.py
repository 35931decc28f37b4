"""The figures of a step: what each is taken over, how it is weighted, and what has none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from srpo_jax.advantage import AdvantageConfig, row_advantages
from srpo_jax.events import Episode, Event, Member, split_complete
from srpo_jax.run.minibatches import apply_truncation
from srpo_jax.run.step_metrics import CV_WINDOW, rollout_metrics, row_metrics, update_metrics

NAN = float("nan")


def episode(number, tokens=10, *, cut=False, reward=0.0, well_formed=True, **changes):
    """An episode of one event of one solver's output."""
    member = Member(
        role="solver", policy="policy", version=0, prompt_ids=[1, 2], response_ids=[3] * tokens,
        logps=np.full(tokens, -0.5, np.float32), stop_reason="length" if cut else "stop",
        well_formed=well_formed,
    )  # fmt: skip
    event = Event(
        id=f"e{number}", episode=f"ep{number}", task="t", type="solve", turn=0, state_id="s",
        expected=1, members=(member,), reward=reward,
    )  # fmt: skip
    return Episode(
        id=f"ep{number}", task="t", slot=0, rollout=number, events=(event,), reward=reward,
        **{"correct": reward == 1, **changes},
    )  # fmt: skip


def results_of(*episodes):
    team = SimpleNamespace(fitted={}, members={}, calls=[])
    return [
        SimpleNamespace(episode=e, team=team, failed=e is None, failure=None if e else "X")
        for e in episodes
    ]


def figures(episodes, truncated="keep"):
    events = [event for e in episodes if e is not None for event in e.events]
    complete, dropped = split_complete(apply_truncation(events, truncated))
    return rollout_metrics(results_of(*episodes), complete, dropped)


# ---- of episodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("truncated", ["keep", "penalise", "drop_event"])
def test_lengths_and_cuts_are_those_of_all_episodes_that_ended(truncated):
    """Outputs of 10, 10, 100 and 100 tokens, the long ones cut; with the cut events left out it
    would read as if nothing were cut (huggingface/trl#3476)."""
    got = figures(
        [
            episode(0, 10), episode(1, 10, well_formed=False), episode(2, 100, cut=True),
            episode(3, 100, cut=True),
        ],
        truncated,
    )  # fmt: skip
    assert got["truncated/solver"] == 0.5 and got["response/length"] == 55.0
    assert got["prompt/length"] == 2.0 and got["policy/entropy"] == 0.5
    assert got["invalid/solver"] == 0.25  # what the workflow could not parse, not what was cut
    assert got["events/mean_k"] == 1.0 and got["events/k_1"] == 4
    assert got["events/complete"] == (2 if truncated == "drop_event" else 4)
    assert got["events/complete_rate"] == got["events/complete"] / 4


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_one_reward_that_is_no_number_leaves_the_mean_of_the_others(bad):
    """huggingface/trl#5902; its event has no advantage, and the others form the group."""
    episodes = [
        episode(0, reward=1.0), episode(1, reward=bad), episode(2, reward=0.0),
        episode(3, reward=0.5, info={"rounds": 2.0}), episode(4, info={"rounds": NAN}),
    ]  # fmt: skip
    got = figures(episodes)
    assert got["reward/mean"] == 0.375 and got["reward/correct"] == 0.25
    assert got["episodes/unscored"] == 1 and got["info/rounds"] == 2.0
    events = [event for e in episodes for event in e.events]
    rows, statistics = row_advantages(events, AdvantageConfig())
    assert np.isfinite(np.concatenate(rows)).all() and rows[1][0] == 0
    scored, _ = row_advantages([e for e in events if e.id != "e1"], AdvantageConfig())
    np.testing.assert_array_equal([*rows[:1], *rows[2:]], scored)
    assert statistics["nonfinite_returns"] == 1


@pytest.mark.parametrize("episodes", [[], [None], [replace(episode(0, reward=NAN), events=())]])
@pytest.mark.filterwarnings("error")
def test_a_mean_of_nothing_is_no_number(episodes):
    got = figures(episodes) | row_metrics(results_of(*episodes), [], [])
    _, statistics = row_advantages([])
    for name in (
        "reward/mean", "reward/correct", "events/mean_k", "events/complete_rate",
        "response/length", "prompt/length", "update/fill",
    ):  # fmt: skip
        assert np.isnan(got[name]), name
    assert np.isnan(statistics["zero_advantage_fraction"])
    assert got["events/complete"] == 0 and got["rows/trained"] == 0


# ---- of updates ----------------------------------------------------------------------------------


def report(norm=1.0, *, events=4, skipped=0, **changes):
    """What the learner says of an update over so many events, ``skipped`` of them not computed."""
    computed = events - skipped
    values = {
        "loss": 0.0, "surrogate": 0.0, "ratio_mean": 1.0, "ratio_min": 1.0, "ratio_max": 1.0,
        "clip_fraction": 0.0, "clamped_events": 0, "approx_kl": 0.0, "nonfinite_events": 0,
        "grad_norm": norm, "applied": bool(np.isfinite(norm)) and norm > 0, "role_norms": {},
        "num_events": events, "num_units": events, "scored_units": computed,
        "num_tokens": 10 * events, "scored_tokens": 10 * computed, "sampler_gap": 0.5,
        "log_ratio": np.zeros(8), "event_valid": np.zeros(8, bool), "event_size": np.ones(8, int),
        "event_tokens": np.ones(8, int), "member_log_ratio": np.zeros(8),
        "row_event": np.full(8, 8),
    }  # fmt: skip
    return values | changes


def test_figures_of_mini_batches_weigh_what_they_are_a_mean_of():
    """3 and 1 events; of the first batch's events 2 were not computed."""
    got = update_metrics(
        [
            report(events=3, skipped=2, loss=1.0, ratio_mean=1.0, clip_fraction=1 / 3,
                   approx_kl=0.1, ratio_min=0.9, ratio_max=1.1),
            report(events=1, loss=5.0, ratio_mean=2.0, clip_fraction=0.0, approx_kl=0.5,
                   ratio_min=0.5, ratio_max=1.0),
        ],
        [],
    )  # fmt: skip
    assert got["update/loss"] == 2.0  # (3 * 1 + 1 * 5) / 4
    assert got["update/clip_fraction"] == pytest.approx(0.25)  # one of four events
    assert got["update/ratio_mean"] == 1.5  # of the two that were computed
    assert got["update/approx_kl"] == pytest.approx(0.3)
    assert (got["update/ratio_min"], got["update/ratio_max"]) == (0.5, 1.1)


def test_what_an_update_did_not_compute_or_could_not_is_no_number_and_no_zero():
    idle = report(0.0, skipped=4, sampler_gap=NAN)
    got = update_metrics([idle, report(NAN, loss=NAN, ratio_mean=NAN)], [1.0, 3.0])
    assert got["update/skipped"] == 2 and got["update/skipped_nonfinite"] == 1
    assert got["update/loss"] == 0.0 and np.isnan(got["update/ratio_mean"])
    assert np.isnan(got["update/grad_norm"]) and got["update/grad_norm_cv"] == 0.5
    got = update_metrics([idle], [])
    assert got["update/clip_fraction"] == 0.0  # of four events none was clipped
    for name in ("ratio_mean", "ratio_min", "ratio_max", "approx_kl", "grad_norm", "grad_norm_cv"):
        assert np.isnan(got[f"update/{name}"]), name
    assert np.isnan(got["policy/sampler_gap"])
    got = update_metrics([idle, report(sampler_gap=0.25)], [])
    assert got["policy/sampler_gap"] == 0.25 and got["update/grad_norm"] == 1.0
    assert np.isnan(update_metrics([], [1.0])["update/grad_norm"])


def test_the_variation_of_the_gradient_norm_is_that_of_one_value_for_each_step():
    """Two updates of 1 and 5 are one step of 3, beside steps of 1 and of 5 before it."""
    got = update_metrics([report(1.0), report(NAN), report(0.0, skipped=4), report(5.0)], [1, 5])
    assert got["update/grad_norm"] == 3.0
    assert got["update/grad_norm_cv"] == pytest.approx(np.std([1, 5, 3]) / 3)
    long = update_metrics([report(2.0)], [100.0] * 5 + [2.0] * (CV_WINDOW - 1))
    assert long["update/grad_norm_cv"] == 0.0


def test_terms_that_are_off_have_no_figures():
    assert not {"update/kl", "update/sampler_weight"} & update_metrics([report()], []).keys()
    on = report(kl=0.2, sampler_weight_mean=1.0, sampler_truncated=0.0)
    got = update_metrics([on, report(events=1, **{**on, "num_tokens": 120, "kl": 0.6})], [])
    assert got["update/kl"] == pytest.approx((0.2 * 40 + 0.6 * 120) / 160)
    assert got["update/sampler_weight"] == 1.0 and got["update/sampler_truncated"] == 0.0
