"""Architecture of a decoder checkpoint, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}

# No published decoder comes near these; what exceeds them would only fill the memory.
MAX_LAYERS, MAX_SIZE, MAX_POSITIONS = 4096, 2**24, 2**31


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read or written as asked; names the file or the tensor."""

    exit_code = 2


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a dense Qwen2.5, Qwen3 or Llama decoder.

    Attributes:
        vocab_size: Embedding rows, which may exceed the ids that the tokenizer knows.
        hidden_size: Width of the residual stream.
        intermediate_size: Inner width of the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; a divisor of ``num_heads``.
        head_dim: Width of a head; even.
        rope_theta: Base of the rotary embedding.
        rms_norm_eps: Added to the mean square.
        tie_embeddings: Whether the head is the transposed embedding.
        qkv_bias: Whether query, key and value projections have a bias (Qwen2).
        qk_norm: Whether queries and keys are normalised in each head (Qwen3).
        max_position: Longest sequence that the checkpoint declares, in tokens.
        model_type: A key of ARCHITECTURES.

    Raises:
        CheckpointError: An unknown ``model_type``, or sizes that do not fit each other.

    End-of-sequence ids belong to ``models.tokenizer.ChatTokenizer``.
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
                f"num_attention_heads must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads}), got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"head_dim must be even for rotary embeddings, got {self.head_dim}"
            )

    def inverse_frequencies(self) -> np.ndarray:
        """Rotary inverse frequencies, float32 [head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return (self.rope_theta**-exponents).astype(np.float32)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the contents of a ``config.json``.

        Args:
            config: Its fields.

        Raises:
            CheckpointError: An unsupported model type or variant, or a missing field;
                ``rope_theta`` in particular has no default.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise CheckpointError(_unknown_model_type(model_type))
        num_layers = _size(config, "num_hidden_layers", MAX_LAYERS)
        _refuse_variants(config, model_type, num_layers)
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        if config.get("head_dim") is not None:
            head_dim = _size(config, "head_dim")
        elif model_type == "qwen3":
            raise CheckpointError("head_dim missing (Qwen3 does not derive it)")
        elif hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size must be a multiple of num_attention_heads ({num_heads}) where "
                f"head_dim is not given, got {hidden_size}"
            )
        else:
            head_dim = hidden_size // num_heads
        if model_type == "llama" and config.get("num_key_value_heads") is None:
            num_kv_heads = num_heads
        else:
            num_kv_heads = _size(config, "num_key_value_heads")
        return cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=_rope_theta(config),
            rms_norm_eps=_positive(_required(config, "rms_norm_eps"), "rms_norm_eps"),
            tie_embeddings=_switch(config, "tie_word_embeddings"),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            max_position=_size(config, "max_position_embeddings", MAX_POSITIONS),
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
        raise CheckpointError(f"{key} missing")
    return value


def _size(config: Mapping[str, Any], key: str, largest: int = MAX_SIZE) -> int:
    value = _required(config, key)
    if type(value) is not int or not 1 <= value <= largest:
        shown = reprlib.repr(value)
        raise CheckpointError(f"{key} must be an integer from 1 to {largest}, got {shown}")
    return value


def _positive(value: Any, name: str) -> float:
    if type(value) in (int, float) and 0 < value < math.inf:
        try:
            return float(value)
        except OverflowError:  # a whole number of more than 308 digits
            pass
    raise CheckpointError(f"{name} must be a positive number, got {reprlib.repr(value)}")


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{key} must be true or false, got {reprlib.repr(value)}")
    return bool(value)


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{key} must be an object, got {reprlib.repr(value)}")
    return value or {}


def _unknown_model_type(model_type: Any) -> str:
    near = difflib.get_close_matches(str(model_type)[:40], ARCHITECTURES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"model_type {reprlib.repr(model_type)} is not one of {', '.join(ARCHITECTURES)}{hint}"


def _refuse_variants(config: Mapping[str, Any], model_type: str, num_layers: int) -> None:
    """Raises on options that would change the computation and are not implemented."""
    if _switch(config, "use_sliding_window"):
        # transformers lets the layers from max_window_layers on slide: here none may be left.
        full_layers = config.get("max_window_layers")
        if type(full_layers) is not int or full_layers < num_layers:
            raise CheckpointError("use_sliding_window is not supported")
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(f"layer_types must be a list, got {reprlib.repr(layer_types)}")
    for kind in layer_types or ():
        if kind != "full_attention":
            raise CheckpointError(f"layer_types: {reprlib.repr(kind)} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {reprlib.repr(config['hidden_act'])} is not silu")
    for key in ("attention_bias", "mlp_bias"):
        if model_type != "qwen2" and _switch(config, key):
            raise CheckpointError(f"{key} of {model_type} is not supported")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base, from either field; every scaled rotary embedding is refused."""
    for name in ("rope_parameters", "rope_scaling"):
        options = _section(config, name)
        rope_type = options.get("rope_type", options.get("type", "default"))
        if rope_type != "default":
            raise CheckpointError(f"{name} of type {reprlib.repr(rope_type)} is not supported")
    places = [config.get("rope_theta"), _section(config, "rope_parameters").get("rope_theta")]
    values = {_positive(value, "rope_theta") for value in places if value is not None}
    if not values:
        raise CheckpointError("rope_theta missing")
    if len(values) > 1:
        raise CheckpointError(f"rope_theta contradicts itself: {sorted(values)}")
    return values.pop()
