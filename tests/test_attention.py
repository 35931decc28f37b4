"""The blocked form against the plain reference, in value and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.forms import ATTENTION_FORMS, AttentionForm
from models.attention.select import attention_on
from models.attention.sequence import blocked_attention, plain_attention
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import parse_recipe
from srpo_jax.recipe.yaml import parse_yaml
from tests.learner_cases import one_device
from tests.test_config import MINIMAL


def inputs(T, N, Kv, H, dtype=jnp.float32, B=3):
    rng = np.random.default_rng(T + N)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, Kv, Kv))
    # Two segments and padding, of other lengths in every sequence.
    ends = np.sort(rng.integers(1, T + 1, (B, 2)), axis=1)
    place = np.arange(T)
    segments = np.where(place < ends[:, :1], 1, np.where(place < ends[:, 1:], 2, 0))
    return q, k, v, jnp.asarray(segments, jnp.int32)


@pytest.mark.parametrize("T, block", [(1, 8), (8, 8), (13, 8), (40, 16)])
@pytest.mark.parametrize("N, Kv", [(4, 4), (4, 2), (6, 1)])
def test_blocked_equals_plain_in_value_and_gradient(T, block, N, Kv):
    q, k, v, segments = inputs(T, N, Kv, 8)

    def weighted(form, *args):
        out = form(*args)
        return jnp.sum(jnp.sin(out) * (segments > 0)[:, :, None, None]), out

    def run(form):
        grad = jax.grad(lambda *x: weighted(form, *x, segments), argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad)(q, k, v)

    expected, out = run(plain_attention)
    got, blocked = run(lambda *x: blocked_attention(*x, block=block))
    np.testing.assert_allclose(blocked, out, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_blocked_scores_stay_within_a_block_of_queries():
    T, block = 64, 16
    args = inputs(T, 4, 2, 8)
    form = jax.grad(lambda *x: blocked_attention(*x, block=block).sum(), argnums=(0, 1, 2))
    shapes = set()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            shapes.update(v.aval.shape for v in equation.outvars)
            for value in equation.params.values():
                for sub in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(sub, "jaxpr", sub)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(form)(*args[:3], args[3]).jaxpr)
    assert any(s[-1:] == (T,) for s in shapes)  # the walk did reach the scores
    assert not [s for s in shapes if s[-2:] == (T, T)]


# ---- the table of forms --------------------------------------------------------------------------


def test_a_form_is_one_entry_of_a_table(monkeypatch):
    """Recipes take its name, and the learner's mesh gets what it builds; ``auto`` prefers one of
    the mesh's own platform, for the arguments that it takes."""
    minimal = parse_yaml(MINIMAL, "minimal")
    with pytest.raises(RecipeError, match=r"attention: must be one of auto, plain, .* got 'zeros'"):
        parse_recipe(minimal, ["learner.attention=zeros"])
    even = AttentionForm(
        lambda mesh: lambda q, k, v, ids: jnp.zeros_like(q),
        platform="cpu",
        takes=lambda shape, kv_heads, dtype: shape[1] % 2 == 0,
    )
    monkeypatch.setitem(ATTENTION_FORMS, "zeros", even)
    name = parse_recipe(minimal, ["learner.attention=zeros"]).learner.attention
    args = inputs(4, 4, 2, 8)
    assert not attention_on(one_device(), name)(*args).any()
    assert not attention_on(one_device())(*args).any()
    odd = inputs(5, 4, 2, 8)
    np.testing.assert_allclose(attention_on(one_device())(*odd), plain_attention(*odd), atol=1e-5)


def test_forms_of_other_platforms_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="attention 'splash' runs on tpu, the mesh is on cpu"):
        attention_on(one_device(), "splash")
    known = "attention 'flash' is not one of auto, plain, blocked, splash, triton"
    with pytest.raises(ValueError, match=known):
        attention_on(one_device(), "flash")
