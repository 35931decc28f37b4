"""The optimiser chain against numpy float64: schedules, decay, Muon, dtypes and shardings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from models.partition import tree_shardings
from models.qwen import split_params
from srpo_jax.learner.optimizer import (
    decay_mask,
    last_rate,
    learning_rate,
    make_optimizer,
    muon_labels,
    opt_state_shardings,
    round_stochastically,
)
from srpo_jax.learner.sharding import make_mesh, replicated
from srpo_jax.recipe.recipe import OptimizerConfig
from srpo_jax.run.checkpoint import Checkpoints
from tests.learner_cases import bit_equal, tiny_model

STORED = ("float32", "bfloat16")
SHAPES = {
    "embed": {"embedding": (7, 4)},
    "layers": {
        "wide": {"kernel": (3, 4, 6), "bias": (3, 6)},
        "tall": {"kernel": (3, 6, 4)},
        "norm": {"scale": (3, 4)},
    },
    "lm_head": {"kernel": (4, 7)},
}


def is_shape(x):
    return isinstance(x, tuple)


def draw(seed, dtype=np.float64, scale=1.0):
    """A tree of SHAPES, normal."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(0, scale, shape), dtype), SHAPES, is_leaf=is_shape
    )


def run(config, params, gradients, total=10):
    """(parameters, state) after an update for each tree of ``gradients``."""
    optimizer = make_optimizer(config, total)
    params = jax.tree.map(jnp.asarray, params)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads):
        moves, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    for grads in gradients:
        params, state = step(params, state, jax.tree.map(jnp.asarray, grads))
    return params, state


def moments(state):
    """The leaves of the state, without counters and Muon's three coefficients."""
    return [x for x in jax.tree.leaves(state) if x.ndim and x.shape != (3,)]


# ---- schedules -----------------------------------------------------------------------------------


def rates(total, steps, **settings):
    """The learning rate of each step, read off a parameter with a constant gradient of 1."""
    config = OptimizerConfig(
        weight_decay=0.0, b1=0.0, b2=0.0, eps=1e-12, grad_clip=None, **settings
    )
    optimizer = make_optimizer(config, total)
    params = {"kernel": jnp.zeros(())}
    state, seen = optimizer.init(params), []
    for _ in range(steps):
        moves, state = optimizer.update({"kernel": jnp.ones(())}, state, params)
        seen.append(-float(moves["kernel"]))
    np.testing.assert_allclose(
        seen, [learning_rate(config, total)(t) for t in range(steps)], rtol=1e-6
    )
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


def test_a_schedule_ends_at_the_least_rate_and_stays_there():
    low = {"lr": 2.0, "min_lr_ratio": 0.1}
    np.testing.assert_allclose(
        rates(4, 6, schedule="linear", **low), [2, 1.55, 1.1, 0.65, 0.2, 0.2], atol=1e-6
    )
    shape = [(1 + np.cos(np.pi * min(t, 4) / 4)) / 2 for t in range(6)]
    np.testing.assert_allclose(
        rates(4, 6, schedule="cosine", **low), [0.2 + 1.8 * s for s in shape], atol=1e-6
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_then_the_schedule_has_the_rest(schedule):
    """The first update has a rate of its own, and the last of the warm-up the peak."""
    warm = rates(12, 9, lr=1.0, schedule=schedule, warmup_steps=4)
    np.testing.assert_allclose(warm[:4], [0.25, 0.5, 0.75, 1.0], atol=1e-6)
    rest = rates(8, 5, lr=1.0, schedule=schedule)
    np.testing.assert_allclose(warm[4:], rest, atol=1e-6)


def test_the_last_rate_is_that_of_the_last_applied_update():
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    seen = [last_rate(config, 6, updates) for updates in range(6)]
    assert np.isnan(seen[0])
    np.testing.assert_allclose(seen[1:], [0.5, 1.0, 1.0, 0.75, 0.5], atol=1e-6)


# ---- AdamW by hand -------------------------------------------------------------------------------

HAND = {
    "lr": 0.1, "weight_decay": 0.2, "b1": 0.5, "b2": 0.75, "eps": 1e-3, "grad_clip": 2.0,
    "warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.25,
}  # fmt: skip
HAND_RATES = [0.05, 0.1, 0.1, 0.1 * (0.25 + 0.75 * (1 + np.cos(np.pi / 8)) / 2)]  # 10 steps in all


def clipped(grads, limit):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * min(1.0, limit / norm), grads)


def adamw_by_hand(params, gradients, *, decays):
    """AdamW of HAND in numpy; ``decays(path)`` says which leaves decay."""
    m = jax.tree.map(np.zeros_like, params)
    v = jax.tree.map(np.zeros_like, params)
    for t, (grads, rate) in enumerate(zip(gradients, HAND_RATES, strict=True), start=1):
        grads = clipped(grads, 2.0)
        m = jax.tree.map(lambda m, g: 0.5 * m + 0.5 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.75 * v + 0.25 * g * g, v, grads)

        def move(path, x, m, v, t=t, rate=rate):
            step = (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.75**t)) + 1e-3)
            return x - rate * (step + 0.2 * x * decays([k.key for k in path]))

        params = jax.tree_util.tree_map_with_path(move, params, m, v)
    return params


@pytest.mark.parametrize("embedding", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-7), (np.float32, 2e-4)])
def test_adamw_by_hand(dtype, rtol, embedding):
    """Clip, moments, decay, warm-up and schedule; the second gradient is short of the limit."""
    params, gradients = draw(0), [draw(s, scale=0.01 if s == 2 else 1.0) for s in range(1, 5)]
    leaves = {"kernel", "embedding"} if embedding else {"kernel"}
    want = adamw_by_hand(params, gradients, decays=lambda path: path[-1] in leaves)
    with jax.enable_x64(True):
        config = OptimizerConfig(**HAND, decay_embedding=embedding)
        narrow = [jax.tree.map(lambda x: x.astype(dtype), t) for t in (params, *gradients)]
        got, _ = run(config, narrow[0], narrow[1:])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * 0.1)


def test_what_decays():
    _, params = split_params(tiny_model(tie_embeddings=False, qkv_bias=True))
    mask = decay_mask(params)
    assert mask["embed"] == {"embedding": True} and mask["lm_head"] == {"kernel": True}
    assert mask["norm"] == {"scale": False}
    assert mask["layers"]["q_proj"] == {"kernel": True, "bias": False}
    assert mask["layers"]["q_norm"] == {"scale": False}
    assert decay_mask(params, embedding=False) == mask | {"embed": {"embedding": False}}


@pytest.mark.parametrize(("clip", "factor"), [(1.0, 0.2), (10.0, 1.0), (None, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(clip, factor):
    """The first moment shows the clipped gradient; 3 and 4 have the norm 5."""
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, b1=0.0, grad_clip=clip), 10)
    params = {"kernel": jnp.zeros(1), "scale": jnp.zeros(1)}
    grads = {"kernel": jnp.array([3.0]), "scale": jnp.array([4.0])}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    mu = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([mu["kernel"][0], mu["scale"][0]], [3 * factor, 4 * factor])


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    """A bfloat16 sum would say 256 or 258 for the 257 that these leaves' squares add up to."""
    params = {"kernel": jnp.ones(256, jnp.bfloat16), "scale": jnp.ones(1, jnp.bfloat16)}
    config = OptimizerConfig(lr=0.1, b1=0.0, grad_clip=1.0)
    _, state = run(config, params, [params])
    mu = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(mu["scale"], 257**-0.5, rtol=1e-6)


# ---- Muon ----------------------------------------------------------------------------------------


def newton_schulz(x):
    """Five quintic steps on one matrix in numpy."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


def muon_by_hand(kernel, gradients, *, momentum=0.95, lr=0.1, decay=0.2):
    """Nesterov momentum, then each layer's matrix on its own; kernel [L, din, dout]."""
    mu = np.zeros_like(kernel)
    for t, g in enumerate(gradients, start=1):
        mu = momentum * mu + (1 - momentum) * g
        ahead = momentum * mu / (1 - momentum ** (t + 1)) + (1 - momentum) * g / (1 - momentum**t)
        step = np.stack([newton_schulz(layer) for layer in ahead])
        step *= 0.2 * np.sqrt(max(kernel.shape[1:]))
        kernel = kernel - lr * (step + decay * kernel)
    return kernel


def test_muon_orthogonalises_each_layer_apart_and_leaves_the_rest_to_adamw():
    params, gradients = draw(0), [draw(s) for s in range(1, 4)]
    shared = {"lr": 0.1, "weight_decay": 0.2, "grad_clip": None}
    with jax.enable_x64(True):
        got, _ = run(OptimizerConfig(name="muon", **shared), params, gradients)
        adamw, _ = run(OptimizerConfig(**shared), params, gradients)
        got, adamw = jax.tree.map(np.asarray, (got, adamw))
    for name in ("wide", "tall"):
        grads = [g["layers"][name]["kernel"] for g in gradients]
        want = muon_by_hand(params["layers"][name]["kernel"], grads)
        np.testing.assert_allclose(got["layers"][name]["kernel"], want, rtol=1e-9)
        got["layers"][name]["kernel"] = adamw["layers"][name]["kernel"]
    assert bit_equal(got, adamw)


def test_a_muon_step_is_about_as_long_as_one_of_adamw():
    """Root mean square 0.2 times the rate, whatever the gradient's scale and the matrix's shape."""
    config = OptimizerConfig(name="muon", lr=0.1, weight_decay=0.0)
    params = {"layers": {"q": {"kernel": np.zeros((2, 32, 64), np.float32)}}}
    grads = {"layers": {"q": {"kernel": np.random.default_rng(0).normal(0, 1e-4, (2, 32, 64))}}}
    got, _ = run(config, params, [jax.tree.map(np.float32, grads)])
    rms = np.sqrt(np.mean(np.square(got["layers"]["q"]["kernel"]), axis=(1, 2)))
    np.testing.assert_allclose(rms, 0.02, rtol=0.2)


def test_which_parameters_muon_takes():
    _, params = split_params(tiny_model(tie_embeddings=False, qkv_bias=True))
    labels = muon_labels(params)
    muon = {
        "/".join(k.key for k in path)
        for path, label in jax.tree_util.tree_leaves_with_path(labels)
        if label == "muon"
    }
    names = ("q", "k", "v", "o", "gate", "up", "down")
    assert muon == {f"layers/{name}_proj/kernel" for name in names}
    # Muon keeps no second moment: layers' kernels have one moment, all else two.
    state = make_optimizer(OptimizerConfig(name="muon", lr=0.1), 10).init(params)
    held = sum(x.size for x in moments(state))
    sizes = jax.tree.map(lambda x, label: x.size * (1 if label == "muon" else 2), params, labels)
    assert held == sum(jax.tree.leaves(sizes))


# ---- dtypes of the state -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "stored"),
    [
        *(("muon", d, s) for d in ("float32", "bfloat16", "float64") for s in STORED),
        ("adamw", "bfloat16", "float32"),
        ("adamw", "bfloat16", "bfloat16"),
        ("adamw", "float64", "float32"),
    ],
)
def test_no_update_changes_a_dtype(name, dtype, stored):
    """Under a scan, which refuses a carry whose dtypes change; moments have the one asked for."""
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), draw(0))
        config = OptimizerConfig(
            name=name, lr=0.1, moment_dtype=stored, schedule="cosine", warmup_steps=1
        )
        optimizer = make_optimizer(config, 10)
        gradients = [jax.tree.map(lambda x: jnp.asarray(x, dtype), draw(s)) for s in range(4)]

        def step(carry, grads):
            moves, state = optimizer.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], moves), state), None

        start = (params, optimizer.init(params))
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *gradients)
        end, _ = jax.jit(lambda start, grads: jax.lax.scan(step, start, grads))(start, stacked)
        assert jax.tree.map(jnp.result_type, end) == jax.tree.map(jnp.result_type, start)
        wide = "float64" if dtype == "float64" else "float32"
        want = wide if stored == "float32" else stored
        assert {str(x.dtype) for x in moments(end[1])} == {want}
        assert all(bool(jnp.any(x != 0)) for x in moments(end[1]))
        assert {str(x.dtype) for x in jax.tree.leaves(end[0])} == {dtype}


def test_moves_of_bfloat16_parameters_are_not_rounded_before_they_are_added():
    params = {"kernel": jnp.full(4, 3.0, jnp.bfloat16)}
    optimizer = make_optimizer(OptimizerConfig(lr=0.1), 10)
    moves, _ = optimizer.update(params, optimizer.init(params), params)
    assert moves["kernel"].dtype == jnp.float32


def test_bfloat16_moments_do_not_stall():
    """b2 = 0.999, gradients of 1 for 1,500 steps and of 0.1 for 1,500 more.

    The second moment is 1 - 0.999^1500 = 0.777 after the first, 0.777 * 0.223 + 0.00777 = 0.181
    after the second. Rounding to nearest stops at 0.25 and never falls again.
    """
    bf16 = ml_dtypes.bfloat16
    nearest, seen = bf16(0), []
    for g in [1.0] * 1500 + [0.1] * 1500:
        nearest = bf16(0.999 * float(nearest) + 0.001 * g * g)
        seen.append(float(nearest))
    assert seen[1499] == seen[2999] == 0.25

    optimizer = make_optimizer(OptimizerConfig(lr=0.1, moment_dtype="bfloat16", grad_clip=None), 10)
    params = {"kernel": jnp.zeros(2000)}

    def step(state, g):
        _, state = optimizer.update({"kernel": jnp.full(2000, g)}, state, params)
        nu, mu = (optax.tree_utils.tree_get(state, name)["kernel"] for name in ("nu", "mu"))
        return state, jnp.stack([x.astype(jnp.float32) for x in (nu, mu)])

    grads = jnp.repeat(jnp.array([1.0, 0.1]), 1500)
    _, seen = jax.jit(lambda: jax.lax.scan(step, optimizer.init(params), grads))()
    for t, nu, mu in ((1499, 0.777, 1.0), (2999, 0.181, 0.1)):
        np.testing.assert_allclose(seen[t].mean(axis=1), [nu, mu], rtol=0.01)
        assert seen[t, 0].std() < 0.1 * nu  # one element is within some per cent


def test_stochastic_rounding_draws_a_neighbour_and_is_unbiased():
    gap = 2.0**-7  # of bfloat16 in [1, 2)
    for x in (1 + 0.3 * gap, -(1 + 0.3 * gap), 1e-30):
        out = round_stochastically(jnp.full(40_000, x), jnp.uint32(1)).astype(jnp.float32)
        out = np.asarray(out, np.float64)
        assert len(np.unique(out)) == 2 and out.min() < x < out.max()
        assert (out.max() - out.min()) <= gap * abs(x)
        error = out.std() / np.sqrt(len(out))
        assert abs(out.mean() - np.float32(x)) < 4 * error
    kept = jnp.array([0.0, -0.0, 1.0, -2.5, 1.0078125, jnp.inf, -jnp.inf, jnp.nan])
    out = jax.vmap(lambda seed: round_stochastically(kept, seed))(jnp.arange(99, dtype=jnp.uint32))
    assert np.array_equal(out.astype(jnp.float32), np.tile(kept, (99, 1)), equal_nan=True)
    nan = jax.lax.bitcast_convert_type(jnp.full(99, 0x7FFFFFFF, jnp.uint32), jnp.float32)
    assert bool(jnp.isnan(round_stochastically(nan, jnp.uint32(3))).all())


def test_every_moment_and_step_has_draws_of_its_own_and_repeats_them():
    config = OptimizerConfig(lr=0.1, b1=0.7, b2=0.7, moment_dtype="bfloat16", grad_clip=None)
    params = {name: {"kernel": np.ones(500, np.float32)} for name in ("a", "b")}

    def up(state):
        """Which elements were rounded upwards, for each moment: all of them have one value."""
        return {np.asarray(x > x.min()).tobytes() for x in moments(state)}

    first, again, second = (run(config, params, [params] * n)[1] for n in (1, 1, 2))
    assert bit_equal(first, again)
    assert len(up(first)) == 4 and len(up(first) | up(second)) == 8


# ---- state on a mesh and on disk -----------------------------------------------------------------


def on_mesh(config, mesh):
    """(shardings of the parameters, parameters, state) after two updates of the tiny model."""
    optimizer = make_optimizer(config, 10)
    _, params = split_params(tiny_model(tie_embeddings=False, qkv_bias=True))
    shardings = tree_shardings(mesh, params)
    params = jax.device_put(params, shardings)
    of_state = opt_state_shardings(optimizer, params, shardings, replicated(mesh))
    state = jax.jit(optimizer.init, out_shardings=of_state)(params)

    def step(params, state, grads):
        moves, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, moves), state

    step = jax.jit(step, out_shardings=(shardings, of_state), donate_argnums=(0, 1))
    for seed in range(2):
        grads = split_params(tiny_model(seed + 5, tie_embeddings=False, qkv_bias=True))[1]
        params, state = jax.block_until_ready(step(params, state, jax.device_put(grads, shardings)))
    return shardings, params, state


@pytest.mark.multidevice
@pytest.mark.parametrize("stored", STORED)
def test_moments_lie_where_their_parameters_lie(stored, tmp_path):
    """And the update does not depend on the mesh; the state comes back from a checkpoint.

    With Muon, which leaves the embedding, head, norms and biases to AdamW: both kinds of state.
    """
    config = OptimizerConfig(name="muon", lr=1e-3, eps=1e-3, moment_dtype=stored)
    alone = on_mesh(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    mesh = make_mesh(1, 2, 2)
    shardings, params, state = on_mesh(config, mesh)
    by_shape = {}
    for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        by_shape.setdefault(x.shape, []).append(sharding)
    split = 0
    for x in jax.tree.leaves(state):
        options = by_shape.get(x.shape, [replicated(mesh)])
        assert any(x.sharding.is_equivalent_to(s, x.ndim) for s in options)
        split += not x.sharding.is_fully_replicated
    assert split >= 10
    for a, b in zip(*(jax.tree.leaves(t[1:]) for t in ((0, params, state), alone)), strict=True):
        # A stochastically rounded moment may fall on the other neighbour where its last bits differ
        rtol = 2**-7 if a.dtype == jnp.bfloat16 else 1e-4
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
        if rtol > 1e-4:
            assert np.mean(a == b) > 0.99  # the draws are the same

    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, state, {})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    loaded, _ = checkpoints.load(1, state)
    checkpoints.close()
    assert jax.tree.structure(loaded) == jax.tree.structure(state) and bit_equal(loaded, state)


def test_the_state_shardings_of_any_optax_optimiser():
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    params = {"layers": {"q_proj": {"kernel": jnp.zeros((2, 4, 4))}}}
    got = opt_state_shardings(
        optax.adam(0.1), params, tree_shardings(mesh, params), replicated(mesh)
    )
    want = tree_shardings(mesh, params)
    assert (got[0].mu, got[0].nu, got[0].count) == (want, want, replicated(mesh))
