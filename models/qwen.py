"""Qwen2, Qwen2.5 and Qwen3 dense decoders (and llama layouts) in Flax NNX.

The layers are one stacked module, scanned: every parameter below ``layers`` has a leading axis L.
A layer takes its attention as an argument, so teacher-forced scoring, prefill and decoding run the
same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import causal_attention
from models.config import ModelConfig

Rope = tuple[jax.Array, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

INIT_STD = 0.02  # initializer_range of the family


class Linear(nnx.Module):
    """y = x @ kernel (+ bias); kernel [*stack, din, dout]."""

    def __init__(
        self,
        din: int,
        dout: int,
        *,
        stack: tuple[int, ...] = (),
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype: Any,
    ):
        draw = jax.random.normal(rngs.params(), (*stack, din, dout), dtype)
        self.kernel = nnx.Param(draw * INIT_STD)
        if bias:
            self.bias = nnx.Param(jnp.zeros((*stack, dout), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in at least float32; scale [*stack, width]."""

    def __init__(self, width: int, *, stack: tuple[int, ...] = (), eps: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((*stack, width), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


class Embedding(nnx.Module):
    """Token embedding [V, D]."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs, dtype: Any):
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (vocab, width), dtype) * INIT_STD
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...][tokens]


def rope_tables(config: ModelConfig, positions: jax.Array, dtype: Any) -> Rope:
    """cos and sin [..., H/2] of rotary positions, from float32 angles (float64 stays float64)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    inv_freq = jnp.asarray(config.inverse_frequencies(), wide)
    angles = positions[..., None].astype(wide) * inv_freq
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates heads x [..., N, H] by tables [..., H/2]; the halves are the pairs."""
    cos, sin = (table[..., None, :] for table in rope)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated MLP; with ``stack=(L,)`` it holds L layers to scan over."""

    def __init__(self, c: ModelConfig, *, stack: tuple[int, ...], rngs: nnx.Rngs, dtype: Any):
        def linear(din, dout, bias=False):
            return Linear(din, dout, stack=stack, bias=bias, rngs=rngs, dtype=dtype)

        def norm(width):
            return RMSNorm(width, stack=stack, eps=c.rms_norm_eps, dtype=dtype)

        self.head_dim = c.head_dim
        self.input_norm = norm(c.hidden_size)
        self.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = linear(c.num_heads * c.head_dim, c.hidden_size)
        if c.qk_norm:
            self.q_norm = norm(c.head_dim)
            self.k_norm = norm(c.head_dim)
        self.post_norm = norm(c.hidden_size)
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, Any]:
        """x [..., D] -> ([..., D], what ``attend`` returned beside its heads, such as a cache)."""
        h = self.input_norm(x)

        def heads(proj, norm):
            y = proj(h).reshape(*h.shape[:-1], -1, self.head_dim)
            return norm(y) if norm is not None else y

        q = apply_rope(heads(self.q_proj, getattr(self, "q_norm", None)), rope)
        k = apply_rope(heads(self.k_proj, getattr(self, "k_norm", None)), rope)
        v = heads(self.v_proj, None)
        attended, carried = attend(q, k, v)
        x = x + self.o_proj(attended.reshape(*x.shape[:-1], -1))
        h = self.post_norm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h)), carried


class Qwen(nnx.Module):
    """A decoder-only language model. ``dtype`` is that of the parameters."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.layers = DecoderLayer(config, stack=(config.num_layers,), rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        dtype: Any = None,
        remat: bool = False,
    ) -> jax.Array:
        """Hidden states [B, T, D] after the last norm, computed in ``dtype`` (the parameters' own
        by default). With ``remat`` the backward pass recomputes each layer."""
        chex.assert_rank([tokens_BT, positions_BT, segment_ids_BT], 2)
        chex.assert_equal_shape([tokens_BT, positions_BT, segment_ids_BT])
        x = self.embed(tokens_BT)
        x = x.astype(dtype or x.dtype)
        rope = rope_tables(self.config, positions_BT, x.dtype)

        def attend(q, k, v):
            return causal_attention(q, k, v, segment_ids_BT), None

        def body(x, layer):
            return layer(x, rope, attend)

        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, self.layers)
        return self.norm(x)

    def head_kernel(self) -> jax.Array:
        """The vocabulary projection [D, V]: the transposed embedding where the head is tied."""
        if self.config.tie_embeddings:
            return self.embed.embedding[...].T
        return self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V], at least float32, of hidden states [..., D]."""
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        kernel = self.head_kernel().astype(hidden.dtype)
        return jnp.matmul(hidden, kernel, preferred_element_type=dtype)


def split_params(model: Qwen) -> tuple[Any, dict]:
    """The model's static part and its parameters as nested dicts: ``nnx.merge`` undoes it."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)
