"""The engine's device programs: prefill pages of prompts, decode all slots for a burst of steps.

Axes of one replica: B slots, S pages of one prefill, P tokens of a page, J pages of a row, V
vocabulary. Every array outside the programs holds all replicas, one after the other, along its
first axis; inside they are mapped over the mesh, and each sees its own part.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.attention.cache import CacheAttention, HostOrDevice, Pages, Work, new_pages
from models.config import ModelConfig
from models.qwen import rope_tables
from srpo_jax.engine.layout import REPLICA, TENSOR, Weights, weight_specs
from srpo_jax.engine.requests import TOP_LOGPS
from srpo_jax.engine.sampling import best_ids, draw, row_uniforms, token_logits


class Sampling(NamedTuple):
    """How each row samples: temperature 0 is greedy; keys [B, 2] uint32 name the request."""

    temperature: HostOrDevice  # float32
    top_p: HostOrDevice  # float32
    top_k: HostOrDevice  # int32, 0 = off
    keys: HostOrDevice  # uint32 [B, 2]


class Slots(NamedTuple):
    """One request each, [B]."""

    last: HostOrDevice  # int32: the token that is fed next
    prompt: HostOrDevice  # int32: tokens in the prompt's pages, all but the prompt's last
    drawn: HostOrDevice  # int32: tokens drawn so far, which equals those fed
    limit: HostOrDevice  # int32: tokens to draw at most
    active: HostOrDevice  # bool
    sampling: Sampling


class EngineState(NamedTuple):
    """Everything that a program changes; donated to every program."""

    cache: tuple[Pages, ...]  # of each layer
    slots: Slots
    workspace: Any  # of CacheAttention: partial results that a decode step overwrites


class Plan(NamedTuple):
    """What the host decides for one burst (decode steps of one dispatch)."""

    alive: HostOrDevice  # [B] bool: slots whose request still runs, as far as the host knows
    admit: HostOrDevice  # [B] bool: slots that get a new request
    new: Slots  # what they get
    own: HostOrDevice  # [B, J] int32: the pages of each slot's own tokens; UNUSED past them
    work: Work
    enough: HostOrDevice  # [1] int32: the burst ends early when so many requests have


class Burst(NamedTuple):
    """What a burst drew, [B, steps], and how many of these count in each slot [B]; the best ids
    and their log-probs [B, steps, TOP_LOGPS], or None."""

    tokens: jax.Array
    logps: jax.Array
    counts: jax.Array
    top_ids: jax.Array | None
    top_logps: jax.Array | None


class Prefill(NamedTuple):
    """S pages of prompts. Unused ones write to UNUSED and have depth 0."""

    tokens: HostOrDevice  # [S, P] int32
    page: HostOrDevice  # [S] int32: where they are stored
    context: HostOrDevice  # [S, J] int32: their prompts' pages up to and including them
    depth: HostOrDevice  # [S] int32: how many those are


def empty_slots(slots: int) -> Slots:
    """No slot is active."""

    def zeros(kind):
        return jnp.zeros(slots, kind)

    def ones():  # a donated state holds every buffer once
        return jnp.ones(slots, jnp.float32)

    return Slots(
        last=zeros(jnp.int32), prompt=zeros(jnp.int32), drawn=zeros(jnp.int32),
        limit=zeros(jnp.int32), active=zeros(bool),
        sampling=Sampling(ones(), ones(), zeros(jnp.int32), jnp.zeros((slots, 2), jnp.uint32)),
    )  # fmt: skip


def new_state(
    config: ModelConfig,
    attention: CacheAttention,
    replicas: int,
    key_heads: int,
    slots: int,
    pages: int,
    page: int,
    work: Work,
    dtype: Any,
) -> EngineState:
    """Empty caches and slots for all replicas.

    Args:
        config: The model's.
        attention: Of the devices.
        replicas: How many.
        key_heads: Of the cache, copies among them.
        slots: Of one replica.
        pages: Of one replica.
        page: Tokens of a page.
        work: Of one replica; only its shapes are read.
        dtype: Of the cache.
    """
    width = config.head_dim
    workspace = attention.workspace(work, key_heads, config.num_heads // key_heads, width)
    return EngineState(
        cache=tuple(
            new_pages(replicas * pages, page, key_heads, width, dtype)
            for _ in range(config.num_layers)
        ),
        slots=empty_slots(replicas * slots),
        workspace=jax.tree.map(lambda x: jnp.concatenate([x] * replicas), workspace),
    )


def state_specs(state: EngineState) -> EngineState:
    """How the state lies on the mesh: replicas apart, key heads over the tensor axis."""
    return EngineState(
        jax.tree.map(lambda _: P(REPLICA, TENSOR), state.cache),
        jax.tree.map(lambda _: P(REPLICA), state.slots),
        jax.tree.map(lambda _: P(REPLICA, None, TENSOR), state.workspace),
    )


def embed(weights: Weights, tokens: HostOrDevice, axis: str | None) -> jax.Array:
    """Embeddings [..., D] of ids, from the device that holds them."""
    if axis is None:
        return weights.embedding[tokens]
    V = weights.embedding.shape[0]
    at = tokens - jax.lax.axis_index(axis) * V
    mine = weights.embedding[jnp.clip(at, 0, V - 1)]
    return jax.lax.psum(jnp.where(((at >= 0) & (at < V))[..., None], mine, 0), axis)


def prefill(
    weights: Weights,
    state: EngineState,
    pages: Prefill,
    *,
    config: ModelConfig,
    attention: CacheAttention,
    axis: str | None,
) -> EngineState:
    """Computes the keys and values of whole pages of prompts.

    Draws nothing: a prompt's last token is fed by the first decode step.

    Args:
        weights: In the engine's layout.
        state: Whose cache is filled.
        pages: Which pages.
        config: The model's.
        attention: Of the devices.
        axis: The mapped axis that heads and vocabulary are split over (None: not split).
    """
    S, size = pages.tokens.shape
    positions = jnp.maximum(pages.depth - 1, 0)[:, None] * size + jnp.arange(size)
    x = embed(weights, pages.tokens.reshape(-1), axis)
    rope = rope_tables(config, positions.reshape(-1), x.dtype)
    caches = []
    for layer, cache in zip(weights.layers, state.cache, strict=True):

        def attend(q, k, v, cache=cache):
            q, k, v = (a.reshape(S, size, *a.shape[1:]) for a in (q, k, v))
            out, cache = attention.prefill(q, k, v, cache, pages.page, pages.context, pages.depth)
            return out.reshape(S * size, *out.shape[2:]), cache

        x, cache = layer(x, rope, attend, axis)
        caches.append(cache)
    return state._replace(cache=tuple(caches))


def decode(
    weights: Weights,
    state: EngineState,
    plan: Plan,
    *,
    steps: int,
    config: ModelConfig,
    attention: CacheAttention,
    axis: str | None,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    top: bool,
) -> tuple[EngineState, Burst]:
    """Admits the plan's requests and draws up to ``steps`` tokens for every active slot.

    Ends early when none is active or ``plan.enough`` requests have ended.

    Args:
        weights: In the engine's layout.
        state: The cache and the slots as they were.
        plan: Of this burst.
        steps: The most decode steps.
        config: The model's.
        attention: Of the devices.
        axis: The mapped axis that heads and vocabulary are split over (None: not split).
        vocab_size: Higher ids are never drawn.
        stop_ids: Ids that end a response.
        top: Whether the best ids of every step are returned too.
    """
    slots = jax.tree.map(
        lambda new, old: jnp.where(plan.admit.reshape(-1, *[1] * (old.ndim - 1)), new, old),
        plan.new, state.slots,
    )  # fmt: skip
    slots = slots._replace(active=slots.active & plan.alive)
    B = slots.last.shape[0]
    size = state.cache[0].v.shape[2]
    sampling = slots.sampling
    greedy = sampling.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)
    running = slots.active.sum()

    def goes_on(carry):
        n, state, _ = carry
        left = state.slots.active.sum()
        return (n < steps) & (left > 0) & (running - left < plan.enough[0])

    def step(carry):
        n, state, burst = carry
        slots, workspace = state.slots, state.workspace
        active = slots.active
        cuts = active & ~greedy  # a slot that is free keeps the settings of its last request
        x = embed(weights, slots.last, axis)
        rope = rope_tables(config, slots.prompt + slots.drawn, x.dtype)
        block = jnp.minimum(slots.drawn // size, plan.own.shape[1] - 1)
        page = jnp.take_along_axis(plan.own, block[:, None], axis=1)[:, 0]
        caches = []
        for layer, cache in zip(weights.layers, state.cache, strict=True):

            def attend(q, k, v, cache=cache, workspace=workspace):
                out, *changed = attention.decode(
                    q, k, v, cache, plan.work, slots.drawn + 1, page, workspace
                )
                return out, changed

            x, (cache, workspace) = layer(x, rope, attend, axis)
            caches.append(cache)
        logits = token_logits(weights.norm(x), weights.head, temperature, vocab_size, axis)
        uniforms = row_uniforms(sampling.keys, slots.drawn)
        tokens, logps, log_z = draw(
            logits,
            uniforms,
            greedy,
            jnp.where(cuts, sampling.top_p, 1.0),
            jnp.where(cuts, sampling.top_k, 0),
            axis,
        )
        burst = burst._replace(
            tokens=burst.tokens.at[:, n].set(tokens),
            logps=burst.logps.at[:, n].set(logps),
            counts=burst.counts + active,
        )
        if top:
            best, ids = best_ids(logits, burst.top_ids.shape[-1], axis)
            burst = burst._replace(
                top_ids=burst.top_ids.at[:, n].set(ids),
                top_logps=burst.top_logps.at[:, n].set(best - log_z[:, None]),
            )
        drawn = slots.drawn + active
        stop = jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32))
        slots = slots._replace(
            last=jnp.where(active, tokens, slots.last),
            drawn=drawn,
            active=active & ~stop & (drawn < slots.limit),
        )
        return n + 1, EngineState(tuple(caches), slots, workspace), burst

    n_top = min(TOP_LOGPS, weights.head.shape[0])
    empty = Burst(
        jnp.zeros((B, steps), jnp.int32),
        jnp.zeros((B, steps), jnp.float32),
        jnp.zeros(B, jnp.int32),
        jnp.zeros((B, steps, n_top), jnp.int32) if top else None,
        jnp.zeros((B, steps, n_top), jnp.float32) if top else None,
    )
    start = (0, state._replace(slots=slots), empty)
    _, state, burst = jax.lax.while_loop(goes_on, step, start)
    return state, burst


def compiled_programs(
    config: ModelConfig,
    attention: CacheAttention,
    mesh: Mesh,
    weights: Weights,
    state: EngineState,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    steps: int,
) -> tuple[Any, Any]:
    """(prefill, decode), jitted over the mesh.

    The state is donated; ``top`` stays an argument of ``decode``. Of ``weights`` and ``state`` only
    the structure is read; the other arguments are those of the two programs.
    """
    axis = TENSOR if mesh.shape[TENSOR] > 1 else None
    where, each = state_specs(state), P(REPLICA)
    common: dict[str, Any] = {"config": config, "attention": attention, "axis": axis}

    def mapped(program, out):
        # Kernels say nothing of how their outputs vary over the mesh, so that check is off.
        return jax.shard_map(
            program, mesh=mesh, in_specs=(weight_specs(weights), where, each), out_specs=out,
            check_vma=False,
        )  # fmt: skip

    def decode_all(weights, state, plan, *, top):
        program = functools.partial(
            decode, steps=steps, vocab_size=vocab_size, stop_ids=stop_ids, top=top, **common,
        )  # fmt: skip
        return mapped(program, (where, each))(weights, state, plan)

    return (
        jax.jit(mapped(functools.partial(prefill, **common), where), donate_argnums=1),
        jax.jit(decode_all, donate_argnums=1, static_argnames="top"),
    )
