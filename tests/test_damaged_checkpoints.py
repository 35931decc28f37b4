"""Checkpoint folders that are not what they should be: one line that names the file, no traceback.

Pointers and links in place of files, folders in place of files and the reverse, absurd configs,
foreign tokenizers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

import models.checkpoint_files
from launch.cli import exit_code, message
from launch.convert import main as convert_main
from models.checkpoint_files import read_config
from models.config import MAX_SIZE, CheckpointError
from models.convert import abstract_model, load_hf, save_hf
from models.flax_folder import load_flax
from models.gguf_reader import read_gguf
from models.hub import resolve_checkpoint
from models.known_configs import find_architecture
from models.tokenizer import ChatTokenizer
from tests import error_cases
from tests.make_golden import GOLDEN
from tests.make_tiny_tokenizer import TINY
from tests.process_cases import python
from tests.test_convert import change_config, shard

ROOT = Path(__file__).parents[1]
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 446564\n"
)
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint, with tokenizer, in one file."""
    target = tmp_path / "checkpoint"
    model, _ = load_hf(GOLDEN / "qwen3_untied", dtype=jnp.float32)
    save_hf(model, target, tokenizer_from=TINY)
    (target / "generation_config.json").write_text('{"eos_token_id": 302}')
    return target


refusal = partial(error_cases.refusal, CheckpointError)


def test_the_whole_folder_loads(folder):
    load_hf(folder)
    ChatTokenizer(folder)


# ---- files that are none -------------------------------------------------------------------------


def pointer(path: Path) -> None:
    path.write_text(POINTER)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("../../blobs/abc")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS = {
    pointer: "a git-lfs pointer, not the file itself",
    dangling: "a link to ../../blobs/abc, which does not exist",
    loop: "Too many levels of symbolic links",
    folder_instead: "Is a directory",
}


@pytest.mark.parametrize("damage", WAYS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_the_model_that_is_none(folder, name, damage):
    damage(folder / name)
    assert refusal(load_hf, folder).startswith(f"{folder / name}: {WAYS[damage]}")


@pytest.mark.parametrize("damage", WAYS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_file_of_the_tokenizer_that_is_none(folder, name, damage):
    damage(folder / name)
    expected = f"{folder / name}: {WAYS[damage]}"
    assert refusal(ChatTokenizer, folder).startswith(expected)
    model, _ = load_hf(folder)
    # Nor is a checkpoint written that lacks it, or holds the pointer in its place.
    assert refusal(save_it, model, folder).startswith(expected)
    assert not (folder.parent / "out").exists()


def save_it(model, folder):
    save_hf(model, folder.parent / "out", tokenizer_from=folder)


def test_a_file_without_permission(folder, monkeypatch):
    opened = Path.open

    def denied(path, *args, **kwargs):
        if path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(models.checkpoint_files.Path, "open", denied)
    assert refusal(load_hf, folder) == f"{folder}/model.safetensors: Permission denied"


@pytest.mark.parametrize(
    "damage", [dangling, loop, Path.unlink], ids=lambda damage: damage.__name__
)
def test_a_shard_whose_link_leads_nowhere_is_missing(folder, damage):
    """A snapshot of the hub's cache, copied without the files that its links name."""
    shard(folder)
    damage(folder / "m-2.safetensors")
    expected = f"{folder}: missing shards named by the index: m-2.safetensors"
    assert refusal(load_hf, folder) == expected


@pytest.mark.parametrize(
    "index, message",
    [
        ("[]", "expected a JSON object"),
        ('{"weight_map": ["a"]}', "weight_map missing or empty"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "is no name of a shard"),
        ('{"weight_map": {"a": 3}}', "3 is no name of a shard"),
        (NESTED, "not valid JSON"),
        ('{"weight_map"', "not valid JSON"),
        (POINTER, "a git-lfs pointer"),
    ],
)
def test_a_foreign_index(folder, index, message):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(index)
    said = refusal(load_hf, folder)
    assert said.startswith(f"{path}: ") and message in said


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype": "F32", "shape": [2, 2.0], "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [2, 2], "data_offsets": [Infinity, 16]}',
        '{"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]}',
        '{"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [2, 2], "data_offsets": [0]}',
        '{"dtype": "F32", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 16]}',
        NESTED,
        "null",
    ],
)
def test_a_header_that_does_not_describe_tensors(folder, entry):
    header = ('{"a": ' + entry + "}").encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert refusal(load_hf, folder) == f"{path}: not a safetensors file (bad header)"


@pytest.mark.parametrize("quantised", [True, False])
def test_float8_weights_are_never_read_without_their_scales(folder, quantised):
    header = json.dumps({
        "w": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "w_scale_inv": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }).encode()  # fmt: skip
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    if quantised:
        change_config(folder, quantization_config={"quant_method": "fp8"})
    expected = "quantised checkpoints" if quantised else "tensor w has dtype F8_E4M3"
    assert expected in refusal(load_hf, folder)


# ---- paths that are no folder --------------------------------------------------------------------


@pytest.mark.parametrize("call", [resolve_checkpoint, find_architecture])
def test_paths_that_are_no_checkpoint_folder(tmp_path, call):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("elsewhere")
    for name, says in (
        ("model.gguf", "a GGUF file, which is not read here"),
        ("model.safetensors", "a file; it must be the folder of a checkpoint"),
        ("loop", "a link to loop, which leads to nothing"),
        ("gone", "a link to elsewhere, which leads to nothing"),
        ("x" * 300, "File name too long"),
    ):
        said = refusal(call, tmp_path / name)
        assert said.startswith(f"{tmp_path / name}: {says}")
    assert refusal(call, "~no-such-user/model").startswith("~no-such-user/model: ")


def test_a_folder_of_gguf_files_is_named_as_such(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert refusal(load_hf, tmp_path).startswith(f"{tmp_path}/model-Q4_K_M.gguf: a GGUF file")


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF\3\0\0\0" + bytes(8) + b"\xff" * 8 + b"\xff" * 8,  # a text longer than any memory
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(15) + b"\x63\0\0\0",  # no such kind of field
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"\xff\4\0\0\0",
    ],
)
def test_damaged_counts_of_a_gguf_file(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(read_gguf, path) == f"{path}: truncated or damaged GGUF header"


def test_a_target_below_a_file(folder, tmp_path):
    (tmp_path / "notes").touch()
    model, _ = load_hf(folder)
    target = tmp_path / "notes/out"
    assert refusal(save_hf, model, target).startswith(f"{target}: cannot be written: ")


def test_a_full_disk_names_the_folder_and_leaves_nothing(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    model, _ = load_hf(folder)
    monkeypatch.setattr(models.checkpoint_files.os, "fsync", full)
    with pytest.raises(OSError) as caught:
        save_hf(model, tmp_path / "out")
    assert exit_code(caught.value) == 1
    assert message(caught.value) == f"{tmp_path}/out: No space left on device"
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_array_of_a_flax_folder(folder, tmp_path):
    convert_main(["to-flax", str(folder), str(tmp_path / "flax")])
    for path in (tmp_path / "flax/state").rglob("d/*"):
        path.write_bytes(b"\0" * 20)
    said = refusal(load_flax, tmp_path / "flax")
    assert said.startswith(f"{tmp_path}/flax/state: ")


# ---- foreign JSON and tokenizers -----------------------------------------------------------------


def test_the_largest_sizes_do_not_fill_the_memory(folder):
    change_config(folder, vocab_size=MAX_SIZE, hidden_size=MAX_SIZE, intermediate_size=MAX_SIZE)
    assert "the config asks for" in refusal(load_hf, folder)
    config = read_config(folder)
    _, state = abstract_model(config)
    assert state["embed", "embedding"].shape == (MAX_SIZE, MAX_SIZE)


@pytest.mark.parametrize(
    "content, message",
    [
        (NESTED.encode(), "not valid JSON"),
        (('{"a":' * 50_000).encode(), "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"[1, 2]", "expected a JSON object"),
        (b"", "not valid JSON"),
        (b'{"model_type": "qwen3"', "not valid JSON"),
        (POINTER.encode(), "a git-lfs pointer"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_files_that_hold_something_else(folder, name, content, message):
    (folder / name).write_bytes(content)
    said = refusal(ChatTokenizer, folder)
    assert said.startswith(f"{folder / name}: {message}")
    if name == "config.json":
        for call in (load_hf, find_architecture, load_flax_of):
            assert message in refusal(call, folder)


def load_flax_of(folder):
    (folder / "state").mkdir(exist_ok=True)
    load_flax(folder)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "null",
        NESTED,
        '{"version": "1.0", "model": {"type": "Other"}}',
        POINTER[:30],
    ],
)
def test_a_foreign_tokenizer(folder, content):
    (folder / "tokenizer.json").write_text(content)
    said = refusal(ChatTokenizer, folder)
    assert said.startswith(f"{folder}/tokenizer.json: cannot load the tokenizer: ")


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_truncated_tokenizer(folder, share):
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    assert refusal(ChatTokenizer, folder).startswith(f"{path}: cannot load the tokenizer: ")


@pytest.mark.parametrize("value", [-1, 305, "</s>", 2.0, True, [1, [2]], {"a": 1}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_ids_that_are_none(folder, name, value):
    content = json.loads((folder / name).read_text()) | {"eos_token_id": value}
    (folder / name).write_text(json.dumps(content))
    said = refusal(ChatTokenizer, folder)
    assert said.startswith(f"{folder / name}: eos_token_id must be ids from 0 to 304, got ")


# ---- as a user sees it ---------------------------------------------------------------------------


def test_a_command_says_it_in_one_line_and_transformers_says_nothing(folder):
    """The notice that PyTorch is missing is not printed; a warning of transformers' own is."""
    script = (
        "import sys, logging; from launch.cli import entry; from models.tokenizer import *;"
        "entry(lambda: (ChatTokenizer(sys.argv[1]),"
        " logging.getLogger('transformers').warning('a real warning')) and None)"
    )

    def run() -> subprocess.CompletedProcess:
        return python("-c", script, str(folder), cwd=folder)

    whole = run()
    assert whole.returncode == 0 and whole.stderr == "[transformers] a real warning\n"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(POINTER)
    damaged = run()
    assert damaged.returncode == 2 and damaged.stdout == ""
    assert damaged.stderr.startswith(f"error: {folder}/tokenizer.json: a git-lfs pointer")
    assert damaged.stderr.count("\n") == 1
