"""Hugging Face folders in and out: exact round trips, and an error that names what is wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import models.convert
from launch.convert import main as convert_main
from models.checkpoint_files import list_tensors
from models.config import CheckpointError
from models.convert import load_hf, save_hf
from models.flax_folder import load_flax
from models.partition import param_spec
from models.qwen import split_params
from srpo_jax.learner.learner import TrainState
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.checkpoint import Checkpoints
from tests.make_golden import CASES, GOLDEN
from tests.make_tiny_tokenizer import TINY
from tests.test_model_config import CONFIG

ROOT = Path(__file__).parents[1]
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    """An untied float32 checkpoint in one file."""
    target = tmp_path / "checkpoint"
    model, _ = load_hf(GOLDEN / "qwen3_untied", dtype=jnp.float32)
    save_hf(model, target)
    return target


def rewrite(folder, change, name="model.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def shard(folder):
    """Splits model.safetensors into two files with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"m-1.safetensors": names[::2], "m-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


# ------------------------------------------------------------------------------ round trips


def raw_tensors(folder) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            data = raw[8 + length + begin : 8 + length + end]
            found[name] = entry["dtype"], entry["shape"], data
    return found


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 9_000])
@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_bit_equal(name, max_shard_bytes, tmp_path):
    model, _ = load_hf(GOLDEN / name, dtype=jnp.bfloat16)
    save_hf(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 9_000)
    assert raw_tensors(tmp_path / "out") == raw_tensors(GOLDEN / name)
    again, config = load_hf(tmp_path / "out")
    assert config == model.config
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        assert ours.dtype == theirs.dtype and bool((ours == theirs).all())


def test_the_safetensors_library_reads_our_files(folder):
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
        head = file.get_tensor(HEAD)
    assert names == set(raw_tensors(GOLDEN / "qwen3_untied"))
    stored = np.frombuffer(raw_tensors(GOLDEN / "qwen3_untied")[HEAD][2], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(head.ravel(), stored.astype(np.float32))


def test_dtype_of_the_files(folder, tmp_path):
    model, _ = load_hf(folder)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
    save_hf(model, tmp_path / "half", dtype=jnp.bfloat16)
    assert raw_tensors(tmp_path / "half") == raw_tensors(GOLDEN / "qwen3_untied")
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_values_land_in_their_places(folder):
    """Kernels are transposed and layers stacked, against the safetensors library's reading."""
    tensors = load_file(folder / "model.safetensors")
    model, _ = load_hf(folder)
    np.testing.assert_array_equal(
        model.layers.gate_proj.kernel[1], tensors["model.layers.1.mlp.gate_proj.weight"].T
    )
    np.testing.assert_array_equal(
        model.layers.k_norm.scale[0], tensors["model.layers.0.self_attn.k_norm.weight"]
    )
    np.testing.assert_array_equal(model.lm_head.kernel[...], tensors[HEAD].T)
    np.testing.assert_array_equal(model.embed.embedding[...], tensors[EMBED])


def test_side_files_and_token_ids_travel(folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "generation_config.json").write_text('{"eos_token_id": [302, 300]}')
    (source / "config.json").write_text('{"eos_token_id": 302, "hidden_size": 1}')
    model, _ = load_hf(folder)
    save_hf(model, tmp_path / "out", tokenizer_from=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == 302 and config["hidden_size"] == 32


def test_a_failed_save_leaves_nothing(folder, tmp_path, monkeypatch):
    model, _ = load_hf(folder)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(models.convert, "copy_side_files", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(model, tmp_path / "out", tokenizer_from=TINY)
    assert not list(tmp_path.glob("out*"))
    before = raw_tensors(folder)
    with pytest.raises(OSError, match="disk full"):
        save_hf(model, folder, tokenizer_from=TINY, overwrite=True)
    assert raw_tensors(folder) == before


def test_only_an_earlier_checkpoint_is_replaced_and_only_when_asked(folder, tmp_path):
    model, config = load_hf(folder)
    with pytest.raises(CheckpointError, match="not an empty folder"):
        save_hf(model, folder)
    save_hf(model, folder, config, max_shard_bytes=9_000, overwrite=True)
    save_hf(model, folder, config, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save_hf(model, tmp_path / "notes", overwrite=True)


def test_placement_on_a_mesh(folder):
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    plain, _ = load_hf(folder, dtype=jnp.float32)
    placed, _ = load_hf(folder, dtype=jnp.float32, mesh=mesh)
    for ours, theirs in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
        assert isinstance(ours.sharding, NamedSharding) and bool((ours == theirs).all())
    kernel = placed.layers.o_proj.kernel[...]
    assert kernel.sharding.spec == param_spec(("layers", "o_proj", "kernel"), kernel.shape)


@pytest.mark.parametrize(("stacked", "transposed"), [(True, True), (True, False), (False, True)])
def test_parts_of_a_parameter_equal_parts_of_the_whole(folder, stacked, transposed):
    """What each device of a mesh would read, against slices of the whole parameter."""
    tensors = list_tensors(folder)
    names = {
        (True, True): [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)],
        (True, False): [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)],
        (False, True): [HEAD],
    }[stacked, transposed]
    source = models.convert._Source(tuple(names), stacked, transposed)
    wholes = [tensors[name].open().T if transposed else tensors[name].open() for name in names]
    whole = np.stack(wholes) if stacked else wholes[0]
    read = models.convert._parameter_reader(
        [tensors[name] for name in names], source, whole.shape, np.dtype(np.float32)
    )
    for axis, size in enumerate(whole.shape):
        for part in (slice(0, size // 2), slice(size // 2, size)):
            index = tuple(part if a == axis else slice(None) for a in range(whole.ndim))
            np.testing.assert_array_equal(read(index), whole[index])


FOUR_DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import AxisType
from models.convert import load_hf, save_hf
mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
placed, _ = load_hf(sys.argv[1], mesh=mesh)
plain, _ = load_hf(sys.argv[1])
for ours, theirs in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
    assert len(ours.sharding.device_set) == 4
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))
kernel = placed.layers.up_proj.kernel[...]
assert kernel.addressable_shards[0].data.shape == (2, 16, 24), kernel.sharding
save_hf(placed, sys.argv[2])
"""


@pytest.mark.multidevice
def test_four_devices_hold_parts_of_the_same_values(tmp_path):
    source = GOLDEN / "qwen3_untied"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", FOUR_DEVICES, str(source), str(tmp_path / "out")]
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[4]))
from jax.sharding import AxisType
from models.convert import load_hf, save_hf
mesh = jax.make_mesh((1, 2, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
model, _ = load_hf(sys.argv[1], mesh=mesh)
assert not model.layers.q_proj.kernel[...].is_fully_addressable
save_hf(model, sys.argv[2])
"""


@pytest.mark.multidevice
def test_two_processes_save_one_checkpoint(tmp_path):
    source = GOLDEN / "qwen3_untied"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", TWO_PROCESSES, str(source), str(tmp_path / "out"), port]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    processes = [subprocess.Popen([*command, rank], env=environment) for rank in "01"]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_untied"])
def test_command_to_flax_and_back(name, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / name, source)
    shutil.copytree(TINY, source, dirs_exist_ok=True)
    change_config(source, eos_token_id=7)
    assert convert_main(["to-flax", str(source), str(tmp_path / "flax")]) == 0
    assert convert_main(["to-hf", str(tmp_path / "flax"), str(tmp_path / "back")]) == 0
    assert "2 layers" in capsys.readouterr().out
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 7
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    change_config(tmp_path / "flax", intermediate_size=64)
    message = r"layers\.down_proj\.kernel: the config asks for \[2, 64, 32\], found \[2, 48, 32\]"
    with pytest.raises(CheckpointError, match=message):
        load_flax(tmp_path / "flax")
    with pytest.raises(CheckpointError, match="not a Flax checkpoint folder"):
        convert_main(["to-hf", str(source), str(tmp_path / "other")])


@pytest.fixture
def run(tmp_path, folder):
    """A training run's folder: latest at steps 2 and 10, best at step 2; the weights say which."""
    run = tmp_path / "run"
    run.mkdir()
    recipe = {"model": {"path": str(folder), "revision": None}}
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    model, _ = load_hf(folder)
    _, params = split_params(model)
    for store, steps in (("checkpoints", (2, 10)), ("best", (2,))):
        checkpoints = Checkpoints(run / store, keep=5)
        for step in steps:
            scaled = jax.tree.map(lambda x, step=step: x * step, params)
            moments = optax.adamw(1e-3).init(params)
            checkpoints.save(step, TrainState(scaled, moments, jnp.int32(step)), {})
        checkpoints.close()
    return run


@pytest.mark.parametrize(("source", "step"), [
    ("", 10), ("checkpoints", 10), ("checkpoints/2", 2), ("best", 2),
])  # fmt: skip
def test_command_exports_what_training_saved(run, folder, tmp_path, source, step):
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    assert convert_main(["to-hf", str(run / source), str(tmp_path / "out")]) == 0
    start = load_file(folder / "model.safetensors")
    expected = {name: value * step for name, value in start.items()}
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(exported[name], value)
    assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize(("options", "key", "expected"), [
    ([], None, "bfloat16"), ([], "float32", "float32"), (["--dtype", "float16"], None, "float16"),
])  # fmt: skip
def test_command_exports_in_the_dtype_of_the_starting_point(
    run, folder, tmp_path, options, key, expected
):
    rewrite(folder, lambda t: t.update({n: a.astype(ml_dtypes.bfloat16) for n, a in t.items()}))
    model = {"path": str(folder), "revision": None, "export_dtype": key}
    (run / "recipe.yaml").write_text(json.dumps({"model": model}))
    assert convert_main(["to-hf", str(run), str(tmp_path / "out"), *options]) == 0
    exported = load_file(tmp_path / "out/model.safetensors")
    assert {str(value.dtype) for value in exported.values()} == {expected}


def test_command_does_not_export_what_was_damaged(run, tmp_path):
    """A flipped bit, which neither Orbax nor the shapes notice."""
    path = max((run / "checkpoints/10").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path.name}: its checksum is not"):
        convert_main(["to-hf", str(run), str(tmp_path / "out")])
    assert convert_main(["to-hf", str(run / "checkpoints/2"), str(tmp_path / "out")]) == 0


def test_command_says_what_is_no_checkpoint(run, tmp_path):
    shutil.rmtree(run / "best")
    with pytest.raises(FileNotFoundError, match="best: holds no checkpoint"):
        convert_main(["to-hf", str(run / "best"), str(tmp_path / "out")])
    with pytest.raises(CheckpointError, match="7: not an Orbax checkpoint with params"):
        convert_main(["to-hf", str(run / "checkpoints/7"), str(tmp_path / "out")])
    (run / "recipe.yaml").write_text("model: x")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: not the recipe of a run"):
        convert_main(["to-hf", str(run), str(tmp_path / "out")])


# ---------------------------------------------------------------------------- tied and untied

EMBEDDING = np.array([[1, 0], [0, 2], [1, 1]], np.float32)
OTHER_HEAD = np.array([[0, 1], [1, 0], [2, 2]], np.float32)
HIDDEN = jnp.array([[[3.0, 1.0]]])


def head_case(tmp_path, tie, head):
    """A checkpoint whose embedding and head are given; every other tensor is ones."""
    p = "model.layers.0."
    shapes = {
        "model.norm.weight": (2,), p + "input_layernorm.weight": (2,),
        p + "post_attention_layernorm.weight": (2,), p + "self_attn.q_norm.weight": (4,),
        p + "self_attn.k_norm.weight": (4,), p + "self_attn.q_proj.weight": (4, 2),
        p + "self_attn.k_proj.weight": (4, 2), p + "self_attn.v_proj.weight": (4, 2),
        p + "self_attn.o_proj.weight": (2, 4), p + "mlp.gate_proj.weight": (4, 2),
        p + "mlp.up_proj.weight": (4, 2), p + "mlp.down_proj.weight": (2, 4),
    }  # fmt: skip
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors[EMBED] = EMBEDDING
    if head is not None:
        tensors[HEAD] = head
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tie}))
    return tmp_path


def test_tied_without_head_uses_the_embedding(tmp_path):
    model, config = load_hf(head_case(tmp_path, True, None), dtype=jnp.float32)
    assert config.tie_embeddings
    assert model.logits(HIDDEN).tolist() == [[[3, 2, 4]]]


def test_untied_uses_its_head(tmp_path):
    model, _ = load_hf(head_case(tmp_path, False, OTHER_HEAD), dtype=jnp.float32)
    assert model.logits(HIDDEN).tolist() == [[[1, 3, 8]]]


def test_untied_without_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight.*is false"):
        load_hf(head_case(tmp_path, False, None), dtype=jnp.float32)


def test_tied_with_a_repeated_head(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model, _ = load_hf(head_case(tmp_path, True, EMBEDDING), dtype=jnp.float32)
    assert "lm_head.weight repeats the tied embedding" in caplog.text
    assert model.logits(HIDDEN).tolist() == [[[3, 2, 4]]]


def test_tied_with_another_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load_hf(head_case(tmp_path, True, OTHER_HEAD), dtype=jnp.float32)


# ------------------------------------------------------------------------ damaged checkpoints

UP = "model.layers.1.mlp.up_proj.weight"


def test_missing_tensor(folder):
    rewrite(folder, lambda t: t.pop(UP))
    with pytest.raises(CheckpointError, match=f"missing tensor {UP}"):
        load_hf(folder, dtype=jnp.float32)


def test_left_over_tensor(folder):
    rewrite(folder, lambda t: t.update({"model.extra.weight": np.ones(2, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight has no place"):
        load_hf(folder, dtype=jnp.float32)


def test_more_layers_than_the_config_says(folder):
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.*and 10 more.*no place"):
        load_hf(folder, dtype=jnp.float32)


def test_wrong_shape(folder):
    rewrite(folder, lambda t: t.update({UP: t[UP].T.copy()}))
    with pytest.raises(CheckpointError, match=rf"{UP} has shape \[32, 48\].*\[48, 32\]"):
        load_hf(folder, dtype=jnp.float32)


def test_wrong_dtype(folder):
    rewrite(folder, lambda t: t.update({UP: t[UP].astype(np.int8)}))
    with pytest.raises(CheckpointError, match=f"{UP} has dtype I8"):
        load_hf(folder, dtype=jnp.float32)


def test_quantised(folder):
    change_config(folder, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="quantised"):
        load_hf(folder, dtype=jnp.float32)


@pytest.mark.parametrize(("keep", "message"), [
    (-1, "truncated, tensor .* ends after the file"),
    (2000, "truncated, (tensor|its header)"),
    (100, "truncated, its header"),
    (4, "truncated, its header"),
    (0, "truncated, its header"),
])  # fmt: skip
def test_truncated_file(folder, keep, message):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=message):
        load_hf(folder, dtype=jnp.float32)


@pytest.mark.parametrize("header", [b"[1]", b"{", b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_bad_header(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="bad header"):
        load_hf(folder, dtype=jnp.float32)


def test_byte_count_that_does_not_fit_the_shape(folder):
    header = b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor a of shape \[2, 2\] needs 16 bytes.*12"):
        load_hf(folder, dtype=jnp.float32)


def test_missing_shard_is_found_before_any_work(folder, monkeypatch):
    shard(folder)
    (folder / "m-2.safetensors").unlink()
    monkeypatch.setattr(models.checkpoint_files, "read_header", None)
    with pytest.raises(CheckpointError, match=r"missing shards.*: m-2\.safetensors"):
        load_hf(folder, dtype=jnp.float32)


def test_a_file_that_the_index_does_not_name_is_ignored(folder, caplog):
    shard(folder)
    right, _ = load_hf(folder, dtype=jnp.float32)
    save_file({EMBED: np.zeros((64, 32), np.float32)}, folder / "old.safetensors")
    with caplog.at_level(logging.WARNING):
        model, _ = load_hf(folder, dtype=jnp.float32)
    assert "old.safetensors" in caplog.text
    np.testing.assert_array_equal(model.embed.embedding[...], right.embed.embedding[...])
    assert float(jnp.abs(model.embed.embedding[...]).max()) > 0


def test_the_index_decides_where_both_are_present(folder):
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(whole)
    rewrite(folder, lambda t: t.update({EMBED: np.zeros_like(t[EMBED])}))
    model, _ = load_hf(folder, dtype=jnp.float32)
    assert float(jnp.abs(model.embed.embedding[...]).max()) > 0


def test_index_and_file_disagree(folder):
    index = shard(folder)
    rewrite(folder, lambda t: t.pop(EMBED), index[EMBED])
    with pytest.raises(CheckpointError, match=f"{EMBED} is in the index, not in the file"):
        load_hf(folder, dtype=jnp.float32)
    extra = np.ones(2, np.float32)
    rewrite(folder, lambda t: t.update({EMBED: extra, "extra": extra}), index[EMBED])
    with pytest.raises(CheckpointError, match="extra is in the file, not there in the index"):
        load_hf(folder, dtype=jnp.float32)


def test_folders_without_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    with pytest.raises(CheckpointError, match=r"neither .* only part-1\.safetensors"):
        load_hf(folder, dtype=jnp.float32)
    (folder / "part-1.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"no safetensors file; pytorch_model\.bin must"):
        load_hf(folder, dtype=jnp.float32)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: file not found"):
        load_hf(folder, dtype=jnp.float32)
