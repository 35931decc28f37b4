"""The optimiser of a recipe as an optax chain."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from srpo_jax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW under a schedule counted in optimiser steps.

    Matrices decay; norms and biases do not.
    """
    warmup = optax.linear_schedule(0.0, config.lr, max(config.warmup_steps, 1))
    rest_steps = max(total_steps - config.warmup_steps, 1)
    rest = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, 0.0, rest_steps),
        "cosine": optax.cosine_decay_schedule(config.lr, rest_steps),
    }[config.schedule]
    schedule = rest
    if config.warmup_steps:
        schedule = optax.join_schedules([warmup, rest], [config.warmup_steps])
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity(),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
            mu_dtype=jnp.dtype(config.moment_dtype),
        ),
    )


def decay_mask(params: dict) -> dict:
    """True where weight decay applies: kernels and embeddings, not norm scales or biases."""
    return {
        key: decay_mask(value) if isinstance(value, dict) else key in ("kernel", "embedding")
        for key, value in params.items()
    }
