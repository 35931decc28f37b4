"""Times a whole decode step of the engine with and without top-p.

Random float32 weights of a published shape, every row at the start of its response, dispatches
with and without top-p interleaved. The last line is JSON: plain_ms and top_p_ms (medians, of
one step), and ratio (median over the pairs, top-p over plain).
"""

from __future__ import annotations

import statistics

from benchmarks.harness import positive
from benchmarks.timing import elapsed, print_json
from launch.cli import Parser, entry


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.sampling", __doc__, "python -m benchmarks.sampling --pairs 9")
    parser.add_argument(
        "--model", default="Qwen/Qwen3-0.6B",
        help="hub name whose shape is taken; nothing is downloaded (default: Qwen/Qwen3-0.6B)",
    )  # fmt: skip
    parser.add_argument("--rows", type=positive, default=32, help="requests at once (default: 32)")
    parser.add_argument("--steps", type=positive, default=8, help="of one dispatch (default: 8)")
    parser.add_argument(
        "--pairs", type=positive, default=5, help="timed pairs of dispatches (default: 5)"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="(default: 0.95)")
    args = parser.parse_args(argv)
    if not 0 < args.top_p < 1:
        parser.error(f"--top-p must be between 0 and 1, got {args.top_p:g}")

    from flax import nnx

    from models.known_configs import find_architecture
    from models.qwen import Qwen, split_params
    from srpo_jax.engine import Engine, Request, request_key

    architecture = find_architecture(args.model)
    engine = Engine(
        architecture.config, *split_params(Qwen(architecture.config, rngs=nnx.Rngs(0))),
        vocab_size=architecture.tokenizer_ids, stop_ids=(), slots=args.rows,
        cache_tokens=args.steps + 1, burst=args.steps,
    )  # fmt: skip

    def step_ms(top_p: float) -> float:
        """Milliseconds of one decode step, over one dispatch; a prompt of one id has no prefill."""
        requests = [
            Request([row], request_key(row), args.steps, top_p=top_p) for row in range(args.rows)
        ]
        return 1e3 * elapsed(lambda: engine.run(requests)) / args.steps

    step_ms(1.0), step_ms(args.top_p)  # compiles
    pairs = [(step_ms(1.0), step_ms(args.top_p)) for _ in range(args.pairs)]
    plain, cut = (statistics.median(times) for times in zip(*pairs, strict=True))
    found = {
        "plain_ms": plain, "top_p_ms": cut,
        "ratio": statistics.median(cut / plain for plain, cut in pairs),
    }  # fmt: skip
    print_json({name: round(value, 3) for name, value in found.items()})
    return 0


if __name__ == "__main__":
    entry(main)
