"""The objective with its gradient, as one compiled function."""

from __future__ import annotations

from functools import partial

import jax

from srpo_jax.objective import setwise_objective


@partial(jax.jit, static_argnames="config")
def compiled(current_logp, *, config, **args):
    """Loss, gradient and metrics."""

    def loss(current):
        return setwise_objective(current_logp=current, config=config, **args)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(current_logp)
    return value, grad, metrics
