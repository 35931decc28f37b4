"""The attention of ``models.attention.cache`` as Triton kernels of Pallas for NVIDIA GPUs.

A decode step takes two kernels a layer. The first has a program for some items and one key head: it
puts the new token into its page on the way, reads the page's visible tokens once for all rows of
the item and writes softmax sums, the second adds up each row's. XLA's own scatter and loops would
do for neither: the scatter may copy the cache, since keys are indexed by their first and last axis,
and a loop whose length is data makes the host wait for the device in every round.

An item reads 4 P H bytes of a page of bfloat16 and moves 8 G H bytes of sums for each of its rows,
which is why pages are not shorter than 64 tokens. More than four lanes would save little: the next
item of a shared page finds it in the L2 cache, while the workspace grows with the lanes.

Axes: as in ``models.attention.cache``, and n = C I items, L lanes in use.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from models.attention.cache import GROUP, MASKED, CacheAttention, Pages, Work, write_pages
from models.attention.sequence_gpu import gpu_supported

PROGRAMS = 2048  # of a decode step's first kernel: a few for each place on the largest GPUs
SMALLEST_TILE = 16  # rows and columns of a product on tensor cores
ACC_DTYPE = jnp.float32


def gpu_cache_attention(interpret: bool = False) -> CacheAttention:
    """The kernels' attention over a KV cache.

    Takes bfloat16, float16 and float32, whose products keep full precision (no TF32), and head
    widths of 16 to 128; its functions raise ValueError with the reason of ``gpu_supported``
    otherwise.

    Not yet run on a GPU. Run were the interpreter on CPU, the lowering to Triton for CUDA, and, of
    an earlier form, the compilation of that for compute capabilities 8.0 and 9.0.

    Args:
        interpret: Runs the kernels on any backend, slowly.
    """
    return CacheAttention(
        page=64,
        lanes=4,
        workspace=no_workspace_gpu,
        decode=functools.partial(decode_attention_gpu, interpret=interpret),
        prefill=functools.partial(prefill_attention_gpu, interpret=interpret),
    )


def no_workspace_gpu(work: Work, kv_heads: int, groups: int, head_dim: int) -> tuple[()]:
    """The sums are temporaries: nothing is carried from layer to layer.

    Raises:
        ValueError: On heads that the kernels do not take.
    """
    if reason := gpu_supported((kv_heads * groups, head_dim), kv_heads, ACC_DTYPE):
        raise ValueError(reason)
    return ()


def decode_attention_gpu(
    q_BNH: jax.Array,
    k_BKvH: jax.Array,
    v_BKvH: jax.Array,
    cache: Pages,
    work: Work,
    own_B: jax.Array,
    page_B: jax.Array,
    workspace: tuple[()],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Pages, tuple[()]]:
    """As ``decode_attention`` of ``models.attention.cache``, but for ``page_B`` and idle rows.

    ``page_B`` is not read: a row's current page is its own item with 0 < own + base <= P. For rows
    without items nothing is written.
    """
    del page_B
    _check(q_BNH, cache)
    B, N, H = q_BNH.shape
    pages, Kv, P = cache.v.shape[:3]
    G, (chunks, items, R) = N // Kv, work.rows.shape
    n, width = chunks * items, _tile(H)
    programs = min(n, max(1, PROGRAMS // Kv))
    places = _tile(R * G)
    whole = pl.BlockSpec()
    token = pl.BlockSpec((B, None, width), lambda i, kv: (0, kv, 0))
    keys = pl.BlockSpec((pages, None, width, P), lambda i, kv: (0, kv, 0, 0))
    values = pl.BlockSpec((pages, None, P, width), lambda i, kv: (0, kv, 0, 0))
    sums = pl.BlockSpec((n, None, places), lambda i, kv: (0, kv, 0))
    maximum, total, summed, *new = pl.pallas_call(
        functools.partial(_items_kernel, items=items, groups=G, head_dim=H),
        grid=(programs, Kv),
        in_specs=[
            *[whole] * 6,
            pl.BlockSpec((B, None, G, width), lambda i, kv: (0, kv, 0, 0)),
            token,
            token,
            keys,
            values,
        ],
        out_specs=[
            sums,
            sums,
            pl.BlockSpec((n, None, places, width), lambda i, kv: (0, kv, 0, 0)),
            keys,
            values,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((n, Kv, R * G), ACC_DTYPE),
            jax.ShapeDtypeStruct((n, Kv, R * G), ACC_DTYPE),
            jax.ShapeDtypeStruct((n, Kv, R * G, H), ACC_DTYPE),
            jax.ShapeDtypeStruct(cache.k.shape, cache.k.dtype),
            jax.ShapeDtypeStruct(cache.v.shape, cache.v.dtype),
        ],
        input_output_aliases={9: 3, 10: 4},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(
        work.chunks,
        work.owned,
        work.page.reshape(n),
        work.rows.reshape(n, R),
        work.base.reshape(n),
        own_B,
        q_BNH.reshape(B, Kv, G, H),
        k_BKvH,
        v_BKvH,
        *cache,
    )
    maximum, total, summed = (
        x.reshape(n, Kv, R, G, *x.shape[3:]) for x in (maximum, total, summed)
    )
    out = _combine(maximum, total, summed, work, q_BNH.dtype, interpret)
    return out.reshape(B, N, H), Pages(*new), workspace


def _items_kernel(
    chunks_ref,  # [1]
    owned_ref,  # [1]
    page_ref,  # [n]
    rows_ref,  # [n, R]
    base_ref,  # [n]
    own_ref,  # [B]
    q_ref,  # [B, G, H]
    k_new_ref,  # [B, H]
    v_new_ref,
    k_ref,  # [pages, H, P]
    v_ref,  # [pages, P, H]
    maximum_ref,  # [n, R G]
    total_ref,
    values_ref,  # [n, R G, H]
    k_out_ref,  # the same memory as k_ref
    v_out_ref,
    *,
    items,
    groups,
    head_dim,
):
    """Every ``programs``-th item; H is filled up to a power of two, R G to places of a product."""
    P, width = v_ref.shape[1:]
    B, R = own_ref.shape[0], rows_ref.shape[1]
    column, real = jnp.arange(P), jnp.arange(width) < head_dim

    def attend(i, lanes, own):
        page, row = page_ref[i], rows_ref[i, 0]
        tokens = base_ref[i]
        if own:
            tokens += plgpu.load(own_ref.at[row], mask=row < B, other=0)
        seen = column < tokens
        # A mask along the contiguous axis would make this two bytes at a time.
        k = plgpu.load(k_ref.at[page], mask=jnp.broadcast_to(real[:, None], (width, P)), other=0)
        v = plgpu.load(v_ref.at[page], mask=seen[:, None] & real[None], other=0)
        if own:
            put = (row < B) & (tokens > 0) & (tokens <= P)
            stored, last = put & real, put & (column == tokens - 1)
            k_new = plgpu.load(k_new_ref.at[row], mask=stored, other=0).astype(k.dtype)
            v_new = plgpu.load(v_new_ref.at[row], mask=stored, other=0).astype(v.dtype)
            k = jnp.where(last[None], k_new[:, None], k)
            v = jnp.where(last[:, None], v_new[None], v)
            _store_token(page, tokens, k_new, v_new, stored, k_out_ref, v_out_ref)

        place = jnp.arange(_tile(lanes * groups))
        lane, group = jax.lax.div(place, groups), jax.lax.rem(place, groups)
        used = place < lanes * groups
        row = plgpu.load(rows_ref.at[i, jnp.minimum(lane, lanes - 1)])
        used &= row < B
        q_at = _grid((jnp.minimum(row, B - 1), group), width)
        q = plgpu.load(q_ref.at[q_at], mask=used[:, None] & real[None], other=0)
        q = (q.astype(ACC_DTYPE) * head_dim**-0.5).astype(k.dtype)
        scores = jnp.where(seen[None], _product(q, k), MASKED)
        maximum = scores.max(1)
        weights = jnp.where(seen[None], jnp.exp(scores - maximum[:, None]), 0)
        values = _product(weights.astype(v.dtype), v)
        here = pl.ds(0, place.size)
        plgpu.store(maximum_ref.at[i, here], maximum, mask=used)
        plgpu.store(total_ref.at[i, here], weights.sum(1), mask=used)
        plgpu.store(values_ref.at[i, here], values, mask=used[:, None] & real[None])

    first, step = pl.program_id(0), pl.num_programs(0)

    def item(m, carry):
        i = first + m * step

        # How many rows share a product can change a row's bits: own pages have one, others R.
        @pl.when(i < owned_ref[0] * items)
        def _():
            attend(i, 1, own=True)

        @pl.when(i >= owned_ref[0] * items)
        def _():
            attend(i, R, own=False)

        return carry

    count = chunks_ref[0] * items
    jax.lax.fori_loop(0, jax.lax.div(count - first + step - 1, step), item, None)


def _store_token(page, tokens, k_new, v_new, mask, k_out_ref, v_out_ref):
    """Writes a row's new token [H], the last of ``tokens``, to its page: no other program does."""
    at = jnp.clip(tokens - 1, 0, v_out_ref.shape[1] - 1)
    plgpu.store(k_out_ref.at[page, :, at], k_new, mask=mask)
    plgpu.store(v_out_ref.at[page, at], v_new, mask=mask)


def _combine(maximum, total, values, work: Work, dtype, interpret: bool) -> jax.Array:
    """As ``combine``: the rows' [B, Kv, G, H] in ``dtype`` from the sums of their pages."""
    n, Kv, R, G, H = values.shape
    B, J = work.parts.shape
    groups, width = pl.next_power_of_2(G), _tile(H)
    sums = pl.BlockSpec((n, None, R, groups), lambda b, kv: (0, kv, 0, 0))
    return pl.pallas_call(
        functools.partial(_combine_kernel, groups=G, head_dim=H),
        grid=(B, Kv),
        in_specs=[
            pl.BlockSpec(),
            pl.BlockSpec((None, J), lambda b, kv: (b, 0)),
            sums,
            sums,
            pl.BlockSpec((n, None, R, groups, width), lambda b, kv: (0, kv, 0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, groups, width), lambda b, kv: (b, kv, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((B, Kv, G, H), dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if groups * width <= 1024 else 8, num_stages=1
        ),
        interpret=interpret,
    )(work.groups, work.parts, maximum, total, values)


def _combine_kernel(
    groups_ref,  # [1]
    parts_ref,  # [J]
    maximum_ref,  # [n, R, G]
    total_ref,
    values_ref,  # [n, R, G, H]
    out_ref,  # [G, H]
    *,
    groups,
    head_dim,
):
    R, many, width = values_ref.shape[1:]
    head = (jnp.arange(many) < groups)[None]
    real = (jnp.arange(width) < head_dim)[None]

    def group(g, carry):
        part = parts_ref[pl.ds(g * GROUP, GROUP)]
        item = jax.lax.div(jnp.maximum(part, 0), R)
        lane = jax.lax.rem(jnp.maximum(part, 0), R)
        there = (part >= 0)[:, None] & head
        at = _grid((item, lane), many)
        maximum = plgpu.load(maximum_ref.at[at], mask=there, other=MASKED)
        total = plgpu.load(total_ref.at[at], mask=there, other=0)
        values_at = _grid((item, lane), many, width)
        filled = there[..., None] & real[None]
        values = plgpu.load(values_ref.at[values_at], mask=filled, other=0)
        old_maximum, old_total, old_values = carry
        new = jnp.maximum(old_maximum, maximum.max(0))
        scale, kept = jnp.exp(maximum - new[None]), jnp.exp(old_maximum - new)
        return (
            new,
            old_total * kept + (total * scale).sum(0),
            old_values * kept[:, None] + (values * scale[..., None]).sum(0),
        )

    start = (
        jnp.full((many,), MASKED, ACC_DTYPE),
        jnp.zeros((many,), ACC_DTYPE),
        jnp.zeros((many, width), ACC_DTYPE),
    )
    _, total, values = jax.lax.fori_loop(0, groups_ref[0], group, start)
    out = values / jnp.maximum(total, 1e-30)[:, None]
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=head[0][:, None] & real)


def prefill_attention_gpu(
    q_SPNH: jax.Array,
    k_SPKvH: jax.Array,
    v_SPKvH: jax.Array,
    cache: Pages,
    page_S: jax.Array,
    context_SJ: jax.Array,
    depth_S: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Pages]:
    """As ``prefill_attention``: the pages are stored by XLA, then a kernel reads them."""
    _check(q_SPNH, cache)
    cache = write_pages(cache, k_SPKvH, v_SPKvH, page_S)
    S, P, N, H = q_SPNH.shape
    pages, Kv = cache.k.shape[:2]
    G, J, width = N // Kv, context_SJ.shape[1], _tile(H)

    def head(s, n):
        return 0, jax.lax.div(n, G), 0, 0

    queries = pl.BlockSpec((None, P, None, width), lambda s, n: (s, 0, n, 0))
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, head_dim=H),
        grid=(S, N),
        in_specs=[
            pl.BlockSpec((None, J), lambda s, n: (s, 0)),
            pl.BlockSpec((None,), lambda s, n: (s,)),
            queries,
            pl.BlockSpec((pages, None, width, P), head),
            pl.BlockSpec((pages, None, P, width), head),
        ],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q_SPNH.shape, q_SPNH.dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if width <= 64 else 8,
            num_stages=2 if q_SPNH.dtype.itemsize < 4 else 1,  # float32 would take 112 KiB of tiles
        ),
        interpret=interpret,
    )(context_SJ, depth_S, q_SPNH, *cache)
    return out, cache


def _prefill_kernel(
    context_ref,  # [J]
    depth_ref,  # []
    q_ref,  # [P, H]
    k_ref,  # [pages, H, P]
    v_ref,  # [pages, P, H]
    out_ref,  # [P, H]
    *,
    head_dim,
):
    P, width = q_ref.shape
    real = (jnp.arange(width) < head_dim)[None]
    depth = depth_ref[...]
    row, column = jnp.arange(P)[:, None], jnp.arange(P)[None]
    q = plgpu.load(q_ref, mask=real, other=0)
    q = (q.astype(ACC_DTYPE) * head_dim**-0.5).astype(k_ref.dtype)

    def page(j, carry):
        at = context_ref[j]
        k = plgpu.load(k_ref.at[at], mask=real.reshape(width, 1), other=0)
        v = plgpu.load(v_ref.at[at], mask=real, other=0)
        maximum, total, values = carry
        visible = column <= row + (depth - 1 - j) * P
        scores = jnp.where(visible, _product(q, k), MASKED)
        new = jnp.maximum(maximum, scores.max(1))
        weights, kept = jnp.exp(scores - new[:, None]), jnp.exp(maximum - new)
        added = _product(weights.astype(v.dtype), v)
        return new, total * kept + weights.sum(1), values * kept[:, None] + added

    start = (
        jnp.full((P,), MASKED, ACC_DTYPE),
        jnp.zeros((P,), ACC_DTYPE),
        jnp.zeros((P, width), ACC_DTYPE),
    )
    _, total, values = jax.lax.fori_loop(0, depth, page, start)
    out = values / jnp.maximum(total, 1e-30)[:, None]
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=real)


def _product(a, b):
    """[M, K] times [K, L] in float32; factors of float32 keep their bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=ACC_DTYPE)


def _grid(places: tuple[jax.Array, ...], *sizes: int) -> tuple[jax.Array, ...]:
    """Indices [K, *sizes] of K places and all of the axes after them. Slices would do for the
    compiler, but the interpreter takes no mixture."""
    shape = (places[0].size, *sizes)
    leading = (jax.lax.broadcast_in_dim(x, shape, (0,)) for x in places)
    rest = (jax.lax.broadcasted_iota(jnp.int32, shape, d + 1) for d in range(len(sizes)))
    return (*leading, *rest)


def _tile(size: int) -> int:
    return max(SMALLEST_TILE, pl.next_power_of_2(size))


def _check(q: jax.Array, cache: Pages) -> None:
    Kv, P = cache.v.shape[1:3]
    if reason := gpu_supported(q.shape, Kv, cache.v.dtype):
        raise ValueError(reason)
    if P != _tile(P):
        raise ValueError(f"the GPU's cache attention takes pages of 16, 32, 64 .. tokens, not {P}")
