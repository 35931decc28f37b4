"""Recipes: YAML values, strict types, nearest keys, inheritance, overrides, presets, plugins."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.advantage import AdvantageConfig
from srpo_jax.objective_config import ObjectiveConfig, names_in, switch_types
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import build_reward, build_workflow, load_object, make_workflow
from srpo_jax.recipe.recipe import WorkflowConfig, load_recipe, parse_recipe
from srpo_jax.recipe.yaml import dump_yaml, inline_yaml, parse_yaml
from tests import error_cases
from tests.recipe_cases import MINIMAL

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(ROOT.glob("configs/*.yaml"))


def recipe(*overrides: str):
    return parse_recipe(parse_yaml(MINIMAL, "minimal"), overrides)


refusal = partial(error_cases.refusal, RecipeError, recipe)


# ---- YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6),
        ("1E+5", 1e5),
        ("3e8", 3e8),
        ("-2.5e-3", -2.5e-3),
        (".5", 0.5),
        ("1.", 1.0),
        ("10", 10),
        ("-3", -3),
        ("0", 0),
        ("1_000", 1000),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-6'", "1e-6"),
        ("no", False),
        ("on", True),
        ("null", None),
    ],
)
def test_scalars(text, value):
    read = parse_yaml(f"x: {text}", "t")["x"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb: 2\na: 3", "t:3: the key 'a' appears twice"),
        ("a: {b: 1, b: 2}", "t:1: the key 'b' appears twice"),
        ("a: [1, 2", "t:1: "),
    ],
)
def test_yaml_errors_name_the_line(text, message):
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "t")
    assert str(caught.value).startswith(message)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=8),
    st.sampled_from(["1e-6", "010", "yes", "2024-01-01", "null", "~", "1_0", "=", "<<", "0o7"]),
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.one_of(plain, st.lists(plain, max_size=3))))
def test_what_is_dumped_reads_back(content):
    assert parse_yaml(dump_yaml(content), "t") == content
    for value in content.values():
        assert parse_yaml(inline_yaml(value), "t") == value


# ---- types and keys ------------------------------------------------------------------------------


def test_public_case_s33():
    """1e-6 is a number, an override also; `no` is false; 010 is never eight; a typo is refused."""
    read = parse_yaml("lr: 1e-6\nresume: no\nseed: 010\nclip_epz: 0.2", "t")
    assert recipe(f"optimizer.lr={inline_yaml(read['lr'])}").optimizer.lr == 1e-6
    assert recipe("optimizer.lr=3e-6").optimizer.lr == 3e-6
    assert recipe("trainer.resume=no").trainer.resume is False
    assert refusal("seed=010") == "recipe: seed: must be a whole number, got '010' (text)"
    for key in ("clip_epz", "objective.clip_epz"):
        assert refusal(f"{key}=0.2") == (
            f"recipe: {key}: unknown key, did you mean `objective.clip_eps`?"
        )


@pytest.mark.parametrize(
    "override, message",
    [
        ("optimizer.lr='1e-6'", "optimizer.lr: must be a number, got '1e-6' (text)"),
        ("optimizer.lr=true", "optimizer.lr: must be a number, got True (true/false)"),
        ("optimizer.lr=.nan", "optimizer.lr: must be a finite number"),
        ("optimizer.lr=0", "optimizer.lr: must be greater than 0"),
        ("trainer.steps=1.5", "trainer.steps: must be a whole number, got 1.5 (number)"),
        ("trainer.resume=1", "trainer.resume: must be true or false, got 1 (whole number)"),
        ("model.dtype=bf16", "model.dtype: must be one of float32, bfloat16, got 'bf16'"),
        ("rollout.slot=3", "rollout.slot: unknown key, did you mean `rollout.slots`?"),
        ("lr=1e-6", "lr: unknown key, did you mean `optimizer.lr`?"),
        ("zzz=1", "zzz: unknown key, `the recipe` has: name, seed, model, workflow"),
        ("optimizer=3", "optimizer: must be a section of keys, got 3 (whole number)"),
        ("rollout={slots: 1}", "rollout.tasks_per_step: this key is missing"),
        ("rollout.group_size=0", "rollout.group_size: must be greater than or equal to 1"),
        ("rollout.temperature=0", "rollout.temperature: must be greater than 0"),
        ("rollout.slots=0", "rollout.slots: must be greater than or equal to 1"),
        ("seed=-1", "seed: must be in 0 .. 2**32 - 1, got -1"),
        ("workflow.name=serch", "workflow.name: must be one of math, search, got 'serch'"),
        ("workflow=search", "the search workflow needs a `retriever` section"),
        (
            "workflow={name: math, path: 'a.py:B'}",
            "workflow: give either `name` (math, search) or `path`",
        ),
        ("learner.mesh.data=-1", "learner.mesh: axis sizes must be at least 1, or one of them -1"),
        ("learner.updates_per_batch=5", "learner.updates_per_batch is 5, more than the 4 episodes"),
        ("advantage.group=[task, rol]", "advantage.group.1: must be one of task, event_type"),
        ("evaluation.every=1", "evaluation.every needs at least one benchmark"),
        ("objective.preset=srpp", "objective: unknown preset 'srpp': did you mean 'srpo'?"),
        ("objective={preset: grpo, set_reduction: sum}", "objective: set_reduction 'sum'"),
        ("objective={clip_eps: 0.2, clip_low: 0.1}", "objective: `clip_eps` sets both sides"),
    ],
)
def test_refusals_name_the_key(override, message):
    assert refusal(override).startswith(f"recipe: {message}")


@pytest.mark.parametrize(
    "override, key",
    [
        ("trainer.out=gs://bucket/run", "trainer.out"),
        ("trainer.out=s3:/bucket/run", "trainer.out"),
        ("model=hf://some/model", "model.path"),
        ("model.path=https://host/model", "model.path"),
        ("tasks.train=gs://bucket/tasks.jsonl", "tasks.train.path"),
        ("tasks.eval={sums: 's3://bucket/tasks'}", "tasks.eval.sums.path"),
        ("reward=gs://bucket/mine.py:reward", "reward.path"),
        ("workflow={path: 'gs://bucket/mine.py:Team'}", "workflow.path"),
        ("retriever={corpus: 'gs://bucket/corpus.jsonl'}", "retriever.corpus"),
    ],
)
def test_a_path_that_is_not_local_is_refused(override, key):
    """As a path, gs://bucket/run is the local folder ./gs:/bucket/run."""
    message = refusal(override)
    assert message.startswith(f"recipe: {key}: ") and "must be a local path" in message


def test_a_run_folder_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert recipe("trainer.out=~/runs/a").run_dir == Path("/home/someone/runs/a")
    assert recipe("trainer.out=C:runs").run_dir == Path("C:runs")


@pytest.mark.parametrize("override", ["seed", "=3", ".a=1", "name.x=3", "a: b"])
def test_malformed_overrides(override):
    assert override in refusal(override)


def test_an_integer_will_do_for_a_number():
    lr = recipe("optimizer.lr=1").optimizer.lr
    assert lr == 1.0 and isinstance(lr, float)


def test_overrides_reach_into_shorthands():
    changed = recipe("model.dtype=bfloat16", "workflow.args.solvers=2", "tasks.train.size=4")
    assert changed.model.path == "some/model" and changed.model.dtype == "bfloat16"
    assert changed.workflow.name == "math" and changed.workflow.args == {"solvers": 2}
    assert changed.tasks.train.name == "arithmetic" and changed.tasks.train.size == 4


# ---- whole recipes -------------------------------------------------------------------------------


def test_a_dump_loads_back_equal():
    for path in RECIPES:
        loaded = load_recipe(path)
        again = parse_recipe(parse_yaml(loaded.dump(), "dump"))
        assert again.model_dump() == loaded.model_dump()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes(path):
    loaded = load_recipe(path)
    assert loaded.name == path.stem
    header = path.read_text().split("\nname:")[0]
    assert f"configs/{path.name}" in header
    assert [word for word in ("Command:", "Machine:", "Expected:") if word not in header] == []
    if loaded.retriever is None or loaded.retriever.kind == "http":
        assert build_workflow(loaded).roles


def test_published_hyper_parameters():
    math = load_recipe(ROOT / "configs/math_qwen3_4b.yaml")
    search = load_recipe(ROOT / "configs/search_qwen2p5_3b.yaml")
    for loaded, expected in ((math, (32, 8, 8192, 4096, 1)), (search, (128, 5, 4096, 800, 5))):
        r = loaded.rollout
        sizes = (r.tasks_per_step, r.group_size, r.prompt_tokens, r.response_tokens)
        assert (*sizes, loaded.learner.updates_per_batch) == expected
        o = loaded.optimizer
        assert (o.lr, o.weight_decay, o.grad_clip) == (1e-6, 0.01, 1.0)
        e = loaded.evaluation
        assert (e.samples, e.temperature, e.top_p) == (16, 0.6, 0.95)
        objective = loaded.objective_config()
        assert (objective.clip_low, objective.clip_high) == (0.2, 0.2)
        assert (objective.ratio_unit, objective.set_reduction) == ("event", "sqrt")
    assert math.advantage_config().invalid_penalty == 0.1
    assert search.advantage_config().invalid_penalty == 0.01
    large = load_recipe(ROOT / "configs/math_qwen3_8b.yaml")
    assert large.model.path == "Qwen/Qwen3-8B" and large.model.dtype == "bfloat16"
    assert large.rollout == math.rollout


def test_base_recipes_merge(tmp_path):
    (tmp_path / "base.yaml").write_text(MINIMAL.replace("math", "{name: math, args: {solvers: 5}}"))
    child = tmp_path / "child.yaml"
    child.write_text(
        "base: base.yaml\nname: child\noptimizer: {b1: 0.8}\nworkflow: {args: {rounds: 3}}"
    )
    loaded = load_recipe(child)
    assert (loaded.name, loaded.optimizer.lr, loaded.optimizer.b1) == ("child", 1e-6, 0.8)
    assert loaded.workflow.args == {"solvers": 5, "rounds": 3}
    assert loaded.folder == tmp_path.resolve()
    # Another kind of workflow, and other tasks, start afresh.
    child.write_text("base: base.yaml\nworkflow: {path: my.py:Team}\ntasks: {train: a.jsonl}")
    loaded = load_recipe(child)
    assert (loaded.workflow.path, loaded.workflow.name, loaded.workflow.args) == (
        "my.py:Team",
        None,
        {},
    )
    assert (loaded.tasks.train.path, loaded.tasks.train.size) == ("a.jsonl", None)


PRESETS_OVER_A_BASE = [
    # (the base's keys, the recipe's, the command line's, the switches that hold)
    ("", "", ["objective.preset=gspo"], {"clip_low": 3e-4, "clip_high": 4e-4}),
    ("", "objective: {preset: gspo}", [], {"clip_low": 3e-4, "ratio_unit": "member"}),
    ("", "objective: {preset: gspo, clip_low: 0.1}", [], {"clip_low": 0.1, "clip_high": 4e-4}),
    ("", "", ["objective.clip_high=0.1", "objective.preset=gspo"], {"clip_high": 0.1}),
    ("", "", ["objective.clip_eps=0.1", "objective={preset: gspo}"], {"clip_high": 0.1}),
    ("", "objective: {preset: gspo}", ["objective.clip_low=0.1"], {"clip_low": 0.1}),
    ("", "", ["objective.preset=srpo"], {"clip_low": 0.2, "set_reduction": "sqrt"}),
    ("objective: {preset: gspo}", "objective: {clip_low: 0.1}", [], {"clip_high": 4e-4}),
    # Either spelling of the clip comes over the other of a lower level.
    ("", "objective: {clip_high: 0.28}", [], {"clip_low": 0.3, "clip_high": 0.28}),
    ("objective: {clip_low: 0.1}", "", ["objective.clip_eps=0.4"], {"clip_low": 0.4}),
    ("", "objective: {clip_eps: null}", [], {"clip_low": 0.2}),
    # Null is a value where None is one.
    ("objective: {preset: dr_mas}", "", [], {"dual_clip": 3.0}),
    ("objective: {preset: dr_mas}", "objective: {dual_clip: null}", [], {"dual_clip": None}),
    ("objective: {preset: dr_mas}", "", ["objective.dual_clip=null"], {"dual_clip": None}),
    ("objective: {dual_clip: null}", "", ["objective.preset=dr_mas"], {"dual_clip": 3.0}),
    ("objective: {sampler_cap: 2.0}", "objective: {sampler_cap: null}", [], {"sampler_cap": None}),
]  # fmt: skip


@pytest.mark.parametrize("base, own, overrides, expected", PRESETS_OVER_A_BASE)
def test_each_level_applies_its_preset_and_then_its_keys(tmp_path, base, own, overrides, expected):
    base = base or "objective: {preset: srpo, clip_eps: 0.3, set_reduction: sum}"
    (tmp_path / "base.yaml").write_text(MINIMAL + base)
    (tmp_path / "own.yaml").write_text("base: base.yaml\n" + own)
    loaded = load_recipe(tmp_path / "own.yaml", overrides)
    config = loaded.objective_config()
    assert {name: getattr(config, name) for name in expected} == expected
    saved = tmp_path / "saved.yaml"
    saved.write_text(loaded.dump())
    assert load_recipe(saved) == loaded and loaded.first_difference(saved) is None
    assert load_recipe(saved).objective_config() == config


def test_a_preset_drops_lower_advantage_switches_but_not_the_penalty():
    content = parse_yaml(
        MINIMAL + "advantage: {group: [role], scale: none, invalid_penalty: 0.01}", "minimal"
    )
    kept = parse_recipe(content, ["objective.clip_eps=0.1"]).advantage_config()
    assert (kept.group, kept.scale, kept.invalid_penalty) == (("role",), "none", 0.01)
    over = ["advantage.std=population", "objective.preset=grpo"]
    fresh = parse_recipe(content, over).advantage_config()
    assert (fresh.group, fresh.scale, fresh.std) == (("task",), "std", "population")
    assert (fresh.statistics, fresh.invalid_penalty) == ("episodes", 0.01)


@pytest.mark.parametrize(
    "overrides, solvers, rounds",
    [
        (["workflow.args.preset=dr_mas"], 1, 2),
        (["workflow.args.rounds=4", "workflow.args.preset=dr_mas"], 1, 4),
        (["workflow={name: math, args: {preset: dr_mas}}"], 1, 2),
        (["workflow.args.solvers=2"], 2, 3),
        (["workflow.args.preset=null"], 3, 2),
    ],
)
def test_a_workflow_preset_drops_lower_arguments(overrides, solvers, rounds):
    content = parse_yaml(
        MINIMAL.replace("math", "{name: math, args: {solvers: 5, rounds: 3}}"), "minimal"
    )
    workflow = build_workflow(parse_recipe(content, overrides))
    assert (workflow.solvers, workflow.rounds) == (solvers, rounds)


def test_another_kind_of_workflow_on_the_command_line_starts_afresh():
    changed = recipe("workflow.args.solvers=2", "workflow.path=a.py:B").workflow
    assert (changed.name, changed.path, changed.args) == (None, "a.py:B", {"solvers": 2})
    content = recipe("workflow.args.solvers=2").model_dump()
    assert parse_recipe(content, ["workflow.path=a.py:B"]).workflow.args == {}


def test_a_recipe_saved_with_null_for_every_switch_left_to_the_preset_still_resumes(tmp_path):
    """So did runs save their recipe before null was a value: dr_mas has its dual clip."""
    loaded = recipe("objective.preset=dr_mas", "objective.clip_eps=0.1")
    content = loaded.model_dump()
    content["objective"] = dict.fromkeys(type(loaded.objective).model_fields) | content["objective"]
    content["advantage"] = dict.fromkeys(type(loaded.advantage).model_fields) | content["advantage"]
    saved = tmp_path / "recipe.yaml"
    saved.write_text(dump_yaml(content))
    assert loaded.first_difference(saved) is None
    assert load_recipe(saved).objective_config().dual_clip == 3.0
    off = recipe("objective.preset=dr_mas", "objective.clip_eps=0.1", "objective.dual_clip=null")
    assert off.first_difference(saved) == "objective.dual_clip is 3.0 there and None here"


@pytest.mark.parametrize("config", [ObjectiveConfig, AdvantageConfig])
def test_a_section_has_a_key_for_each_switch_of_its_dataclass(config):
    """Every name of a choice is taken by the recipe and by the dataclass, and no other by either;
    what the dataclass refuses beyond that, the recipe refuses too, naming section and key."""
    section = "objective" if config is ObjectiveConfig else "advantage"
    keys = set(type(getattr(recipe(), section)).model_fields)
    assert keys - {"preset", "clip_eps"} == {field.name for field in fields(config)}
    for name, hint in switch_types(config).items():
        known = names_in(hint)
        if known is None:
            assert refusal(f"{section}.{name}=word").startswith(f"recipe: {section}.{name}: ")
            continue
        is_list = isinstance(getattr(config(), name), tuple)
        where = f"{section}.{name}.0" if is_list else f"{section}.{name}"
        said = "[unknown]" if is_list else "unknown"
        assert refusal(f"{section}.{name}={said}") == (
            f"recipe: {where}: must be one of {', '.join(known)}, got 'unknown'"
        )
        with pytest.raises(ValueError, match=f"unknown {name} 'unknown': did you mean"):
            config(**{name: ("unknown",) if is_list else "unknown"})


@pytest.mark.parametrize(
    "key, value",
    [
        *[("objective.clip_low", -0.1), ("objective.clip_low", 1.5), ("objective.clip_high", -1)],
        *[("objective.dual_clip", 1), ("objective.sampler_cap", 0), ("objective.length", 0)],
        *[("objective.kl_coef", -1), ("objective.entropy_coef", -1)],
        *[("advantage.scale_floor", -1), ("advantage.invalid_penalty", -1)],
    ],
)
def test_numbers_of_the_wrong_size_are_refused_by_name(key, value):
    section, name = key.split(".")
    message = refusal(f"{key}={value}")
    assert section in message and name in message and f"got {value}" in message


def test_missing_and_circular_files(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: no such file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(RecipeError, match="`base` leads back"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RecipeError, match=r"list\.yaml: must be a mapping of keys, got a list"):
        load_recipe(tmp_path / "list.yaml")


def test_constant_length_defaults_to_the_response_limit():
    assert recipe("objective.preset=dr_grpo").objective_config().length == 16
    chosen = recipe("objective={preset: dr_grpo, length: 5}")
    assert chosen.objective_config().length == 5


def test_advantage_changes_come_over_the_preset():
    config = recipe("objective.preset=dr_mas", "advantage.std=population").advantage_config()
    assert (config.group, config.statistics, config.std) == (("task", "role"), "rows", "population")


def test_what_may_change_when_a_run_is_resumed(tmp_path):
    saved = tmp_path / "recipe.yaml"
    saved.write_text(recipe().dump())
    assert recipe().first_difference(saved) is None
    assert recipe("trainer.steps=9", "trainer.keep=1").first_difference(saved) is None
    assert recipe("optimizer.lr=3e-6").first_difference(saved) == (
        "optimizer.lr is 1e-06 there and 3e-06 here"
    )
    assert recipe("workflow.args.solvers=2").first_difference(saved).startswith("workflow.args")
    saved.write_text(recipe("optimizer.schedule=cosine").dump())
    longer = recipe("optimizer.schedule=cosine", "trainer.steps=9")
    assert longer.first_difference(saved) == "trainer.steps is 3 there and 9 here"


# ---- plugins -------------------------------------------------------------------------------------

TEAM = """
import helper_of_my_team
class MyTeam:
    roles = ("a",)
    def __init__(self, size=1, retriever=None):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size, self.retriever = size, retriever
    async def run(self, task, team): ...
def reward(task, outcome):
    return 1.0
"""


@pytest.fixture
def team_folder(tmp_path):
    (tmp_path / "my_team.py").write_text(TEAM)
    (tmp_path / "helper_of_my_team.py").write_text("")
    (tmp_path / "recipe.yaml").write_text(
        MINIMAL.replace("workflow: math", "workflow: {path: my_team.py:MyTeam, args: {size: 2}}")
        + "reward: my_team.py:reward\n"
    )
    return tmp_path


def test_a_users_class_beside_its_recipe(team_folder):
    loaded = load_recipe(team_folder / "recipe.yaml")
    workflow = build_workflow(loaded, retriever="found")
    assert (workflow.size, workflow.retriever) == (2, "found")
    assert type(workflow) is load_object("my_team.py:MyTeam", team_folder)
    assert build_reward(loaded)(None, None) == 1.0


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["workflow.args.sise=3"], "workflow.args.sise: unknown argument, did you mean `size`?"),
        (["workflow.args.size=0"], "workflow.args: size must be at least 1"),
        (["workflow.path=my_team.py:MyTaem"], "has no 'MyTaem': did you mean `MyTeam`?"),
        (["workflow.path=no.py:MyTeam"], "no.py: no such file"),
        (["workflow.path=my_team"], "must be file.py:Name, got 'my_team'"),
    ],
)
def test_plugin_errors(team_folder, overrides, message):
    loaded = load_recipe(team_folder / "recipe.yaml", overrides)
    with pytest.raises(RecipeError) as caught:
        build_workflow(loaded)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "source, place",
    [
        ("x = 1\nimport no_such_module\n", "my_bad.py:2: ModuleNotFoundError"),
        ("x = 1\n\ndef f(:\n", "my_bad.py:3: SyntaxError"),
        ("def f():\n    return 1 / 0\nf()\n", "my_bad.py:2: ZeroDivisionError"),
    ],
)
def test_a_file_that_fails_to_load_names_its_line(tmp_path, source, place):
    (tmp_path / "my_bad.py").write_text(source)
    with pytest.raises(RecipeError) as caught:
        load_object("my_bad.py:f", tmp_path)
    assert place in str(caught.value)


def test_presets_of_built_in_workflows():
    config = WorkflowConfig(name="math", args={"preset": "dr_mas", "rounds": 3})
    workflow = make_workflow(config, None, lambda: None)
    assert (workflow.solvers, workflow.rounds, workflow.aggregator) == (1, 3, False)
    with pytest.raises(RecipeError, match=r"workflow\.args: preset must be one of dr_mas"):
        make_workflow(WorkflowConfig(name="math", args={"preset": "dr_max"}), None, lambda: None)
    with pytest.raises(RecipeError, match=r"workflow\.args\.solver: .*did you mean `solvers`\?"):
        make_workflow(WorkflowConfig(name="math", args={"solver": 2}), None, lambda: None)


def test_the_dump_is_plain_yaml():
    assert json.loads(json.dumps(recipe().model_dump())) == parse_yaml(recipe().dump(), "dump")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.warmup_steps=12", "learner.epochs=4"],
            "optimizer.warmup_steps is 12, but the run has 12 optimiser steps in all",
        ),
        (
            ["optimizer.warmup_steps=100", "optimizer.schedule=cosine"],
            "optimizer.warmup_steps is 100, but the run has 3 optimiser steps in all",
        ),
        (
            ["rollout.truncated=penalise", "advantage.invalid_penalty=0.0"],
            "rollout.truncated is penalise, but advantage.invalid_penalty is 0",
        ),
        (
            ["objective.preset=rloo", "learner.updates_per_batch=2"],
            "objective: 'rloo' with ratio_unit 'none' takes one update of a batch",
        ),
        (["objective.preset=magrpo", "learner.epochs=3"], "here it takes 3 (learner.updates"),
        (["objective.preset=reinforce", "objective.clip_eps=0.2"], "objective: a clip bounds a"),
        (["objective.preset=magrpo", "objective.clip_high=0.3"], "bound a ratio; ratio_unit"),
        (["objective.preset=magrpo", "objective.dual_clip=3.0"], "dual_clip bounds a ratio"),
        (
            ["objective.kl_coef=0.1", "objective.kl_estimator=k1"],
            "objective: kl_estimator 'k1' is no penalty",
        ),
        (["objective.kl_estimator=k2"], "objective: kl_estimator acts with kl_coef, which is 0"),
        (["objective.length=4096"], "objective: length acts with loss_reduction"),
        (["objective.preset=dr_grpo", "advantage.std=sample"], "advantage: std acts with scale"),
        (["optimizer.muon_momentum=0.9"], "optimizer: muon_momentum needs `name: muon`"),
    ],
)
def test_settings_that_cannot_act_together_are_refused(overrides, message):
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.warmup_steps=11", "learner.epochs=4"],
        ["optimizer.warmup_steps=1", "trainer.steps=1"],
        ["optimizer.warmup_steps=5", "trainer.steps=0"],
        ["rollout.truncated=penalise"],
        ["objective.preset=magrpo"],
        ["objective.kl_coef=0.1", "objective.kl_estimator=k2"],
        ["objective.preset=grpo", "advantage.scale=none"],
    ],
)
def test_settings_that_do_act_together_are_taken_and_load_back(overrides):
    read = recipe(*overrides)
    assert parse_recipe(parse_yaml(read.dump(), "saved")) == read
