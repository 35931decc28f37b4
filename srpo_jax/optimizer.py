"""The optimiser of a recipe as an optax chain: AdamW, or Muon for the layers' matrices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from srpo_jax.config import OptimizerConfig

# Root mean square of a Muon step before the rate, close to that of AdamW's: one rate and one decay
# then suit both (Liu et al., arXiv 2502.16982).
MUON_RMS = 0.2


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Global-norm clip, AdamW or Muon, decoupled weight decay, and the scheduled rate.

    Computes in ``promote_types(dtype of the parameter, float32)``, and returns the moves in that
    dtype. ``moment_dtype`` holds for both moments: "float32" means that same dtype (so bfloat16
    parameters have float32 moments and float64 ones float64 moments), "bfloat16" is stored with
    stochastic rounding. The state has the same structure and dtypes after every update.
    """
    scaled = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    scaled = _stored_as(config.moment_dtype, scaled)
    if config.name == "muon":
        orthogonal = optax.contrib.scale_by_muon(
            beta=config.muon_momentum, weight_dimension_numbers=_last_two_axes
        )
        orthogonal = _stored_as(config.moment_dtype, orthogonal)
        scaled = optax.partition(
            {"muon": optax.chain(orthogonal, optax.stateless(_scaled_to_rms)), "adamw": scaled},
            muon_labels,
        )
    chain = optax.chain(
        optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity(),
        scaled,
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda tree: decay_mask(tree, config.decay_embedding)
        ),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )
    return optax.GradientTransformation(
        lambda params: chain.init(_wide(params)),
        lambda grads, state, params: chain.update(_wide(grads), state, _wide(params)),
    )


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The rate at each optimiser step, from 0: ``warmup_steps`` of linear warm-up from 0, then the
    schedule, which reaches ``min_lr_ratio * lr`` at ``total_steps``. Skipped steps do not count."""
    rest_steps, last = max(total_steps - config.warmup_steps, 1), config.min_lr_ratio
    rest = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, last * config.lr, rest_steps),
        "cosine": optax.cosine_decay_schedule(config.lr, rest_steps, alpha=last),
    }[config.schedule]
    if not config.warmup_steps:
        return rest
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    return optax.join_schedules([warmup, rest], [config.warmup_steps])


def decay_mask(params: Any, embedding: bool = True) -> Any:
    """True where weight decay applies: kernels and, unless told otherwise, the embedding (which is
    also the head where that is tied). Norm scales and biases never decay."""
    decays = ("kernel", "embedding") if embedding else ("kernel",)
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decays, params)


def muon_labels(params: Any) -> Any:
    """ "muon" for the matrices inside the layers; "adamw" for embedding, head, norms and biases."""

    def label(path, _):
        names = [entry.key for entry in path]
        return "muon" if "layers" in names and names[-1] == "kernel" else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, other: Any
) -> Any:
    """Shardings of ``optimizer.init(params)``: a moment's is that of its parameter, and counters
    and constants get ``other``. ``params``: arrays or ShapeDtypeStructs."""

    def masked(x):  # stands where a part of the optimiser leaves a parameter to another part
        return isinstance(x, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer,
        lambda moment, sharding: moment if masked(moment) else sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: other,
        is_leaf=masked,
    )


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Floating ``x``, any shape -> bfloat16: one of its two neighbours, drawn so that the expected
    value is ``x`` to float32 precision. What bfloat16 holds exactly, inf and NaN stay as they are.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # The lower half of the bits is the fraction to round: noise below 1 carries it that often.
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _stored_as(dtype: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` with its moments kept in ``dtype`` between updates.

    bfloat16 holds 8 bits: with b2 = 0.999 a second moment moves by less than half of its last one,
    so rounding to nearest would let it rise to a quarter of what it should be and never fall again.
    The draw depends on the step alone: a resumed run repeats it, and so does every mesh.
    """
    if dtype == "float32":
        return inner

    def init(params):
        return optax.tree_map_params(inner, lambda m: m.astype(dtype), inner.init(params))

    def update(grads, state, params=None):
        state = optax.tree_map_params(inner, lambda m: m.astype(jnp.float32), state)
        moves, state = inner.update(grads, state, params)
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), state.count)
        leaf = itertools.count()
        return moves, optax.tree_map_params(
            inner, lambda m: round_stochastically(m, jax.random.fold_in(key, next(leaf))), state
        )

    return optax.GradientTransformation(init, update)


def _last_two_axes(params: Any) -> Any:
    """Kernels are [L, din, dout]: the matrix of each layer is orthogonalised on its own."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: axes, params)


def _scaled_to_rms(moves: Any, params: Any) -> Any:
    """An orthogonal [din, dout] matrix has the root mean square 1 / sqrt(max(din, dout))."""
    return jax.tree.map(lambda x: MUON_RMS * math.sqrt(max(x.shape[-2:])) * x, moves)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)
