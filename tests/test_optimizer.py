"""The optimiser chain: AdamW by hand, its schedule in optimiser steps, what decays, the clip."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.qwen import split_params
from srpo_jax.config import OptimizerConfig
from srpo_jax.optimizer import decay_mask, make_optimizer
from tests.learner_cases import tiny_model


def rates(total, steps, **settings):
    """The learning rate of each step, read off a parameter with a constant gradient of 1."""
    optimizer = make_optimizer(
        OptimizerConfig(weight_decay=0.0, b1=0.0, b2=0.0, eps=1e-12, grad_clip=None, **settings),
        total,
    )
    params = {"kernel": jnp.zeros(())}
    state, seen = optimizer.init(params), []
    for _ in range(steps):
        moves, state = optimizer.update({"kernel": jnp.ones(())}, state, params)
        seen.append(-float(moves["kernel"]))
    return np.array(seen)


def test_schedules_count_optimiser_steps():
    np.testing.assert_allclose(rates(8, 4, lr=0.5), 0.5, rtol=1e-6)
    np.testing.assert_allclose(
        rates(4, 6, lr=1.0, schedule="linear"), [1, 0.75, 0.5, 0.25, 0, 0], atol=1e-6
    )
    np.testing.assert_allclose(
        rates(4, 5, lr=1.0, schedule="cosine"),
        [(1 + np.cos(np.pi * t / 4)) / 2 for t in range(5)], atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_then_the_schedule_has_the_rest(schedule):
    warm = rates(12, 9, lr=1.0, schedule=schedule, warmup_steps=4)
    np.testing.assert_allclose(warm[:4], [0, 0.25, 0.5, 0.75], atol=1e-6)
    rest = rates(8, 5, lr=1.0, schedule=schedule)
    np.testing.assert_allclose(warm[4:], rest, atol=1e-6)


def test_two_steps_of_adamw_by_hand():
    config = OptimizerConfig(lr=0.1, weight_decay=0.2, b1=0.5, b2=0.75, eps=1e-3, grad_clip=None)
    optimizer = make_optimizer(config, 10)
    params = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
    state = optimizer.init(params)
    x = {name: 2.0 for name in params}
    m = v = 0.0
    for t, g in enumerate([3.0, -1.0], start=1):
        grads = {name: jnp.array([g]) for name in params}
        moves, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, moves)
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
        step = (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.75**t)) + 1e-3)
        x["kernel"] -= 0.1 * (step + 0.2 * x["kernel"])
        x["bias"] -= 0.1 * step  # biases do not decay
    np.testing.assert_allclose(params["kernel"], [x["kernel"]], rtol=1e-5)
    np.testing.assert_allclose(params["bias"], [x["bias"]], rtol=1e-5)


def test_what_decays():
    _, params = split_params(tiny_model(tie_embeddings=False, qkv_bias=True))
    mask = decay_mask(params)
    assert mask["embed"] == {"embedding": True} and mask["lm_head"] == {"kernel": True}
    assert mask["norm"] == {"scale": False}
    assert mask["layers"]["q_proj"] == {"kernel": True, "bias": False}
    assert mask["layers"]["q_norm"] == {"scale": False}


@pytest.mark.parametrize(("clip", "factor"), [(1.0, 0.2), (10.0, 1.0), (None, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(clip, factor):
    """The first moment shows the clipped gradient; 3 and 4 have the norm 5."""
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, b1=0.0, grad_clip=clip), 10)
    params = {"kernel": jnp.zeros(1), "scale": jnp.zeros(1)}
    grads = {"kernel": jnp.array([3.0]), "scale": jnp.array([4.0])}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    mu = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([mu["kernel"][0], mu["scale"][0]], [3 * factor, 4 * factor])


def test_moment_dtype():
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, moment_dtype="bfloat16"), 10)
    mu = optax.tree_utils.tree_get(optimizer.init({"kernel": jnp.zeros(1)}), "mu")
    assert mu["kernel"].dtype == jnp.bfloat16
