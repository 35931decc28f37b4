"""Times the objective alone: from log-probs to the loss and its weights d loss / d logp.

The last line is JSON: ms at 10,000 events of 40,000 rows of 64 tokens, and ns_per_event at each
number of events with rows of 4 tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from rich.table import Table

from benchmarks.harness import report
from benchmarks.timing import median_seconds
from launch.cli import Parser, entry
from srpo_jax.objective import ObjectiveConfig, setwise_objective

SIZES = (1, 3, 5, 7)  # K of the events, in turn: four rows an event on average
WHOLE = (10_000, 64)  # events, tokens of a row
SCALED = (10_000, 100_000, 1_000_000)  # events
SCALED_TOKENS = 4
REPEATS = 5
MS_LIMIT, GROWTH_LIMIT = 50, 1.5


def make_batch(num_events: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments of the objective: R = 4 E rows of ``tokens`` tokens, log-ratios near 0.

    current_logp, old_logp [R, T] float32; loss_mask [R, T] bool; token_row [R, T], row_event [R],
    event_size [E] int32; event_advantage [E] float32
    """
    rng = np.random.default_rng(seed)
    event_size = np.resize(np.asarray(SIZES, np.int32), num_events)
    rows = int(event_size.sum())
    old = -rng.uniform(0.1, 4.0, (rows, tokens)).astype(np.float32)
    lengths = rng.integers(1, tokens + 1, rows)
    return {
        "current_logp": old + rng.normal(0, 0.01, old.shape).astype(np.float32),
        "old_logp": old,
        "loss_mask": np.arange(tokens) < lengths[:, None],
        "token_row": np.repeat(np.arange(rows, dtype=np.int32)[:, None], tokens, axis=1),
        "row_event": np.repeat(np.arange(num_events, dtype=np.int32), event_size),
        "event_size": event_size,
        "event_advantage": rng.normal(size=num_events).astype(np.float32),
    }


@jax.jit
def loss_and_weights(batch: dict[str, jax.Array]) -> Any:
    """(loss, metrics), [R, T] weights: what the learner computes between scoring and gradient."""
    rest = dict(batch)
    current = rest.pop("current_logp")

    def loss_of(current):
        return setwise_objective(current, **rest, config=ObjectiveConfig())

    return jax.value_and_grad(loss_of, has_aux=True)(current)


def milliseconds(num_events: int, tokens: int) -> float:
    """Median time of one call, after one that compiles."""
    batch = jax.device_put(make_batch(num_events, tokens))
    seconds = median_seconds(lambda _: jax.block_until_ready(loss_and_weights(batch)), REPEATS)
    return seconds * 1e3


def main(argv: list[str] | None = None) -> int:
    Parser("benchmarks.objective", __doc__, "python -m benchmarks.objective").parse_args(argv)

    table = Table(title=f"log-probs to loss and weights, median of {REPEATS}")
    for title in ("events", "rows", "tokens a row", "ms", "ns an event"):
        table.add_column(title, justify="right")

    def measured(num_events: int, tokens: int) -> float:
        ms = milliseconds(num_events, tokens)
        cells = (f"{num_events:,}", f"{4 * num_events:,}", str(tokens), f"{ms:.2f}")
        table.add_row(*cells, f"{ms * 1e6 / num_events:.0f}")
        return ms

    ms = measured(*WHOLE)
    per_event = {n: measured(n, SCALED_TOKENS) * 1e6 / n for n in SCALED}
    growth = per_event[SCALED[-1]] / per_event[SCALED[0]]
    targets = (
        f"targets: below {MS_LIMIT} ms, seen {ms:.1f}; time per event at {SCALED[-1]:,} events "
        f"within {GROWTH_LIMIT} of that at {SCALED[0]:,}, seen {growth:.2f}"
    )
    report(table, targets, figures={"ms": ms, "ns_per_event": per_event})
    return 0


if __name__ == "__main__":
    entry(main)
