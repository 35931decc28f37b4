"""Recipes whose evaluation samples from a server, and the engine's mesh in a recipe."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

from envs.http_server import Access
from launch import evaluate
from launch.cli import entry
from models.config import CheckpointError
from models.tiny import tiny_config
from models.tokenizer import ChatTokenizer
from srpo_jax.engine.layout import fewest_devices
from srpo_jax.engine.remote import RemoteEngineError
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.yaml import dump_yaml
from srpo_jax.run import build as run_parts
from srpo_jax.run import evaluate as run_evaluation
from tests import server_cases
from tests.run_cases import EVAL_EPISODES, recipe_content, tiny_recipe
from tests.test_remote_engine import NO_URLS

VERSION = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    recipe_content(folder)
    return folder


@contextmanager
def serving(folder, **options):
    tokenizer = ChatTokenizer(folder / "checkpoint")
    engine = server_cases.engine_of(
        folder / "checkpoint", tokenizer, slots=8, cache_tokens=102, version=VERSION
    )
    with server_cases.serving(engine, tokenizer, **options) as server:
        yield server


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture
def bare(folder, tmp_path):
    """The checkpoint's config and tokenizer, without its weights."""
    bare = tmp_path / "checkpoint"
    bare.mkdir()
    for file in (folder / "checkpoint").iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    return bare


def benchmark(recipe):
    return run_evaluation.evaluate(run_parts.build_evaluation_parts(recipe))


def remote(server, **settings):
    settings = {"url": server.url, "model": "tiny", "version": VERSION} | settings
    return "rollout.remote=" + "{" + ", ".join(f"{k}: {v}" for k, v in settings.items()) + "}"


class TestEvaluation:
    def test_a_server_gives_the_engines_episodes_without_weights(
        self, folder, server, bare, monkeypatch
    ):
        seen = []
        summary = run_evaluation.benchmark_result

        def keep(tasks, episodes, samples):
            seen.append(episodes)
            return summary(tasks, episodes, samples)

        monkeypatch.setattr(run_evaluation, "benchmark_result", keep)
        local = benchmark(tiny_recipe(folder, "learner.mesh.data=1"))["sums"]
        recipe = tiny_recipe(folder, f"model.path={bare}", remote(server))
        there = benchmark(recipe)["sums"]
        assert (there.correct == local.correct).all() and there.failed == local.failed == 0
        assert [len(episodes) for episodes in seen] == [EVAL_EPISODES, EVAL_EPISODES]
        for mine, its in zip(*seen, strict=True):
            assert mine.team.members.keys() == its.team.members.keys() != set()
            for uid, member in mine.team.members.items():
                other = its.team.members[uid]
                assert other.prompt_ids == member.prompt_ids
                assert other.response_ids == member.response_ids
                assert other.stop_reason == member.stop_reason
                np.testing.assert_allclose(other.logps, member.logps, atol=1e-5)
                assert (member.version, other.version) == (0, VERSION)

    def test_lengths_and_vocabulary_are_checked_before_the_server_is_asked(self, folder, bare):
        nobody = "rollout.remote={url: 'http://127.0.0.1:9', model: tiny, retries: 0}"
        too_long = tiny_recipe(
            folder, f"model.path={bare}", nobody, "rollout.response_tokens=1000000"
        )
        with pytest.raises(RecipeError, match=r"rollout\.response_tokens is 1000096, but .* posit"):
            run_parts.build_evaluation_parts(too_long)
        config = json.loads((bare / "config.json").read_text())
        (bare / "config.json").write_text(json.dumps(config | {"vocab_size": 16}))
        recipe = tiny_recipe(folder, f"model.path={bare}", nobody)
        with pytest.raises(
            CheckpointError, match=r"the tokenizer has \d+ ids, the model embeds 16"
        ):
            run_parts.build_evaluation_parts(recipe)

    def test_the_key_of_the_environment_is_sent(self, folder, monkeypatch):
        monkeypatch.setenv("TINY_KEY", "sesame")
        with serving(folder, access=Access(token="sesame")) as server:
            with pytest.raises(RemoteEngineError, match=r"remote_refused.*status 401"):
                run_parts.build_evaluation_parts(tiny_recipe(folder, remote(server)))
            keyed = tiny_recipe(folder, remote(server, api_key_env="TINY_KEY"))
            run_parts.build_evaluation_parts(keyed)

    def test_stale_weights_are_noticed_before_anything_runs(self, folder, server, run):
        assert run(remote(server, version=VERSION + 1)) == (
            2,
            f"remote_stale: {server.url}: answered with policy version {VERSION}, "
            f"expected {VERSION + 1}",
        )

    def test_a_server_that_refuses_the_requests_gives_no_score(self, server, run):
        code, said = run(remote(server), "rollout.response_tokens=60")
        assert code == 1 and said.startswith(
            f"{EVAL_EPISODES} of {EVAL_EPISODES} episodes failed (rollout.max_failed_fraction is "
            f"0.5); the first, e0-t0-r0: remote_refused: {server.url}: model 'tiny': status 400: "
        )

    def test_no_server(self, run):
        code, said = run("rollout.remote={url: 'http://127.0.0.1:9', model: tiny, retries: 0}")
        assert code == 2 and said.startswith("remote_unreachable: http://127.0.0.1:9: ")

    def test_another_model(self, server, run):
        code, said = run(remote(server, model="other"))
        assert (
            code == 2 and said == f"remote_model: {server.url}: no model 'other', it serves: tiny"
        )

    def test_a_key_that_is_not_set(self, server, run, monkeypatch):
        monkeypatch.delenv("TINY_KEY", raising=False)
        code, said = run(remote(server, api_key_env="TINY_KEY"))
        assert code == 2
        assert said == "rollout.remote.api_key_env: TINY_KEY is not set in the environment"


@pytest.fixture
def run(folder, tmp_path, capsys):
    """launch.evaluate with overrides: its exit code and the line it says."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_yaml(recipe_content(folder)))
    out = tmp_path / "evaluation"

    def command(*overrides):
        with pytest.raises(SystemExit) as ended:
            entry(lambda: evaluate.main([str(recipe), *overrides, "--out", str(out)]))
        lines = capsys.readouterr().err.strip().splitlines()
        return ended.value.code, lines[-1].removeprefix("error: ")

    return command


def test_training_with_a_server_is_refused_before_anything_is_loaded(folder, server):
    recipe = tiny_recipe(folder, "model.path=nowhere", remote(server))
    with pytest.raises(RecipeError, match=r"rollout\.remote: training samples with the learner's"):
        run_parts.build_parts(recipe)


def test_settings_of_a_local_engine_are_refused_beside_a_server(folder, server):
    with pytest.raises(RecipeError, match="`cache_tokens` is of an engine in this process"):
        tiny_recipe(folder, remote(server), "rollout.cache_tokens=4096")


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_refused_when_the_recipe_is_read(folder, url):
    for override in (
        f"rollout.remote={{url: '{url}', model: tiny}}",
        f"retriever={{kind: http, urls: ['http://fine:80', '{url}']}}",
    ):
        with pytest.raises(RecipeError, match=r"url.*must be a URL such as http://host:8000"):
            tiny_recipe(folder, override)


class TestMesh:
    def test_training_on_replicas_of_tensor_parallel_engines(self, folder, tmp_path):
        overrides = (f"trainer.out={tmp_path}/run", "trainer.steps=1", "evaluation.every=0")
        parts = run_parts.build_parts(
            tiny_recipe(
                folder, "learner.mesh={data: 2, fsdp: 1, tensor: 2}",
                "rollout.mesh={replicas: 2, tensor: 2}", *overrides,
            )
        )  # fmt: skip
        assert parts.engine.slots == 16
        parts.sync()
        weights = parts.engine._weights.layers[0].q_proj.kernel[...]
        assert len(weights.sharding.device_set) == 4
        jax.block_until_ready(weights)

    def test_a_mesh_that_does_not_fit(self, folder, single_device):
        with pytest.raises(RecipeError, match=r"rollout\.mesh: replicas 3 x tensor 1"):
            run_parts.build_parts(tiny_recipe(folder, "rollout.mesh={replicas: 3, tensor: 1}"))

    def test_replicas_below_one(self, folder):
        with pytest.raises(RecipeError, match="replicas must be at least 1, or -1 for the rest"):
            tiny_recipe(folder, "rollout.mesh={replicas: 0}")

    @pytest.mark.parametrize("size, devices", [(10, 1), (11, 2), (21, 4), (1000, 4)])
    def test_as_few_devices_as_hold_the_weights(self, size, devices):
        config = replace(tiny_config(64), num_heads=8, intermediate_size=64)
        assert fewest_devices(config, 4, size, limit=10) == devices
