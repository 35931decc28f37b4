"""The work that every learner of the benchmark does, and how it is timed. Needs numpy alone.

One on-policy update with AdamW (learning rate 1e-6) of a Qwen3-shaped model with random float32
weights, over ragged rows.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.timing import elapsed

# 54.5 M parameters; head and embedding are tied.
VOCAB, WIDTH, MLP, LAYERS = 32_768, 512, 1536, 12
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
ROPE_THETA, NORM_EPS = 1e6, 1e-6
MAX_PROMPT, MAX_RESPONSE = 256, 256
LEARNING_RATE, CLIP = 1e-6, 0.2
MATMUL = 2048  # side of the square product that measures the peak
MATMULS = 5  # of them in one measurement


@dataclass(frozen=True)
class RaggedRows:
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


def make_rows(count: int) -> RaggedRows:
    """``count`` rows from seed 0: prompts of 64 to 256 tokens, responses of 16 to 256."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(64, MAX_PROMPT + 1, count)
    responses = rng.integers(16, MAX_RESPONSE + 1, count)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(10, 32_000, length, dtype=np.int32)

    return RaggedRows(
        [tokens(n) for n in prompts],
        [tokens(n) for n in responses],
        rng.normal(size=count).astype(np.float32),
    )


def measure_updates(
    step: Callable[[], object],
    matmul: Callable[[], object],
    *,
    parameters: int,
    tokens: int,
    steps: int,
) -> dict[str, float]:
    """Times updates after one that compiles, with the matmul peak between them.

    The machine's speed drifts, so the peak is measured before every update and both are medians.

    Args:
        step: One update; returns when it is done.
        matmul: Multiplies two square float32 matrices of MATMUL rows; returns when it is done.
        parameters: Of the model.
        tokens: Real tokens of an update.
        steps: Timed updates.

    Returns:
        Seconds of an update, tokens per second, the matmul peak in GFLOP/s, the share of it that
        the update reaches, and the peak memory of the process so far in GiB.
    """

    def matmuls() -> None:
        for _ in range(MATMULS):
            matmul()

    step(), matmul()
    seconds, peaks = [], []
    for _ in range(steps):
        peaks.append(MATMULS * 2 * MATMUL**3 / elapsed(matmuls))
        seconds.append(elapsed(step))
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
