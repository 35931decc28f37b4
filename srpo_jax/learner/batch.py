"""Complete events as device-ready arrays of few static shapes.

One row is one member output: its prompt, then its response. A sequence holds one row, or several
packed whole and told apart by segment ids. Rows are numbered in the order (task slot, rollout,
event, member), and every row of an event is in one batch. Events without an advantage may be left
out of the arrays: their gradient is zero, and the divisors still count them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from srpo_jax.events import Event, Member, role_kind


@dataclass
class ShapeMemory:
    """The largest M, R and E so far.

    Later batches are padded to them, so that they run programs that are compiled already. Padding
    costs nothing there: empty micro-batches are not computed.
    """

    micro_batches: int = 1
    rows: int = 16
    events: int = 8

    def fit(self, micro_batches: int, rows: int, events: int) -> tuple[int, int, int]:
        """The shape for so many of each, from buckets."""
        self.micro_batches = max(self.micro_batches, bucket(micro_batches))
        self.rows = max(self.rows, bucket(rows, 16))
        self.events = max(self.events, bucket(events, 8))
        return self.micro_batches, self.rows, self.events


@dataclass(frozen=True)
class EventBatch:
    """Host arrays of one optimiser step: M micro-batches of S sequences of T tokens.

    Attributes:
        tokens: [M, S, T] int32.
        positions: [M, S, T] int32, of a token in its row.
        segment_ids: [M, S, T] int32, the rows of a sequence from 1, padding 0.
        loss_mask: [M, S, T] bool, True where ``tokens[t]`` was generated.
        sampler_logp: [M, S, T] float32.
        token_row: [M, S, T] int32, padding R.
        row_event: [R] int32, padding rows E.
        row_advantage: [R] float32, the event's own, unless the estimator tells members apart.
        row_role: [R] int32, index into ``roles``; padding rows len(roles).
        event_size: [E] int32, padding events 0.
        event_advantage: [E] float32.
        roles: Kinds of role in the batch, sorted.
        num_tokens: Generated tokens in the arrays.
        skipped: Events, members and generated tokens that are left out for their zero advantage;
            they count in every divisor.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    sampler_logp: np.ndarray
    token_row: np.ndarray
    row_event: np.ndarray
    row_advantage: np.ndarray
    row_role: np.ndarray
    event_size: np.ndarray
    event_advantage: np.ndarray
    roles: tuple[str, ...]
    num_tokens: int
    skipped: tuple[int, int, int] = (0, 0, 0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(M, S, T, E): equal shapes run the same compiled programs."""
        return (*self.tokens.shape, len(self.event_size))

    @property
    def num_events(self) -> int:
        """|B|: every complete event, those left out included."""
        return int(np.count_nonzero(self.event_size)) + self.skipped[0]

    @property
    def used_micro_batches(self) -> int:
        """Micro-batches that hold rows; the rest of M is there for its shape alone."""
        return int(self.segment_ids.any(axis=(1, 2)).sum())

    @property
    def event_tokens(self) -> np.ndarray:
        """[E] generated tokens of every event."""
        E = len(self.event_size)
        event_of_row = np.append(self.row_event, E)
        return np.bincount(event_of_row[self.token_row[self.loss_mask]], minlength=E + 1)[:E]

    @property
    def fill(self) -> float:
        """Real tokens over the token places that are computed; NaN where none is."""
        places = self.used_micro_batches * self.tokens[0].size
        return float(np.count_nonzero(self.segment_ids)) / places if places else float("nan")


def build_batch(
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    *,
    micro_batch_rows: int,
    max_tokens: int,
    sequence_tokens: int | None = None,
    min_tokens: int = 32,
    skip_zero_advantage: bool = False,
    shapes: ShapeMemory | None = None,
) -> EventBatch:
    """Lays complete events out as arrays.

    S is ``micro_batch_rows``; M, R and E come from buckets.

    Args:
        events: Complete events, whose rows keep their order.
        advantages: For each event [K] floats.
        micro_batch_rows: Sequences of a micro-batch.
        max_tokens: The limit of a row: prompt and response limits together.
        sequence_tokens: Rows are packed into sequences of so many tokens (more, where a row is
            longer); None: every row is a sequence, and T is the bucket of the longest.
        min_tokens: The smallest bucket of T.
        skip_zero_advantage: Leaves out events all of whose advantages are 0: right where the loss
            is nothing but the surrogate.
        shapes: Remembers the largest M, R and E, and pads to them.

    Raises:
        ValueError: For an incomplete event, or a row longer than ``max_tokens``.
    """
    for event in events:
        if not event.complete:
            raise ValueError(
                f"event {event.id}: {len(event.members)} of {event.expected} members; "
                "incomplete events are dropped before a batch is built"
            )
    live = [bool(np.any(a)) or not skip_zero_advantage for a in advantages]
    left_out = [event for event, is_live in zip(events, live, strict=True) if not is_live]
    events = [event for event, is_live in zip(events, live, strict=True) if is_live]
    advantages = [a for a, is_live in zip(advantages, live, strict=True) if is_live]
    members = [member for event in events for member in event.members]
    lengths = [len(m.prompt_ids) + len(m.response_ids) for m in members]
    longest = max(lengths, default=1)
    if longest > max_tokens:
        raise ValueError(f"a row has {longest} tokens, the limit is {max_tokens}")

    T = min(bucket(longest, min_tokens), max_tokens)
    sequences = [[r] for r in range(len(members))]
    if sequence_tokens is not None:
        T = max(T, sequence_tokens)
        sequences = best_fit(lengths, T)
    S = micro_batch_rows
    M, R, E = (shapes or ShapeMemory()).fit(-(-len(sequences) // S), len(members), len(events))
    roles = tuple(sorted({role_kind(m.role) for m in members}))
    by_token = _token_arrays(members, sequences, M * S, T, padding_row=R)
    return EventBatch(
        **{name: array.reshape(M, S, T) for name, array in by_token.items()},
        **_row_arrays(events, advantages, roles, R, E),
        **_event_arrays(events, advantages, E),
        roles=roles,
        num_tokens=int(by_token["loss_mask"].sum()),
        skipped=(
            len(left_out),
            sum(event.expected for event in left_out),
            sum(len(m.response_ids) for event in left_out for m in event.members),
        ),
    )


def _token_arrays(
    members: Sequence[Member], sequences: Sequence[Sequence[int]], count: int, T: int, *,
    padding_row: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The [M * S, T] arrays of a batch by name; ``sequences`` hold the rows of each."""
    tokens, positions, segment_ids = (np.zeros((count, T), np.int32) for _ in range(3))
    loss_mask, sampler_logp = np.zeros((count, T), bool), np.zeros((count, T), np.float32)
    token_row = np.full((count, T), padding_row, np.int32)
    for s, rows in enumerate(sequences):
        start = 0
        for segment, r in enumerate(rows, 1):
            m = members[r]
            middle = start + len(m.prompt_ids)
            end = middle + len(m.response_ids)
            tokens[s, start:middle], tokens[s, middle:end] = m.prompt_ids, m.response_ids
            positions[s, start:end] = np.arange(end - start)
            segment_ids[s, start:end] = segment
            loss_mask[s, middle:end] = True
            sampler_logp[s, middle:end] = m.logps
            token_row[s, start:end] = r
            start = end
    return {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "sampler_logp": sampler_logp,
        "token_row": token_row,
    }


def _row_arrays(
    events: Sequence[Event],
    advantages: Sequence[np.ndarray],
    roles: Sequence[str],
    R: int,
    E: int,
) -> dict[str, np.ndarray]:
    row_event, row_advantage = np.full(R, E, np.int32), np.zeros(R, np.float32)
    row_role = np.full(R, len(roles), np.int32)
    rows = [
        (e, roles.index(role_kind(m.role)), a)
        for e, event in enumerate(events)
        for m, a in zip(event.members, advantages[e], strict=True)
    ]
    for r, row in enumerate(rows):
        row_event[r], row_role[r], row_advantage[r] = row
    return {"row_event": row_event, "row_advantage": row_advantage, "row_role": row_role}


def _event_arrays(
    events: Sequence[Event], advantages: Sequence[np.ndarray], E: int
) -> dict[str, np.ndarray]:
    event_size, event_advantage = np.zeros(E, np.int32), np.zeros(E, np.float32)
    event_size[: len(events)] = [event.expected for event in events]
    event_advantage[: len(events)] = [np.mean(a) for a in advantages]
    return {"event_size": event_size, "event_advantage": event_advantage}


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most ``capacity`` tokens, each a list of row indices in ascending order.

    Rows are placed longest first into the fullest bin that still holds them, so equal inputs give
    equal bins. Bins come in the order of their first rows.

    Args:
        lengths: Tokens of each row.
        capacity: Tokens of a bin.

    Raises:
        ValueError: For a longer row.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        length = lengths[row]
        if length > capacity:
            raise ValueError(f"a row has {length} tokens, a sequence {capacity}")
        place = bisect.bisect_left(open_bins, (length, -1))
        if place < len(open_bins):
            free, chosen = open_bins.pop(place)
            bins[chosen].append(row)
        else:
            free, chosen = capacity, len(bins)
            bins.append([row])
        bisect.insort(open_bins, (free - length, chosen))
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])


def bucket(n: int, floor: int = 1) -> int:
    """The smallest of floor, 1.5 floor, 2 floor, 3 floor, 4 floor, ... that holds n."""
    size = floor
    while size < n:
        if size * 3 // 2 >= n and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size
