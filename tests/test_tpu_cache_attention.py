"""The TPU kernels of the paged cache against the plain reference, in the Pallas interpreters.

What the compiler for v5e says of them, in memory above all, is asked where libtpu is installed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention.cache import PLAIN, Pages, Work, new_partial
from models.attention.cache_tpu import tpu_cache_attention
from srpo_jax.engine.pages import PageNode
from srpo_jax.engine.plan import RowPages, Shapes, decode_work

TPU_KERNEL = 'custom_call_target="tpu_custom_call"'
KERNEL = tpu_cache_attention(interpret=True)
LANES = KERNEL.lanes
SLOTS = LANES + 3
decode = jax.jit(KERNEL.decode)
plain_decode = jax.jit(PLAIN.decode)


def random(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_cache(pages, Kv, H, page, dtype=jnp.float32):
    return Pages(
        random(1, pages, Kv, H, page, dtype=dtype), random(2, pages, Kv, page, H, dtype=dtype)
    )


def nodes(page, *counts):
    """A prompt in the pages from ``page`` on, with so many tokens each."""
    return [PageNode(page + i, tuple(range(count)), None) for i, count in enumerate(counts)]


def plan(rows, page, slots=SLOTS):
    return decode_work(rows, Shapes(slots, page, LANES, cache_tokens=6 * page))


def own_page(rows, own, page):
    """Where each slot's newest own token goes, as the engine finds it."""
    at = np.zeros(len(own), np.int32)
    for slot, row in rows.items():
        if row.own and 0 < own[slot] <= len(row.own) * page:
            at[slot] = row.own[(own[slot] - 1) // page]
    return at


def busy_rows(page):
    """One more reader of a prompt than an item has lanes, one of a full page of its own, one
    without a prompt, and an empty slot; each with two own pages."""
    rows = {
        slot: RowPages(nodes(1, page, page - 78), [5 + 2 * slot, 6 + 2 * slot])
        for slot in range(LANES + 1)
    }
    rows[3] = RowPages([], rows[3].own)
    rows[LANES + 1] = RowPages(nodes(3, page), [5 + 2 * SLOTS, 6 + 2 * SLOTS])
    own = np.array([1, page - 1, page, page + 1, 2, 128, 127, 15, 16, 2 * page - 3, 17, 0])
    return rows, own[:SLOTS].astype(np.int32)


@pytest.mark.parametrize(
    "Kv, G, H, page, dtype",
    [
        (2, 1, 64, 128, jnp.float32),
        (1, 7, 64, 256, jnp.float32),
        (2, 2, 128, 256, jnp.float32),
        (2, 7, 128, 128, jnp.bfloat16),
        (3, 2, 64, 128, jnp.bfloat16),
    ],
)
def test_decode_equals_plain_over_steps(Kv, G, H, page, dtype):
    """Three steps, in which rows fill a page and go on in the next."""
    rows, own = busy_rows(page)
    work = plan(rows, page)
    cache = start = random_cache(30, Kv, H, page, dtype)
    expected_cache, workspace = start, new_partial(work, Kv, G, H)
    for step in range(3):
        q, k, v = (
            random(10 * step + i, SLOTS, n, H, dtype=dtype)
            for i, n in enumerate((Kv * G, Kv, Kv), 3)
        )
        at = own_page(rows, own, page)
        out, cache, nothing = decode(q, k, v, cache, work, own, at, ())
        expected, expected_cache, workspace = plain_decode(
            q, k, v, expected_cache, work, own, at, workspace
        )
        assert nothing == () and out.dtype == dtype and expected[:-1].any()
        np.testing.assert_allclose(
            np.asarray(out, np.float32), np.asarray(expected, np.float32),
            atol=1e-5 if dtype == jnp.float32 else 0.02,
        )  # fmt: skip
        assert not np.asarray(out[-1]).any()  # a slot without pages
        for got, want, old in zip(cache, expected_cache, start, strict=True):
            np.testing.assert_array_equal(got[1:], want[1:])
            np.testing.assert_array_equal(got[0], old[0])
        own += own > 0


@pytest.mark.parametrize("H", [64, 128])
def test_the_pipeline_of_a_tpu_gives_the_same(H):
    """Copies, buffers that live from item to item and memory that nobody wrote, simulated."""
    rows, own = busy_rows(128)
    own[0] = 130  # the first item stores nothing
    work, at = plan(rows, 128), own_page(rows, own, 128)
    cache = random_cache(30, 1, H, 128)
    args = random(3, SLOTS, 2, H), random(4, SLOTS, 1, H), random(5, SLOTS, 1, H), cache, work, own
    simulator = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    out, got, _ = jax.jit(tpu_cache_attention(simulator).decode)(*args, at, ())
    expected, want, _ = plain_decode(*args, at, new_partial(work, 1, 2, H))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for a, b, old in zip(got, want, cache, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])
        np.testing.assert_array_equal(a[0], old[0])


@pytest.mark.parametrize("H", [64, 128])
def test_slots_past_one_tile_of_new_tokens(H):
    slots, page = 140, 128
    own = np.zeros(slots, np.int32)
    rows = {slot: RowPages([], [1 + i]) for i, slot in enumerate((5, 127, 128, 139))}
    own[list(rows)] = 1, 128, 64, 7
    work, at = plan(rows, page, slots), own_page(rows, own, page)
    cache = random_cache(6, 1, H, page)
    args = random(3, slots, 2, H), random(4, slots, 1, H), random(5, slots, 1, H), cache, work, own
    out, got, _ = decode(*args, at, ())
    expected, want, _ = plain_decode(*args, at, new_partial(work, 1, 2, H))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])


def test_without_items_nothing_happens():
    cache = random_cache(4, 1, 64, 128)
    q, k = random(3, SLOTS, 2, 64), random(4, SLOTS, 1, 64)
    own = np.ones(SLOTS, np.int32)
    out, got, _ = decode(q, k, k, cache, plan({}, 128), own, np.zeros(SLOTS, np.int32), ())
    assert not np.asarray(out).any()
    for a, b in zip(got, cache, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_do_not_depend_on_place_or_company(dtype):
    """The same query and pages in every slot, alone and among rows that share its pages or not."""
    Kv, G, H, page = 2, 2, 64, 128
    cache = random_cache(40, Kv, H, page, dtype)
    q, k, v = (random(i, SLOTS, n, H, dtype=dtype) for i, n in enumerate((Kv * G, Kv, Kv), 3))
    prompt, mine = nodes(1, page, page, 9), [38, 39]

    def run(slot, others):
        """The row's result and its page after the step."""
        rows = {slot: RowPages(prompt, mine)}
        own = np.zeros(SLOTS, np.int32)
        own[slot] = page + 6
        for other in others:
            shared = [prompt, prompt[:2], [], nodes(4, page, 3)][other % 4]
            rows[other] = RowPages(shared, [6 + 2 * other, 7 + 2 * other])
            own[other] = 1 + 23 * other
        rows = dict(sorted(rows.items()))
        moved = [x.at[slot].set(x[0]) for x in (q, k, v)]
        at = own_page(rows, own, page)
        out, new, _ = decode(*moved, cache, plan(rows, page), own, at, ())
        return [np.asarray(x, np.float32) for x in (out[slot], new.k[39], new.v[39])]

    alone = run(0, [])
    assert alone[0].any()
    for slot in range(SLOTS):
        for got, want in zip(run(slot, set(range(SLOTS)) - {slot}), alone, strict=True):
            np.testing.assert_array_equal(got, want)


def test_kernel_runs_in_a_loop_over_split_heads():
    """Two devices with a key head each, the cache carried by a loop inside ``shard_map``."""
    Kv, G, H, page, steps = 2, 2, 64, 128, 3
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, own = busy_rows(page)
    work = plan(rows, page)
    args = random(3, SLOTS, Kv * G, H), random(4, SLOTS, Kv, H), random(5, SLOTS, Kv, H)
    current = jnp.asarray([row.own for row in rows.values()] + [[0, 0]], jnp.int32)

    def loop(attention, q, k, v, cache, workspace, work, own):
        def step(n, carry):
            x, cache, workspace = carry
            there = own > 0
            at = jnp.take_along_axis(current, ((own + n - 1) // page)[:, None], 1, mode="clip")
            return attention.decode(
                q + x, k, v, cache, work, own + n * there, jnp.where(there, at[:, 0], 0), workspace
            )

        return jax.lax.fori_loop(0, steps, step, (jnp.zeros_like(q), cache, workspace))

    heads = P(None, "tensor")
    split = jax.shard_map(
        functools.partial(loop, KERNEL), mesh=mesh,
        in_specs=(heads, heads, heads, heads, heads, P(), P()), out_specs=(heads, heads, heads),
        check_vma=False,
    )  # fmt: skip
    cache = random_cache(30, Kv, H, page)
    out, got, _ = jax.block_until_ready(jax.jit(split)(*args, cache, (), work, own))
    workspace = new_partial(work, Kv, G, H)
    expected, want, _ = jax.jit(functools.partial(loop, PLAIN))(*args, cache, workspace, work, own)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])


@pytest.mark.parametrize(
    "Kv, G, H, dtype",
    [
        (2, 2, 64, jnp.float32),
        (1, 7, 128, jnp.float32),
        (2, 1, 128, jnp.bfloat16),
    ],
)
def test_prefill_equals_plain(Kv, G, H, dtype):
    """Pages of three prompts of up to four pages, some stored before, and unused ones."""
    page, S = 128, 6
    cache = random_cache(12, Kv, H, page, dtype)
    q, k, v = (random(i, S, page, n, H, dtype=dtype) for i, n in enumerate((Kv * G, Kv, Kv), 3))
    paths = [[7], [1, 2, 3, 9], [], [4, 8], [4, 8, 10], []]
    context = np.zeros((S, 5), np.int32)
    for s, path in enumerate(paths):
        context[s, : len(path)] = path
    depth = np.array([len(path) for path in paths], np.int32)
    at = np.array([path[-1] if path else 0 for path in paths], np.int32)
    out, got = jax.jit(KERNEL.prefill)(q, k, v, cache, at, context, depth)
    expected, want = jax.jit(PLAIN.prefill)(q, k, v, cache, at, context, depth)
    assert out.dtype == dtype and np.asarray(expected[3]).any()
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected, np.float32),
        atol=1e-5 if dtype == jnp.float32 else 0.02,
    )  # fmt: skip
    assert not np.asarray(out[2]).any() and not np.asarray(out[5]).any()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])
    alone = jax.jit(KERNEL.prefill)(
        *(x[4:5] for x in (q, k, v)), got, at[4:5], context[4:5], depth[4:5]
    )[0]
    np.testing.assert_array_equal(alone[0], out[4])


def test_more_items_than_scalar_memory_holds_are_refused_when_room_is_made():
    for slots, fits in ((512, True), (600, False)):  # of 40 pages each, and a chunk of 32 more
        work = decode_work({}, Shapes(slots, 256, KERNEL.lanes, 38 * 256))
        if fits:
            assert KERNEL.workspace(work, 2, 4, 128) == ()
        else:
            with pytest.raises(ValueError, match=r"takes at most 23458 items .* not 24032"):
                KERNEL.workspace(work, 2, 4, 128)


def test_what_the_kernel_does_not_take_is_refused_in_words():
    work, own = plan({}, 128), np.zeros(SLOTS, np.int32)
    for page, dtype, words in [
        (128, jnp.float16, "bfloat16 or float32, not float16"),
        (64, jnp.float32, "a multiple of it, not 64"),
    ]:
        q, k = random(3, SLOTS, 2, 64, dtype=dtype), random(4, SLOTS, 1, 64, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            KERNEL.decode(q, k, k, random_cache(2, 1, 64, page, dtype), work, own, own, ())
        pages = random(3, 1, page, 1, 64, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            KERNEL.prefill(
                pages,
                pages,
                pages,
                random_cache(2, 1, 64, page, dtype),
                own[:1],
                own[None],
                own[:1],
            )


MODELS = pytest.mark.parametrize(
    "Kv, G, H, tensor, dtype",
    [
        (8, 2, 128, 1, "bfloat16"),  # Qwen3-0.6B
        (2, 7, 64, 1, "bfloat16"),  # Qwen2.5-0.5B
        (8, 4, 128, 4, "bfloat16"),  # Qwen3-4B on four chips
        (8, 4, 128, 1, "float32"),
        (4, 7, 128, 1, "bfloat16"),  # Qwen2.5-7B
    ],
)


def compile_in_place(program, devices, cache, heads, others, spec):
    """The text of ``program(cache, heads, others)``, compiled for heads that ``spec`` splits over
    the devices. Asserts that it changes the donated cache in place.

    The cache exceeds VMEM by far: the compiler moves smaller ones there as a whole.
    """
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))
    pages = P(None, "tensor")
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(pages, spec, P()), out_specs=(pages, spec), check_vma=False
    )

    def place(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    args = place(cache, pages), place(heads, spec), place(others, P())
    program = jax.jit(mapped, donate_argnums=0).lower(*args).compile()
    memory = program.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0])) // len(devices)
    assert memory.alias_size_in_bytes == size > 2**29 - 2**24
    assert memory.temp_size_in_bytes < size / 20
    return program.as_text()


def like(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def two_layers(Kv, H, tensor, dtype, page=256):
    """Caches of 256 MiB a device and layer."""
    pages = 2**28 * tensor // (2 * Kv * H * page * jnp.dtype(dtype).itemsize)
    return [Pages(like(dtype, pages, Kv, H, page), like(dtype, pages, Kv, page, H))] * 2


@MODELS
def test_decode_compiles_for_a_tpu_and_changes_the_cache_in_place(v5e, Kv, G, H, tensor, dtype):
    B, items, chunks, J = 64, 32, 49, 24
    flat = like("int32", chunks, items)
    work = Work(
        page=flat,
        rows=like("int32", chunks, items, LANES),
        base=flat,
        own=like("bool", chunks, items),
        parts=like("int32", B, J),
        chunks=like("int32", 1),
        owned=like("int32", 1),
        groups=like("int32", 1),
    )
    attention = tpu_cache_attention()

    def loop(cache, heads, others):
        q, k, v = heads
        work, own, page = others

        def step(carry):
            n, cache, x = carry
            new = []
            for layer in cache:
                x, layer, _ = attention.decode(q + x, k, v, layer, work, own + n, page, ())
                new.append(layer)
            return n + 1, new, x

        _, cache, x = jax.lax.while_loop(lambda carry: carry[0] < 32, step, (0, cache, q))
        return cache, [x, k, v]

    heads = [like(dtype, B, n, H) for n in (Kv * G, Kv, Kv)]
    others = [work, like("int32", B), like("int32", B)]
    text = compile_in_place(
        loop, v5e[:tensor], two_layers(Kv, H, tensor, dtype), heads, others, P(None, "tensor")
    )
    assert text.count(TPU_KERNEL) == 2


@MODELS
def test_prefill_compiles_for_a_tpu_and_changes_the_cache_in_place(v5e, Kv, G, H, tensor, dtype):
    S, page, J = 4, 256, 24
    attention = tpu_cache_attention()

    def layers(cache, heads, others):
        q, k, v = heads
        new = []
        for layer in cache:
            q, layer = attention.prefill(q, k, v, layer, *others)
            new.append(layer)
        return new, [q, k, v]

    heads = [like(dtype, S, page, n, H) for n in (Kv * G, Kv, Kv)]
    others = [like("int32", S), like("int32", S, J), like("int32", S)]
    text = compile_in_place(
        layers, v5e[:tensor], two_layers(Kv, H, tensor, dtype), heads, others,
        P(None, None, "tensor"),
    )  # fmt: skip
    assert text.count(TPU_KERNEL) == 2
