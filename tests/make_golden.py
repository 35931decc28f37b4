"""Writes the tiny checkpoints and the logits that tests/test_model_parity.py compares with.

    python -m tests.make_golden            (needs torch and transformers)

Every case is a folder of tests/data/golden: a random checkpoint and ``expected.npz`` with tokens,
positions, mask [2,T] and transformers' float32 logits [2,T,V]. One row is padded on the left and
one on the right; positions start past 300 and jump, so that a rotary mistake cannot hide behind
relative positions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "data" / "golden"
SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
)  # fmt: skip
CASES = {
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6)),
    "qwen2_untied": ("Qwen2", dict(tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-6)),
    "qwen3_tied": (
        "Qwen3", dict(tie_word_embeddings=True, rope_theta=5e6, rms_norm_eps=1e-6, head_dim=16),
    ),
    "qwen3_untied": (
        "Qwen3", dict(tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-5, head_dim=16),
    ),
    "llama_tied": ("Llama", dict(tie_word_embeddings=True, rope_theta=1e5, rms_norm_eps=1e-5)),
}  # fmt: skip


def random_model(family: str, options: dict, seed: int):
    """A transformers model whose weights are all far from their trivial values."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * draw if "norm" in name else 0.25 * draw)
            weight.copy_(weight.to(torch.bfloat16).to(torch.float32))  # exact in both dtypes
    return model


def example_batch(seed: int = 0, length: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, positions, mask, each [2, length]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SHAPE["vocab_size"], (2, length))
    mask = np.ones((2, length), bool)
    mask[0, :4] = False
    mask[1, -3:] = False
    steps = rng.integers(1, 40, (2, length)) * mask
    positions = (300 + np.cumsum(steps, axis=1)) * mask
    return tokens, positions, mask


def reference_logits(model, tokens, positions, mask) -> np.ndarray:
    """Logits [2,T,V] of a transformers model, float32."""
    import torch

    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(mask.astype(np.int64)),
            position_ids=torch.tensor(positions),
            use_cache=False,
        )
    return output.logits.float().numpy()


def main() -> None:
    import torch

    for seed, (name, (family, options)) in enumerate(CASES.items()):
        model = random_model(family, options, seed)
        tokens, positions, mask = example_batch(seed)
        logits = reference_logits(model, tokens, positions, mask)
        model.to(torch.bfloat16).save_pretrained(GOLDEN / name)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            GOLDEN / name / "expected.npz",
            tokens=tokens, positions=positions, mask=mask, logits=logits,
        )  # fmt: skip


if __name__ == "__main__":
    main()
