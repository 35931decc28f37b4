"""Tunix's in-process sampler: static batches, each run until its longest row ends.

The workload is called in batches of 32 in order of arrival, with the longest length of each batch
rounded up to 64, so that few shapes are compiled. Source: github.com/google/tunix,
``tunix.generate.sampler``.
"""

from __future__ import annotations

import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3

from benchmarks import engine_work, learner_work
from benchmarks.timing import median_seconds, run_program

ROUND = 64


class Ids:
    """A tokenizer whose text is ids separated by spaces; the sampler puts id 1 before each."""

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0

    def encode(self, text, **options):
        return [int(t) for t in text.split()]

    def decode(self, ids, **options):
        return " ".join(str(int(i)) for i in ids)

    def tokenize(self, text):
        return np.array(self.encode(text), np.int32)

    def dedup_bos_ids(self, ids):
        return ids


def measure_tunix_engine(repeats: int) -> dict[str, float]:
    config = ModelConfig(
        num_layers=learner_work.LAYERS, vocab_size=learner_work.VOCAB,
        embed_dim=learner_work.WIDTH, hidden_dim=learner_work.MLP,
        num_heads=learner_work.HEADS, head_dim=learner_work.HEAD_DIM,
        num_kv_heads=learner_work.KV_HEADS, rope_theta=int(learner_work.ROPE_THETA),
        norm_eps=learner_work.NORM_EPS, use_tied_embedding=True,
    )  # fmt: skip
    model = Qwen3(config, rngs=nnx.Rngs(0))

    def sampler(cache_tokens: int) -> Sampler:
        cache = CacheConfig(
            cache_size=cache_tokens, num_layers=learner_work.LAYERS,
            num_kv_heads=learner_work.KV_HEADS, head_dim=learner_work.HEAD_DIM,
        )  # fmt: skip
        return Sampler(model, Ids(), cache)

    def generate(sampler: Sampler, prompts, new: int, prompt: int) -> None:
        text = [" ".join(map(str, ids[1:])) for ids in prompts]  # the sampler adds the first id
        sampler(
            text, max_generation_steps=new, max_prompt_length=prompt, temperature=1.0, top_p=1.0,
            return_logprobs=True, seed=0,
        )  # fmt: skip

    prompt, new, rows = engine_work.PROMPT, engine_work.NEW, engine_work.ROWS
    engine = sampler(prompt + new)
    uniform = median_seconds(
        lambda number: generate(engine, engine_work.uniform_prompts(number), new, prompt), repeats
    )
    prompts, lengths = engine_work.ragged_requests()
    prompt = engine_work.TASK_PROMPT
    engine = sampler(-(-(prompt + engine_work.MAX_NEW) // 512) * 512)

    longest = [
        -(-max(lengths[i : i + rows]) // ROUND) * ROUND for i in range(0, len(lengths), rows)
    ]

    def ragged(number: int) -> None:
        for i, new in enumerate(longest):
            if number or new not in longest[:i]:  # every shape once in the warm-up
                generate(engine, prompts[i * rows : (i + 1) * rows], new, prompt)

    return {
        "uniform": rows * new / uniform,
        "workload": sum(lengths) / median_seconds(ragged, max(1, repeats // 3)),
    }


if __name__ == "__main__":
    run_program(measure_tunix_engine)
