"""An update leaf by leaf: the chain's numbers, the compiler's memory, and bfloat16 parameters."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.known_configs import find_architecture
from models.qwen import abstract_params
from srpo_jax.learner.optimizer import apply_by_leaf, make_optimizer
from srpo_jax.learner.programs import (
    Accumulated,
    LearnerSettings,
    TrainState,
    build_learner_programs,
    state_shardings,
)
from srpo_jax.objective_config import ObjectiveConfig
from srpo_jax.recipe.recipe import OptimizerConfig
from tests.learner_cases import bit_equal, one_device, tiny_config
from tests.test_optimizer import draw

GIB = 2**30


def by_leaf(optimizer):
    """A compiled step (parameters, state, gradient, number, whether it is applied)."""

    @jax.jit
    def step(params, state, grads, number, applied=True):
        return apply_by_leaf(
            optimizer, grads, optax.tree.norm(grads), state, params,
            step=jnp.int32(number), applied=jnp.asarray(applied),
        )  # fmt: skip

    return step


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_leaf_by_leaf_gives_the_chains_numbers(name, stored):
    """The clip acts on every gradient, so a norm of one leaf alone would show."""
    config = OptimizerConfig(
        name=name, lr=0.1, weight_decay=0.2, grad_clip=0.5, moment_dtype=stored, warmup_steps=2
    )
    optimizer = make_optimizer(config, 10)
    params = jax.tree.map(jnp.float32, draw(0))
    whole = alone = (params, optimizer.init(params))
    step = by_leaf(optimizer)

    @jax.jit
    def at_once(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(3):
        grads = jax.tree.map(jnp.float32, draw(number + 1))
        whole, alone = at_once(*whole, grads), step(*alone, grads, number)
    assert jax.tree.structure(alone) == jax.tree.structure(whole)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(whole), strict=True):
        assert a.dtype == b.dtype
        rtol = 2**-7 if a.dtype == jnp.bfloat16 else 1e-3 if stored == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-5)
    assert bit_equal(step(*alone, grads, 3, applied=False), alone)


# ---- memory, by the compiler ---------------------------------------------------------------------


def memory_of_apply(config, **options):
    """The compiler's figures, and the bytes of each leaf of the float32 gradient."""
    param_dtype = jnp.dtype(options.pop("param_dtype", "float32"))
    mesh = one_device()
    graphdef, params = abstract_params(config, param_dtype)
    optimizer = make_optimizer(OptimizerConfig(lr=1e-6, **options), 100)
    where = state_shardings(mesh, params, optimizer)
    settings = LearnerSettings(objective=ObjectiveConfig(), vocab_size=config.vocab_size)
    programs = build_learner_programs(graphdef, optimizer, mesh, settings, where)
    state = TrainState(
        params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32)
    )
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    sums = Accumulated(grads, *[jax.ShapeDtypeStruct((), jnp.float32)] * 2)
    memory = (
        programs.apply.lower(state, sums, jax.ShapeDtypeStruct((), jnp.int32))
        .compile()
        .memory_analysis()
    )
    return memory, 4 * np.array([p.size for p in jax.tree.leaves(params)])


@pytest.mark.parametrize(
    ("name", "stored", "param_dtype"),
    [
        ("adamw", "float32", "float32"),
        ("adamw", "bfloat16", "float32"),
        ("adamw", "bfloat16", "bfloat16"),
        ("muon", "bfloat16", "float32"),
    ],
)
def test_an_update_holds_the_temporaries_of_one_leaf(name, stored, param_dtype):
    """And the state in place: parameters and moments are donated and come out where they were."""
    config = tiny_config(vocab_size=4096, hidden_size=128, intermediate_size=512, num_layers=4)
    memory, leaves = memory_of_apply(
        config, name=name, moment_dtype=stored, param_dtype=param_dtype
    )
    # Muon's iteration holds several matrices of the size of its leaf, which is half of the largest.
    most = (1.1 if name == "adamw" else 2.0) * leaves.max()
    assert memory.temp_size_in_bytes < most < leaves.sum()
    # All but the gradient and a few counters, some of them padded.
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < leaves.sum() + 1024


@pytest.mark.parametrize(("stored", "limit"), [("float32", 8.4), ("bfloat16", 6.6)])
def test_the_update_of_half_a_billion_parameters_fits(stored, limit):
    """Arguments and temporaries in GiB: three or two trees of 1.84, or half, and the gradient."""
    config = find_architecture("Qwen/Qwen2.5-0.5B").config
    memory, _ = memory_of_apply(config, moment_dtype=stored)
    assert (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / GIB <= limit


# ---- bfloat16 parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_parameters_move_as_far_as_float32_ones_on_average(name):
    """20 steps of 1e-5 on weights near 0.02, whose last place in bfloat16 is 1.2e-4: to nearest,
    all of them would stay where they are."""
    rng = np.random.default_rng(0)
    start = np.asarray(rng.uniform(0.018, 0.03, (2, 64, 96)), np.float32)
    start = np.asarray(jnp.asarray(start, jnp.bfloat16).astype(jnp.float32))
    grads = rng.normal(0.5, 1.0, (2, 64, 96)).astype(np.float32)
    config = OptimizerConfig(name=name, lr=1e-5, weight_decay=0.0, grad_clip=None)
    optimizer = make_optimizer(config, 100)
    moved = {}
    for dtype in ("float32", "bfloat16"):
        params = {"layers": {"q_proj": {"kernel": jnp.asarray(start, dtype)}}}
        gradient = {"layers": {"q_proj": {"kernel": jnp.asarray(grads)}}}
        state, step = optimizer.init(params), by_leaf(optimizer)
        for number in range(20):
            params, state = step(params, state, gradient, number)
        (kernel,) = jax.tree.leaves(params)
        assert kernel.dtype == dtype
        moved[dtype] = np.asarray(kernel, np.float64) - start
    want, got = moved["float32"], moved["bfloat16"]
    assert np.mean(got != 0) > 0.1
    # A step's rounding has at most the variance 1e-5 * 1.2e-4, and 20 of them 1.6e-4 squared.
    assert abs(got.mean() - want.mean()) < 4 * 1.6e-4 / np.sqrt(got.size)
    slope = (got * want).sum() / (want * want).sum()
    assert slope == pytest.approx(1.0, abs=0.1)


def test_what_is_drawn_for_a_step_is_repeated_and_differs_by_step_and_leaf():
    optimizer = optax.sgd(1e-5)
    params = {name: jnp.full((50, 40), 0.02, jnp.bfloat16) for name in ("a", "b")}
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    state, step = optimizer.init(params), by_leaf(optimizer)
    first, again, second = (step(params, state, grads, n)[0] for n in (0, 0, 1))
    assert bit_equal(first, again)
    drawn = {np.asarray(x).tobytes() for tree in (first, second) for x in tree.values()}
    assert len(drawn) == 4


def test_the_noise_of_a_rounding_is_uniform_and_uncorrelated():
    """Standard scores of its mean, and of its correlation along every axis, stay below 4.5."""
    from srpo_jax.learner.optimizer import _noise

    noise = jax.jit(partial(_noise, shape=(30, 200, 90)))
    x, other = (np.asarray(noise(jnp.uint32(s)), np.float64) / 2**16 - 0.5 for s in (1, 2))
    scores = [x.mean() * np.sqrt(12 * x.size)]
    for pair in (
        (x, other), (x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[..., 1:], x[..., :-1])
    ):  # fmt: skip
        product = pair[0] * pair[1]
        scores.append(12 * product.mean() * np.sqrt(product.size))
    assert np.abs(scores).max() < 4.5, scores
    assert x.std() == pytest.approx(12**-0.5, rel=0.01)
