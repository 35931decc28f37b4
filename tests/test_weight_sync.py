"""An engine's weights from parameters anywhere, against numpy; and what TPUs send for them."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.known_configs import find_architecture
from models.partition import tree_shardings
from models.qwen import abstract_params
from srpo_jax.compile_check.report import compiled_report
from srpo_jax.engine.layout import engine_mesh, key_head_copies
from srpo_jax.engine.sampling import BLOCK
from srpo_jax.engine.weight_sync import split_stack, sync_programs, sync_weights, tree_sources
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.run.memory_plan import GIB
from tests.engine_cases import checkpoint

MODELS = ("qwen3_tied", "qwen2_untied")


def numpy_weights(config, params, dtype, tensor):
    """(embedding, layers by name, last norm, head) of the whole model, cast and unstacked."""
    params = jax.tree.map(lambda a: np.asarray(a).astype(dtype), params)
    copies = key_head_copies(config, tensor)

    def copied(name, a):
        if name not in ("k_proj", "v_proj"):
            return a
        heads = a.reshape(*a.shape[:-1], -1, config.head_dim)
        return np.repeat(heads, copies, axis=-2).reshape(*a.shape[:-1], -1)

    layers = [
        {(module, leaf): copied(module, a[i]) for module, leaves in params["layers"].items()
         for leaf, a in leaves.items()}
        for i in range(config.num_layers)
    ]  # fmt: skip
    pad = -config.vocab_size % (BLOCK * tensor) if tensor > 1 else 0
    embedding = np.pad(params["embed"]["embedding"], ((0, pad), (0, 0)))
    head = None
    if not config.tie_embeddings:
        head = np.pad(params["lm_head"]["kernel"].T, ((0, pad), (0, 0)))
    return embedding, layers, params["norm"]["scale"], head


def by_name(layer):
    leaves = jax.tree_util.tree_flatten_with_path(layer)[0]
    names = [[str(getattr(k, "key", getattr(k, "name", k))) for k in path] for path, _ in leaves]
    return {(n[0], n[1]): np.asarray(a) for n, (_, a) in zip(names, leaves, strict=True)}


def where_they_lie(name, params):
    """The same parameters on other devices, or elsewhere on the same."""
    devices = jax.devices()[:4]
    if name == "one device":
        return params
    if name == "numpy":
        return jax.tree.map(np.asarray, params)
    order = devices[::-1] if name == "other order" else devices
    sizes = {"fsdp": (1, 4, 1), "data": (4, 1, 1), "both": (1, 2, 2), "other order": (1, 4, 1)}
    mesh = make_mesh(*sizes[name], devices=order)
    return jax.device_put(params, tree_shardings(mesh, params))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("source", ["one device", "fsdp", "data", "both", "other order"])
@pytest.mark.parametrize("replicas, tensor", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_weights_are_those_of_numpy_from_any_devices(model, source, replicas, tensor):
    config, graphdef, params = checkpoint(model)[:3]
    placed = where_they_lie(source, params)
    mesh = engine_mesh(jax.devices()[: replicas * tensor], replicas=replicas, tensor=tensor)
    programs = sync_programs(config, graphdef, params, mesh, jnp.bfloat16)
    weights = sync_weights(programs, placed, mesh, jnp.dtype(jnp.bfloat16))
    embedding, layers, norm, head = numpy_weights(config, params, jnp.bfloat16, tensor)
    np.testing.assert_array_equal(weights.embedding, embedding)
    np.testing.assert_array_equal(weights.norm.scale[...], norm)
    if head is None:
        assert weights.untied is None
    else:
        np.testing.assert_array_equal(weights.untied, head)
    for layer, expected in zip(weights.layers, layers, strict=True):
        found = by_name(layer)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values)
    made, planned = (
        [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]
        for tree in (weights, programs.weights)
    )
    assert made == planned


def test_one_program_serves_all_layers():
    config, graphdef, params = checkpoint("qwen3_tied")[:3]
    mesh = engine_mesh(jax.devices()[:4], replicas=2, tensor=2)
    programs = sync_programs(config, graphdef, params, mesh, jnp.float32)
    placed = where_they_lie("fsdp", params)
    for _ in range(2):
        sync_weights(programs, placed, mesh, jnp.dtype(jnp.float32))
    assert programs.layer._cache_size() == programs.vocabulary._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, learner, tensor", [("8B", (1, 16, 1), 4), ("4B", (1, 16, 1), 2), ("8B", (2, 8, 1), 4)]
)
def test_a_tpus_sync_needs_no_more_than_a_layer(v5e_4x4, size, learner, tensor):
    """On 16 chips of four hosts. A chip receives its part of what its replica's chips exchange,
    inside a host, and what the replicas then gather: of 8B in bfloat16 3.84 GB, 3.07 of them from
    other hosts, where a gather of all weights would be 15.4."""
    config = find_architecture(f"Qwen/Qwen3-{size}").config
    graphdef, params = abstract_params(config, jnp.dtype(jnp.float32))
    mesh = make_mesh(*learner, devices=v5e_4x4)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params, tree_shardings(mesh, params),
    )  # fmt: skip
    engine = engine_mesh(list(mesh.devices.flat), replicas=-1, tensor=tensor)
    programs = sync_programs(config, graphdef, params, engine, jnp.bfloat16)
    stack, others = split_stack(params)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    layer = programs.layer.lower(stack, index, sources=tree_sources(stack))
    rest = programs.vocabulary.lower(others, sources=tree_sources(others))
    reports = compiled_report("layer", layer), compiled_report("vocabulary", rest)
    payload: collections.Counter[str] = collections.Counter()
    for report, times in zip(reports, (config.num_layers, 1), strict=True):
        assert report.scratch < 0.5 * GIB
        for kind, found in report.collectives.by_kind.items():
            payload[kind] += times * found.bytes
    assert payload.keys() == {"all-to-all", "all-gather"}, payload
    if (size, learner) == ("8B", (1, 16, 1)):
        within, between = (n * 3 / 4 for n in (payload["all-to-all"], payload["all-gather"]))
        assert between < 3.1e9 and within + between < 3.9e9
