"""Reading compiled programs (collectives, memory, work) and compiling for a TPU without one."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from launch.cli import entry
from launch.compile_check import LIBTPU_ENVIRONMENT, main
from models.attention.cache import PLAIN
from models.config import CheckpointError, ModelConfig
from models.known_configs import find_architecture
from models.qwen import Qwen
from srpo_jax.compile_check import report as compile_report
from srpo_jax.compile_check.engine import compile_engine
from srpo_jax.compile_check.hlo import Collective, CollectiveCounts, read_collectives
from srpo_jax.compile_check.report import (
    OutOfMemory,
    ProgramReport,
    collective_table,
    memory_table,
    model_flops,
    phase_table,
)
from srpo_jax.compile_check.update import AbstractUpdate, abstract_update
from srpo_jax.learner.learner import Learner
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.sharding import bytes_per_device, make_mesh
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import Recipe, load_recipe
from srpo_jax.run.build import learner_settings
from srpo_jax.run.build_engine import engine_settings, settings_mesh
from srpo_jax.run.memory_plan import GIB, Phase, learner_memory, plan_memory
from tests.learner_cases import batch_of

# ---- collectives ---------------------------------------------------------------------------------

# Four devices. A loop of 12 rounds holds a loop of 3; gather.2 and gather.3 are two pieces of one
# collective; the bounds of the last loop and of the one in it come from outside: both are open.
HLO = """\
HloModule jit_update, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_condition (p: (s32[], bf16[8,128])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %three = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%i, %three), direction=LT
}

%inner_body (q: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %q = (s32[], bf16[8,128]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%q), index=1
  %permute = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), channel_id=5, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %y = bf16[8,128]{1,0} collective-permute-done(%permute)
  ROOT %r = (s32[], bf16[8,128]{1,0}) tuple(%j, %y)
}

%gather_start (g: bf16[2,128]) -> bf16[8,128] {
  %g = bf16[2,128]{1,0} parameter(0)
  ROOT %gather.2 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%g), channel_id=7, \
replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="4"}
}

%gather_done (h: bf16[2,128]) -> bf16[8,128] {
  %h = bf16[2,128]{1,0} parameter(0)
  ROOT %gather.3 = bf16[8,128]{1,0} all-gather(%h), channel_id=7, \
replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="4"}
}

%layer_condition (s: (s32[], bf16[2,128])) -> pred[] {
  %s = (s32[], bf16[2,128]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %twelve = s32[] constant(12)
  ROOT %more = pred[] compare(%k, %twelve), direction=LT
}

%layer_body (t: (s32[], bf16[2,128])) -> (s32[], bf16[2,128]) {
  %t = (s32[], bf16[2,128]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = bf16[2,128]{1,0} get-tuple-element(%t), index=1
  %start = bf16[8,128]{1,0} fusion(%w), kind=kCustom, calls=%gather_start
  %done = bf16[8,128]{1,0} fusion(%w), kind=kCustom, calls=%gather_done
  %init = (s32[], bf16[8,128]{1,0}) tuple(%n, %done)
  %ring = (s32[], bf16[8,128]{1,0}) while(%init), condition=%inner_condition, body=%inner_body
  %full = bf16[8,128]{1,0} get-tuple-element(%ring), index=1
  %part = bf16[2,128]{1,0} reduce-scatter(%full), channel_id=9, dimensions={0}, to_apply=%add
  ROOT %u = (s32[], bf16[2,128]{1,0}) tuple(%n, %part)
}

%open_condition (v: (s32[], s32[], f32[16])) -> pred[] {
  %v = (s32[], s32[], f32[16]{0}) parameter(0)
  %l = s32[] get-tuple-element(%v), index=0
  %bound = s32[] get-tuple-element(%v), index=1
  ROOT %open = pred[] compare(%l, %bound), direction=LT
}

%deep_body (d: (s32[], s32[], f32[16])) -> (s32[], s32[], f32[16]) {
  %d = (s32[], s32[], f32[16]{0}) parameter(0)
  %g4 = f32[16]{0} get-tuple-element(%d), index=2
  %head = f32[4]{0} slice(%g4), slice={[0:4]}
  %exchange = f32[4]{0} all-to-all(%head), channel_id=12, dimensions={0}
  ROOT %dd = (s32[], s32[], f32[16]{0}) tuple(%d, %d, %g4)
}

%open_body (o: (s32[], s32[], f32[16])) -> (s32[], s32[], f32[16]) {
  %o = (s32[], s32[], f32[16]{0}) parameter(0)
  %m = s32[] get-tuple-element(%o), index=0
  %e = s32[] get-tuple-element(%o), index=1
  %z = f32[16]{0} get-tuple-element(%o), index=2
  %deeper = (s32[], s32[], f32[16]{0}) while(%o), condition=%open_condition, body=%deep_body
  %swap = f32[16]{0} all-to-all(%z), channel_id=11, dimensions={0}
  ROOT %oo = (s32[], s32[], f32[16]{0}) tuple(%m, %e, %swap)
}

ENTRY %main (w0: bf16[2,128], n0: s32[], f0: f32[16]) -> f32[16] {
  %w0 = bf16[2,128]{1,0} parameter(0)
  %n0 = s32[] parameter(1)
  %f0 = f32[16]{0} parameter(2)
  %c0 = (s32[], bf16[2,128]{1,0}) tuple(%n0, %w0)
  %layers = (s32[], bf16[2,128]{1,0}) while(%c0), condition=%layer_condition, body=%layer_body
  %c1 = (s32[], s32[], f32[16]{0}) tuple(%n0, %n0, %f0)
  %loop = (s32[], s32[], f32[16]{0}) while(%c1), condition=%open_condition, body=%open_body
  %f1 = f32[16]{0} get-tuple-element(%loop), index=2
  %norm = f32[] constant(0)
  %both = (f32[16]{0}, f32[]) all-reduce(%f1, %norm), channel_id=13, to_apply=%add
  ROOT %out = f32[16]{0} get-tuple-element(%both), index=0
}
"""


def test_collectives_by_hand():
    found = read_collectives(HLO)
    gathered = 8 * 128 * 2
    assert found.by_kind == {
        "all-gather": Collective(12, 12 * gathered),  # two pieces of one
        "collective-permute": Collective(12 * 3, 12 * 3 * gathered),  # without its two contexts
        "reduce-scatter": Collective(12, 12 * gathered),  # what goes in, not what comes out
        "all-to-all": Collective(2, 16 * 4 + 4 * 4),
        "all-reduce": Collective(1, 16 * 4 + 4),
    }
    assert found.open_loops == 2


def test_open_loops_run_as_often_as_the_caller_says():
    found = read_collectives(HLO, open_trips=(5, 7))
    assert found.by_kind["all-to-all"] == Collective(5 + 5 * 7, 5 * 16 * 4 + 5 * 7 * 4 * 4)
    assert found.by_kind["reduce-scatter"].count == 12  # not in an open loop


def test_a_trip_count_that_xla_says_comes_first():
    said = HLO.replace(
        "body=%open_body", 'body=%open_body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    found = read_collectives(said)
    assert found.by_kind["all-to-all"] == Collective(7 + 7, 7 * 16 * 4 + 7 * 4 * 4)
    assert found.open_loops == 1


def test_collectives_of_a_real_program():
    """Per outer round, of which there are ``n``, five inner ones with an all-reduce of [4, 8]."""
    mesh = make_mesh(data=4)
    whole = NamedSharding(mesh, PartitionSpec())

    def body(x, n):
        def inner(x, _):
            return jax.lax.psum(x * 0.5, "data"), None

        return jax.lax.fori_loop(0, n, lambda _, x: jax.lax.scan(inner, x, length=5)[0], x)

    looped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=whole)
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    found = read_collectives(jax.jit(looped).lower(x, n).compile().as_text(), open_trips=(3,))
    assert found.by_kind == {"all-reduce": Collective(3 * 5, 3 * 5 * 4 * 8 * 4)}
    assert found.open_loops == 1


# ---- memory --------------------------------------------------------------------------------------


def text_of(table) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that starts with ``first``."""
    line = next(line for line in text.splitlines() if line.strip(" │┃").startswith(first))
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_bytes_per_device_follow_the_sharding():
    mesh = make_mesh(data=1, fsdp=4)
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    tree = {
        "kernel": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=split),  # [6, 2] a device
        "scale": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=whole),
    }
    assert bytes_per_device(tree) == 6 * 2 * 4 + 8 * 2


def test_program_report_of_a_compiled_program():
    x = jnp.ones((64, 64), jnp.float32)
    compiled = jax.jit(lambda x, y: x @ y).lower(x, x).compile()
    report = ProgramReport.of("product", compiled, 0.5)
    assert report.arguments == 2 * 64 * 64 * 4
    assert report.outputs == 64 * 64 * 4
    assert report.flops == pytest.approx(2 * 64**3, rel=0.01)
    assert report.peak >= report.arguments + report.outputs
    assert report.scratch == report.peak - report.arguments - report.outputs
    assert report.collectives == CollectiveCounts({}, 0)


def test_scratch_counts_donated_arguments_once():
    """3 GiB in, 2 of them given back as the output: a peak of 4 leaves 1."""
    report = ProgramReport("apply", 3, 2, 2, 9, 4, 0.0, CollectiveCounts({}, 0), 0.0)
    assert report.scratch == 1


def test_phase_table_adds_up_and_says_what_does_not_fit():
    phases = [
        Phase("score", {"parameters": 3 * GIB, "temporaries": 2 * GIB}),
        Phase(
            "accumulate", {"parameters": 3 * GIB, "gradient sums": 3 * GIB, "temporaries": 4 * GIB}
        ),
    ]
    text = text_of(phase_table(phases, usable_gib=9.5))
    assert cells(text, "score") == ["score", "3.00", "2.00", "-", "5.00", "yes"]
    assert cells(text, "accumulate") == ["accumulate", "3.00", "4.00", "3.00", "10.00", "NO"]


def test_memory_and_collective_tables():
    found = CollectiveCounts({"all-gather": Collective(36, 3 * GIB)}, 0)
    report = ProgramReport("apply", 4 * GIB, 3 * GIB, 2 * GIB, GIB, 6 * GIB, 1.0, found, 2.5)
    row = cells(text_of(memory_table([report])), "apply")
    assert row == ["apply", "4.00", "3.00", "2.00", "1.00", "6.00", "2.5 s"]
    text = text_of(collective_table([report]))
    assert cells(text, "apply") == ["apply", "all-gather", "36", "3.00"]


# ---- architectures and work ----------------------------------------------------------------------


def count_params(name: str) -> float:
    from models.convert import abstract_model

    _, params = abstract_model(find_architecture(name).config)
    return sum(math.prod(p.shape) for p in params.values())


@pytest.mark.parametrize(
    "name, billions",  # as the checkpoints' own cards say
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.49),
        ("Qwen/Qwen2.5-1.5B", 1.54),
        ("Qwen/Qwen2.5-3B", 3.09),
        ("Qwen/Qwen2.5-7B", 7.62),
        ("Qwen/Qwen3-0.6B", 0.60),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
    ],
)
def test_known_architectures_have_the_published_sizes(name, billions):
    assert count_params(name) / 1e9 == pytest.approx(billions, abs=0.006)


def test_unknown_architectures_say_what_is_known():
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen9-4B: neither a local .*Qwen3-4B"):
        find_architecture("Qwen/Qwen9-4B")


def test_model_flops_by_hand():
    """Qwen3-0.6B, 2 sequences of 1000 tokens."""
    config = find_architecture("Qwen/Qwen3-0.6B").config
    layer = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072
    weights = 28 * layer + 1024 * 151_936
    flops = model_flops(config, sequences=2, length=1000)
    assert flops.matrices == 2 * weights * 2000
    # 28 layers x 16 heads x 128: 1e6 / 2 visible pairs, a product and a sum, twice.
    assert flops.attention == 2 * 28 * 16 * 128 * (1e6 / 2) * 2 * 2
    assert flops.total == flops.matrices + flops.attention


# ---- the update of a recipe ----------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, rope_theta=1e4, rms_norm_eps=1e-6, tie_embeddings=True,
    qkv_bias=False, qk_norm=True, max_position=512, model_type="qwen3",
)  # fmt: skip
# Embedding; two layers of q and o, k and v, MLP, two norms and two head norms; the last norm.
TINY_PARAMS = 512 * 128 + 2 * (
    2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 256 + 2 * 128 + 2 * 64
) + 128  # fmt: skip
TINY_NORMS = 2 * (2 * 128 + 2 * 64) + 128


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    """A recipe whose model is a folder with nothing but a config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY.to_hf()))
    content = {
        "name": "tiny",
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "workflow": "math",
        "tasks": {"train": "sums.jsonl"},
        "rollout": {
            "tasks_per_step": 2, "group_size": 2, "prompt_tokens": 192, "response_tokens": 64,
            "slots": 8,
        },
        "optimizer": {"lr": 1e-6},
        "learner": {"micro_batch_rows": 4, "mesh": {"data": 1, "fsdp": -1, "tensor": 1}},
        "trainer": {"steps": 1},
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(content))
    return path


def tiny_update(recipe: Recipe, **mesh: int) -> tuple[AbstractUpdate, jax.sharding.Mesh]:
    on = make_mesh(**mesh)
    return abstract_update(recipe, find_architecture(recipe.model.path), on), on


def test_resident_bytes_by_hand(recipe_file):
    """Matrices are split over the four devices, norms are not."""
    update, _ = tiny_update(load_recipe(recipe_file), data=1, fsdp=4)
    assert update.num_params == TINY_PARAMS
    split = (TINY_PARAMS - TINY_NORMS) // 4 + TINY_NORMS
    assert update.resident["parameters"] == 4 * split
    assert update.resident["gradient sums"] == 4 * split
    counters = update.resident["moments"] - 2 * 4 * split
    assert 0 < counters <= 64
    # A token's six arrays, two scores, two weights and whether it is kept, on one of four devices.
    per_token = 5 * 4 + 1 + 2 * 4 + 2 * 4 + 1
    assert update.resident["batch"] == 64 * 256 * per_token
    assert update.chunks == 1
    assert "reference" not in update.resident


def test_moments_and_reference_follow_the_recipe(recipe_file):
    recipe = load_recipe(recipe_file, ["objective.kl_coef=0.1", "optimizer.moment_dtype=bfloat16"])
    update, _ = tiny_update(recipe, data=1, fsdp=4)
    assert update.resident["reference"] == update.resident["parameters"]
    assert update.resident["moments"] < 1.1 * update.resident["parameters"]


def test_the_arguments_are_those_of_a_real_update(recipe_file):
    """Structure, dtypes and ranks of what a learner hands to its programs."""
    recipe = load_recipe(recipe_file, ["objective.kl_coef=0.1"])
    update, mesh = tiny_update(recipe, data=1, fsdp=4)
    learner = Learner(
        Qwen(TINY, rngs=nnx.Rngs(0)), make_optimizer(recipe.optimizer, 1),
        mesh=mesh, settings=learner_settings(recipe, 512),
    )  # fmt: skip
    seen = {}

    def recorded(name, program):
        def call(*arguments):
            seen[name] = jax.tree.map(jax.typeof, arguments)
            return program(*arguments)

        return call

    programs = learner._programs._asdict()
    learner._programs = learner._programs._replace(
        **{name: recorded(name, program) for name, program in programs.items()}
    )
    batch = batch_of(rows=4)
    learner.update([batch, batch])
    jax.block_until_ready(learner.state)

    def kinds(arguments):
        return jax.tree.map(lambda x: (x.dtype, x.ndim), arguments)

    for name, arguments in update.arguments.items():
        assert kinds(seen[name]) == kinds(arguments), name


def test_phases_of_a_compiled_update(recipe_file):
    update, _ = tiny_update(load_recipe(recipe_file), data=1, fsdp=4)
    reports = update.compile()
    assert list(reports) == ["score", "weigh", "accumulate", "apply"]
    phases = {phase.name.removeprefix("update: "): phase.parts for phase in update.phases(reports)}
    for name, parts in phases.items():
        assert parts["parameters"] == update.resident["parameters"]
        assert ("gradient sums" in parts) == (name in ("accumulate", "apply"))
        assert parts["temporaries"] == reports[name].scratch
    # A micro-batch: each layer's kernels are gathered at least once.
    assert reports["score"].collectives.by_kind["all-gather"].count >= 2 * 7
    assert reports["apply"].aliased > update.resident["parameters"]  # the state is donated


def tiny_plan(recipe: Recipe, usable: float):
    """On one host of four devices, over which the learner is split."""
    config = find_architecture(recipe.model.path).config
    mesh = make_mesh(data=1, fsdp=4)
    return plan_memory(recipe, config, mesh, jax.devices(), int(usable))


TOKEN = 2 * 2 * (TINY.num_kv_heads // 2) * 64 * 2  # keys and values, layers, heads, width, bytes


def test_engine_memory_by_hand(recipe_file):
    """Two replicas of two devices each on the four of the only host."""
    recipe = load_recipe(recipe_file, ["rollout.mesh={replicas: -1, tensor: 2}"])
    plan = tiny_plan(recipe, 1e9)
    assert plan.engine.mesh == {"replicas": 2, "tensor": 2}
    phases = {phase.name: phase.parts for phase in plan.phases}
    assert list(phases) == ["init", "sync", "rollout", "update", "resume"]
    rollout = phases["rollout"]
    assert rollout["engine weights"] == 2 * ((TINY_PARAMS - TINY_NORMS) // 2 + TINY_NORMS)
    assert plan.cache_tokens == 8 * (256 + 64)  # a longest call in every slot, one page to round
    assert rollout["KV cache"] == plan.cache_tokens * TOKEN
    update, _ = tiny_update(recipe, data=1, fsdp=4)
    kept = {"parameters": update.resident["parameters"], "moments": update.resident["moments"]}
    assert phases["init"] == phases["resume"] == kept
    assert phases["sync"] == {k: v for k, v in rollout.items() if k != "KV cache"}
    assert phases["update"] == kept | {"gradient sums": update.resident["parameters"]}
    reports = compile_engine(find_architecture(recipe.model.path), plan, jax.devices())
    assert list(reports) == ["prefill", "decode"]
    for report in reports.values():  # the state is donated
        assert report.aliased >= rollout["KV cache"]


def test_the_cache_gets_what_is_free(recipe_file):
    recipe = load_recipe(recipe_file, ["rollout.mesh={replicas: -1, tensor: 2}"])
    parts = learner_memory(recipe, TINY, make_mesh(data=1, fsdp=4))
    kept = parts["parameters"] + parts["moments"]
    used = kept + 2 * ((TINY_PARAMS - TINY_NORMS) // 2 + TINY_NORMS)
    assert tiny_plan(recipe, used + 1000 * TOKEN / 0.85 + 8).cache_tokens == 1000
    architecture = find_architecture(recipe.model.path)
    with pytest.raises(OutOfMemory, match="the KV cache holds 0 tokens, one call needs 320"):
        compile_engine(architecture, tiny_plan(recipe, used), jax.devices())


def test_one_slot_has_room_for_its_call_and_no_more(recipe_file):
    recipe = load_recipe(recipe_file, ["rollout.slots=1"])
    assert tiny_plan(recipe, 1e9).cache_tokens == 256 + 64


def test_what_the_attention_does_not_take_is_said_in_a_line(recipe_file, monkeypatch):
    def refused(*_):
        raise ValueError("no such heads")

    monkeypatch.setattr(
        "srpo_jax.compile_check.engine.cache_attention_on",
        lambda _: PLAIN._replace(workspace=refused),
    )
    recipe = load_recipe(recipe_file)
    architecture = find_architecture(recipe.model.path)
    with pytest.raises(RecipeError, match=r"^rollout: no such heads$"):
        compile_engine(architecture, tiny_plan(recipe, 1e9), jax.devices())


def test_few_devices_a_replica_where_memory_allows(recipe_file):
    settings, devices = engine_settings(load_recipe(recipe_file)), jax.devices()
    for memory, tensor in ((1e9, 1), (2 * TINY_PARAMS / 0.3, 1), (2 * TINY_PARAMS / 0.31, 2)):
        mesh = settings_mesh(settings, TINY, TINY_PARAMS, devices, memory)
        assert mesh.shape["tensor"] == tensor


def test_what_xla_refuses_is_named():
    class Refused:
        def lower(self, *_):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM.\nMore")

    programs = SimpleNamespace(score=Refused())
    refused = AbstractUpdate(
        programs, arguments={"score": ()}, state=None, resident={}, chunks=1, num_params=0
    )
    with pytest.raises(OutOfMemory, match=r"^score: Ran out of memory on HBM\.$"):
        refused.compile()


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(recipe_file, monkeypatch, capsys):
    """Runs the command on the recipe; returns its exit code, output and errors."""
    for name, value in LIBTPU_ENVIRONMENT.items():  # which the command sets, and the test unsets
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "160")

    def command(topology: str, *overrides: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            entry(lambda: main([str(recipe_file), *overrides, "--topology", topology]))
        return exit_.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def four_devices(monkeypatch):
    """The machine's own devices stand for a topology's."""
    from jax.experimental import topologies

    monkeypatch.setattr(
        topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=jax.devices())
    )


def test_the_whole_command(run, four_devices):
    code, out, err = run("v5e:2x2")
    assert (code, err) == (0, "")
    assert cells(out, "update: accumulate")[-1] == cells(out, "rollout")[-1] == "yes"
    assert cells(out, "init")[-1] == cells(out, "sync")[-1] == cells(out, "resume")[-1] == "yes"
    assert "on each host 4 replicas of 1 devices, each with 8 slots and 2,560 cached tokens" in out
    assert "4 v5e devices: data 1 x fsdp 4 x tensor 1; 64 micro-batches of 4 x 256 tokens" in out
    assert "GiB left of 15.75 GiB" in out


def test_what_does_not_fit_exits_with_1(run, four_devices, monkeypatch):
    monkeypatch.setitem(compile_report.USABLE_GIB, "v5e", 1e-3)
    code, out, _ = run("v5e:2x2")
    assert code == 1
    assert cells(out, "update")[-1] == "NO"
    assert "does not fit: rollout: beside weights and learner the KV cache holds 0" in out


@pytest.mark.parametrize(
    "topology, said",
    [
        ("v5e", "--topology must be a TPU and its grid, such as v5e:4x4, got v5e"),
        ("v5f:4x4", "--topology v5f:4x4: unknown TPU, did you mean `v5"),
    ],
)
def test_unknown_topologies(run, topology, said):
    code, _, err = run(topology)
    assert code == 2
    assert err.startswith(f"error: {said}") and err.count("\n") == 1


def test_a_mesh_of_another_size(run, four_devices):
    code, _, err = run("v5e:2x2", "learner.mesh.fsdp=3")
    assert code == 2
    assert err.startswith("error: learner.mesh: data 1 x fsdp 3 x tensor 1 does not make 4 devices")


def test_rows_that_do_not_divide(run, four_devices):
    code, _, err = run("v5e:2x2", "learner.micro_batch_rows=6")
    assert code == 2
    assert err.startswith("error: learner.micro_batch_rows is 6, not a multiple of the 4 devices")


def test_without_libtpu(run, monkeypatch):
    from jax.experimental import topologies

    def missing(**_):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert run("v5e:2x2") == (2, "", "error: libtpu is not installed: pip install libtpu\n")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_real_compile_for_tpus(run):
    code, out, err = run("v5e:2x2")
    assert (code, err) == (0, "")
    for phase in ("init", "sync", "rollout", "update: accumulate", "update: apply", "resume"):
        assert cells(out, phase)[-1] == "yes"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_grid_that_the_tpu_does_not_come_in(run):
    code, _, err = run("v5e:3x5")
    assert code == 2
    assert err.startswith("error: --topology v5e:3x5: ") and err.count("\n") == 1
