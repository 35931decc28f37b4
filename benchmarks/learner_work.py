"""The work that every learner of the benchmark does, and how it is timed. Needs numpy alone.

One on-policy update with AdamW (learning rate 1e-6) of a Qwen3-shaped model with random float32
weights, over ragged rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# 54.5 M parameters; head and embedding are tied.
VOCAB, WIDTH, MLP, LAYERS = 32_768, 512, 1536, 12
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
ROPE_THETA, NORM_EPS = 1e6, 1e-6
LONGEST_PROMPT, LONGEST_RESPONSE = 256, 256
LEARNING_RATE, CLIP = 1e-6, 0.2
MATMUL = 2048  # side of the square product that measures the peak
MATMULS = 5  # of them in one measurement


@dataclass(frozen=True)
class Rows:
    """``prompts`` and ``responses``: one int32 array of token ids for each row; advantages [R]."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    advantages: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def real_tokens(self) -> int:
        """Prompt and response tokens, padding left out."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))


def make_rows(count: int) -> Rows:
    """``count`` rows from seed 0: prompts of 64 to 256 tokens, responses of 16 to 256."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(64, LONGEST_PROMPT + 1, count)
    responses = rng.integers(16, LONGEST_RESPONSE + 1, count)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(10, 32_000, length, dtype=np.int32)

    return Rows(
        [tokens(n) for n in prompts],
        [tokens(n) for n in responses],
        rng.normal(size=count).astype(np.float32),
    )


def measure(
    step: Callable[[], object],
    matmul: Callable[[], object],
    *,
    parameters: int,
    tokens: int,
    steps: int,
) -> dict[str, float]:
    """Times ``steps`` steps after one that compiles, with the matmul peak between them.

    ``step`` and ``matmul`` return when their work is done; ``matmul`` multiplies two square float32
    matrices of MATMUL rows. The machine's speed drifts, so the peak is measured before every step
    and both are medians. Peak memory is that of the whole process so far.
    """
    step(), matmul()
    seconds, peaks = [], []
    for _ in range(steps):
        start = time.perf_counter()
        for _ in range(MATMULS):
            matmul()
        peaks.append(MATMULS * 2 * MATMUL**3 / (time.perf_counter() - start))
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    second, peak = statistics.median(seconds), statistics.median(peaks)
    return {
        "seconds": second,
        "tokens_per_second": tokens / second,
        "peak_gflops": peak / 1e9,
        "matmul_share": 6 * parameters * tokens / second / peak,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # from KiB
        "parameters": parameters,
        "tokens": tokens,
    }


def run_learner(work: Callable[[Rows, int], dict[str, float]]) -> None:
    """The main function of a learner's program: arguments in, one JSON line out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(work(make_rows(args.rows), args.steps)), flush=True)
