"""The engine's device programs: prefill some slots, decode all of them for a burst of steps.

Axes: B slots, P prompts of one prefill, T prompt bucket, C cache positions, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import cache_attention, causal_attention
from models.config import ModelConfig
from models.qwen import Qwen, rope_tables
from srpo_jax.engine.sampling import draw, row_uniforms
from srpo_jax.logprob import scaled_logits


class Sampling(NamedTuple):
    """How each row samples: temperature 0 is greedy; keys [*, 2] uint32 name the request."""

    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    top_k: jax.Array  # int32, 0 = off
    keys: jax.Array  # uint32 [*, 2]


class EngineState(NamedTuple):
    """Everything that decoding changes; donated to every program."""

    k: tuple[jax.Array, ...]  # L times [B, C, Kv, H]
    v: tuple[jax.Array, ...]
    length: jax.Array  # [B] int32: tokens whose keys are cached
    last: jax.Array  # [B] int32: drawn, not yet fed
    drawn: jax.Array  # [B] int32: tokens drawn so far
    limit: jax.Array  # [B] int32: tokens to draw at most
    active: jax.Array  # [B] bool
    sampling: Sampling  # [B]


class Burst(NamedTuple):
    """What a program drew: tokens, log-probs [B, steps] and how many of them count per slot."""

    tokens: jax.Array
    logps: jax.Array
    counts: jax.Array


class Weights(NamedTuple):
    """Decode-time layout: per-layer arrays (no slicing of stacks) and a [D, V] head."""

    embed: Any
    layers: tuple[Any, ...]
    norm: Any
    head: jax.Array


def prepare_weights(graphdef: Any, params: dict, dtype: Any) -> Weights:
    """Unstacks the layers and transposes a tied head, in the engine's dtype."""
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    model: Qwen = nnx.merge(graphdef, params)
    layers = tuple(
        jax.tree.map(lambda a, i=i: a[i], model.layers) for i in range(model.config.num_layers)
    )
    return Weights(model.embed, layers, model.norm, model.head_kernel())


def new_state(config: ModelConfig, slots: int, cache: int, dtype: Any) -> EngineState:
    """An empty state: no slot is active."""
    shape = (slots, cache, config.num_kv_heads, config.head_dim)

    def zeros(kind):
        return jnp.zeros(slots, kind)

    return EngineState(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        length=zeros(jnp.int32),
        last=zeros(jnp.int32),
        drawn=zeros(jnp.int32),
        limit=zeros(jnp.int32),
        active=zeros(bool),
        sampling=Sampling(
            jnp.ones(slots, jnp.float32), jnp.ones(slots, jnp.float32), zeros(jnp.int32),
            jnp.zeros((slots, 2), jnp.uint32),
        ),
    )  # fmt: skip


def _draw(hidden, head, sampling: Sampling, drawn, vocab_size, truncated):
    greedy = sampling.temperature == 0.0
    scale = jnp.where(greedy, 1.0, sampling.temperature)
    logits = scaled_logits(hidden, head, temperature=scale, vocab_size=vocab_size)
    uniforms = row_uniforms(sampling.keys, drawn)
    return draw(logits, uniforms, greedy, sampling.top_p, sampling.top_k, truncated=truncated)


def _is_stop(tokens, stop_ids):
    return jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32))


def prefill(
    weights: Weights,
    state: EngineState,
    tokens_PT: jax.Array,
    lengths_P: jax.Array,
    slots_P: jax.Array,
    limits_P: jax.Array,
    sampling_P: Sampling,
    *,
    config: ModelConfig,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    truncated: bool,
) -> tuple[EngineState, jax.Array, jax.Array]:
    """Runs P prompts, fills their slots' caches and draws their first tokens.

    Unused rows have a slot past the last: their writes are dropped. Returns the state, tokens
    [P] and log-probs [P].
    """
    P, T = tokens_PT.shape
    positions = jnp.broadcast_to(jnp.arange(T), (P, T))
    segments = (positions < lengths_P[:, None]).astype(jnp.int32)
    x = weights.embed(tokens_PT)
    rope = rope_tables(config, positions, x.dtype)

    def attend(q, k, v):
        return causal_attention(q, k, v, segments), (k, v)

    ks, vs = [], []
    for layer, k_cache, v_cache in zip(weights.layers, state.k, state.v, strict=True):
        x, (k, v) = layer(x, rope, attend)
        ks.append(k_cache.at[slots_P, :T].set(k, mode="drop"))
        vs.append(v_cache.at[slots_P, :T].set(v, mode="drop"))
    last = jnp.take_along_axis(x, (lengths_P - 1)[:, None, None], axis=1)[:, 0]
    zero = jnp.zeros(P, jnp.int32)
    drawn, logps = _draw(weights.norm(last), weights.head, sampling_P, zero, vocab_size, truncated)

    def put(old, new):
        return old.at[slots_P].set(new, mode="drop")

    state = EngineState(
        k=tuple(ks),
        v=tuple(vs),
        length=put(state.length, lengths_P),
        last=put(state.last, drawn),
        drawn=put(state.drawn, zero + 1),
        limit=put(state.limit, limits_P),
        active=put(state.active, ~_is_stop(drawn, stop_ids) & (limits_P > 1)),
        sampling=jax.tree.map(put, state.sampling, sampling_P),
    )
    return state, drawn, logps


def decode(
    weights: Weights,
    state: EngineState,
    *,
    steps: int,
    config: ModelConfig,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    truncated: bool,
) -> tuple[EngineState, Burst]:
    """Draws up to ``steps`` tokens for every active slot; ends early when none is active."""
    B = state.length.shape[0]
    rows = jnp.arange(B)

    def step(carry):
        n, state, burst = carry
        x = weights.embed(state.last)
        rope = rope_tables(config, state.length, x.dtype)
        ks, vs = [], []
        for layer, k_cache, v_cache in zip(weights.layers, state.k, state.v, strict=True):

            def attend(q, k, v, k_cache=k_cache, v_cache=v_cache):
                k_cache = k_cache.at[rows, state.length].set(k, mode="drop")
                v_cache = v_cache.at[rows, state.length].set(v, mode="drop")
                return cache_attention(q, k_cache, v_cache, state.length + 1), (k_cache, v_cache)

            x, (k_cache, v_cache) = layer(x, rope, attend)
            ks.append(k_cache)
            vs.append(v_cache)
        tokens, logps = _draw(
            weights.norm(x), weights.head, state.sampling, state.drawn, vocab_size, truncated
        )
        active = state.active
        drawn = state.drawn + active
        burst = Burst(
            burst.tokens.at[:, n].set(tokens),
            burst.logps.at[:, n].set(logps),
            burst.counts + active,
        )
        state = state._replace(
            k=tuple(ks),
            v=tuple(vs),
            length=state.length + active,
            last=jnp.where(active, tokens, state.last),
            drawn=drawn,
            active=active & ~_is_stop(tokens, stop_ids) & (drawn < state.limit),
        )
        return n + 1, state, burst

    empty = Burst(
        jnp.zeros((B, steps), jnp.int32),
        jnp.zeros((B, steps), jnp.float32),
        jnp.zeros(B, jnp.int32),
    )
    _, state, burst = jax.lax.while_loop(
        lambda carry: (carry[0] < steps) & jnp.any(carry[1].active), step, (0, state, empty)
    )
    return state, burst


def release(state: EngineState, slots_n: jax.Array) -> EngineState:
    """Deactivates slots (indices past the last are ignored): their requests ended on the host."""
    return state._replace(active=state.active.at[slots_n].set(False, mode="drop"))


def compiled_programs(**static: Any) -> tuple[Any, Any, Any]:
    """(prefill, decode, release) jitted, the state donated; ``truncated`` stays an argument."""
    prefill_static = {k: static[k] for k in ("config", "vocab_size", "stop_ids")}
    return (
        jax.jit(
            functools.partial(prefill, **prefill_static),
            donate_argnums=1,
            static_argnames="truncated",
        ),
        jax.jit(
            functools.partial(decode, steps=static["steps"], **prefill_static),
            donate_argnums=1,
            static_argnames="truncated",
        ),
        jax.jit(release, donate_argnums=0),
    )
