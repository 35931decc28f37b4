"""The work that every engine of the benchmark does. Needs numpy alone.

Uniform: 32 prompts of 128 tokens, 128 new tokens each, sampled, with log-probs. Workload: 16 tasks
of 4 rollouts of 3 members; the 12 requests of a task share one prompt of 192 tokens, and responses
have lengths that are fixed in advance (8 to 256, long-tailed), so that every engine does the same.
The model is that of ``learner_work``: 54.5 M random float32 weights.
"""

from __future__ import annotations

import numpy as np

ROWS, PROMPT, NEW = 32, 128, 128
TASKS, REQUESTS_PER_TASK, TASK_PROMPT, MAX_NEW = 16, 12, 192, 256
FIRST_ID, LAST_ID = 10, 32_000  # of the prompts: no peer's special id


def uniform_prompts(seed: int) -> list[list[int]]:
    """ROWS prompts of PROMPT random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(FIRST_ID, LAST_ID, PROMPT).tolist() for _ in range(ROWS)]


def ragged_requests(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts [192][192] and lengths [192], in order of arrival."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(FIRST_ID, LAST_ID, TASK_PROMPT).tolist() for _ in range(TASKS)]
    count = TASKS * REQUESTS_PER_TASK
    lengths = np.clip(np.round(rng.lognormal(np.log(64), 0.7, count)), 8, MAX_NEW).astype(int)
    return [prompts[i // REQUESTS_PER_TASK] for i in range(count)], lengths.tolist()
