"""A tiny Qwen3-architecture checkpoint from scratch: tokenizer, config and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.config import ModelConfig

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Digits and marks one by one, so that sums are spelled out; words with the space before them.
_SPLIT = r"\d|<?/?[A-Za-z]+>?| ?[^\s\p{L}\p{N}]| ?\p{L}+|\s"


def tiny_config(vocab_size: int) -> ModelConfig:
    """The shape of the embedded checkpoint: about a million parameters."""
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=32, rope_theta=10_000.0, rms_norm_eps=1e-6, tie_embeddings=True,
        qkv_bias=False, qk_norm=True, max_position=512, model_type="qwen3",
    )  # fmt: skip


def train_tokenizer(folder: Path, texts: Iterable[str], config: ModelConfig) -> None:
    """Trains a byte-level BPE and writes a checkpoint folder without weights.

    Args:
        folder: Gets the tokenizer, a ChatML template and the model's config.json.
        texts: What the merges are learnt from.
        config: Its ``vocab_size`` is the number of ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
