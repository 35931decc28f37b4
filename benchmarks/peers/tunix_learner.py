"""Tunix's GRPO loss and Qwen3 model, rows padded to the longest prompt and response.

Source: github.com/google/tunix, ``tunix.rl.algo_core.grpo_loss_fn``.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import algo_core

from benchmarks import learner_work as shape
from benchmarks.learner_work import RaggedRows, make_rows, measure_updates
from benchmarks.timing import run_program

PAD, EOS = 0, 2  # no row holds an id below 10


def grpo_inputs(rows: RaggedRows) -> SimpleNamespace:
    """What the loss reads: prompts right-aligned, completions left-aligned, and their masks."""
    size = len(rows)
    prompts = np.full((size, shape.MAX_PROMPT), PAD, np.int32)
    completions = np.full((size, shape.MAX_RESPONSE), PAD, np.int32)
    for i, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        prompts[i, shape.MAX_PROMPT - len(prompt) :] = prompt
        completions[i, : len(response)] = response
    return SimpleNamespace(
        prompt_ids=jnp.asarray(prompts),
        prompt_mask=jnp.asarray(prompts != PAD),
        completion_ids=jnp.asarray(completions),
        completion_mask=jnp.asarray(completions != PAD, jnp.int32),
        advantages=jnp.asarray(rows.advantages),
        old_per_token_logps=None,  # on policy: the loss takes stop-gradient of its own log-probs
        ref_per_token_logps=None,
    )


def measure_tunix_learner(rows: int, steps: int) -> dict[str, float]:
    work = make_rows(rows)
    config = ModelConfig(
        num_layers=shape.LAYERS, vocab_size=shape.VOCAB, embed_dim=shape.WIDTH,
        hidden_dim=shape.MLP, num_heads=shape.HEADS, head_dim=shape.HEAD_DIM,
        num_kv_heads=shape.KV_HEADS, rope_theta=int(shape.ROPE_THETA), norm_eps=shape.NORM_EPS,
        use_tied_embedding=True,
    )  # fmt: skip
    algorithm = SimpleNamespace(
        beta=0.0, epsilon=shape.CLIP, loss_algo="grpo", loss_agg_mode="sequence-mean-token-mean",
        temperature=1.0,
    )  # fmt: skip
    model = Qwen3(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(shape.LEARNING_RATE), wrt=nnx.Param)
    batch = grpo_inputs(work)

    @nnx.jit(donate_argnums=(0, 1))
    def update(model, optimizer):
        def loss_of(model):
            return algo_core.grpo_loss_fn(model, batch, algorithm, PAD, EOS)

        (loss, _), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss

    square = jnp.ones((shape.MATMUL, shape.MATMUL), jnp.float32)
    product = jax.jit(jnp.matmul)
    return measure_updates(
        lambda: float(update(model, optimizer)),
        lambda: product(square, square).block_until_ready(),
        parameters=sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        tokens=work.real_tokens,
        steps=steps,
    )


if __name__ == "__main__":
    run_program(measure_tunix_learner)
