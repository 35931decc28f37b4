"""What an update may leave out, repeat, store or measure, and that its gradient stays the same."""

from __future__ import annotations

from functools import cache

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.remat import REMAT_POLICIES
from srpo_jax.learner.batch import ShapeMemory, build_batch
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.objective import ObjectiveConfig
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import OptimizerConfig, parse_recipe
from srpo_jax.recipe.yaml import parse_yaml
from tests.learner_cases import (
    advantages_of,
    batch_of,
    bit_equal,
    events_of,
    host,
    make_learner,
    norm,
    perturbed,
    relative_error,
    set_params,
    tiny_model,
)
from tests.objective_oracle import clipmin
from tests.test_config import MINIMAL


def off_policy(learner, seed=1):
    """Moves the learner away from the policy that sampled; returns the parameters of that."""
    start = learner.params
    set_params(learner, perturbed(start, 0.01, seed))
    return start


def gradient_of(learner, batch, old_params):
    sums, metrics, _ = learner.gradient(
        batch, learner.score(batch), learner.score(batch, old_params)
    )
    return jax.block_until_ready(sums.grads), metrics


# ---- one gradient, however it is computed --------------------------------------------------------


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("remat", [name for name in REMAT_POLICIES if name != "none"])
def test_every_remat_policy_computes_the_same_gradient(remat, tied):
    assert relative_error(float64_gradient(remat, tied), float64_gradient("none", tied)) < 1e-12


@cache
def float64_gradient(remat, tied):
    with jax.enable_x64(True):
        model = tiny_model(dtype=jnp.float64, tie_embeddings=tied)
        learner = make_learner(model, dtype=jnp.float64, remat=remat)
        return host(gradient_of(learner, batch_of(rows=4), off_policy(learner))[0])


def test_a_remat_policy_is_one_entry_of_a_table(monkeypatch):
    """Its name is the recipe's too, and the model gets the policy."""
    minimal = parse_yaml(MINIMAL, "minimal")
    with pytest.raises(RecipeError, match=r"remat: must be one of none, dots, .* got 'all'"):
        parse_recipe(minimal, ["learner.remat=all"])
    asked = []

    def everything(policies):
        asked.append(policies)
        return policies.everything_saveable

    monkeypatch.setitem(REMAT_POLICIES, "all", everything)
    assert parse_recipe(minimal, ["learner.remat=all"]).learner.remat == "all"
    learner, batch = make_learner(remat="all"), batch_of(rows=4)
    got, want = (x.gradient(batch)[0].grads for x in (learner, make_learner()))
    assert asked and relative_error(got, want) < 1e-6


def test_an_unknown_remat_policy_is_refused():
    with pytest.raises(ValueError, match="remat 'half' is not one of none, dots"):
        make_learner(remat="half")


@pytest.mark.multidevice
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_float64_gradient_is_one_for_any_split_packing_order_and_devices(remat):
    events, advantages = events_of(), advantages_of(events_of())
    back = [events[i] for i in (3, 0, 4, 2, 1)], [advantages[i] for i in (3, 0, 4, 2, 1)]
    split, packed = dict(rows=4), dict(rows=4, sequence_tokens=24)
    reordered = dict(rows=4, sequence_tokens=48, events=back[0], advantages=back[1])
    # With "full", XLA's CPU collectives now and then wait for each other on two cores.
    devices = {(1, 1, 1): [dict(rows=12), split, packed, reordered]}
    devices |= {} if remat == "full" else {(2, 1, 1): [packed], (1, 2, 2): [reordered]}
    with jax.enable_x64(True):
        gradients = []
        for sizes, layouts in devices.items():
            mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
            learner = make_learner(
                tiny_model(dtype=jnp.float64), mesh=mesh, dtype=jnp.float64, remat=remat
            )
            old = off_policy(learner)
            for layout in layouts:
                batch = batch_of(**{"events": events, "advantages": advantages, **layout})
                gradients.append(host(gradient_of(learner, batch, old)[0]))
        assert max(relative_error(g, gradients[0]) for g in gradients[1:]) < 1e-12


# ---- events without an advantage -----------------------------------------------------------------


def with_zeros(advantages):
    return [a * (i % 2) for i, a in enumerate(advantages)]


@pytest.mark.parametrize("preset", ["srpo", "srpo_token_reduced", "grpo", "dr_grpo", "magrpo"])
def test_events_without_an_advantage_are_counted_but_not_computed(preset):
    events = events_of()
    # With a narrow clip and positive advantages what became likelier is clipped.
    advantages = with_zeros([np.abs(a) for a in advantages_of(events)])
    clip = {} if preset == "magrpo" else {"clip_low": 1e-3, "clip_high": 1e-3}
    learner = make_learner(objective=ObjectiveConfig.preset(preset, **clip))
    old = off_policy(learner)
    whole, part = (
        build_batch(
            events, advantages, micro_batch_rows=1, max_tokens=64, skip_zero_advantage=skip,
            shapes=ShapeMemory(micro_batches=12),
        )
        for skip in (False, True)
    )  # fmt: skip
    assert whole.used_micro_batches == 11 and part.used_micro_batches == 2
    left_out = [events[i] for i in (0, 2, 4)]
    tokens = sum(len(m.response_ids) for e in left_out for m in e.members)
    assert part.skipped == (3, 9, tokens) and part.num_events == whole.num_events == 5
    want, metrics = gradient_of(learner, whole, old)
    got, part_metrics = gradient_of(learner, part, old)
    assert relative_error(got, want) < 1e-6
    assert float(part_metrics.loss) == pytest.approx(float(metrics.loss), rel=1e-5)
    assert int(part_metrics.num_events) == 5
    assert int(part_metrics.num_tokens) == int(metrics.num_tokens)
    # Off policy some units are clipped: they are a share of all units, computed or not.
    for name in ("num_units", "clip_fraction", "zero_advantage_fraction", "mean_k"):
        assert float(getattr(part_metrics, name)) == pytest.approx(
            float(getattr(metrics, name)), rel=1e-5
        ), name
    if learner.objective.ratio_unit != "none":
        assert 0 < float(metrics.clip_fraction) < 1


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_without_any_advantage_is_skipped_bit_for_bit(skip):
    """Its gradient is zero: momentum and decay would move the parameters all by themselves."""
    events = events_of()
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), 10)
    learner = make_learner(optimizer=optimizer)
    learner.update([batch_of()])
    before = host(learner.state)
    batch = build_batch(
        events, [np.zeros(e.expected) for e in events], micro_batch_rows=4, max_tokens=64,
        skip_zero_advantage=skip,
    )  # fmt: skip
    (report,) = learner.update([batch])
    assert not report["applied"] and report["grad_norm"] == 0 and report["num_events"] == 5
    assert bit_equal(learner.state, before)
    assert learner.update([batch_of()])[0]["applied"]


# ---- several epochs ------------------------------------------------------------------------------


def test_epochs_go_through_the_whole_batch_again_with_the_first_log_probs_as_old():
    batches = [batch_of(events_of((2, 1, 3), 7)), batch_of(events_of((1, 2), 8))]
    learner = make_learner()
    reports = learner.update(batches, orders=[[0, 1], [1, 0]])
    assert [int(r["num_events"]) for r in reports] == [3, 2, 2, 3]
    assert int(learner.state.updates) == 4

    by_hand = make_learner()
    old = [by_hand.score(batch) for batch in batches]
    for i in (0, 1, 1, 0):
        current = by_hand.score(batches[i])
        sums, metrics, _ = by_hand.gradient(batches[i], current, old[i])
        by_hand.state, *_ = by_hand._programs.apply(by_hand.state, sums, metrics.live_events)
    assert relative_error(learner.params, by_hand.params) < 1e-6
    assert np.abs(reports[3]["log_ratio"][:3]).min() > 1e-3


# ---- another sampler -----------------------------------------------------------------------------


def test_truncated_importance_sampling_weighs_each_event_once():
    """J = mean of min(exp(sum(old - sampler) / sqrt(K)), cap) * surrogate, written out."""
    cap = 1.2
    learner = make_learner(objective=ObjectiveConfig(sampler_cap=cap))
    batch = batch_of()
    old_logp = np.asarray(learner.score(batch).logp, np.float64)
    rng = np.random.default_rng(3)
    drift = rng.normal(0, 0.15, old_logp.shape)
    batch.sampler_logp[:] = np.where(batch.loss_mask, old_logp - drift, 0)
    old = off_policy(learner)
    (_, metrics), current = gradient_of(learner, batch, old), learner.score(batch).logp
    current = np.asarray(current, np.float64)

    row = np.append(batch.row_event, 8)[batch.token_row]
    values, weights = [], []
    for e in range(5):
        mine = (row == e) & batch.loss_mask
        k = batch.event_size[e]
        weight = min(np.exp(drift[mine].sum() / np.sqrt(k)), cap)
        ratio = np.exp((current - old_logp)[mine].sum() / np.sqrt(k))
        weights.append(weight)
        values.append(weight * clipmin(ratio, batch.event_advantage[e]))
    assert max(weights) == cap and min(weights) < 1
    assert float(metrics.loss) == pytest.approx(-np.mean(values), rel=1e-4)
    assert float(metrics.sampler_weight_mean) == pytest.approx(np.mean(weights), rel=1e-4)
    assert float(metrics.sampler_truncated) == pytest.approx(np.mean(np.array(weights) == cap))


def test_a_sampler_that_agrees_changes_nothing():
    batch = batch_of()
    plain, corrected = make_learner(), make_learner(objective=ObjectiveConfig(sampler_cap=2.0))
    batch.sampler_logp[:] = np.asarray(plain.score(batch).logp)
    reports = [learner.update([batch])[0] for learner in (plain, corrected)]
    assert float(reports[1]["grad_norm"]) == pytest.approx(float(reports[0]["grad_norm"]), rel=1e-5)
    assert relative_error(corrected.params, plain.params) < 1e-4
    assert reports[1]["sampler_truncated"] == 0


# ---- what is measured ----------------------------------------------------------------------------


def test_the_gradients_of_the_roles_add_up():
    events = events_of((2, 1, 2))
    learner = make_learner()
    batch = batch_of(events)
    assert batch.roles == ("solver",)
    (report,) = learner.update([batch], by_role=True)
    assert float(report["role_norms"]["solver"]) == pytest.approx(float(report["grad_norm"]))

    learner, old_roles = make_learner(), batch.row_role.copy()
    batch.row_role[:] = np.where(old_roles == 0, np.arange(len(old_roles)) % 2, 2)
    object.__setattr__(batch, "roles", ("critic", "solver"))
    norms = learner.role_norms(batch)
    alone = []
    for role in (0, 1):  # a batch in which only this role's tokens carry loss
        keep = np.append(batch.row_role, 2)[batch.token_row] == role
        tokens, arrays = learner._place(batch)
        weights, _, _ = learner._weigh(batch, tokens, arrays, None, None, None)
        masked = weights._replace(logp=jnp.where(keep, weights.logp, 0))
        sums = learner._programs.accumulate(
            learner.params, tokens, masked, np.int32(batch.used_micro_batches)
        )
        alone.append(host(sums.grads))
    whole = learner.gradient(batch)[0].grads
    assert relative_error(jax.tree.map(np.add, *alone), whole) < 1e-5
    assert [float(norms[r]) for r in ("critic", "solver")] == pytest.approx(
        [norm(g) for g in alone], rel=1e-5
    )


# ---- compiled programs ---------------------------------------------------------------------------


def test_nothing_is_compiled_after_the_warm_up_over_50_varying_updates():
    """Counted by the compiler's own events, so eager operations count too."""
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )
    learner, shapes = make_learner(optimizer=optax.adam(1e-2)), ShapeMemory()
    rng = np.random.default_rng(0)

    def batch(sizes, seed):
        events = events_of(sizes, seed)
        # One event at least is computed: an update without any is skipped.
        drawn = enumerate(advantages_of(events, seed))
        advantages = [a * (rng.integers(0, 2) if i else 1) for i, a in drawn]
        return build_batch(
            events, advantages, micro_batch_rows=2, max_tokens=64, sequence_tokens=32,
            skip_zero_advantage=True, shapes=shapes,
        )  # fmt: skip

    def update(largest, seed):
        sizes = tuple(rng.integers(1, 5, largest))
        learner.update([batch(sizes, seed), batch(sizes[::-1], seed + 1)])
        jax.block_until_ready(learner.state)

    update(20, 0)
    update(20, 1)
    warm, programs = len(compiles), learner.compile_count()
    assert warm > 0
    for seed in range(25):  # two updates each
        update(int(rng.integers(1, 9)), 2 + seed)
    assert len(compiles) == warm and learner.compile_count() == programs
    assert int(learner.state.updates) == 54


def test_another_shape_is_noticed_as_a_compile():
    learner = make_learner(optimizer=optax.adam(1e-2))  # its programs are no other test's
    learner.update([batch_of(rows=4, min_tokens=24)])
    count = learner.compile_count()
    learner.update([batch_of(rows=4, min_tokens=24)])
    assert learner.compile_count() == count
    learner.update([batch_of(rows=8, min_tokens=24)])
    assert learner.compile_count() > count
