"""The three-step update: one autograd's gradient for any preset, split, padding and mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen import split_params
from srpo_jax.learner.learner import GateError, Learner
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import LearnerSettings
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.objective import ObjectiveConfig, setwise_objective
from srpo_jax.recipe.recipe import OptimizerConfig
from tests.learner_cases import (
    ADAM,
    REAL_VOCAB,
    TEMPERATURE,
    advantages_of,
    batch_of,
    bit_equal,
    events_of,
    host,
    make_learner,
    norm,
    one_device,
    perturbed,
    relative_error,
    set_params,
    tiny_model,
)

NAN = float("nan")


@cache
def shared_learner(preset="srpo", **changes):
    """Learners are compiled once for the whole file; ``fresh_learner`` resets the state."""
    learner = make_learner(objective=ObjectiveConfig.preset(preset, **changes))
    return learner, host(learner.state), jax.tree.map(lambda x: x.sharding, learner.state)


def fresh_learner(preset="srpo", **changes):
    learner, state, shardings = shared_learner(preset, **changes)
    learner.state = jax.device_put(state, shardings)
    return learner


@partial(jax.jit, static_argnums=0)
def plain_forward(graphdef, params, tokens, positions, segments):
    model = nnx.merge(graphdef, params)
    logits = model.logits(model(tokens, positions, segments))[:, :-1, :REAL_VOCAB]
    logps = jax.nn.log_softmax(logits / TEMPERATURE)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


def plain_scores(graphdef, params, batch):
    """Log-probs and entropies [R, T] by one forward and a whole log_softmax."""
    T = batch.tokens.shape[-1]
    fields = (batch.tokens, batch.positions, batch.segment_ids)
    return plain_forward(graphdef, params, *(x.reshape(-1, T) for x in fields))


def one_autograd(graphdef, params, batch, objective, old, reference=None):
    """(loss, gradient) through model and objective at once."""

    def loss(params):
        logp, entropy = plain_scores(graphdef, params, batch)
        return setwise_objective(
            logp, old, batch.loss_mask.reshape(logp.shape), batch.row_event, batch.event_size,
            batch.event_advantage, token_row=batch.token_row.reshape(logp.shape),
            reference_logp=reference,
            entropy=entropy if objective.entropy_coef else None,
            row_advantage=None if objective.unit.name == "event" else batch.row_advantage,
            config=objective,
        )[0]  # fmt: skip

    return jax.jit(jax.value_and_grad(loss))(params)


def update_gradient(learner, batch, old_params=None):
    """(loss, gradient) of the three steps; old log-probs are those of ``old_params``."""
    old = learner.score(batch, old_params)
    sums, metrics, _ = learner.gradient(batch, learner.score(batch), old)
    return metrics.loss, sums.grads


# ---- exactness -----------------------------------------------------------------------------------

# Wide clips let both branches act at the distances of these tests.
OBJECTIVES = {
    "srpo": {},
    "srpo_token_reduced": {"kl_coef": 0.3, "entropy_coef": 0.1},
    "grpo": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "dr_mas": {"entropy_coef": 0.2},
    "magrpo": {},
}


FEW = ("srpo_token_reduced", "gspo", "magrpo")


@pytest.mark.parametrize(
    "preset", [p if p in FEW else pytest.param(p, marks=pytest.mark.slow) for p in OBJECTIVES]
)
def test_three_steps_are_one_autograd(preset):
    objective = ObjectiveConfig.preset(preset, **OBJECTIVES[preset])
    with jax.enable_x64(True):
        model = tiny_model(dtype=jnp.float64)
        learner = make_learner(model, objective, dtype=jnp.float64)
        graphdef, start = split_params(model)
        batch = batch_of(rows=4, by_row=preset == "dr_mas")
        old_params, params = perturbed(start, 0.005, 1), perturbed(start, 0.01, 2)
        set_params(learner, params)
        loss, grads = update_gradient(learner, batch, old_params)
        reference = plain_scores(graphdef, start, batch)[0] if objective.kl_coef else None
        old = plain_scores(graphdef, old_params, batch)[0]
        want_loss, want = one_autograd(graphdef, params, batch, objective, old, reference)
        assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(np.float64)}
        assert relative_error(grads, want) < 1e-10
        assert float(loss) == pytest.approx(float(want_loss), rel=1e-10)


def test_the_gradient_is_the_papers_formula_written_out():
    """dJ = (1/|B|) sum_e g_e sum_j d log q, with g_e = rho_e A_e / sqrt(K_e), 0 where clipped."""
    learner = fresh_learner()
    graphdef, start = split_params(learner.model())
    events, params = events_of(), perturbed(start, 0.01, 2)
    advantages = advantages_of(events)
    set_params(learner, params)
    loss, grads = update_gradient(learner, batch_of(events, advantages, rows=4), start)

    def log_prob(params, tokens, mask):
        model = nnx.merge(graphdef, params)
        row = tokens[None]
        hidden = model(row, jnp.arange(len(tokens))[None], jnp.ones_like(row))
        logits = model.logits(hidden)[0, :-1, :REAL_VOCAB] / TEMPERATURE
        chosen = jax.nn.log_softmax(logits)[jnp.arange(len(tokens) - 1), tokens[1:]]
        return jnp.where(mask[1:], chosen, 0).sum()

    compiled = jax.jit(jax.value_and_grad(log_prob))
    total, value, clipped = jax.tree.map(np.zeros_like, host(params)), 0.0, 0
    for event, (a, *_) in zip(events, advantages, strict=True):
        gap, score = 0.0, jax.tree.map(np.zeros_like, total)
        for m in event.members:
            ids = [*m.prompt_ids, *m.response_ids]
            tokens = np.pad(np.array(ids, np.int32), (0, 20 - len(ids)))  # one compiled shape
            mask = (np.arange(20) >= len(m.prompt_ids)) & (np.arange(20) < len(ids))
            now, grad = compiled(params, tokens, mask)
            gap += float(now) - float(compiled(start, tokens, mask)[0])
            score = jax.tree.map(np.add, score, host(grad))
        rho = np.exp(gap / np.sqrt(event.k))
        value += min(rho * a, np.clip(rho, 0.8, 1.2) * a) / len(events)
        active = rho <= 1.2 if a > 0 else rho >= 0.8
        clipped += not active
        g = rho * a / np.sqrt(event.k) if active else 0.0
        total = jax.tree.map(lambda t, s, g=g: t - g * s / len(events), total, score)
    assert 0 < clipped < len(events)  # both branches took part
    assert float(loss) == pytest.approx(-float(value), rel=1e-4)
    assert relative_error(grads, total) < 1e-4


def test_public_case_s05_any_micro_batch_size_gives_the_same_gradient():
    learner = fresh_learner()
    params = learner.params
    set_params(learner, perturbed(params, 0.01))
    batches = [batch_of(rows=rows) for rows in (11, 1, 3)]
    assert [b.shape[0] for b in batches] == [1, 12, 4]
    whole, *splits = (update_gradient(learner, batch, params) for batch in batches)
    for loss, grads in splits:
        assert float(loss) == pytest.approx(float(whole[0]), abs=1e-5)
        assert relative_error(grads, whole[1]) < 1e-5


def with_padding(batch, micro_batches=0, events=0, tokens=0):
    """The batch with so many micro-batches, event slots and token places more, all of padding."""
    M, S, T, E = batch.shape
    R, more = len(batch.row_event), micro_batches * S

    def wider(array, fill):
        pad = ((0, micro_batches), (0, 0), (0, tokens))
        return np.pad(array, pad, constant_values=fill)

    def longer(array, count, fill):
        return np.pad(array, (0, count), constant_values=fill)

    names = ("tokens", "positions", "segment_ids", "loss_mask", "sampler_logp")
    token_row = np.where(batch.token_row == R, R + more, batch.token_row)
    row_event = np.where(batch.row_event == E, E + events, batch.row_event).astype(np.int32)
    padded = replace(
        batch,
        **{name: wider(getattr(batch, name), 0) for name in names},
        token_row=wider(token_row, R + more),
        row_event=longer(row_event, more, E + events),
        row_advantage=longer(batch.row_advantage, more, NAN),
        event_size=longer(batch.event_size, events, 0),
        event_advantage=longer(batch.event_advantage, events, NAN),
    )
    assert padded.shape == (M + micro_batches, S, T + tokens, E + events)
    return padded


def test_padding_with_rows_and_events_changes_no_bit():
    """Every product keeps its shape, and every sum its terms and their order."""
    learner = fresh_learner()
    params = learner.params
    set_params(learner, perturbed(params, 0.01))
    batch = batch_of(rows=4, min_tokens=16)
    wanted = update_gradient(learner, batch, params)
    padded = with_padding(batch, micro_batches=2, events=3)
    assert bit_equal(update_gradient(learner, padded, params), wanted)


@pytest.mark.slow
def test_padding_with_tokens_changes_nothing():
    """Attention over longer sequences adds in another order, which float32 sees: log-probs of 6 to
    four units of their last place, 2e-6, and the loss, in which signs cancel, to 4e-6 of itself.
    In float64 the same is 1e-14, and what padding must not change stands out."""
    with jax.enable_x64(True):
        learner = make_learner(tiny_model(dtype=jnp.float64), dtype=jnp.float64)
        params = learner.params
        set_params(learner, perturbed(params, 0.01))
        batch = batch_of(rows=4, min_tokens=16)
        loss, grads = update_gradient(learner, batch, params)
        for padding in ({"tokens": 4}, {"micro_batches": 2, "events": 3, "tokens": 16}):
            padded = with_padding(batch, **padding)
            padded_loss, padded_grads = update_gradient(learner, padded, params)
            assert float(padded_loss) == pytest.approx(float(loss), rel=1e-12)
            assert relative_error(padded_grads, grads) < 1e-12


def test_packed_sequences_give_the_gradient_of_padded_rows():
    learner = fresh_learner()
    params = learner.params
    set_params(learner, perturbed(params, 0.01))  # away from ratio 1, so that the clip can act
    padded, packed = batch_of(), batch_of(rows=1, sequence_tokens=48)
    assert packed.fill > padded.fill and (packed.segment_ids > 1).any()
    loss, grads = update_gradient(learner, padded, params)
    packed_loss, packed_grads = update_gradient(learner, packed, params)
    assert float(packed_loss) == pytest.approx(float(loss), abs=1e-5)
    assert relative_error(packed_grads, grads) < 1e-5


def test_an_event_with_nonfinite_log_probs_is_dropped_and_the_others_are_trained():
    learner = make_learner(tiny_model(tie_embeddings=False))
    events = events_of()
    poison = 63  # an id that no other event holds, because it is past the tokenizer's
    first = events[0].members[0]
    poisoned = replace(first, prompt_ids=[poison, *first.prompt_ids[1:]])
    ill = replace(events[0], members=(poisoned, *events[0].members[1:]))
    params = learner.params
    embedding = params["embed"]["embedding"].at[poison].set(NAN)
    set_params(learner, {**params, "embed": {"embedding": embedding}})

    batch = batch_of([ill, *events[1:]], advantages_of(events))
    scores = learner.score(batch)
    sums, metrics, dropped = learner.gradient(batch, scores, scores)
    rest = batch_of(events[1:], advantages_of(events)[1:])
    scores = learner.score(rest)
    want, want_metrics, none = learner.gradient(rest, scores, scores)
    assert (int(dropped), int(none)) == (1, 0)
    assert int(metrics.num_events) == len(events) - 1
    assert float(metrics.loss) == pytest.approx(float(want_metrics.loss), abs=1e-6)
    assert relative_error(sums.grads, want.grads) < 1e-5


def test_a_single_update_with_a_nonfinite_event_is_taken_again_without_it(monkeypatch):
    """The others are trained as if it had not been there; a batch that is sound costs nothing."""
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), 10)
    learner = make_learner(tiny_model(tie_embeddings=False), optimizer=optimizer)
    params = learner.params
    embedding = params["embed"]["embedding"].at[63].set(NAN)
    set_params(learner, {**params, "embed": {"embedding": embedding}})
    state = host(learner.state)
    events, advantages = events_of(), advantages_of(events_of())
    first = events[2].members[0]
    poisoned = replace(first, prompt_ids=[63, *first.prompt_ids[1:]])
    ill = replace(events[2], members=(poisoned, *events[2].members[1:]))

    scored, score = [], learner.score
    monkeypatch.setattr(learner, "score", lambda *args: (scored.append(args), score(*args))[1])
    (report,) = learner.update([batch_of([*events[:2], ill, *events[3:]], advantages)])
    assert len(scored) == 1
    assert report["applied"] and int(report["nonfinite_events"]) == 1
    assert int(report["num_events"]) == 4 and np.isfinite(report["grad_norm"])
    assert np.isfinite(report["sampler_gap"])
    got, updates = host(learner.params), int(learner.state.updates)
    learner.state = jax.device_put(state)
    (want,) = learner.update(
        [batch_of([*events[:2], *events[3:]], [*advantages[:2], *advantages[3:]])]
    )
    assert len(scored) == 1 and updates == int(learner.state.updates) == 1
    assert float(report["grad_norm"]) == pytest.approx(float(want["grad_norm"]), rel=1e-5)
    finite = [jax.tree.map(lambda x: np.nan_to_num(x), t) for t in (got, host(learner.params))]
    assert relative_error(*finite) < 1e-5


# ---- devices -------------------------------------------------------------------------------------

MESHES = [
    *(
        pytest.param(sizes, marks=pytest.mark.slow)
        for sizes in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1)]
    ),
    (1, 2, 2),
]


def two_updates(mesh):
    """(loss, gradient, parameters after two updates) of a small run on a mesh, as numpy."""
    config = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, grad_clip=0.5)
    learner = make_learner(mesh=mesh, optimizer=make_optimizer(config, 10))
    batches = [batch_of(rows=4), batch_of(events_of((2, 2, 1, 3), 5), rows=4)]
    sums, metrics, _ = learner.gradient(batches[0], *[learner.score(batches[0])] * 2)
    gradient = jax.block_until_ready(sums.grads)
    shardings = jax.tree.map(lambda x: x.sharding, learner.state)
    reports = learner.update(batches)
    jax.block_until_ready(learner.state)
    same = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), learner.state, shardings
    )
    assert all(jax.tree.leaves(same))
    losses = [float(metrics.loss), *(float(r["loss"]) for r in reports)]
    return losses, host(gradient), host(learner.params)


@pytest.fixture(scope="module")
def on_one_device():
    return two_updates(make_mesh(1, 1, 1, devices=jax.devices()[:1]))


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_computes_the_same_update(sizes, on_one_device):
    losses, gradient, params = on_one_device
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    got_losses, got_gradient, got_params = two_updates(mesh)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5, atol=1e-5)
    assert relative_error(got_gradient, gradient) < 1e-5
    start = host(split_params(tiny_model())[1])
    moved = jax.tree.map(np.subtract, params, start)
    got_moved = jax.tree.map(np.subtract, got_params, start)
    assert relative_error(got_moved, moved) < 1e-4


# ---- several updates of one batch ----------------------------------------------------------------


def test_the_second_minibatch_has_ratios_to_the_policy_that_sampled_it():
    learner = fresh_learner()
    graphdef, start = split_params(learner.model())
    start = host(start)
    first, second = batch_of(rows=4), batch_of(events_of((2, 1, 3), 7), rows=4)
    seen = []
    reports = learner.update([first, second], on_step=lambda: seen.append(host(learner.params)))
    assert len(seen) == 2 and [int(r["num_events"]) for r in reports] == [5, 3]
    np.testing.assert_array_equal(reports[0]["ratio"][:5], np.ones(5))
    assert float(reports[0]["loss"]) == pytest.approx(-np.mean(first.event_advantage[:5]), rel=1e-5)

    old = plain_scores(graphdef, start, second)[0]
    loss, grads = one_autograd(graphdef, seen[0], second, learner.objective, old)
    gap = np.where(
        second.loss_mask.reshape(old.shape), plain_scores(graphdef, seen[0], second)[0] - old, 0
    ).sum(1)
    log_ratio = [gap[:2].sum() / np.sqrt(2), gap[2], gap[3:6].sum() / np.sqrt(3)]
    assert np.abs(log_ratio).min() > 1e-3  # off-policy indeed
    np.testing.assert_allclose(reports[1]["log_ratio"][:3], log_ratio, rtol=1e-3, atol=1e-5)
    assert float(reports[1]["loss"]) == pytest.approx(float(loss), rel=1e-4)
    assert float(reports[1]["grad_norm"]) == pytest.approx(norm(grads), rel=1e-4)
    assert int(learner.state.updates) == 2


@pytest.mark.parametrize("preset", ["srpo", "dr_mas"])
def test_a_single_batch_skips_scoring_and_equals_the_scored_update(preset, monkeypatch):
    learner = fresh_learner(preset)
    batch = batch_of(rows=4, by_row=preset == "dr_mas")
    scores = learner.score(batch)
    scored, want, _ = learner.gradient(batch, scores, scores)
    unscored, metrics, _ = learner.gradient(batch)
    assert relative_error(unscored.grads, scored.grads) < 1e-6
    assert float(metrics.loss) == pytest.approx(float(want.loss), rel=1e-6)
    np.testing.assert_array_equal(metrics.ratio, np.ones(8))

    def no_score(*_):
        raise AssertionError("a single update needs no scores")

    monkeypatch.setattr(learner, "score", no_score)
    (report,) = learner.update([batch])
    assert float(report["grad_norm"]) == pytest.approx(norm(scored.grads), rel=1e-5)
    assert report["applied"] and float(report["ratio_mean"]) == 1.0


@pytest.mark.parametrize(
    ("preset", "changes"),
    [pytest.param("magrpo", {}, marks=pytest.mark.slow), ("srpo", {"entropy_coef": 0.5})],
    ids=str,
)
def test_a_single_batch_is_scored_where_the_gradient_needs_the_values(preset, changes, monkeypatch):
    learner = fresh_learner(preset, **changes)
    graphdef, params = split_params(learner.model())
    batch = batch_of(rows=4)
    old = plain_scores(graphdef, params, batch)[0]
    loss, grads = one_autograd(graphdef, params, batch, learner.objective, old)
    scored, score = [], learner.score
    monkeypatch.setattr(learner, "score", lambda *args: (scored.append(args), score(*args))[1])
    (report,) = learner.update([batch])
    # Without a ratio the gradient needs no values, and the loss is known from the update itself.
    assert len(scored) == (preset != "magrpo")
    assert float(report["loss"]) == pytest.approx(float(loss), rel=1e-4)
    if preset == "magrpo":
        assert float(report["surrogate"]) == -float(report["loss"])
    assert float(report["grad_norm"]) == pytest.approx(norm(grads), rel=1e-4)


def test_the_kl_reference_is_scored_once_for_each_batch(monkeypatch):
    learner = fresh_learner(kl_coef=0.1)
    scored, score = [], learner.score

    def counting(batch, params=None):
        scored.extend([batch] * (params is learner.reference))
        return score(batch, params)

    monkeypatch.setattr(learner, "score", counting)
    batches = [batch_of(rows=4), batch_of(events_of((2, 1, 3), 7), rows=4)]
    reports = learner.update(batches, orders=[[0, 1], [1, 0]], by_role=True)
    assert [id(batch) for batch in scored] == [id(batch) for batch in batches]
    assert float(reports[0]["kl"]) == 0.0 and float(reports[3]["kl"]) > 0


def test_the_first_update_has_a_gradient_though_every_ratio_is_one():
    learner = fresh_learner()
    before = host(learner.params)
    (report,) = learner.update([batch_of()])
    assert float(report["grad_norm"]) > 1e-2
    assert relative_error(learner.params, before) > 1e-3


# ---- the score program ---------------------------------------------------------------------------


def test_scores_are_the_plain_ones():
    learner = fresh_learner(entropy_coef=0.5)
    graphdef, params = split_params(learner.model())
    batch = batch_of(rows=4)
    mask = batch.loss_mask.reshape(-1, batch.shape[2])
    for got, want in zip(learner.score(batch), plain_scores(graphdef, params, batch), strict=True):
        np.testing.assert_allclose(
            np.asarray(got).reshape(mask.shape)[mask], np.asarray(want)[mask], rtol=1e-4, atol=1e-5
        )


def test_bfloat16_computation():
    batch = batch_of(rows=4)
    full = fresh_learner().gradient(batch)[0].grads
    low = make_learner(dtype=jnp.bfloat16)
    low.check_gate(batch)
    grads = low.gradient(batch)[0].grads
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert 1e-4 < relative_error(grads, full) < 0.2


def test_the_gate_passes_and_fails_where_two_scores_differ(monkeypatch):
    learner = fresh_learner()
    batch = batch_of(rows=4)
    learner.check_gate(batch)
    score, calls = learner.score, []

    def drifting(batch, params=None):
        calls.append(1)
        scores = score(batch, params)
        return scores._replace(logp=scores.logp + 1e-6 * len(calls))

    monkeypatch.setattr(learner, "score", drifting)
    with pytest.raises(GateError, match="scoring one batch twice differs by up to"):
        learner.check_gate(batch)


def test_the_samplers_gap_is_the_mean_absolute_difference_per_token():
    learner = fresh_learner()
    batch = batch_of(rows=4)
    logp = np.asarray(learner.score(batch)[0])
    want = np.abs(logp - batch.sampler_logp)[batch.loss_mask].mean()
    (report,) = learner.update([batch])
    assert float(report["sampler_gap"]) == pytest.approx(want, rel=1e-5)
    sampled = replace(batch, sampler_logp=np.asarray(learner.score(batch)[0]))
    assert float(learner.update([sampled])[0]["sampler_gap"]) < 1e-5


# ---- compiled programs and buffers ---------------------------------------------------------------


def test_the_old_state_is_donated_and_the_model_handed_in_is_not():
    model = tiny_model()
    given = split_params(model)[1]
    learner = make_learner(model)
    old = learner.state
    learner.update([batch_of()])
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert not any(x.is_deleted() for x in jax.tree.leaves((given, learner.state)))
    assert bit_equal(given, split_params(tiny_model())[1])


def test_bfloat16_moments_stay_bfloat16():
    config = OptimizerConfig(lr=1e-2, moment_dtype="bfloat16", schedule="cosine", warmup_steps=1)
    learner = make_learner(optimizer=make_optimizer(config, 10))
    types = jax.tree.map(lambda x: (x.dtype, x.shape), learner.state)
    assert np.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(learner.state.opt_state)}
    before = host(learner.params)
    for seed in range(2):
        learner.update([batch_of(events_of(seed=seed))])
    assert jax.tree.map(lambda x: (x.dtype, x.shape), learner.state) == types
    assert relative_error(learner.params, before) > 0


def test_the_kl_reference_is_frozen_and_is_the_model_handed_in():
    model = jax.device_put(tiny_model(), one_device().devices.flat[0])
    given = split_params(model)[1]
    settings = LearnerSettings(
        objective=ObjectiveConfig(kl_coef=0.1), vocab_size=REAL_VOCAB, temperature=TEMPERATURE
    )
    learner = Learner(model, ADAM, mesh=one_device(), settings=settings)
    pairs = zip(jax.tree.leaves(learner.reference), jax.tree.leaves(given), strict=True)
    assert all(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in pairs)
    start = host(learner.params)
    batch = batch_of(rows=4)
    first = learner.update([batch])[0]
    second = learner.update([batch])[0]
    assert bit_equal(learner.reference, start)
    assert float(first["kl"]) == 0.0 and float(second["kl"]) > 1e-5
    assert relative_error(learner.params, start) > 0
    assert fresh_learner().reference is None


# ---- updates that must not happen ----------------------------------------------------------------


def spoilt(batch):
    return replace(batch, event_advantage=np.where(batch.event_size > 0, NAN, 0).astype(np.float32))


@pytest.mark.parametrize("kind", ["non-finite", "empty"])
def test_public_case_s10_a_useless_step_is_skipped_bit_for_bit(kind):
    """Momentum and weight decay must not move parameters either."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    learner = make_learner(optimizer=make_optimizer(config, 10))
    good = batch_of(rows=4)
    assert learner.update([good])[0]["applied"]
    before = host(learner.state)
    bad = spoilt(good) if kind == "non-finite" else batch_of([], [])
    (report,) = learner.update([bad])
    assert not report["applied"] and bit_equal(learner.state, before)
    assert int(learner.state.updates) == 1
    if kind == "empty":
        assert np.isnan(report.pop("sampler_gap"))  # a mean over no token
        scalars = [v for v in report.values() if np.ndim(v) == 0 and not isinstance(v, dict)]
        assert np.isfinite(np.asarray(scalars, float)).all()
        assert float(report["loss"]) == 0.0 and float(report["grad_norm"]) == 0.0
    else:
        assert not np.isfinite(report["grad_norm"])
    assert learner.update([good])[0]["applied"] and int(learner.state.updates) == 2


def test_a_skipped_step_leaves_the_next_minibatch_on_policy():
    learner = fresh_learner()
    batch = batch_of(rows=4)
    reports = learner.update([spoilt(batch), batch])
    assert [bool(r["applied"]) for r in reports] == [False, True]
    np.testing.assert_array_equal(reports[1]["log_ratio"], np.zeros(8))
