"""The command that serves a model: what it builds, announces and ends with."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from launch import serve, serve_retriever
from launch.cli import entry
from srpo_jax.engine import Engine
from srpo_jax.engine import server as completion_server
from srpo_jax.recipe.yaml import dump_yaml
from srpo_jax.run import build_engine as run_engine
from tests import server_cases
from tests.run_cases import recipe_content
from tests.server_cases import (
    ROOT,
    TINY,
    ask,
    new_request,
    remote_of,
)

tokenizer, server = server_cases.tokenizer, server_cases.server


@pytest.mark.parametrize(
    "option",
    [("--slots", "0"), ("--cache-tokens", "0"), ("--port", "70000"), ("--tensor", "0")],
)
def test_bad_options_are_one_line(capsys, option):
    with pytest.raises(SystemExit) as exit_:
        serve.main([str(TINY), *option])
    assert exit_.value.code == 2
    assert f"{option[0]} must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, said",
    [
        (("--replicas", "8"), "replicas 8 x tensor 1 does not make 4 devices"),
        (("--tensor", "3"), "tensor 3 does not divide the model's 4 query heads"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(capsys, options, said):
    with pytest.raises(SystemExit) as exit_:
        serve.main([str(TINY), *options, "--cache-tokens", "64"])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_taken_port_is_one_line(server, capsys, monkeypatch):
    """Before anything is loaded."""
    monkeypatch.setattr("models.convert.load_hf", None)
    port = server.url.rpartition(":")[2]
    with pytest.raises(SystemExit) as exit_:
        serve.main([str(TINY), "--port", port, "--slots", "1", "--cache-tokens", "64"])
    assert exit_.value.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_command_serves_and_ends_cleanly():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "launch.serve", str(TINY), "--port", "0", "--slots", "1"]
    command += ["--replicas", "2"]
    env["JAX_NUM_CPU_DEVICES"] = "2"
    with subprocess.Popen(
        [*command, "--cache-tokens", "64", "--policy-version", "3"], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            line = process.stdout.readline()
            assert "2 slots of 64 tokens, POST http://127.0.0.1:" in line
            url = line.split("POST ")[1].strip().removesuffix("/v1/completions")
            engine = remote_of(url, model=str(TINY), version=3)
            engine.check()
            assert len(engine.run([new_request(max_tokens=4)])[0].ids) <= 4
        finally:
            process.terminate()  # a background job of a plain shell ignores SIGINT
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


def served(*options):
    """The engine that the command builds for its arguments."""
    return served_as(*options)[0]


def served_as(*options):
    """That engine, and the model's name."""
    found = []

    class Stop(Exception):
        pass

    def keep(engine, tokenizer, name, *_):
        found.append((engine, name))
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion_server, "CompletionServer", keep)
        with pytest.raises(Stop):
            serve.main([*map(str, options), "--port", "0"])
    return found[0]


def cache_tokens(engine):
    """Of its cache, but for the page that nobody holds."""
    pages, _, page, _ = engine._state.cache[0].v.shape
    return (pages - 1) * page


def live_bytes():
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays())


@pytest.fixture
def recipe(tmp_path):
    content = recipe_content(tmp_path)
    content["rollout"] |= {
        "dtype": "bfloat16", "cache_tokens": 512, "slots": 3, "burst": 5,
        "mesh": {"replicas": 1, "tensor": 1},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"

    def write(**changes):
        content["rollout"] |= changes
        file.write_text(dump_yaml(content))
        return file

    return write


class TestWhatIsBuilt:
    def test_has_the_recipes_settings(self, recipe):
        engine = served(recipe())
        assert (engine.dtype, engine.slots, engine.cache_tokens) == (jnp.bfloat16, 3, 96 + 6)
        assert cache_tokens(engine) == 512
        assert engine.stats["decode_steps"] == 1  # the first step is taken

    def test_the_model_is_called_as_the_user_calls_it(self, monkeypatch):
        monkeypatch.chdir(ROOT)
        assert served_as("assets/tiny_team/", "--cache-tokens", 64)[1] == "assets/tiny_team"

    def test_options_take_precedence(self, recipe):
        engine = served(recipe(), "--dtype", "float32", "--slots", "2", "--cache-tokens", "64")
        assert (engine.dtype, engine.slots, engine.cache_tokens) == (jnp.float32, 2, 64)

    def test_the_cache_takes_what_memory_there_is(self, recipe, monkeypatch):
        """As in a run: room for every slot at full length only where there is so much memory."""
        file = recipe(cache_tokens=None, slots=64)
        whole = served(file)
        assert cache_tokens(whole) > 64 * (96 + 6)
        layers, (_, heads, _, width) = len(whole._state.cache), whole._state.cache[0].v.shape
        one = 2 * layers * heads * width * 2  # keys and values in bfloat16
        weights = sum(a.nbytes for a in jax.tree.leaves(whole._weights))
        monkeypatch.setattr(run_engine, "free_bytes", lambda devices: weights + 2_000 * one)
        assert cache_tokens(served(file)) == pytest.approx(0.85 * 2_000, abs=64)

    def test_too_little_memory_is_one_line(self, recipe, monkeypatch, capsys):
        monkeypatch.setattr(run_engine, "free_bytes", lambda devices: 0)
        with pytest.raises(SystemExit) as ended:
            served(recipe(cache_tokens=None))
        assert ended.value.code == 2
        assert "a cache of 0 tokens is too small: one request of 102" in capsys.readouterr().err

    def test_the_model_is_held_once(self, recipe):
        before = live_bytes()
        engine = served(recipe())
        own = jax.tree.leaves((engine._weights, engine._state))
        size = sum(a.nbytes for a in own)
        del own
        assert size <= live_bytes() - before <= 1.02 * size

    def test_a_checkpoint_on_a_cpu_is_decoded_in_float32(self):
        assert served(TINY, "--cache-tokens", 64).dtype == jnp.float32

    def test_free_memory_of_a_cpu_is_shared_by_its_devices(self):
        one, four = (run_engine.free_bytes(jax.devices()[:n]) for n in (1, 4))
        assert one is None or four == pytest.approx(one / 4, rel=0.2)


def fail_in_step(monkeypatch, number):
    """The engine's device fails in its ``number``-th step."""
    step, taken = Engine.step, itertools.count(1)

    def failing(engine):
        if next(taken) >= number:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nallocating 3 GiB")
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)


def ended(capsys, *options):
    """The command's exit code, output and error output."""
    with pytest.raises(SystemExit) as exit_:
        entry(lambda: serve.main([str(TINY), "--cache-tokens", "64", *options]))
    return exit_.value.code, *capsys.readouterr()


def test_a_server_whose_first_step_fails_is_not_announced(monkeypatch, capsys):
    fail_in_step(monkeypatch, 1)
    code, out, err = ended(capsys, "--port", "0")
    assert (code, out) == (1, "")
    assert err == "error: the engine cannot start: RESOURCE_EXHAUSTED: out of memory\n"


def test_an_engine_that_breaks_ends_the_command_after_its_clients_have_heard(monkeypatch, capsys):
    fail_in_step(monkeypatch, 3)  # the first warms up, the second is the first request's
    port, said = free_port(), []

    def client():
        address = SimpleNamespace(url=f"http://127.0.0.1:{port}")
        while True:
            try:
                said.append(ask(address, "POST", "/v1/completions", BODY))
            except OSError:
                if said:
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    code, out, err = ended(capsys, "--port", str(port))
    thread.join(10)
    assert code == 1 and f":{port}/v1/completions" in out
    assert err == "error: the engine has failed: RESOURCE_EXHAUSTED: out of memory\n"
    statuses = [status for status, _ in said]
    assert statuses[0] == 200 and set(statuses[1:]) == {500}
    assert "RESOURCE_EXHAUSTED" in said[-1][1]["error"]["message"]


BODY = {"prompt": [30], "max_tokens": 1}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_servers_have_default_ports_of_their_own():
    assert serve.DEFAULT_PORT != serve_retriever.DEFAULT_PORT
