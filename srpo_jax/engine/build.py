"""The engine's compiled programs and the shapes that they are compiled for, from abstract values
alone: what an engine runs, and what can be compiled ahead for devices that are not there."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention.cache import CacheAttention
from models.config import ModelConfig
from srpo_jax.engine.layout import (
    REPLICA,
    TENSOR,
    Weights,
    key_head_copies,
    shardings,
)
from srpo_jax.engine.plan import Shapes, decode_work, pages_of, plan_prefill
from srpo_jax.engine.programs import EngineState, compiled_programs, new_state, state_specs
from srpo_jax.engine.replica import empty_plan
from srpo_jax.engine.weight_sync import SyncPrograms, sync_programs

# Tokens of one prefill: enough for the full speed of the products. One size alone, because a row's
# bits can change with the number of rows beside it (seen on CPU at small widths).
PREFILL_TOKENS = {"cpu": 512}
OTHER_PREFILL_TOKENS = 1024


class EnginePrograms(NamedTuple):
    """Jitted programs over a mesh.

    sync       see SyncPrograms: (params) -> Weights, layer by layer
    new_state  () -> EngineState
    prefill    (weights, state, pages) -> state
    decode     (weights, state, plan, top=) -> (state, burst)
    weights, state, pages, plan: ShapeDtypeStructs of the arguments, where they lie on the mesh
    """

    sync: SyncPrograms
    new_state: Any
    prefill: Any
    decode: Any
    weights: Weights
    state: EngineState
    pages: Any
    plan: Any


def engine_programs(
    config: ModelConfig,
    graphdef: Any,
    params: dict,
    mesh: Mesh,
    attention: CacheAttention,
    shapes: Shapes,
    *,
    pages: int,
    vocab_size: int,
    stop_ids: Collection[int],
    burst: int,
    dtype: Any,
) -> EnginePrograms:
    """The jitted programs of an engine, none of them compiled yet.

    Args:
        config: The model's.
        graphdef: The model without its parameters.
        params: Its parameters, of which only shapes and dtypes are read.
        mesh: (replica, tensor).
        attention: Of the mesh's devices.
        shapes: The fixed sizes of the programs.
        pages: Pages of a replica's KV cache.
        vocab_size: The tokenizer's length; higher ids are never drawn.
        stop_ids: Ids that end a response.
        burst: Decode steps of one dispatch.
        dtype: Of weights and cache.
    """
    replicas, tensor = mesh.shape[REPLICA], mesh.shape[TENSOR]
    dtype = jnp.dtype(dtype)
    sync = sync_programs(config, graphdef, params, mesh, dtype)
    weights = sync.weights
    key_heads = config.num_kv_heads * key_head_copies(config, tensor)
    create = functools.partial(
        new_state, config, attention, replicas, key_heads,
        shapes.slots, pages, shapes.page, decode_work({}, shapes), dtype,
    )  # fmt: skip
    state = jax.eval_shape(create)
    state_shardings = shardings(mesh, state_specs(state))
    prefill, decode = compiled_programs(
        config, attention, mesh, weights, state, vocab_size, tuple(sorted(stop_ids)), burst
    )

    def placed(tree, where):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
        )

    def of_replicas(tree):
        each = NamedSharding(mesh, P(REPLICA))
        return placed(tree, jax.tree.map(lambda _: each, tree))

    unused = plan_prefill([], prefill_size(mesh, shapes), shapes)
    return EnginePrograms(
        sync,
        jax.jit(create, out_shardings=state_shardings),
        prefill,
        decode,
        weights,
        placed(state, state_shardings),
        of_replicas(joined([unused] * replicas)),
        of_replicas(joined([empty_plan(shapes)] * replicas)),
    )


def prefill_size(mesh: Mesh, shapes: Shapes) -> int:
    """Pages of one prefill, fixed for a mesh."""
    tokens = PREFILL_TOKENS.get(mesh.devices.flat[0].platform, OTHER_PREFILL_TOKENS)
    return pages_of(tokens, shapes.page)


def joined(parts: Sequence[Any]) -> Any:
    """The arguments of all replicas as one: their arrays concatenated along the first axis."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
