"""Complete events as device-ready arrays of few static shapes.

One row is one member output: its prompt, then its response. A sequence holds one row, or several
packed whole and told apart by segment ids. Rows are numbered in the order (task slot, rollout,
event, member), every row of an event is in one batch, and every event handed in is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from srpo_jax.buckets import bucket
from srpo_jax.events import Event
from srpo_jax.packing import best_fit


@dataclass(frozen=True)
class EventBatch:
    """Host arrays of one optimiser step: M micro-batches of S sequences of T tokens.

    tokens, positions [M, S, T] int32
    segment_ids       [M, S, T] int32, the rows of a sequence from 1, padding 0
    loss_mask         [M, S, T] bool, True where ``tokens[t]`` was generated
    sampler_logp      [M, S, T] float32
    token_row         [M, S, T] int32, padding R
    row_event         [R] int32, padding rows E
    row_advantage     [R] float32: the event's own, unless the estimator tells members apart
    event_size        [E] int32, padding events 0
    event_advantage   [E] float32
    num_events, num_tokens   real events and generated tokens
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    sampler_logp: np.ndarray
    token_row: np.ndarray
    row_event: np.ndarray
    row_advantage: np.ndarray
    event_size: np.ndarray
    event_advantage: np.ndarray
    num_events: int
    num_tokens: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(M, S, T, E): equal shapes run the same compiled programs."""
        return (*self.tokens.shape, len(self.event_size))

    @property
    def used_micro_batches(self) -> int:
        """Micro-batches that hold rows; the rest of M is there for its shape alone."""
        return max(1, int(self.segment_ids.any(axis=(1, 2)).sum()))

    @property
    def fill(self) -> float:
        """Real tokens over the token places that are computed."""
        places = self.used_micro_batches * self.tokens[0].size
        return float(np.count_nonzero(self.segment_ids)) / places


def build_batch(
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    *,
    micro_batch_rows: int,
    max_tokens: int,
    sequence_tokens: int | None = None,
    min_tokens: int = 32,
) -> EventBatch:
    """Lays complete ``events`` out; ``advantages`` holds [K] floats for each.

    With ``sequence_tokens`` rows are packed into sequences of that many tokens (more, where a row
    is longer); without, every row is a sequence and T is the bucket of the longest, at least
    ``min_tokens``. S is ``micro_batch_rows``; M, R and E come from buckets. Raises ValueError for
    an incomplete event or a row longer than ``max_tokens`` (prompt and response limits together).
    """
    rows = []
    for e, event in enumerate(events):
        if not event.complete:
            raise ValueError(
                f"event {event.id}: {len(event.members)} of {event.expected} members; "
                "incomplete events are dropped before a batch is built"
            )
        rows += [(e, m, a) for m, a in zip(event.members, advantages[e], strict=True)]
    lengths = [len(m.prompt_ids) + len(m.response_ids) for _, m, _ in rows]
    longest = max(lengths, default=1)
    if longest > max_tokens:
        raise ValueError(f"a row has {longest} tokens, the limit is {max_tokens}")

    T = min(bucket(longest, min_tokens), max_tokens)
    bins = [[r] for r in range(len(rows))]
    if sequence_tokens is not None:
        T = max(T, sequence_tokens)
        bins = best_fit(lengths, T)
    S = micro_batch_rows
    M = bucket(-(-max(len(bins), 1) // S))
    R = M * S if sequence_tokens is None else bucket(max(len(rows), 1), 16)
    E = bucket(max(len(events), 1), 8)
    tokens, positions, segment_ids = (np.zeros((M * S, T), np.int32) for _ in range(3))
    loss_mask, sampler_logp = np.zeros((M * S, T), bool), np.zeros((M * S, T), np.float32)
    token_row = np.full((M * S, T), R, np.int32)
    row_event, row_advantage = np.full(R, E, np.int32), np.zeros(R, np.float32)
    for s, members in enumerate(bins):
        start = 0
        for segment, r in enumerate(members, 1):
            e, m, advantage = rows[r]
            middle = start + len(m.prompt_ids)
            end = middle + len(m.response_ids)
            tokens[s, start:middle], tokens[s, middle:end] = m.prompt_ids, m.response_ids
            positions[s, start:end] = np.arange(end - start)
            segment_ids[s, start:end] = segment
            loss_mask[s, middle:end] = True
            sampler_logp[s, middle:end] = m.logps
            token_row[s, start:end] = r
            row_event[r], row_advantage[r] = e, advantage
            start = end
    event_size = np.zeros(E, np.int32)
    event_size[: len(events)] = [event.expected for event in events]
    event_advantage = np.zeros(E, np.float32)
    event_advantage[: len(events)] = [np.mean(a) for a in advantages]

    def split(x):
        return x.reshape(M, S, T)

    return EventBatch(
        tokens=split(tokens),
        positions=split(positions),
        segment_ids=split(segment_ids),
        loss_mask=split(loss_mask),
        sampler_logp=split(sampler_logp),
        token_row=split(token_row),
        row_event=row_event,
        row_advantage=row_advantage,
        event_size=event_size,
        event_advantage=event_advantage,
        num_events=len(events),
        num_tokens=int(loss_mask.sum()),
    )
