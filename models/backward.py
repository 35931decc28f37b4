"""The gradient of a loss on the last hidden states, added to given sums layer by layer.

``jax.grad`` over the scanned layers makes a second tree of gradients before they can be added to
the sums. Where each layer is recomputed anyway (``remat: full``), the backward scan is written out
here instead, and XLA adds every layer's gradient to the sums in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.qwen import Forward, Qwen, RMSNorm

# (hidden [B, T, D], head, vocabulary axis of the head) -> (d_hidden, d_head, anything else)
HeadStage = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, Any]]


def add_gradients(
    graphdef: Any,
    params: dict,
    sums: dict,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    head_stage: HeadStage,
    forward: Forward,
) -> tuple[dict, Any]:
    """Adds the gradient of a loss on the last hidden states to given sums (gradient accumulation).

    Args:
        graphdef: The model's static part, from ``split_params``.
        params: Its parameters, from there too.
        sums: With the structure of ``params``.
        tokens_BT: [B, T] int.
        positions_BT: [B, T] int.
        segment_ids_BT: [B, T] int.
        head_stage: (hidden states [B, T, D] after the last norm, vocabulary projection, its
            vocabulary axis) -> (the loss's gradient for the hidden states, for the projection in
            its layout, anything else).
        forward: How the pass is computed.

    Returns:
        (the new sums, anything else of the stage).
    """
    model: Qwen = nnx.merge(graphdef, params)
    inputs = (tokens_BT, positions_BT, segment_ids_BT)
    form = _layer_by_layer if forward.remat == "full" else _at_once
    return form(graphdef, params, sums, inputs, model.head(), head_stage, forward)


def _at_once(graphdef, params, sums, inputs, head, head_stage, forward):
    def hidden_of(params):
        return nnx.merge(graphdef, params)(*inputs, forward=forward)

    hidden, pull_back = jax.vjp(hidden_of, params)
    d_hidden, d_head, aux = head_stage(hidden, *head)
    (grads,) = pull_back(d_hidden)
    sums = jax.tree.map(jnp.add, sums, grads)
    return _add_to_head(sums, d_head), aux


def _layer_by_layer(graphdef, params, sums, inputs, head, head_stage, forward):
    model: Qwen = nnx.merge(graphdef, params)
    tokens_BT, positions_BT, segment_ids_BT = inputs
    step = model.layer_step(positions_BT, segment_ids_BT, forward)
    layers_def, _ = nnx.split(model.layers)
    norm_def, _ = nnx.split(model.norm)
    embed_def, _ = nnx.split(model.embed)

    def embed(params):
        return nnx.merge(embed_def, params)(tokens_BT, forward)

    def layer(x, params):
        return step(x, nnx.merge(layers_def, params))

    def norm(x, params):
        module: RMSNorm = nnx.merge(norm_def, params)
        return module(x)

    x, embed_back = jax.vjp(embed, params["embed"])
    x, layer_inputs = jax.lax.scan(lambda x, p: (layer(x, p), x), x, params["layers"])
    hidden, norm_back = jax.vjp(norm, x, params["norm"])
    d_hidden, d_head, aux = head_stage(hidden, *head)
    dx, d_norm = norm_back(d_hidden)

    def back(carry, index_input_params):
        dx, layer_sums = carry
        index, x, layer_params = index_input_params
        _, layer_back = jax.vjp(layer, x, layer_params)
        dx, d_layer = layer_back(dx)
        return (dx, jax.tree.map(lambda s, d: s.at[index].add(d), layer_sums, d_layer)), None

    index = jnp.arange(model.config.num_layers)
    (dx, layer_sums), _ = jax.lax.scan(
        back, (dx, sums["layers"]), (index, layer_inputs, params["layers"]), reverse=True
    )
    (d_embed,) = embed_back(dx)
    sums = sums | {
        "embed": jax.tree.map(jnp.add, sums["embed"], d_embed),
        "layers": layer_sums,
        "norm": jax.tree.map(jnp.add, sums["norm"], d_norm),
    }
    return _add_to_head(sums, d_head), aux


def _add_to_head(sums: dict, d_head: jax.Array) -> dict:
    if "lm_head" in sums:
        return sums | {"lm_head": {"kernel": sums["lm_head"]["kernel"] + d_head}}
    return sums | {"embed": {"embedding": sums["embed"]["embedding"] + d_head}}
