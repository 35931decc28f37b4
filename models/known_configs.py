"""Architectures of published Qwen checkpoints, for work that needs shapes but no weights."""

from __future__ import annotations

from dataclasses import dataclass

from models.checkpoint_files import read_config
from models.config import CheckpointError, ModelConfig
from models.hub import local_folder

TOKENIZER_IDS = {"qwen2": 151_665, "qwen3": 151_669}

# name: hidden size, MLP size, layers, query heads, key heads, head size, embedding rows, tied head
_SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151_936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151_936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152_064, False),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151_936, False),
}
_VARIANTS = ("-Instruct", "-Base")  # the same architecture under another name


@dataclass(frozen=True)
class Architecture:
    """A model's shapes and the number of ids that its tokenizer knows."""

    config: ModelConfig
    tokenizer_ids: int


def find_architecture(path_or_hub_name: str) -> Architecture:
    """The architecture of a local checkpoint folder, or of a published one by hub name.

    Nothing is downloaded.

    Raises:
        CheckpointError: The name is neither.
    """
    folder = local_folder(path_or_hub_name)
    if folder is not None:
        config = read_config(folder)
        ids = TOKENIZER_IDS.get(config.model_type, config.vocab_size)
        return Architecture(config, min(ids, config.vocab_size))
    organisation, _, name = path_or_hub_name.rpartition("/")
    for variant in _VARIANTS:
        name = name.removesuffix(variant)
    if organisation != "Qwen" or name not in _SHAPES:
        known = ", ".join(f"Qwen/{known}" for known in _SHAPES)
        raise CheckpointError(
            f"{path_or_hub_name}: neither a local folder nor an architecture known here ({known}); "
            "download its config.json into a folder and name that"
        )
    return _published(name)


def _published(name: str) -> Architecture:
    hidden, mlp, layers, heads, kv_heads, head_dim, vocab, tied = _SHAPES[name]
    model_type = "qwen2" if name.startswith("Qwen2.5") else "qwen3"
    config = ModelConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=1e6,
        rms_norm_eps=1e-6, tie_embeddings=tied, qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3", max_position=32_768 if model_type == "qwen2" else 40_960,
        model_type=model_type,
    )  # fmt: skip
    return Architecture(config, TOKENIZER_IDS[model_type])
