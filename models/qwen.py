"""Qwen2, Qwen2.5 and Qwen3 dense decoders (and llama layouts) in Flax NNX.

The layers are one stacked module, scanned: every parameter below ``layers`` has a leading axis L.
A layer takes its attention as an argument, so teacher-forced scoring, prefill and decoding run the
same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.attention.mesh import Attention
from models.attention.select import causal_attention
from models.config import ModelConfig
from models.partition import Placement
from models.remat import REMAT_POLICIES

Rope = tuple[jax.Array, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

INIT_STD = 0.02  # initializer_range of the family


class Forward(NamedTuple):
    """How a forward pass over whole sequences is computed.

    Attributes:
        dtype: Of the computation; None: the parameters' own.
        remat: A name of ``REMAT_POLICIES``.
        attention: Takes (q, k, v, segment_ids) as ``causal_attention`` does.
        placement: The sharding constraints on a mesh; None on one device.
    """

    dtype: Any = None
    remat: str = "none"
    attention: Attention = causal_attention
    placement: Placement | None = None


PLAIN = Forward()


@jax.custom_vjp
def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., din] @ kernel [din, dout] in the dtype of x.

    The kernel's gradient is one product over the flattened leading axes, in the kernel's dtype: of
    a bfloat16 copy, what crosses the mesh is bfloat16 too. Autodiff's own transposes the cotangent
    first, which costs XLA's CPU backend a third of a layer's backward pass.
    """
    return x @ kernel.astype(x.dtype)


def _project_fwd(x, kernel):
    return project(x, kernel), (x, kernel)


def _project_bwd(saved, dy):
    x, kernel = saved
    x_rows, dy_rows = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    dx = (dy_rows @ kernel.astype(dy.dtype).T).reshape(x.shape)
    d_kernel = jax.lax.dot_general(
        x_rows,
        dy_rows,
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.promote_types(x.dtype, kernel.dtype),
    )
    return dx, d_kernel.astype(kernel.dtype)


project.defvjp(_project_fwd, _project_bwd)


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
        y = project(x, self.kernel[...])
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in at least float32; scale [*stack, width]."""

    def __init__(self, width: int, *, stack: tuple[int, ...] = (), eps: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((*stack, width), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        full = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = full * jax.lax.rsqrt(jnp.mean(jnp.square(full), -1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


class Embedding(nnx.Module):
    """Token embedding [V, D]."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs, dtype: Any):
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (vocab, width), dtype) * INIT_STD
        )

    def __call__(self, tokens_BT: jax.Array, forward: Forward = PLAIN) -> jax.Array:
        """[B, T] -> [B, T, D] in ``forward.dtype``."""
        table = self.embedding[...]
        dtype = forward.dtype or table.dtype
        if forward.placement is not None:
            return forward.placement.embed(table, tokens_BT, dtype)
        return table[tokens_BT].astype(dtype)


def rope_tables(config: ModelConfig, positions: jax.Array, dtype: Any) -> Rope:
    """cos and sin [..., H/2] of rotary positions, from float32 angles (float64 stays float64).

    Args:
        config: Says the frequencies.
        positions: [...] int.
        dtype: Of the tables.
    """
    full = jnp.promote_types(dtype, jnp.float32)
    inv_freq = jnp.asarray(config.inverse_frequencies(), full)
    angles = positions[..., None].astype(full) * inv_freq
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

    def __call__(
        self, x: jax.Array, rope: Rope, attend: Attend, tensor_axis: str | None = None
    ) -> tuple[jax.Array, Any]:
        """One layer.

        Args:
            x: [..., D] floating, the residual stream.
            rope: Tables [..., H/2] of the tokens' positions.
            attend: (q [..., N, H], k and v [..., Kv, H]) -> ([..., N, H], anything to carry).
            tensor_axis: The mapped axis over which the kernels are split, under shard_map.

        Returns:
            ([..., D], what ``attend`` returned beside its heads, such as a KV cache).
        """
        h = self.input_norm(x)

        def heads(proj, norm):
            y = proj(h).reshape(*h.shape[:-1], -1, self.head_dim)
            return norm(y) if norm is not None else y

        q = apply_rope(heads(self.q_proj, getattr(self, "q_norm", None)), rope)
        k = apply_rope(heads(self.k_proj, getattr(self, "k_norm", None)), rope)
        v = heads(self.v_proj, None)

        def summed(y):
            return y if tensor_axis is None else jax.lax.psum(y, tensor_axis)

        attended, carried = attend(q, k, v)
        x = x + summed(self.o_proj(attended.reshape(*x.shape[:-1], -1)))
        h = self.post_norm(x)
        h = jax.nn.silu(self.gate_proj(h)) * self.up_proj(h)
        return x + summed(self.down_proj(h)), carried


class Qwen(nnx.Module):
    """A decoder-only language model.

    Args:
        config: Its shape.
        rngs: Draw the parameters.
        dtype: Of the parameters.
    """

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
        forward: Forward = PLAIN,
    ) -> jax.Array:
        """Hidden states after the last norm.

        Args:
            tokens_BT: [B, T] int.
            positions_BT: [B, T] int, of each token in its segment.
            segment_ids_BT: [B, T] int; a token attends to its own segment alone.
            forward: How the pass is computed.

        Returns:
            [B, T, D] in ``forward.dtype``.
        """
        chex.assert_rank([tokens_BT, positions_BT, segment_ids_BT], 2)
        chex.assert_equal_shape([tokens_BT, positions_BT, segment_ids_BT])
        step = self.layer_step(positions_BT, segment_ids_BT, forward)

        def body(x, layer):
            return step(x, layer), None

        policy = REMAT_POLICIES[forward.remat]
        if policy is not None:
            body = jax.checkpoint(body, policy=policy(jax.checkpoint_policies))
        x, _ = jax.lax.scan(body, self.embed(tokens_BT, forward), self.layers)
        return self.norm(x)

    def layer_step(
        self, positions_BT: jax.Array, segment_ids_BT: jax.Array, forward: Forward
    ) -> Callable[[jax.Array, DecoderLayer], jax.Array]:
        """(x [B, T, D], one layer of the stack) -> [B, T, D]."""
        dtype = forward.dtype or self.embed.embedding[...].dtype
        rope = rope_tables(self.config, positions_BT, dtype)

        def attend(q, k, v):
            out = forward.attention(q, k, v, segment_ids_BT)
            return checkpoint_name(out, "attention"), None

        def step(x, layer):
            if forward.placement is not None:
                layer = forward.placement.gather(layer, dtype)
            x, _ = layer(x, rope, attend)
            return x if forward.placement is None else forward.placement.rows(x)

        return step

    def head(self) -> tuple[jax.Array, int]:
        """The vocabulary projection as it is stored, and its vocabulary axis: the embedding [V, D]
        and 0 where the head is tied, else the kernel [D, V] and 1."""
        if self.config.tie_embeddings:
            return self.embed.embedding[...], 0
        return self.lm_head.kernel[...], 1

    def head_kernel(self) -> jax.Array:
        """The vocabulary projection [D, V]: the transposed embedding where the head is tied."""
        head, vocab_axis = self.head()
        return head if vocab_axis == 1 else head.T

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V], at least float32, of hidden states [..., D]."""
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        kernel = self.head_kernel().astype(hidden.dtype)
        return jnp.matmul(hidden, kernel, preferred_element_type=dtype)


def split_params(model: Qwen) -> tuple[Any, dict]:
    """The model's static part and its parameters as nested dicts: ``nnx.merge`` undoes it."""
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, dtype: Any) -> tuple[Any, dict]:
    """A model's static part and its parameters as ShapeDtypeStructs (see ``split_params``)."""
    return split_params(nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0), dtype=dtype)))
