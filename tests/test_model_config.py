"""Architectures from config.json: what is read, what is refused, and why."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from models.config import CheckpointError, ModelConfig
from models.convert import abstract_model, parameter_sources
from tests import error_cases
from tests.make_golden import CASES, GOLDEN

CONFIG = {
    "model_type": "qwen3", "vocab_size": 3, "hidden_size": 2, "intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 16, "rope_theta": 1e6,
}  # fmt: skip


refusal = partial(error_cases.refusal, CheckpointError, ModelConfig.from_hf)


@pytest.mark.parametrize("rope", [
    {"rope_theta": 1000000.0},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    {"rope_scaling": None, "rope_theta": 1000000},
])  # fmt: skip
def test_rope_theta_wherever_it_is(rope):
    config = ModelConfig.from_hf(CONFIG | rope)
    np.testing.assert_allclose(config.inverse_frequencies(), [1.0, 0.001], rtol=1e-6)


@pytest.mark.parametrize(("fields", "message"), [
    ({"rope_theta": None}, "rope_theta missing"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta contradicts itself"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn' is not supported"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias of qwen3"),
    ({"head_dim": None}, "head_dim missing"),
    ({"head_dim": 3}, "head_dim must be even"),
    ({"num_key_value_heads": 2}, "must be a multiple of num_key_value_heads"),
    ({"rms_norm_eps": None}, "rms_norm_eps missing"),
    ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not one of qwen2, qwen3, llama"),
    ({"model_type": None}, "is not one of qwen2, qwen3, llama"),
])  # fmt: skip
def test_unsupported_configs_are_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(CONFIG | fields)


PUBLISHED = {
    "Qwen2.5-3B": ({
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "hidden_act": "silu",
        "sliding_window": 32768, "max_window_layers": 70, "use_sliding_window": False,
    }, 3.09e9),
    "Qwen3-8B": ({
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": None, "attention_bias": False, "use_sliding_window": False,
    }, 8.19e9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """Parameter counts of the shapes, against those that the model cards state."""
    hf, expected = PUBLISHED[name]
    config = ModelConfig.from_hf(hf)
    _, state = abstract_model(config)
    assert state.keys() == parameter_sources(config).keys()
    count = sum(np.prod(param.shape, dtype=np.int64) for param in state.values())
    assert abs(count - expected) < 0.005e9
    assert (("lm_head", "kernel") in state) != hf["tie_word_embeddings"]


def test_an_unused_sliding_window_is_accepted():
    config = ModelConfig.from_hf(CONFIG | {"sliding_window": 4096, "use_sliding_window": False})
    assert config.head_dim == 4 and config.qk_norm and not config.qkv_bias


@pytest.mark.parametrize("name", CASES)
def test_config_round_trip(name):
    hf = json.loads((GOLDEN / name / "config.json").read_text())
    config = ModelConfig.from_hf(hf)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert config.model_type == hf["model_type"]


# ---- absurd values ------------------------------------------------------------------------------

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", [-1, 0, 2.0, 1e300, "8", True, [8], {}, 10**30, 10**4000])
@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_are_none(key, value):
    said = refusal(CONFIG | {key: value})
    assert said.startswith(f"{key} must be an integer from 1 to ") and len(said) < 200


@pytest.mark.parametrize("key", [key for key in SIZES if key != "head_dim"])
def test_sizes_that_are_missing(key):
    assert refusal(CONFIG | {key: None}) == f"{key} missing"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive number, got '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
        ({"rope_theta": -1e6}, "rope_theta must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_theta": [1e6]}, "rope_theta must be a positive number"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling must be an object, got ['yarn']"),
        ({"rope_parameters": 3}, "rope_parameters must be an object, got 3"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling of type ['yarn']"),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] is not one of"),
        ({"model_type": {"a": "b"}}, "is not one of"),
        ({"model_type": "qwen33"}, "did you mean qwen3?"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types: ['full_attention'] is not"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "'sliding_attention' is not"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not silu"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must be a multiple of"),
        (
            {"model_type": "qwen2", "head_dim": None, "hidden_size": 7, "num_attention_heads": 2},
            "hidden_size must be a multiple of num_attention_heads (2)",
        ),
        ({"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
    ],
)
def test_values_that_mean_nothing(fields, message):
    assert message in refusal(CONFIG | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False},
        # In transformers the layers from max_window_layers on slide: there are none.
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4096},
        {"layer_types": ["full_attention"]},
    ],
)
def test_windows_that_no_layer_has_are_accepted(fields):
    assert ModelConfig.from_hf(CONFIG | fields).num_layers == 1
