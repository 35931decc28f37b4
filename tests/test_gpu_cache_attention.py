"""The GPU's cache attention in the Pallas interpreter, against the plain form; its lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from models.attention import cache_gpu as gpu
from models.attention.cache import PLAIN, Pages, Work
from srpo_jax.engine.pages import PageNode
from srpo_jax.engine.plan import RowPages, Shapes, decode_work, plan_prefill

P = 16
SHAPES = Shapes(slots=7, page=P, lanes=4, cache_tokens=80)
OWN = 20  # a row's own pages are 20 + 2 * slot and the next
KERNELS = gpu.gpu_cache_attention(interpret=True)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Each program has several items, as on a GPU where there are more items than programs."""
    monkeypatch.setattr(gpu, "PROGRAMS", 8)


def node(page, count=P, parent=None):
    return PageNode(page, tuple(range(count)), parent)


def plan(prompts):
    """Work for slots with these prompts (pages, tokens of the last) and two own pages each."""
    rows = {}
    for slot, (pages, last) in prompts.items():
        nodes = [node(page) for page in pages[:-1]] + [node(page, last) for page in pages[-1:]]
        rows[slot] = RowPages(nodes, [OWN + 2 * slot, OWN + 2 * slot + 1])
    return Work(*map(jnp.asarray, decode_work(rows, SHAPES)))


def current_pages(prompts, own):
    pages = [OWN + 2 * s + (int(own[s]) - 1) // P if s in prompts else 0 for s in range(len(own))]
    return jnp.asarray(pages, jnp.int32)


def inputs(G, Kv, H, dtype=jnp.float32, pages=40):
    """Queries, new keys and values, and a cache that is full of numbers, unseen places too."""
    rng = np.random.default_rng(G * H)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    tokens = normal(SHAPES.slots, Kv * G, H), *(normal(SHAPES.slots, Kv, H) for _ in range(2))
    return *tokens, Pages(normal(pages, Kv, H, P), normal(pages, Kv, P, H))


# Six rows, five of which read page 1: more than lanes. Row 5 has no prompt, row 6 no pages.
PROMPTS = {s: ([1, 2 + s // 3], 5 + s // 3) for s in range(5)} | {5: ([], 0)}
LENGTHS = jnp.asarray([1, 16, 17, 20, 32, 5, 0], jnp.int32)


@functools.lru_cache
def decoder(attention):
    """One jitted step without its workspace, compiled once for all tests of a shape."""

    def step(q, k, v, cache, work, own, page):
        groups = q.shape[1] // k.shape[1]
        workspace = attention.workspace(work, k.shape[1], groups, q.shape[2])
        out, cache, _ = attention.decode(q, k, v, cache, work, own, page, workspace)
        return out, cache

    return jax.jit(step)


def assert_close(got, expected, atol):
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)


def assert_same_cache(got, expected):
    """Page 0 takes what nobody reads, and only the plain form writes it."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a[1:]), np.asarray(b[1:]))


@pytest.mark.parametrize(
    "G, Kv, H, dtype, atol",
    [
        (1, 2, 64, "bfloat16", 0.03),
        (2, 1, 80, "float32", 1e-5),
        (7, 2, 128, "float32", 1e-5),
    ],
)
def test_a_step_equals_the_plain_form(G, Kv, H, dtype, atol):
    q, k, v, cache = inputs(G, Kv, H, dtype)
    args = (q, k, v, cache, plan(PROMPTS), LENGTHS, current_pages(PROMPTS, LENGTHS))
    (got, got_cache), (expected, cache) = decoder(KERNELS)(*args), decoder(PLAIN)(*args)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, expected, atol)
    assert_same_cache(got_cache, cache)
    assert not np.asarray(got[6], np.float32).any()


def test_unseen_places_of_a_page_may_hold_anything():
    q, k, v, cache = inputs(2, 1, 64)
    args = (plan(PROMPTS), LENGTHS, current_pages(PROMPTS, LENGTHS))
    expected, _ = decoder(KERNELS)(q, k, v, cache, *args)
    dirty = Pages(
        cache.k.at[2, :, :, 5:].set(jnp.nan).at[OWN + 1].set(jnp.nan),
        cache.v.at[2, :, 5:].set(jnp.nan).at[OWN + 1].set(jnp.nan),
    )
    np.testing.assert_array_equal(decoder(KERNELS)(q, k, v, dirty, *args)[0], expected)


def test_steps_in_a_loop_cross_into_the_next_page():
    """Five steps with the cache as carry; rows 0 to 2 go on from 13, 14 and 15 own tokens."""
    prompts = {0: ([1, 2], 3), 1: ([1, 2], 3), 2: ([], 0)}
    _, _, _, cache = inputs(2, 1, 64)
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(5, 7, n, 64)), jnp.float32) for n in (2, 1, 1))
    work, start = plan(prompts), jnp.asarray([13, 14, 15, 0, 0, 0, 0], jnp.int32)
    tables = jnp.asarray([[OWN + 2 * s, OWN + 2 * s + 1] if s < 3 else [0, 0] for s in range(7)])

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, cache):
        def step(carry):
            n, cache, workspace, outs = carry
            own = start + n + 1
            page = jnp.take_along_axis(tables, ((own - 1) // P)[:, None], 1)[:, 0]
            out, cache, workspace = attention.decode(
                q[n], k[n], v[n], cache, work, own, page, workspace
            )
            return n + 1, cache, workspace, outs.at[n].set(out)

        workspace = attention.workspace(work, 1, 2, 64)
        carry = (0, cache, workspace, jnp.zeros((5, 7, 2, 64)))
        _, cache, _, outs = jax.lax.while_loop(lambda carry: carry[0] < 5, step, carry)
        return outs, cache

    (got, got_cache), (expected, expected_cache) = run(KERNELS, cache), run(PLAIN, cache)
    assert_close(got, expected, 1e-5)
    assert_same_cache(got_cache, expected_cache)
    np.testing.assert_array_equal(got_cache.k[OWN, 0, :, 13:], k[:3, 0, 0].T)  # own tokens 14 to 16
    np.testing.assert_array_equal(got_cache.v[OWN + 1, 0, :2], v[3:, 0, 0])


def test_bits_do_not_depend_on_company():
    q, k, v, cache = inputs(2, 1, 64)

    def row_3(prompts, lengths):
        args = (plan(prompts), lengths, current_pages(prompts, lengths))
        return np.asarray(decoder(KERNELS)(q, k, v, cache, *args)[0][3])

    alone = row_3({3: PROMPTS[3]}, LENGTHS.at[jnp.asarray([0, 1, 2, 4, 5])].set(0))
    assert alone.any()
    np.testing.assert_array_equal(row_3(PROMPTS, LENGTHS), alone)


@pytest.mark.parametrize("G, Kv, H, dtype, atol", [(2, 2, 80, "float32", 1e-5),
                                                   (1, 1, 128, "bfloat16", 0.03)])  # fmt: skip
def test_prefill_equals_the_plain_form(G, Kv, H, dtype, atol):
    *_, cache = inputs(G, Kv, H, dtype)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, P, n, H)), dtype) for n in (Kv * G, Kv, Kv))
    first = node(5)
    second = node(3, parent=first)
    nodes = [first, second, node(8, 7, node(9, parent=node(4)))]  # 4 and 9 are in the cache already
    pages = plan_prefill(nodes, 4, SHAPES)  # the fourth is not used
    args = (q, k, v, cache, *map(jnp.asarray, (pages.page, pages.context, pages.depth)))
    got, got_cache = jax.jit(KERNELS.prefill)(*args)
    expected, expected_cache = jax.jit(PLAIN.prefill)(*args)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, expected, atol)
    assert not np.asarray(got[3], np.float32).any()
    assert_same_cache(got_cache, expected_cache)


def test_key_heads_apart_on_a_mesh():
    q, k, v, cache = inputs(2, 2, 64)
    args = (q, k, v, cache, plan(PROMPTS), LENGTHS, current_pages(PROMPTS, LENGTHS))
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    heads = Spec(None, "tensor")
    mapped = jax.shard_map(
        decoder(KERNELS), mesh=mesh, in_specs=(*[heads] * 4, Spec(), Spec(), Spec()),
        out_specs=heads, check_vma=False,
    )  # fmt: skip
    got, got_cache = jax.block_until_ready(jax.jit(mapped)(*args))
    expected, expected_cache = decoder(PLAIN)(*args)
    assert_close(got, expected, 1e-5)
    assert_same_cache(got_cache, expected_cache)


@pytest.mark.parametrize("H, dtype", [(64, "bfloat16"), (80, "float32"), (128, "float16")])
@pytest.mark.usefixtures("h100")
def test_lowers_to_triton(H, dtype):
    """Two kernels a decode layer and no other loop; one for a prefill."""
    attention = gpu.gpu_cache_attention()
    page, Kv, N, S = attention.page, 2, 14, 3
    shapes = Shapes(slots=32, page=page, lanes=attention.lanes, cache_tokens=1024)
    work = jax.eval_shape(lambda: Work(*map(jnp.asarray, decode_work({}, shapes))))

    def array(*shape, of=dtype):
        return jax.ShapeDtypeStruct(shape, of)

    cache = Pages(array(100, Kv, H, page), array(100, Kv, page, H))
    rows, ints = [array(32, n, H) for n in (N, Kv, Kv)], array(32, of=jnp.int32)

    def layers(q, k, v, cache, work, own, page):
        for _ in range(2):
            q, cache, _ = attention.decode(q, k, v, cache, work, own, page, ())
        return q, cache

    traced = jax.jit(layers).trace(*rows, cache, work, ints, ints)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 2 * 2
    assert "stablehlo.while" not in text and "stablehlo.scatter" not in text
    whole = [array(S, page, n, H) for n in (N, Kv, Kv)]
    at = [array(*shape, of=jnp.int32) for shape in ((S,), (S, shapes.row_pages), (S,))]
    text = jax.jit(attention.prefill).trace(*whole, cache, *at).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    "H, dtype, page, reason",
    [(8, "float32", 16, "not 8"), (64, "int8", 16, "not int8"), (64, "float32", 24, "not 24")],
)
def test_what_it_cannot_take_is_refused_in_words(H, dtype, page, reason):
    cache = Pages(jnp.zeros((2, 1, H, page), dtype), jnp.zeros((2, 1, page, H), dtype))
    q = jnp.zeros((1, page, 1, H), dtype)
    with pytest.raises(ValueError, match=reason):
        KERNELS.prefill(q, q, q, cache, *[jnp.zeros(1, jnp.int32)] * 3)


def test_heads_it_cannot_take_are_refused_when_room_is_made():
    assert KERNELS.workspace(plan({}), 2, 2, 128) == ()
    with pytest.raises(ValueError, match="head widths of 16 to 128, not 256"):
        KERNELS.workspace(plan({}), 2, 2, 256)
