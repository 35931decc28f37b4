"""From a learner's parameters to an engine's weights: cast, laid out anew and moved on the devices,
one layer at a time, so that beside both of them no more than a layer is ever in memory.

On a mesh that shares the learner's devices a kernel takes two steps. Each device first sends to
those of its own replica what they hold of the tensor axis; then the replicas exchange the rest. A
device so receives little more than the part that it keeps, and most of it from its own replica.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from models.config import ModelConfig
from models.qwen import Qwen
from srpo_jax.engine.layout import (
    REPLICA,
    TENSOR,
    Weights,
    engine_mesh,
    key_head_copies,
    shardings,
    tensor_axis,
    weight_specs,
)
from srpo_jax.engine.sampling import BLOCK

_STACK = "layers"


class SyncPrograms(NamedTuple):
    """The two programs of a sync over a mesh, and what they make.

    layer       (stack, index, sources=) -> one decoder layer
    vocabulary  (other parameters, sources=) -> Weights without layers
    mesh: where they run: the engine's, or that of the engines of all processes together
    weights: ShapeDtypeStructs of all weights, where they lie on the engine's mesh

    ``sources`` are the shardings of the parameters' leaves where these lie on the mesh's devices,
    else None.
    """

    layer: Any
    vocabulary: Any
    mesh: Mesh
    weights: Weights


def sync_programs(
    config: ModelConfig, graphdef: Any, params: dict, mesh: Mesh, dtype: Any
) -> SyncPrograms:
    """The programs of an engine's sync, none of them compiled yet.

    Args:
        config: The model's.
        graphdef: The model without its parameters.
        params: Its parameters, layers stacked, of which only shapes, dtypes and devices are read.
            Where other processes have parts of them, all processes run these programs together.
        mesh: The engine's, (replica, tensor).
        dtype: Of the weights.
    """
    own, mesh = mesh, _mesh_of_all(params, mesh)
    layout = _Layout(config, graphdef, mesh, jnp.dtype(dtype), params)
    stack, others = split_stack(params)
    layer = jax.eval_shape(functools.partial(layout.layer, sources=None), stack, 0)
    rest = jax.eval_shape(functools.partial(layout.vocabulary, sources=None), others)
    weights = rest._replace(layers=(layer,) * config.num_layers)
    specs = weight_specs(weights)
    where = shardings(mesh, specs)
    return SyncPrograms(
        jax.jit(layout.layer, static_argnames="sources", out_shardings=where.layers[0]),
        jax.jit(
            layout.vocabulary, static_argnames="sources", out_shardings=where._replace(layers=())
        ),
        mesh,
        jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            weights, shardings(own, specs),
        ),
    )  # fmt: skip


def _mesh_of_all(params: dict, mesh: Mesh) -> Mesh:
    """The replicas of all processes that hold parameters; ``mesh`` itself where that is one."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return mesh
    devices = list(sharding.mesh.devices.flat)
    if len({d.process_index for d in devices}) == 1:
        return mesh
    return engine_mesh(devices, replicas=-1, tensor=mesh.shape[TENSOR])


def split_stack(params: dict) -> tuple[dict, dict]:
    """Parameters as (the stack of layers, the others)."""
    return params[_STACK], {name: part for name, part in params.items() if name != _STACK}


def sync_weights(programs: SyncPrograms, params: dict, mesh: Mesh, dtype: Any) -> Weights:
    """The weights that parameters make.

    Args:
        programs: Of the engine.
        params: On any devices. Where these are not the mesh's in its order, each layer is cast
            where it lies and then copied whole to every device of the mesh.
        mesh: The engine's.
        dtype: Of the weights.
    """
    stack, others = split_stack(params)
    own, mesh = mesh, programs.mesh
    # Virtual CPU devices deadlock when two programs with collectives run at once.
    one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def run(program, *args, sources):
        out = program(*args, sources=sources)
        return jax.block_until_ready(out) if one_at_a_time else out

    if _on_mesh(params, mesh):
        layers = tuple(
            run(programs.layer, stack, i, sources=tree_sources(stack)) for i in _indices(stack)
        )
        rest = run(programs.vocabulary, others, sources=tree_sources(others))
    else:
        whole = NamedSharding(mesh, P())
        layers = tuple(
            run(programs.layer, jax.device_put(_taken(stack, i, dtype), whole), 0, sources=None)
            for i in _indices(stack)
        )
        rest = run(programs.vocabulary, jax.device_put(_cast(others, dtype), whole), sources=None)
    weights = rest._replace(layers=layers)
    return weights if mesh is own else jax.tree.map(functools.partial(_own_part, own), weights)


def _own_part(own: Mesh, a: jax.Array) -> jax.Array:
    """What this process's replicas have of an array of all replicas, without a copy."""
    sharding = a.sharding
    assert isinstance(sharding, NamedSharding)
    parts = {shard.device: shard.data for shard in a.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        a.shape, NamedSharding(own, sharding.spec), [parts[d] for d in own.devices.flat]
    )


def tree_sources(tree: Any) -> tuple[Sharding, ...]:
    """The shardings of a tree's leaves, as the programs' ``sources``."""
    return tuple(leaf.sharding for leaf in jax.tree.leaves(tree))


def _indices(stack: dict) -> Iterator[int]:
    return iter(range(len(jax.tree.leaves(stack)[0])))


def _on_mesh(params: dict, mesh: Mesh) -> bool:
    """Whether every array lies on the mesh's devices in the mesh's order."""
    order = tuple(mesh.devices.flat)

    def devices(leaf):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            return tuple(sharding.mesh.devices.flat)
        return tuple(sharding.device_set)

    return all(devices(leaf) == order for leaf in jax.tree.leaves(params))


@functools.partial(jax.jit, static_argnames="dtype")
def _taken(stack, index, dtype):
    """One layer of a stack, as a stack of one."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index, 1).astype(dtype), stack)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


class _Layout:
    """How parameters become weights on a mesh.

    Args:
        config: The model's.
        graphdef: The model without its parameters.
        mesh: The engine's.
        dtype: Of the weights.
        params: The model's, of which only the structure is read.
    """

    def __init__(self, config: ModelConfig, graphdef: Any, mesh: Mesh, dtype: Any, params: dict):
        self._config, self._graphdef, self._mesh, self._dtype = config, graphdef, mesh, dtype
        # A merge asks for every parameter; those that are not laid out together are empty in it.
        self._empty = jax.tree.map(lambda _: np.zeros(0), params)

    def layer(self, stack: dict, index: Any, *, sources: tuple[Sharding, ...] | None) -> Any:
        """One layer of the stack, its key heads copied as often as ``tensor`` devices need."""

        def chosen(_, a):
            return jax.lax.dynamic_index_in_dim(a, index, keepdims=False)

        one = self._moved(stack, chosen, sources)
        copies = key_head_copies(self._config, self._mesh.shape[TENSOR])
        if copies > 1:
            for name in ("k_proj", "v_proj"):
                one[name] = {
                    leaf: _copied(a, self._config.head_dim, copies) for leaf, a in one[name].items()
                }
        model: Qwen = nnx.merge(self._graphdef, self._empty | {_STACK: one})
        return model.layers

    def vocabulary(self, others: dict, *, sources: tuple[Sharding, ...] | None) -> Weights:
        """Embedding, head and last norm: the vocabulary is padded to equal shares of whole blocks
        for ``tensor`` devices."""
        config, tensor = self._config, self._mesh.shape[TENSOR]
        pad = -config.vocab_size % (BLOCK * tensor) if tensor > 1 else 0

        def filled(path, a):
            if not pad or a.ndim < 2:
                return a
            axis = 1 if path[0] == "lm_head" else 0
            return jnp.pad(a, [(0, pad if n == axis else 0) for n in range(a.ndim)])

        moved = self._moved(others, filled, sources)
        model: Qwen = nnx.merge(self._graphdef, self._empty | moved)
        untied = None if config.tie_embeddings else model.head_kernel().T
        return Weights(model.embed.embedding[...], (), model.norm, untied)

    def _moved(self, tree: dict, change: Any, sources: tuple[Sharding, ...] | None) -> dict:
        """Every leaf cast and changed, in the first of its two steps: what is sent is cast before,
        and the axis that the source splits and the weights do not is split over the replicas."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        out = []
        for n, (path, a) in enumerate(leaves):
            names = tuple(k.key for k in path)
            moved = change(names, a).astype(self._dtype)
            source = None if sources is None else sources[n]
            if isinstance(source, NamedSharding) and moved.ndim == 2 and self._mesh.size > 1:
                own = [*source.spec, *[None] * (a.ndim - len(source.spec))][a.ndim - 2 :]
                moved = self._constrained(moved, source.mesh, P(*own))
                split_axis = self._tensor_axis(names)
                target = [TENSOR if axis == split_axis else None for axis in (0, 1)]
                spread = [
                    REPLICA if here is None and split is not None else here
                    for here, split in zip(target, own, strict=True)
                ]
                exchange = self._exchange_mesh(source.mesh)
                sizes = {**exchange.shape, None: 1}
                if all(d % sizes[s] == 0 for d, s in zip(moved.shape, spread, strict=True)):
                    moved = self._constrained(moved, exchange, P(*spread))
            out.append(moved)
        return jax.tree.unflatten(structure, out)

    def _exchange_mesh(self, learner: Any) -> Mesh:
        """The engine's mesh, its replicas grouped by the learner's copies of the parameters: each
        group has them all, and nothing goes from one to another."""
        replicas, tensor = self._mesh.shape[REPLICA], self._mesh.shape[TENSOR]
        copies = math.gcd(learner.shape.get("data", 1), replicas)
        grid = self._mesh.devices.reshape(copies, replicas // copies, tensor)
        return Mesh(grid, ("copy", REPLICA, TENSOR), axis_types=(AxisType.Auto,) * 3)

    @staticmethod
    def _tensor_axis(names: tuple[str, ...]) -> int | None:
        """Of a parameter's matrix, the axis that its weights split over ``tensor``."""
        if names[0] == "lm_head":  # [D, V], transposed afterwards
            return 1
        axis = 0 if names[0] == "embed" else tensor_axis(names)
        return None if axis is None else axis % 2

    def _constrained(self, a: jax.Array, mesh: Any, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))


def _copied(a: jax.Array, head_dim: int, copies: int) -> jax.Array:
    heads = a.reshape(*a.shape[:-1], -1, head_dim)
    return jnp.repeat(heads, copies, axis=-2).reshape(*a.shape[:-1], -1)
