"""The engine's attention over a paged cache as Pallas kernels for TPU.

Decoding is one kernel a layer, whose grid runs over the items of ``Work`` in order; the pipeline
fetches item i + 1's page while item i is computed. An item reads its page once for up to R rows:
2 Kv H P numbers, 1 MiB or 1.3 us of a v5e's bandwidth at Kv 8, H 128, P 256 in bfloat16. A row's
new token is put into its page in VMEM and only the tiles that hold it are written back: [Kv, H,
128] of the keys and [Kv, 16, H] of the values, a quarter of such a page. A step of the grid costs
about a third of a microsecond beside that, which narrow pages (Kv H < 256) do not hide.

The running maximum and sum of every row's online softmax are kept in VMEM and updated in the order
of the items, in which a row's pages have a fixed order. An own page always goes through a product
of one row and a shared one through a product of R, so a row's bits depend on its own pages alone.
Query heads stay dense: a product takes all of them and keeps those that belong to its key head, so
any group size G fits.

VMEM, as compiled for v5e: decoding takes 4 to 15 MiB (64 to 256 rows of 16 to 32 heads), prefill
9 MiB at N H = 2048 and 15 MiB at 4096, or 21 MiB in float32; up to twice that for v5p. The 16 MiB
of a v4 hold 64 rows, but no prefill of N H = 4096.

Axes: B rows (slots), n items, R rows of an item, S pages of a prefill, J pages of a row, P tokens
of a page, N query heads (padded to whole tiles), Kv key heads, G = N / Kv, H head width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.cache import MASKED, CacheAttention, HostOrDevice, Pages, Work, write_pages

LANES = 128  # the minor axis of a tile
SUBLANES = 8  # of a float32 tile
# Of VMEM that a kernel may take: a page of queries of 28 heads and their sums need 17 MiB, which
# is over the compiler's default. A v5e core has 128 MiB.
VMEM_BYTES = 48 << 20
SLAB = 16  # tokens of values that are written together: a tile of bfloat16
SCALARS = 2**18 - 2**12  # int32 that fit in a core's scalar memory beside a kernel's own


def tpu_cache_attention(interpret: Any = False) -> CacheAttention:
    """Attention over a KV cache in bfloat16 or float32 whose pages hold a multiple of 128 tokens.

    Works on local arrays: inside ``shard_map`` where the heads are split, and in loops that carry
    the cache, which is changed in place.

    Args:
        interpret: Runs it on any backend, slowly: True, or ``pltpu.InterpretParams`` for the
            interpreter that also simulates the pipeline's copies.
    """
    return CacheAttention(
        page=256,
        lanes=8,
        workspace=no_workspace_tpu,
        decode=functools.partial(decode_attention_tpu, interpret=interpret),
        prefill=functools.partial(prefill_attention_tpu, interpret=interpret),
    )


def no_workspace_tpu(work: Work, kv_heads: int, groups: int, head_dim: int) -> tuple[()]:
    """The sums live in VMEM: nothing is carried from layer to layer.

    Raises:
        ValueError: On more items than scalar memory holds.
    """
    most = SCALARS // (work.rows.shape[2] + 3)
    if work.page.size > most:
        raise ValueError(
            f"the TPU kernel takes at most {most} items (slots x pages of a row), "
            f"not {work.page.size}: fewer slots, fewer cache tokens or larger pages"
        )
    return ()


def decode_attention_tpu(
    q_BNH: jax.Array,
    k_BKvH: jax.Array,
    v_BKvH: jax.Array,
    cache: Pages,
    work: Work,
    own_B: jax.Array,
    page_B: jax.Array,
    workspace: tuple[()],
    *,
    interpret: Any = False,
) -> tuple[jax.Array, Pages, tuple[()]]:
    """As ``decode_attention`` of ``models.attention.cache``, but for ``page_B``.

    It is not needed: the page of a row's new token is that of its only own item with
    0 < base + own <= P. A row without one stores nothing, and page UNUSED (0) may get any content
    if no row has one. Without any item the result is 0.

    Raises:
        ValueError: On a cache of another dtype or page size.
    """
    _check(cache)
    B, N, H = q_BNH.shape
    _, Kv, P, _ = cache.v.shape
    R = work.rows.shape[2]
    heads = -(-N // SUBLANES) * SUBLANES
    acc_dtype = jnp.float32
    # Row B is what empty lanes read and write.
    q = jnp.pad((q_BNH * H**-0.5).astype(acc_dtype), ((0, 1), (0, heads - N), (0, 0)))
    transposed = _is_transposed(cache)
    new_k = _columns(k_BKvH.astype(acc_dtype))
    k_page, k_tile, v_page, v_tile = _page_specs(cache)
    if transposed:
        v, new_v = _transposed(cache.v), _columns(v_BKvH.astype(acc_dtype))
    else:
        v, new_v = cache.v, v_BKvH.astype(acc_dtype)

    def whole(x):
        return pl.BlockSpec(x.shape, lambda i, *_: (0,) * x.ndim)

    count = jnp.maximum(work.chunks[0] * work.rows.shape[1], 1)
    out, k, v = pl.pallas_call(
        functools.partial(_decode_kernel, groups=N // Kv, lanes=R, transposed=transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(count,),
            in_specs=[whole(q), whole(new_k), whole(new_v), k_page, v_page],
            out_specs=[whole(q), k_tile, v_tile],
            scratch_shapes=[pltpu.VMEM((B + 1, heads, 1), acc_dtype)] * 2,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, acc_dtype),
            jax.ShapeDtypeStruct(cache.k.shape, cache.k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        input_output_aliases={8: 1, 9: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="cache_decode",
    )(*_items(work, own_B, P), q, new_k, new_v, cache.k, v)
    return out[:B, :N].astype(q_BNH.dtype), Pages(k, _transposed(v) if transposed else v), workspace


def _columns(x_BKvH: jax.Array) -> jax.Array:
    """[B, Kv, H] -> [tiles, Kv, H, 128]: a row is a column, the rows filled up to whole tiles."""
    B, Kv, H = x_BKvH.shape
    x = jnp.pad(x_BKvH, ((0, -B % LANES), (0, 0), (0, 0)))
    return x.reshape(-1, LANES, Kv, H).transpose(0, 2, 3, 1)


def _page_specs(cache: Pages) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Blocks of the decode kernel: an item's page of keys, the tile of it that gets the new token,
    and the same of the values. The kernel's scalars are those of ``_items``."""
    _, Kv, P, H = cache.v.shape

    def read(i, page, *_):
        return page[i], 0, 0, 0

    def written(i, page, seen, writer, size):
        """The page and the tile of ``size`` tokens that ``writer`` names; page 0 if nobody."""
        at = jnp.maximum(writer[i], 0)
        last = jax.lax.div(jnp.maximum(seen[at] - 1, 0), size)
        return jnp.where(writer[i] < 0, 0, page[at]), last

    def written_columns(i, page, seen, writer, *_):
        at, tile = written(i, page, seen, writer, LANES)
        return at, 0, 0, tile

    def written_rows(i, page, seen, writer, *_):
        at, slab = written(i, page, seen, writer, SLAB)
        return at, 0, slab, 0

    k_page = pl.BlockSpec((1, Kv, H, P), read)
    k_tile = pl.BlockSpec((1, Kv, H, LANES), written_columns)
    if _is_transposed(cache):
        return k_page, k_tile, k_page, k_tile
    v_page = pl.BlockSpec((1, Kv, P, H), read)
    return k_page, k_tile, v_page, pl.BlockSpec((1, Kv, SLAB, H), written_rows)


def _items(work: Work, own_B: jax.Array, P: int) -> tuple[HostOrDevice, ...]:
    """What the decode kernel must know of each item before it runs.

    page    [n] int32: the page to fetch; an item that sees nothing keeps the page before it
    seen    [n] int32: visible tokens
    writer  [n] int32: the last item up to this one (else the first after it) that stores a token,
            whose tiles stay in VMEM until another's replace them; -1 if none does
    rows    [n * R] int32
    shared  [1] int32: the first item that is not an own one
    """
    _, items, R = work.rows.shape
    rows, own = work.rows.reshape(-1, R), work.own.reshape(-1)
    seen = work.base.reshape(-1) + jnp.where(own, jnp.take(own_B, rows[:, 0], mode="clip"), 0)
    writes = own & (seen > 0) & (seen <= P)
    number = jnp.arange(own.size, dtype=jnp.int32)
    fetched = jax.lax.cummax(jnp.where(seen > 0, number, 0))
    writer = jax.lax.cummax(jnp.where(writes, number, -1))
    first = jnp.where(writes.any(), jnp.argmax(writes).astype(jnp.int32), -1)
    return (
        work.page.reshape(-1)[fetched],
        jnp.clip(seen, 0, P),
        jnp.where(writer < 0, first, writer),
        rows.reshape(-1),
        work.owned * items,
    )


def _decode_kernel(
    page, seen, writer, rows, shared,
    q, new_k, new_v, k, v,
    out, k_out, v_out,
    maximum, total,
    *, groups, lanes, transposed,
):  # fmt: skip
    """q and out [B + 1, N, H], new_k [tiles, Kv, H, 128], new_v [B, Kv, H] and the sums [B + 1, N,
    1] are whole, in float32; k [1, Kv, H, P] and v [1, Kv, P, H] are the item's page, k_out and
    v_out the tiles of it, or of an earlier page, that hold a new token."""
    i = pl.program_id(0)

    @pl.when(i == 0)
    def _():
        maximum[...] = jnp.full_like(maximum, MASKED)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)

    @pl.when(writer[i] == i)
    def _():
        row, at = rows[i * lanes], seen[i] - 1
        _insert_column(row, at, new_k, k, k_out)
        (_insert_column if transposed else _insert_row)(row, at, new_v, v, v_out)

    def attend(count):
        _attend(
            [rows[i * lanes + r] for r in range(count)],
            seen[i], groups, transposed, q, k, v, out, maximum, total,
        )  # fmt: skip

    @pl.when((seen[i] > 0) & (i < shared[0]))
    def _():
        attend(1)

    @pl.when((seen[i] > 0) & (i >= shared[0]))
    def _():
        attend(lanes)

    @pl.when(i == pl.num_programs(0) - 1)
    def _():
        out[...] = out[...] / jnp.maximum(total[...], 1e-30)


def _insert_column(row, at, new, page, out):
    """Puts the row's vectors of ``new`` [tiles, Kv, H, 128] at column ``at`` of the page [1, Kv, H,
    P] in VMEM; ``out`` [1, Kv, H, 128] gets the tile that holds it."""
    lane = at & (LANES - 1)
    columns = pltpu.roll(new[jax.lax.div(row, LANES)], (at - row) & (LANES - 1), 2)
    tile = pl.ds(pl.multiple_of(at - lane, LANES), LANES)
    place = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 2)
    old = page[0, :, :, tile].astype(columns.dtype)
    out[0] = jnp.where(place == lane, columns, old).astype(page.dtype)
    page[0, :, :, tile] = out[0]


def _insert_row(row, at, new, page, out):
    """The same for ``new`` [B, Kv, H], row ``at`` of the page [1, Kv, P, H] and ``out`` [1, Kv, 16,
    H]."""
    sublane = at & (SLAB - 1)
    slab = pl.ds(pl.multiple_of(at - sublane, SLAB), SLAB)
    for kv in range(page.shape[1]):
        old = page[0, kv, slab].astype(new.dtype)
        place = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0)
        out[0, kv] = jnp.where(place == sublane, new[row, kv : kv + 1], old).astype(page.dtype)
        page[0, kv, slab] = out[0, kv]


def _attend(rows, seen, groups, transposed, q, k, v, out, maximum, total):
    """Adds one page to the sums of ``rows``."""
    N, H = q.shape[1:]
    P = k.shape[3]

    def of_rows(x):
        return jnp.concatenate([x[row] for row in rows])

    queries = of_rows(q)
    head = jax.lax.broadcasted_iota(jnp.int32, (len(rows), N, H), 1).reshape(queries.shape)

    def of_head(kv, x):
        return jnp.where((head >= kv * groups) & (head < (kv + 1) * groups), x, 0)

    scores = sum(_dot(of_head(kv, queries).astype(k.dtype), k[0, kv]) for kv in range(k.shape[1]))
    place = jax.lax.broadcasted_iota(jnp.int32, (len(rows) * N, P), 1)
    scores = jnp.where(place < seen, scores, MASKED)
    old = of_rows(maximum)
    new = jnp.maximum(old, scores.max(-1, keepdims=True))
    weights, kept = jnp.exp(scores - new), jnp.exp(old - new)
    sums = of_rows(total) * kept + weights.sum(-1, keepdims=True)
    weights = weights.astype(v.dtype)
    added = sum(of_head(kv, _dot(weights, v[0, kv], transposed)) for kv in range(k.shape[1]))
    values = of_rows(out) * kept + added
    for r, row in enumerate(rows):
        part = slice(r * N, (r + 1) * N)
        maximum[row], total[row], out[row] = new[part], sums[part], values[part]


def prefill_attention_tpu(
    q_SPNH: jax.Array,
    k_SPKvH: jax.Array,
    v_SPKvH: jax.Array,
    cache: Pages,
    page_S: jax.Array,
    context_SJ: jax.Array,
    depth_S: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, Pages]:
    """As ``prefill_attention`` of ``models.attention.cache``.

    Raises:
        ValueError: On a cache of another dtype or page size.
    """
    _check(cache)
    S, P, N, H = q_SPNH.shape
    J = context_SJ.shape[1]
    Kv = cache.k.shape[1]
    G = N // Kv
    cache = write_pages(cache, k_SPKvH, v_SPKvH, page_S)
    q = (q_SPNH * H**-0.5).reshape(S, P, Kv, G, H).transpose(0, 2, 3, 1, 4)

    def read(s, j, context, depth):
        return context[s * J + jnp.clip(j, 0, jnp.maximum(depth[s] - 1, 0))], 0, 0, 0

    transposed = _is_transposed(cache)
    k_page = pl.BlockSpec((1, Kv, H, P), read)
    v_page = k_page if transposed else pl.BlockSpec((1, Kv, P, H), read)
    queries = pl.BlockSpec((1, Kv, G * P, H), lambda s, j, *_: (s, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, transposed=transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(S, jnp.maximum(depth_S.max(), 1)),
            in_specs=[queries, k_page, v_page],
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((Kv, G * P, 1), jnp.float32),
                pltpu.VMEM((Kv, G * P, 1), jnp.float32),
                pltpu.VMEM((Kv, G * P, H), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((S, Kv, G * P, H), q_SPNH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="cache_prefill",
    )(
        context_SJ.reshape(-1),
        depth_S,
        q.reshape(S, Kv, G * P, H),
        cache.k,
        _transposed(cache.v) if transposed else cache.v,
    )
    out = out.reshape(S, Kv, G, P, H).transpose(0, 3, 1, 2, 4)
    return out.reshape(S, P, N, H), cache


def _prefill_kernel(context, depth, q, k, v, out, maximum, total, values, *, transposed):
    """One page of queries [1, Kv, G * P, H] and one of its context."""
    s, j = pl.program_id(0), pl.program_id(1)
    Kv, rows = q.shape[1:3]
    P = k.shape[3]

    @pl.when(j == 0)
    def _():
        maximum[...] = jnp.full_like(maximum, MASKED)
        total[...] = jnp.zeros_like(total)
        values[...] = jnp.zeros_like(values)

    @pl.when(j < depth[s])
    def _():
        row = jax.lax.broadcasted_iota(jnp.int32, (rows // P, P, P), 1).reshape(rows, P)
        place = jax.lax.broadcasted_iota(jnp.int32, (rows, P), 1)
        visible = place <= row + (depth[s] - 1 - j) * P

        def head(kv, _):
            scores = jnp.where(visible, _dot(q[0, kv], k[0, kv]), MASKED)
            new = jnp.maximum(maximum[kv], scores.max(-1, keepdims=True))
            weights, kept = jnp.exp(scores - new), jnp.exp(maximum[kv] - new)
            maximum[kv] = new
            total[kv] = total[kv] * kept + weights.sum(-1, keepdims=True)
            values[kv] = values[kv] * kept + _dot(weights.astype(v.dtype), v[0, kv], transposed)

        jax.lax.fori_loop(0, Kv, head, None)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        out[0] = (values[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)


def _dot(a, b, transposed=False):
    """a @ b, or a @ b.T; float32 stays exact."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _is_transposed(cache: Pages) -> bool:
    """XLA lays out values [pages, Kv, P, H] of heads narrower than a tile with P as the minor axis,
    so that nothing is padded: a kernel that wanted H there would get a padded copy of the cache."""
    return cache.v.shape[3] % LANES > 0


def _transposed(v: jax.Array) -> jax.Array:
    return jnp.swapaxes(v, 2, 3)


def _check(cache: Pages) -> None:
    if cache.k.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the TPU kernel takes bfloat16 or float32, not {cache.k.dtype}")
    if cache.k.shape[3] % LANES:
        raise ValueError(f"the TPU kernel takes pages of {LANES} tokens or a multiple of it, "
                         f"not {cache.k.shape[3]}")  # fmt: skip
