"""transformers' generate on PyTorch: one static batch of the uniform work."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import engine_work, learner_work
from benchmarks.timing import median_seconds, run_program


def measure_transformers_engine(repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=learner_work.LAYERS, vocab_size=learner_work.VOCAB,
        hidden_size=learner_work.WIDTH, intermediate_size=learner_work.MLP,
        num_attention_heads=learner_work.HEADS, head_dim=learner_work.HEAD_DIM,
        num_key_value_heads=learner_work.KV_HEADS, rms_norm_eps=learner_work.NORM_EPS,
        tie_word_embeddings=True, eos_token_id=None, pad_token_id=0, bos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": learner_work.ROPE_THETA},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None

    def generate(number: int) -> None:
        tokens = torch.tensor(engine_work.uniform_prompts(number))
        with torch.inference_mode():
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=engine_work.NEW if number else 4,
            )  # fmt: skip

    return {"uniform": engine_work.ROWS * engine_work.NEW / median_seconds(generate, repeats)}


if __name__ == "__main__":
    run_program(measure_transformers_engine)
