"""Teacher-forced log-probs in chunks of tokens: never a [T, V] float32 array.

The definition is the sampler's: log_softmax(logits / temperature) over the real vocabulary (rows at
or past the tokenizer's length are masked), computed in at least float32.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

MASKED_LOGIT = -1e30


def scaled_logits(
    hidden: jax.Array, head_kernel: jax.Array, *, temperature: jax.Array | float, vocab_size: int
) -> jax.Array:
    """Logits [..., V] / temperature in at least float32, ids >= ``vocab_size`` masked.

    ``temperature`` is a scalar or has the leading shape of ``hidden`` [..., D].
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.matmul(hidden, head_kernel.astype(hidden.dtype), preferred_element_type=dtype)
    logits = logits / jnp.asarray(temperature, dtype)[..., None]
    if vocab_size < logits.shape[-1]:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, MASKED_LOGIT)
    return logits


def _chunk_logps(hidden_CD, targets_C, head_kernel, temperature, vocab_size, with_entropy):
    logits = scaled_logits(hidden_CD, head_kernel, temperature=temperature, vocab_size=vocab_size)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets_C[:, None], axis=-1)[:, 0]
    if not with_entropy:
        return chosen - log_z, jnp.zeros_like(log_z)
    p = jnp.exp(logits - log_z[:, None])
    return chosen - log_z, log_z - jnp.sum(p * jnp.where(p > 0, logits, 0.0), axis=-1)


def token_logps(
    hidden_BTD: jax.Array,
    tokens_BT: jax.Array,
    head_kernel: jax.Array,
    *,
    temperature: float,
    vocab_size: int,
    chunk: int = 1024,
    with_entropy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [B, T] float32: entry t scores ``tokens[t]`` given those before it.

    ``hidden_BTD[t]`` predicts token t+1. Entry 0 is 0 (nothing precedes it); entropies are 0 unless
    asked for. Logits exist for ``chunk`` tokens at a time, forward and backward.
    """
    chex.assert_rank([hidden_BTD, tokens_BT, head_kernel], [3, 2, 2])
    B, T, D = hidden_BTD.shape
    hidden = hidden_BTD[:, :-1].reshape(-1, D)
    targets = tokens_BT[:, 1:].reshape(-1)
    n = hidden.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, D)
    targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk)

    step = functools.partial(
        _chunk_logps,
        head_kernel=head_kernel,
        temperature=temperature,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
    )
    body = jax.checkpoint(lambda _, x: (None, step(*x)))
    _, (logps, entropies) = jax.lax.scan(body, None, (hidden, targets))

    def unflatten(x):
        return jnp.pad(x.reshape(-1)[:n].reshape(B, T - 1), ((0, 0), (1, 0)))

    return unflatten(logps), unflatten(entropies)
