"""Architecture of a decoder checkpoint, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read or written as asked; names the file or the tensor."""

    exit_code = 2


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a dense Qwen2.5, Qwen3 or Llama decoder.

    ``vocab_size`` counts embedding rows, which may exceed the tokenizer's length. End-of-sequence
    ids belong to :class:`models.tokenizer.ChatTokenizer`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position: int
    model_type: str

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise CheckpointError(_unknown_model_type(self.model_type))
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embeddings: {self.head_dim}")

    def inverse_frequencies(self) -> np.ndarray:
        """Rotary inverse frequencies, float32 [head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return (self.rope_theta**-exponents).astype(np.float32)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the contents of a ``config.json``.

        Raises:
          CheckpointError: an unsupported model type or variant, or a missing field; ``rope_theta``
            in particular has no default.
        """
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise CheckpointError(_unknown_model_type(model_type))
        _refuse_variants(config, model_type)
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if model_type == "qwen3":
                raise CheckpointError("config.json: head_dim missing (Qwen3 does not derive it)")
            head_dim = hidden_size // num_heads
        num_kv_heads = config.get("num_key_value_heads")
        if num_kv_heads is None:
            if model_type != "llama":
                raise CheckpointError("config.json: num_key_value_heads missing")
            num_kv_heads = num_heads
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=_rope_theta(config),
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            max_position=_required(config, "max_position_embeddings"),
            model_type=model_type,
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers and vLLM read this architecture from."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.model_type != "qwen2":
            config["attention_bias"] = False
        if self.model_type != "llama":
            config["use_sliding_window"] = False
        return config


def _required(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise CheckpointError(f"config.json: {key} missing")
    return value


def _unknown_model_type(model_type: Any) -> str:
    near = difflib.get_close_matches(str(model_type), ARCHITECTURES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"config.json: model_type {model_type!r} is not one of {', '.join(ARCHITECTURES)}{hint}"


def _refuse_variants(config: Mapping[str, Any], model_type: str) -> None:
    """Raises on options that would change the computation and are not implemented."""
    if config.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window is not supported")
    other_layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise CheckpointError(f"config.json: layer_types {sorted(other_layers)} not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {config['hidden_act']!r} is not silu")
    for key in ("attention_bias", "mlp_bias"):
        if model_type != "qwen2" and config.get(key):
            raise CheckpointError(f"config.json: {key} of {model_type} is not supported")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base, wherever the config keeps it; refuses every scaled rotary embedding."""
    nested = config.get("rope_parameters") or {}
    for name in ("rope_parameters", "rope_scaling"):
        options = config.get(name) or {}
        rope_type = options.get("rope_type", options.get("type", "default"))
        if rope_type != "default":
            raise CheckpointError(f"config.json: {name} of type {rope_type!r} is not supported")
    places = [config.get("rope_theta"), nested.get("rope_theta")]
    values = {float(value) for value in places if value is not None}
    if not values:
        raise CheckpointError("config.json: rope_theta missing")
    if len(values) > 1:
        raise CheckpointError(f"config.json: rope_theta contradicts itself: {sorted(values)}")
    return values.pop()
