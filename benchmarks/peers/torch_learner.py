"""The same update in eager PyTorch: transformers' Qwen3 with SDPA, rows padded to the longest."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import learner_work as shape
from benchmarks.learner_work import RaggedRows, make_rows, measure_updates
from benchmarks.timing import run_program


def right_padded(rows: RaggedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[R, L] token ids, attention mask, and mask of the response tokens, rows left-aligned."""
    longest = max(len(p) + len(r) for p, r in zip(rows.prompts, rows.responses, strict=True))
    tokens, attention, response_mask = torch.zeros(3, len(rows), longest, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[i, : len(prompt)] = torch.from_numpy(prompt)
        tokens[i, len(prompt) : end] = torch.from_numpy(response)
        attention[i, :end] = 1
        response_mask[i, len(prompt) : end] = 1
    return tokens, attention, response_mask


def measure_transformers_learner(rows: int, steps: int) -> dict[str, float]:
    work = make_rows(rows)
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=shape.LAYERS, vocab_size=shape.VOCAB, hidden_size=shape.WIDTH,
        intermediate_size=shape.MLP, num_attention_heads=shape.HEADS, head_dim=shape.HEAD_DIM,
        num_key_value_heads=shape.KV_HEADS, rms_norm_eps=shape.NORM_EPS, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": shape.ROPE_THETA},
        use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.LEARNING_RATE)
    tokens, attention, response_mask = right_padded(work)
    advantages = torch.from_numpy(work.advantages)[:, None]

    def update() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1].float()
        logps = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logps - logps.detach())
        clipped = ratio.clamp(1 - shape.CLIP, 1 + shape.CLIP)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        mask = response_mask[:, 1:]
        loss = -((surrogate * mask).sum(1) / mask.sum(1)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    square = torch.ones(shape.MATMUL, shape.MATMUL)
    return measure_updates(
        update,
        lambda: square @ square,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens=work.real_tokens,
        steps=steps,
    )


if __name__ == "__main__":
    run_program(measure_transformers_learner)
