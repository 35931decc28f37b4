"""This project's engine on the benchmark's work, and what the machine could do at most.

The limit is the time of the matrix products at the measured rates (decoding at that of [slots,
8192] by [8192, 8192], prefill at that of 2048 cubed) and of reading the cached keys and values once
a step, a shared prompt's once for all of its requests, at the measured bandwidth of weight reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import engine_work, learner_work
from benchmarks.timing import Timing, median_seconds, run_program, time_work
from models.config import ModelConfig
from models.qwen import Qwen, split_params
from srpo_jax.engine import Engine, Request, request_key

SLOTS, BURST = 32, 8
SIDE = 8192  # of the square weight whose products measure decoding and bandwidth
KV_BYTES = 2 * 4 * learner_work.LAYERS * learner_work.KV_HEADS * learner_work.HEAD_DIM  # a token


def model_config(max_position: int) -> ModelConfig:
    """The benchmarks' model of 54.5 M parameters."""
    return ModelConfig(
        vocab_size=learner_work.VOCAB, hidden_size=learner_work.WIDTH,
        intermediate_size=learner_work.MLP, num_layers=learner_work.LAYERS,
        num_heads=learner_work.HEADS, num_kv_heads=learner_work.KV_HEADS,
        head_dim=learner_work.HEAD_DIM, rope_theta=learner_work.ROPE_THETA,
        rms_norm_eps=learner_work.NORM_EPS, tie_embeddings=True, qkv_bias=False, qk_norm=True,
        max_position=max_position, model_type="qwen3",
    )  # fmt: skip


def measure_srpo_engine(repeats: int) -> dict[str, float]:
    """Tokens per second of both works, the machine's limits for them, and its rates."""
    config = model_config(engine_work.TASK_PROMPT + engine_work.MAX_NEW)
    graphdef, params = split_params(Qwen(config, rngs=nnx.Rngs(0)))
    total = sum(a.size for a in jax.tree.leaves(params))
    body = total - learner_work.VOCAB * learner_work.WIDTH
    rates = measure_machine()

    def engine(cache_tokens: int) -> Engine:
        return Engine(
            config, graphdef, params, vocab_size=learner_work.VOCAB, stop_ids=(), slots=SLOTS,
            cache_tokens=cache_tokens, burst=BURST,
        )  # fmt: skip

    def timed(
        engine: Engine, prompts_of: Callable[[int], list[list[int]]], lengths: Sequence[int]
    ) -> Timing:
        def run(number: int) -> None:
            engine.set_weights(params, number)  # forgets the prompts of the run before
            engine.run(
                [
                    Request(prompt, request_key(number, i), n)
                    for i, (prompt, n) in enumerate(zip(prompts_of(number), lengths, strict=True))
                ]
            )

        return time_work(run, repeats, engine.compile_count)

    equal = [engine_work.NEW] * engine_work.ROWS
    uniform = timed(
        engine(engine_work.PROMPT + engine_work.NEW), engine_work.uniform_prompts, equal
    )
    prompts, lengths = engine_work.ragged_requests()
    ragged = timed(
        engine(engine_work.TASK_PROMPT + engine_work.MAX_NEW), lambda run: prompts, lengths
    )
    return {
        "uniform": sum(equal) / uniform.seconds,
        "workload": sum(lengths) / ragged.seconds,
        "uniform_limit": limit(rates, total, body, equal, engine_work.PROMPT, 1),
        "workload_limit": limit(
            rates, total, body, lengths, engine_work.TASK_PROMPT, engine_work.REQUESTS_PER_TASK
        ),
        "slots": SLOTS,
        "compiles": uniform.compiles + ragged.compiles,
        **rates,
    }


def measure_machine() -> dict[str, float]:
    """Medians: GFLOP/s of 2048 cubed and of SLOTS rows by a weight, and GB/s of weight reads."""
    square = jnp.ones((learner_work.MATMUL, learner_work.MATMUL))
    weight = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)

    def taken(x: jax.Array, y: jax.Array) -> float:
        return median_seconds(lambda _: product(x, y).block_until_ready(), 7)

    return {
        "peak_gflops": 2 * learner_work.MATMUL**3 / taken(square, square) / 1e9,
        "decode_gflops": 2 * SLOTS * SIDE**2 / taken(jnp.ones((SLOTS, SIDE)), weight) / 1e9,
        "read_gbs": 4 * SIDE**2 / taken(jnp.ones((1, SIDE)), weight) / 1e9,
    }


def limit(
    rates: dict[str, float],
    total: int,
    body: int,
    lengths: Sequence[int],
    prompt: int,
    sharing: int,
) -> float:
    """Tokens per second that no engine of SLOTS rows can exceed on this machine.

    Args:
        rates: See ``measure_machine``.
        total: Parameters of the model.
        body: Those below the head.
        lengths: New tokens of each request.
        prompt: Tokens of a prompt.
        sharing: How many consecutive requests share one prompt.
    """
    groups = [lengths[i : i + sharing] for i in range(0, len(lengths), sharing)]
    decode = 2 * total * sum(lengths) / (rates["decode_gflops"] * 1e9)
    prefill = 2 * body * prompt * len(groups) / (rates["peak_gflops"] * 1e9)
    own = sum(n * (n + 1) // 2 for n in lengths)
    shared = prompt * sum(max(group) for group in groups)
    reads = KV_BYTES * (own + shared) / (rates["read_gbs"] * 1e9)
    return sum(lengths) / (decode + prefill + reads)


if __name__ == "__main__":
    run_program(measure_srpo_engine)
