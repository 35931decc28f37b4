"""The TPU and GPU attention kernels against the plain reference, in value and gradient.

Both run in the Pallas interpreter on CPU. What the compilers for the real devices say is asked
where they are installed: libtpu for v5e, and the lowering to Triton, which is part of JAX.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import sequence_gpu as gpu
from models.attention import sequence_tpu as splash
from models.attention.sequence import plain_attention

AXES = ("data", "fsdp", "tensor")
TPU_KERNEL = 'custom_call_target="tpu_custom_call"'
KERNELS = {"splash": splash.splash_attention, "gpu": gpu.gpu_attention}


def inputs(B, T, N, Kv, H, dtype=jnp.float32):
    """q, k, v and rows of two packed segments and padding, of other lengths in every row."""
    rng = np.random.default_rng(T)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, Kv, Kv))
    ends = np.sort(np.stack([rng.permutation(T - 1)[:2] + 1 for _ in range(B)]), axis=1)
    place = np.arange(T)
    segments = np.where(place < ends[:, :1], 1, np.where(place < ends[:, 1:], 2, 0))
    return q, k, v, jnp.asarray(segments, jnp.int32)


def out_and_grads(form, q, k, v, segments):
    """The output and the gradients of a sum over its real positions."""

    def loss(q, k, v):
        out = form(q, k, v, segments)
        real = (segments > 0)[:, :, None, None]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)) * real), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return jax.block_until_ready((out, *grads))


def assert_same(got, expected, segments, atol):
    real = np.asarray(segments > 0)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all(), f"{name} is not finite, padding included"
        np.testing.assert_allclose(a[real], b[real], atol=atol, rtol=atol, err_msg=name)


@pytest.mark.parametrize(
    "kernel, shape",
    [
        ("splash", (2, 200, 4, 2, 16)),  # filled up to 256, one block
        ("splash", (1, 600, 2, 1, 64)),  # two blocks of 384
        ("gpu", (2, 200, 4, 2, 16)),  # filled up to four blocks of 64
        ("gpu", (1, 64, 6, 2, 24)),  # heads narrower than the kernel's power of two
    ],
)
def test_kernel_equals_plain_in_value_and_gradient(kernel, shape):
    args = inputs(*shape)
    got = out_and_grads(functools.partial(KERNELS[kernel], interpret=True), *args)
    assert_same(got, out_and_grads(plain_attention, *args), args[3], atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_keeps_bfloat16(kernel):
    args = inputs(1, 128, 2, 1, 64, jnp.bfloat16)
    got = out_and_grads(functools.partial(KERNELS[kernel], interpret=True), *args)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    wide = [x.astype(jnp.float32) for x in args[:3]]
    assert_same(got, out_and_grads(plain_attention, *wide, args[3]), args[3], atol=0.06)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_of_padding_alone_stays_finite(kernel):
    q, k, v, segments = inputs(1, 40, 2, 1, 16)
    got = out_and_grads(
        functools.partial(KERNELS[kernel], interpret=True), q, k, v, jnp.zeros_like(segments)
    )
    assert all(np.isfinite(x).all() for x in got)
    assert not np.any(got[1]) and not np.any(got[2]) and not np.any(got[3])


def sharded(args, mesh, heads):
    """``args`` put on the mesh the way that a learner's activations lie."""
    spec = P(("data", "fsdp"), None, heads, None)
    specs = (spec, spec, spec, P(("data", "fsdp"), None))
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


@pytest.mark.parametrize(
    "kernel, mesh_shape, batch, kv_heads, heads",
    [
        ("splash", (2, 1, 2), 4, 2, "tensor"),
        ("splash", (1, 1, 4), 1, 2, None),  # four devices cannot share two key heads
        ("splash", (1, 4, 1), 2, 2, "tensor"),  # nor two rows
        ("gpu", (2, 1, 2), 2, 2, "tensor"),
    ],
)
def test_sharded_kernel_equals_plain(kernel, mesh_shape, batch, kv_heads, heads):
    args = inputs(batch, 96, 4, kv_heads, 16)
    expected = out_and_grads(plain_attention, *args)
    mesh = jax.make_mesh(mesh_shape, AXES, axis_types=(AxisType.Auto,) * 3)
    placed = args if batch % (mesh_shape[0] * mesh_shape[1]) else sharded(args, mesh, heads)
    got = out_and_grads(functools.partial(KERNELS[kernel], mesh=mesh, interpret=True), *placed)
    assert_same(got, expected, args[3], atol=1e-5)


def test_blocks_are_few_and_equal():
    lengths = [1, 128, 129, 512, 513, 640, 1024, 1030, 16256]
    assert [splash.block_length(T) for T in lengths] == [
        128, 128, 256, 512, 384, 384, 512, 384, 512
    ]  # fmt: skip
    # 64 tokens of at most 128 * 2 bytes fill 16 KiB; heads of 80 are kept as 128.
    cases = [(16, 2), (64, 2), (128, 2), (64, 4), (128, 4), (80, 4)]
    assert [gpu.block_length(*case) for case in cases] == [64, 64, 64, 64, 32, 32]


@pytest.mark.parametrize(
    "shape, kv_heads, dtype, reason",
    [
        ((2, 512, 14, 64), 2, jnp.bfloat16, None),
        ((2, 100, 16, 128), 8, jnp.float32, None),
        ((2, 512, 4, 64), 2, jnp.float64, "not float64"),
        ((2, 512, 4, 8), 2, jnp.float32, "not 8"),
        ((2, 512, 4, 160), 2, jnp.float32, "not 160"),
        ((2, 512, 4, 64), 3, jnp.float32, "4 query heads do not share 3"),
    ],
)
def test_gpu_supported_gives_the_reason(shape, kv_heads, dtype, reason):
    said = gpu.gpu_supported(shape, kv_heads, dtype)
    assert said is None if reason is None else reason in said


def test_unsupported_dtypes_are_refused_in_words():
    args = inputs(1, 40, 2, 1, 16, jnp.float16)
    with pytest.raises(ValueError, match="bfloat16 or float32, not float16"):
        splash.splash_attention(*args)
    with pytest.raises(ValueError, match="not int32"):
        gpu.gpu_attention(*(x.astype(jnp.int32) for x in args))


def value_and_grads(attention):
    def loss(q, k, v, segments):
        return attention(q, k, v, segments).astype(jnp.float32).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("width, dtype", [(64, "bfloat16"), (128, "float16"), (80, "float32")])
@pytest.mark.usefixtures("h100")
def test_gpu_kernel_lowers_to_triton(width, dtype):
    shapes = [jax.ShapeDtypeStruct((2, 500, heads, width), dtype) for heads in (14, 2, 2)]
    segments = jax.ShapeDtypeStruct((2, 500), jnp.int32)
    traced = value_and_grads(gpu.gpu_attention).trace(*shapes, segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3  # forward, its backward's sums, backward


@pytest.mark.parametrize(
    "heads, kv_heads, width, mesh_shape",
    [
        (14, 2, 64, (2, 1, 2)),  # Qwen2.5-0.5B
        (16, 8, 128, (1, 2, 2)),  # Qwen3-0.6B
        (14, 2, 64, (1, 1, 4)),  # key heads replicated
    ],
)
def test_splash_compiles_for_a_tpu(v5e, heads, kv_heads, width, mesh_shape):
    mesh = jax.sharding.Mesh(
        np.array(v5e).reshape(mesh_shape), AXES, axis_types=(AxisType.Auto,) * 3
    )
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    shapes = [
        jax.ShapeDtypeStruct((4, 1000, n, width), jnp.bfloat16, sharding=rows)
        for n in (heads, kv_heads, kv_heads)
    ]
    segments = jax.ShapeDtypeStruct((4, 1000), jnp.int32, sharding=rows)
    attention = functools.partial(splash.splash_attention, mesh=mesh)
    text = value_and_grads(attention).lower(*shapes, segments).compile().as_text()
    assert text.count(TPU_KERNEL) == 3  # forward, dk with dv, and dq


@pytest.mark.parametrize("policy, kernels", [("nothing_saveable", 4), ("names", 3)])
def test_a_remat_policy_can_keep_the_kernels_output(v5e, policy, kernels):
    """Kept by its name, the output spares the backward pass a second forward kernel."""
    policies = jax.checkpoint_policies
    rule = (
        policies.save_only_these_names(splash.CHECKPOINT_NAME)
        if policy == "names"
        else policies.nothing_saveable
    )

    def layer(x, segments):
        h = jnp.sin(x)
        return jnp.sin(splash.splash_attention(h, h[:, :, :1], h[:, :, 1:], segments))

    def loss(x, segments):
        return jax.checkpoint(layer, policy=rule)(x, segments).astype(jnp.float32).sum()

    one = jax.sharding.SingleDeviceSharding(v5e[0])
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16, sharding=one)
    segments = jax.ShapeDtypeStruct((1, 128), jnp.int32, sharding=one)
    text = jax.jit(jax.value_and_grad(loss)).lower(x, segments).compile().as_text()
    assert text.count(TPU_KERNEL) == kernels
