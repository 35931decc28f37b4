"""Complete events as device-ready arrays of few static shapes.

One row is one member output, padded right: prompt, response, padding. Rows keep the order of their
events, so every row of an event is in one batch. Every event handed in is accounted for: in the
batch, or counted under the reason for which it was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from srpo_jax.buckets import bucket
from srpo_jax.events import Event


@dataclass(frozen=True)
class EventBatch:
    """Host arrays of one optimiser step; M micro-batches of R' rows each, M * R' = R.

    tokens, positions, segment_ids [M, R', T] int32 (segment 1 is the row, 0 its padding);
    loss_mask [M, R', T] bool, True where ``tokens[t]`` was generated; sampler_logp [M, R', T] float32;
    row_event [R] int32, padding rows = E; row_advantage [R] float32 (the event's own, unless the
    estimator tells members apart); event_size [E] int32, padding events 0; event_advantage [E]
    float32; num_events, num_tokens: real events and generated tokens.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    sampler_logp: np.ndarray
    row_event: np.ndarray
    row_advantage: np.ndarray
    event_size: np.ndarray
    event_advantage: np.ndarray
    num_events: int
    num_tokens: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(M, R', T, E): equal shapes run the same compiled programs."""
        return (*self.tokens.shape, len(self.event_size))


def build_batch(
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    *,
    micro_batch_rows: int,
    max_tokens: int,
    min_tokens: int = 32,
) -> EventBatch:
    """Packs complete ``events`` into padded rows; ``advantages`` holds [K] floats for each.

    T is the bucket of the longest row (at most ``max_tokens``, the prompt and response limits
    together), R' = ``micro_batch_rows``, and M and E come from buckets too. Raises ValueError for an
    incomplete event or a row longer than ``max_tokens``.
    """
    rows = []
    for e, event in enumerate(events):
        if not event.complete:
            raise ValueError(
                f"event {event.id}: {len(event.members)} of {event.expected} members; "
                "incomplete events are dropped before a batch is built"
            )
        rows += [(e, m, a) for m, a in zip(event.members, advantages[e], strict=True)]
    longest = max((len(m.prompt_ids) + len(m.response_ids) for _, m, _ in rows), default=1)
    if longest > max_tokens:
        raise ValueError(f"a row has {longest} tokens, the limit is {max_tokens}")

    T = min(bucket(longest, min_tokens), max_tokens)
    M = bucket(-(-max(len(rows), 1) // micro_batch_rows))
    R = M * micro_batch_rows
    E = bucket(max(len(events), 1), 8)
    tokens = np.zeros((R, T), np.int32)
    segment_ids = np.zeros((R, T), np.int32)
    loss_mask = np.zeros((R, T), bool)
    sampler_logp = np.zeros((R, T), np.float32)
    row_event = np.full(R, E, np.int32)
    row_advantage = np.zeros(R, np.float32)
    for r, (e, m, advantage) in enumerate(rows):
        start, end = len(m.prompt_ids), len(m.prompt_ids) + len(m.response_ids)
        tokens[r, :start] = m.prompt_ids
        tokens[r, start:end] = m.response_ids
        segment_ids[r, :end] = 1
        loss_mask[r, start:end] = True
        sampler_logp[r, start:end] = m.logps
        row_event[r], row_advantage[r] = e, advantage
    event_size = np.zeros(E, np.int32)
    event_size[: len(events)] = [event.expected for event in events]
    event_advantage = np.zeros(E, np.float32)
    event_advantage[: len(events)] = [np.mean(a) for a in advantages]
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (R, T))

    def split(x):
        return np.ascontiguousarray(x).reshape(M, micro_batch_rows, T)

    return EventBatch(
        tokens=split(tokens),
        positions=split(positions),
        segment_ids=split(segment_ids),
        loss_mask=split(loss_mask),
        sampler_logp=split(sampler_logp),
        row_event=row_event,
        row_advantage=row_advantage,
        event_size=event_size,
        event_advantage=event_advantage,
        num_events=len(events),
        num_tokens=int(loss_mask.sum()),
    )
