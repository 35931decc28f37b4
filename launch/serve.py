"""Serves a model over HTTP by the OpenAI completions protocol, token ids and log-probs included.

POST /v1/completions, GET /v1/models and GET /health answer this machine alone unless --host says
otherwise; there is no password. Ctrl-C ends it.
"""

from __future__ import annotations

import signal
from pathlib import Path

from launch.cli import Parser, entry

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
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument(
        "--slots", type=int, help=f"requests at once on each replica (default {DEFAULT_SLOTS})"
    )
    parser.add_argument("--replicas", type=int, help="engines beside each other (default 1)")
    parser.add_argument("--tensor", type=int, help="devices of each of them (default 1)")
    parser.add_argument(
        "--cache-tokens", type=int,
        help=f"longest prompt and response together (default {DEFAULT_CACHE_TOKENS}, or what the "
        "model was made for)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: the recipe's, or float32"
    )
    parser.add_argument(
        "--policy-version", type=int, default=0, metavar="N",
        help="version of the weights that answers name (default 0)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    for name in ("slots", "replicas", "tensor", "cache_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, got {args.port}")

    path, revision, dtype = args.model, None, args.dtype or "float32"
    slots, cache_tokens, burst = args.slots, args.cache_tokens, 16
    axes, budget, stored = {"replicas": 1, "tensor": 1}, None, None
    if path.endswith((".yaml", ".yml")):
        from srpo_jax.config import load_recipe

        recipe = load_recipe(path)
        path, revision = recipe.model.path, recipe.model.revision
        rollout = recipe.rollout
        dtype = args.dtype or rollout.dtype or recipe.model.dtype
        burst, budget, stored = rollout.burst, rollout.cache_tokens, rollout.stored_tokens
        slots = slots or rollout.slots
        cache_tokens = cache_tokens or rollout.prompt_tokens + rollout.response_tokens
        axes = rollout.mesh.model_dump() if rollout.mesh else axes
    axes |= {name: value for name in axes if (value := getattr(args, name)) is not None}

    import jax
    import jax.numpy as jnp

    from models.convert import load_hf
    from models.qwen import split_params
    from models.tokenizer import ChatTokenizer
    from srpo_jax.completion_server import CompletionServer
    from srpo_jax.engine import Engine, Request
    from srpo_jax.engine.layout import engine_mesh
    from srpo_jax.sharding import make_mesh

    devices = jax.local_devices()
    if axes["replicas"] != -1:
        devices = devices[: axes["replicas"] * axes["tensor"]]
    try:
        mesh = engine_mesh(devices, **axes)
    except ValueError as error:
        parser.error(f"--replicas, --tensor: {error}")
    tokenizer = ChatTokenizer(path, revision=revision)
    model, config = load_hf(
        path, dtype=jnp.dtype(dtype), mesh=make_mesh(1, -1, 1, devices), revision=revision
    )
    cache_tokens = cache_tokens or min(DEFAULT_CACHE_TOKENS, config.max_position)
    if cache_tokens > config.max_position:
        parser.error(f"--cache-tokens is {cache_tokens}, {path} was made for {config.max_position}")
    try:
        engine = Engine(
            config, *split_params(model), mesh=mesh,
            vocab_size=tokenizer.vocab_size, stop_ids=tokenizer.stop_ids,
            slots=slots or DEFAULT_SLOTS, cache_tokens=cache_tokens, burst=burst,
            budget_tokens=budget, store_tokens=stored, dtype=jnp.dtype(dtype),
            tokenizer=tokenizer, version=args.policy_version,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    try:
        server = CompletionServer(
            engine, tokenizer, str(Path(path)), host=args.host, port=args.port
        )
    except OSError as error:
        parser.error(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        engine_ready = server.pump.submit(Request([0], (0, 0), 1))  # compiles
        engine_ready.done.wait()
        print(
            f"{server.name}, {engine.slots} slots of {engine.cache_tokens} tokens, "
            f"POST {server.url}/v1/completions",
            flush=True,
        )
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    entry(main)
