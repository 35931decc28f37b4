"""The optimiser of a recipe as an optax chain: AdamW, or Muon for the layers' matrices.

Once the gradient's global norm is known, what becomes of a leaf depends on that leaf alone:
``apply_by_leaf`` updates one after the other, and so holds the temporaries of one.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from srpo_jax.recipe.recipe import OptimizerConfig

# Root mean square of a Muon step before the rate, close to that of AdamW's: one rate and one decay
# then suit both (Liu et al., arXiv 2502.16982).
MUON_RMS = 0.2


def make_optimizer(
    config: OptimizerConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:
    """Global-norm clip, AdamW or Muon, decoupled weight decay, and the scheduled rate.

    Computes in ``promote_types(dtype of the parameter, float32)``, and returns the updates in that
    dtype. ``moment_dtype`` holds for both moments: "float32" means that same dtype (so bfloat16
    parameters have float32 moments and float64 ones float64 moments), "bfloat16" is stored with
    stochastic rounding. The state has the same structure and dtypes after every update.

    Args:
        config: The recipe's ``optimizer`` section.
        total_steps: Optimiser steps of the run, at which the schedule ends.

    Returns:
        A transformation whose ``update`` takes the gradient's global norm as ``norm=``, or else
        that of what it is given.
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
        _clip_by_norm(config.grad_clip) if config.grad_clip else optax.identity(),
        scaled,
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda tree: decay_mask(tree, config.decay_embedding)
        ),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )
    return optax.GradientTransformationExtraArgs(
        lambda params: chain.init(_at_least_float32(params)),
        lambda grads, state, params, **norm: chain.update(
            _at_least_float32(grads), state, _at_least_float32(params), **norm
        ),
    )


def apply_by_leaf(
    optimizer: optax.GradientTransformation,
    grads: Any,
    norm: jax.Array,
    state: Any,
    params: Any,
    *,
    step: jax.Array,
    applied: jax.Array,
) -> tuple[Any, Any]:
    """One update, leaf after leaf. Beside the arguments, which may be donated, memory holds the
    temporaries of one leaf.

    bfloat16 parameters are rounded stochastically: most updates are below half of a bfloat16's last
    place, and rounding to nearest would lose them. The draws depend on step and leaf alone.

    Args:
        optimizer: Given the norm, no leaf's update may depend on another leaf.
        grads: The gradient, with the structure of ``params``.
        norm: Its global norm, a scalar.
        state: Of the optimizer.
        params: The parameters.
        step: int32, the number of updates before this one.
        applied: bool; where it is False nothing changes.

    Returns:
        (parameters, state).
    """
    update = optax.with_extra_args_support(optimizer).update
    leaves: Any = jax.tree.structure(params)
    codes = _leaf_codes(params)
    results = []
    for chosen in range(leaves.num_leaves):
        only = leaves.unflatten([leaf == chosen for leaf in range(leaves.num_leaves)])
        of_leaf = functools.partial(jax.tree.map, _kept, is_leaf=_is_masked)
        own = (
            of_leaf(params, only),
            optax.tree_map_params(optimizer, _kept, state, only, is_leaf=_is_masked),
            of_leaf(grads, only),
        )
        seeds = jax.tree.map(lambda code: _seed(step, code), of_leaf(codes, only))

        # Branches, not a choice between the old leaf and the new one, which would hold both. And
        # the update is a branch of its own that ends before the moments are written: fused into
        # what uses it, it would read the old ones side by side with that, and they would be copied.
        def updates_of(own):
            params, state, grads = own
            return update(grads, state, params, norm=norm)[0]

        def add_updates(own, updates, seeds=seeds):
            params, state, grads = own
            new = jax.tree.map(_add_update, params, updates, seeds)
            return new, update(grads, state, params, norm=norm)[1]

        def updated(own, add_updates=add_updates):
            updates = jax.lax.cond(applied, updates_of, lambda own: _zeros(updates_of, own), own)
            return jax.lax.cond(applied, add_updates, lambda own, _: own[:2], own, updates)

        results.append(jax.lax.cond(applied, updated, lambda own: own[:2], own))
    return _joined(results)


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate at each optimiser step, from 0. Skipped steps do not count.

    Over ``warmup_steps`` it rises in equal parts to the peak, which the last of them has; then
    comes the schedule, which reaches ``min_lr_ratio * lr`` at ``total_steps``.
    """
    rest_steps, last = max(total_steps - config.warmup_steps, 1), config.min_lr_ratio
    rest = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, last * config.lr, rest_steps),
        "cosine": optax.cosine_decay_schedule(config.lr, rest_steps, alpha=last),
    }[config.schedule]
    if not config.warmup_steps:
        return rest
    first = config.lr / config.warmup_steps
    warmup = optax.linear_schedule(first, config.lr, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, rest], [config.warmup_steps])


def last_rate(config: OptimizerConfig, total_steps: int, updates: int) -> float:
    """The rate of the last of so many applied updates; NaN before the first."""
    return float(learning_rate(config, total_steps)(updates - 1)) if updates else float("nan")


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
    """Shardings of ``optimizer.init(params)``.

    Args:
        optimizer: The transformation whose state it is.
        params: Arrays or ShapeDtypeStructs.
        shardings: Those of the parameters, which their moments get too.
        other: That of counters and constants.
    """
    return optax.tree_map_params(
        optimizer,
        lambda moment, sharding: moment if _is_masked(moment) else sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: other,
        is_leaf=_is_masked,
    )


def round_stochastically(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Rounds to one of the two bfloat16 neighbours, drawn so that the expected value is ``x``.

    The expectation holds to float32 precision. What bfloat16 holds exactly, inf and NaN stay as
    they are.

    Args:
        x: Floating, any shape.
        seed: uint32; the draws depend on it and on an element's place, not on the sharding.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # The lower half of the bits is the fraction to round: noise below 1 carries it that often.
    bits += _noise(seed, x.shape)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _noise(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 below 2**16, uniform. A hash of the place, unlike a generator of ``jax.random``, is
    computed where it is added: it takes no memory of the array's size."""
    x = jnp.broadcast_to(seed, shape)
    for axis in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        x = _hash(x ^ (place * jnp.uint32(0x9E3779B9)))
    return x >> 16


def _hash(x: jax.Array) -> jax.Array:
    """uint32 -> uint32, one to one: lowbias32 (github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _seed(step: jax.Array, code: int) -> jax.Array:
    """uint32 from a step and a leaf's code alone: a resumed run repeats its draws, and so does
    every mesh."""
    return _hash(_hash(step.astype(jnp.uint32)) ^ jnp.uint32(code))


def _leaf_codes(params: Any, kind: str = "parameter") -> Any:
    """A number for each leaf by its path, so that it has it in a masked tree as well."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: zlib.crc32((kind + jax.tree_util.keystr(path)).encode()), params
    )


def _stored_as(dtype: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` with its moments kept in ``dtype`` between updates.

    bfloat16 holds 8 bits: with b2 = 0.999 a second moment changes by less than half of its last
    place, so rounding to nearest would let it rise to a quarter of what it should be and never fall
    again.
    """
    if dtype == "float32":
        return inner

    def init(params):
        return optax.tree_map_params(inner, lambda m: m.astype(dtype), inner.init(params))

    def update(grads, state, params=None):
        step = state.count
        state = optax.tree_map_params(inner, lambda m: m.astype(jnp.float32), state)
        updates, state = inner.update(grads, state, params)
        order: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)  # of its moments

        def rounded(moment, code):
            return round_stochastically(moment, _hash(_seed(step, code) ^ next(order[code])))

        return updates, optax.tree_map_params(inner, rounded, state, _leaf_codes(grads, "moment"))

    return optax.GradientTransformation(init, update)


def _clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """``optax.clip_by_global_norm``, but the norm may be given where the tree is a part."""

    def update(grads, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(grads) if norm is None else norm
        scale = jnp.where(
            norm < limit, 1, limit / norm
        )  # one number: a product fuses with the rest
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _add_update(x: jax.Array, update: jax.Array, seed: jax.Array) -> jax.Array:
    new = x + update
    return round_stochastically(new, seed) if x.dtype == jnp.bfloat16 else new.astype(x.dtype)


def _zeros(function: Callable[[Any], Any], argument: Any) -> Any:
    """Zeros like the function's result."""
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(function, argument))


def _kept(x: Any, keep: bool) -> Any:
    return x if keep else optax.MaskedNode()


def _joined(trees: Sequence[Any]) -> Any:
    """One tree from several that hold a leaf each; what all of them hold is the first's."""
    return jax.tree.map(
        lambda *xs: next((x for x in xs if not _is_masked(x)), xs[0]), *trees, is_leaf=_is_masked
    )


def _is_masked(x: Any) -> bool:
    """Whether ``x`` stands for a leaf that is not there."""
    return isinstance(x, optax.MaskedNode)


def _last_two_axes(params: Any) -> Any:
    """Kernels are [L, din, dout]: the matrix of each layer is orthogonalised on its own."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: axes, params)


def _scaled_to_rms(updates: Any, params: Any) -> Any:
    """An orthogonal [din, dout] matrix has the root mean square 1 / sqrt(max(din, dout))."""
    return jax.tree.map(lambda x: MUON_RMS * math.sqrt(max(x.shape[-2:])) * x, updates)


def _at_least_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)
