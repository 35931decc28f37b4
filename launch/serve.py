"""Serves a model over HTTP by the OpenAI completions protocol, token ids and log-probs included.

POST /v1/completions, GET /v1/models and GET /health answer this machine alone unless --host says
otherwise, and clients without a token unless --token-env names one. Ctrl-C ends it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cli import Parser, entry
from launch.http_options import add_http_arguments, open_http

if TYPE_CHECKING:
    from models.tokenizer import ChatTokenizer
    from srpo_jax.engine import Engine
    from srpo_jax.run.build_engine import EngineSettings

DEFAULT_PORT = 8000  # launch.serve_retriever has 8100
DEFAULT_SLOTS = 8
DEFAULT_CACHE_TOKENS = 4096


def main(argv: list[str] | None = None) -> int:
    parser = Parser("launch.serve", __doc__, "python -m launch.serve Qwen/Qwen3-0.6B --port 8000")
    parser.add_argument(
        "model",
        metavar="MODEL_OR_RECIPE",
        help="a Hugging Face folder or hub name; or a recipe (.yaml), whose model and rollout "
        "settings are then the defaults",
    )
    add_http_arguments(parser, DEFAULT_PORT)
    parser.add_argument(
        "--slots", type=int, help=f"requests at once on each replica (default {DEFAULT_SLOTS})"
    )
    parser.add_argument(
        "--replicas", type=int, help="engines beside each other (default: the recipe's, or 1)"
    )
    parser.add_argument(
        "--tensor", type=int, help="devices of each of them (default: the recipe's, or 1)"
    )
    parser.add_argument(
        "--cache-tokens", type=int,
        help=f"longest prompt and response together (default {DEFAULT_CACHE_TOKENS}, or what the "
        "model was made for)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"),
        help="default: the recipe's, or the checkpoint's own (on a CPU float32)",
    )  # fmt: skip
    parser.add_argument(
        "--policy-version", type=int, default=0, metavar="N",
        help="version of the weights that answers name (default 0)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    for name in ("slots", "replicas", "tensor", "cache_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    from srpo_jax.engine.server import CompletionServer

    name, revision, settings = args.model, None, None
    if name.endswith((".yaml", ".yml")):
        from srpo_jax.recipe.recipe import load_recipe
        from srpo_jax.run.build_engine import engine_settings

        recipe = load_recipe(name)
        name, path, revision = recipe.model.path, recipe.checkpoint, recipe.model.revision
        settings = engine_settings(recipe)
    else:
        from srpo_jax.recipe.paths import find_model

        path = find_model(name)
    listener, access = open_http(parser, args)  # first: a model may take minutes to load
    with listener:
        engine, tokenizer = start_engine(parser, args, path, revision, settings)
        server = CompletionServer(engine, tokenizer, str(Path(name)), listener, access)
        print(
            f"{server.name} in {engine.dtype}, {engine.slots} slots of {engine.cache_tokens} "
            f"tokens, POST {server.url}/v1/completions",
            flush=True,
        )
        try:
            server.run()
        except KeyboardInterrupt:
            pass
    return 0


def start_engine(
    parser: Parser,
    args: Namespace,
    path: str,
    revision: str | None,
    settings: EngineSettings | None,
) -> tuple[Engine, ChatTokenizer]:
    """An engine that has taken its first step, by a recipe's ``settings`` (None: the defaults) and
    what ``args`` say. The loaded model ends with this call: the engine's copy stays alone.

    Raises:
        EngineFailed: Its first step failed.
    """
    import jax
    import jax.numpy as jnp

    from models.convert import load_hf
    from models.qwen import split_params
    from models.tokenizer import ChatTokenizer
    from srpo_jax.engine import Request
    from srpo_jax.engine.layout import engine_mesh
    from srpo_jax.engine.server import EngineFailed
    from srpo_jax.learner.sharding import make_mesh
    from srpo_jax.run.build_engine import EngineSettings, MeshError, build_engine

    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    dtype = args.dtype and jnp.dtype(args.dtype)
    dtype = dtype or (settings.dtype if settings else jnp.dtype("float32") if on_cpu else None)
    mesh = settings.mesh if settings else None
    axes = {name: value for name in ("replicas", "tensor") if (value := getattr(args, name))}
    if axes or settings is None:
        mesh = {"replicas": 1, "tensor": 1, **(mesh or {}), **axes}
    if mesh and mesh["replicas"] != -1:
        devices = devices[: mesh["replicas"] * mesh["tensor"]]
    try:
        engine_mesh(devices, **(mesh or {"replicas": -1}))
    except ValueError as error:
        parser.error(f"--replicas, --tensor: {error}")
    tokenizer = ChatTokenizer(path, revision=revision)
    model, config = load_hf(path, dtype=dtype, mesh=make_mesh(1, -1, 1, devices), revision=revision)
    if settings is None:
        leaves = jax.tree.leaves(split_params(model)[1])
        settings = EngineSettings(
            DEFAULT_SLOTS, min(DEFAULT_CACHE_TOKENS, config.max_position),
            jnp.result_type(*(leaf.dtype for leaf in leaves)),
        )  # fmt: skip
    settings = replace(
        settings, slots=args.slots or settings.slots, longest=args.cache_tokens or settings.longest,
        dtype=dtype or settings.dtype, mesh=mesh,
    )  # fmt: skip
    if settings.longest > config.max_position:
        parser.error(
            f"--cache-tokens is {settings.longest}, {path} was made for {config.max_position}"
        )
    try:
        engine = build_engine(settings, model, tokenizer, devices, version=args.policy_version)
        engine.run([Request([0], (0, 0), 1)])  # compiles
    except MeshError as error:
        parser.error(f"--replicas, --tensor: {error}")
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:  # a device's, such as one whose memory is full
        raise EngineFailed("the engine cannot start", error) from error
    return engine, tokenizer


if __name__ == "__main__":
    entry(main)
