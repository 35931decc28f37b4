"""Times an async HTTP tool alone and beside the engine's decode steps.

A server in a process of its own answers after a fixed time; a coroutine asks it again and again,
first alone, then while every slot of an engine decodes for other coroutines of the same event loop.
The last line is JSON: burst_ms (one dispatch of decode steps), alone_ms and beside_ms (medians of
the tool's time), and ratio (beside over alone).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.harness import positive
from benchmarks.timing import elapsed, print_json
from launch.cli import Parser, entry

if TYPE_CHECKING:
    from srpo_jax.engine import Engine

BURST = 16  # decode steps
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 100
SERVER = """
import asyncio, contextlib

async def serve(reader, writer):
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\\r\\n\\r\\n"):
            await asyncio.sleep({seconds})
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
            await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.async_tool", __doc__, "python -m benchmarks.async_tool --calls 40")
    parser.add_argument(
        "--model", default="assets/tiny_team", metavar="FOLDER", help="default: assets/tiny_team"
    )
    parser.add_argument("--slots", type=positive, default=64, help="of the engine (default: 64)")
    parser.add_argument("--calls", type=positive, default=40, help="of the tool (default: 40)")
    parser.add_argument(
        "--answer-ms", type=positive, default=50, help="time of the server (default: 50)"
    )
    args = parser.parse_args(argv)

    import jax.numpy as jnp

    from models.convert import load_hf
    from models.qwen import split_params
    from srpo_jax.engine import Engine

    model, config = load_hf(args.model, dtype=jnp.float32)
    engine = Engine(
        config, *split_params(model), vocab_size=config.vocab_size, stop_ids=(), slots=args.slots,
        cache_tokens=PROMPT_TOKENS + RESPONSE_TOKENS, burst=BURST,
    )  # fmt: skip
    with answering(args.answer_ms / 1e3) as url:
        found = asyncio.run(measure_tool(engine, url, args.calls))
    print_json({name: round(value, 3) for name, value in found.items()})
    return 0


@contextlib.contextmanager
def answering(seconds: float) -> Iterator[str]:
    """The URL of a server that answers every request after ``seconds``."""
    command = [sys.executable, "-c", SERVER.format(seconds=seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def measure_tool(engine: Engine, url: str, calls: int) -> dict[str, float]:
    """Medians of ``calls`` calls of the tool alone, and as many beside the engine."""
    import httpx

    from srpo_jax.engine import Request, request_key
    from srpo_jax.engine.async_engine import EngineThread

    def request(number: int) -> Request:
        return Request([number % 50] * PROMPT_TOKENS, request_key(number), RESPONSE_TOKENS)

    async def tool_ms(client: httpx.AsyncClient) -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            (await client.get(url)).raise_for_status()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    async def decode(thread: EngineThread, first: int) -> None:
        for turn in range(10**6):
            await thread.generate([request(first + turn * engine.slots)])

    batch = [request(slot) for slot in range(engine.slots)]
    engine.run(batch)  # compiles
    steps = engine.stats["decode_steps"]
    step_ms = 1e3 * elapsed(lambda: engine.run(batch)) / (engine.stats["decode_steps"] - steps)
    async with httpx.AsyncClient(trust_env=False) as client, EngineThread(engine) as thread:
        await client.get(url)  # connects
        alone = await tool_ms(client)
        others = [asyncio.create_task(decode(thread, slot)) for slot in range(engine.slots)]
        await asyncio.sleep(4 * BURST * step_ms / 1e3)
        beside = await tool_ms(client)
        for other in others:
            assert not other.done()
            other.cancel()
        await asyncio.wait(others)
    return {
        "burst_ms": BURST * step_ms, "alone_ms": alone, "beside_ms": beside,
        "ratio": beside / alone,
    }  # fmt: skip


if __name__ == "__main__":
    entry(main)
