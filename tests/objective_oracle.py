"""Objectives in float64 numpy, one plain function for each recipe, over ragged events.

An independent reading of the published formulas: no masks, no segments, no shared switches. Values
are of the loss; gradients come from central differences. Also lays ragged events out as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Ragged:
    """One complete event: its advantage, and current and old log-probs of every member's tokens."""

    advantage: float
    current: list[np.ndarray]
    old: list[np.ndarray]

    @property
    def k(self) -> int:
        return len(self.current)

    @property
    def tokens(self) -> int:
        return sum(len(x) for x in self.current)

    def gaps(self) -> list[np.ndarray]:
        return [c - o for c, o in zip(self.current, self.old, strict=True)]


def random_events(
    rng: np.random.Generator, sizes: Sequence[int] = (3, 1, 2, 1, 4), spread: float = 0.15
) -> list[Ragged]:
    """Events of the given sizes with 1 to 5 tokens a member; the last advantage but one is 0."""
    events = []
    for k in sizes:
        old = [-rng.uniform(0.1, 3.0, rng.integers(1, 6)) for _ in range(k)]
        current = [x + rng.normal(0.0, spread, x.shape) for x in old]
        events.append(Ragged(float(rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2)), current, old))
    if len(events) > 1:
        events[-2].advantage = 0.0
    return events


def clipmin(ratio, advantage, low=0.2, high=0.2, dual=None):
    value = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        value = np.maximum(value, dual * advantage)
    return value


def _event_ratio(event, power):
    return np.exp(sum(gap.sum() for gap in event.gaps()) * event.k**power)


def srpo(events, power=-0.5):
    return -np.mean([clipmin(_event_ratio(e, power), e.advantage) for e in events])


def srpo_token_reduced(events):
    values = [e.tokens * clipmin(_event_ratio(e, -0.5), e.advantage) for e in events]
    return -sum(values) / sum(e.tokens for e in events)


def srpo_member_weighted(events):
    values = [e.k * clipmin(_event_ratio(e, -0.5), e.advantage) for e in events]
    return -sum(values) / sum(e.k for e in events)


def srpo_mean_score(events):
    values = []
    for e in events:
        log_ratio = sum(gap.mean() for gap in e.gaps()) / np.sqrt(e.k)
        values.append(clipmin(np.exp(log_ratio), e.advantage))
    return -np.mean(values)


def grpo(events):
    rows = [clipmin(np.exp(gap), e.advantage).mean() for e in events for gap in e.gaps()]
    return -np.mean(rows)


def dr_grpo(events, length=4096):
    rows = [clipmin(np.exp(gap), e.advantage).sum() / length for e in events for gap in e.gaps()]
    return -np.mean(rows)


def _token_mean(events, **clip):
    tokens = [clipmin(np.exp(gap), e.advantage, **clip) for e in events for gap in e.gaps()]
    return -np.concatenate(tokens).mean()


def dapo(events):
    return _token_mean(events, low=0.2, high=0.28)


def dr_mas(events):
    return _token_mean(events, dual=3.0)


def token_event(events):
    means = [
        np.concatenate([clipmin(np.exp(gap), e.advantage) for gap in e.gaps()]).mean()
        for e in events
    ]
    return -np.mean(means)


def gspo(events, low=3e-4, high=4e-4):
    rows = [clipmin(np.exp(gap.mean()), e.advantage, low, high) for e in events for gap in e.gaps()]
    return -np.mean(rows)


def member_event(events):
    return -np.mean(
        [np.mean([clipmin(np.exp(gap.sum()), e.advantage) for gap in e.gaps()]) for e in events]
    )


def member_token(events):
    rows = [len(gap) * clipmin(np.exp(gap.sum()), e.advantage) for e in events for gap in e.gaps()]
    return -sum(rows) / sum(e.tokens for e in events)


def magrpo(events):
    return -np.mean([e.advantage * sum(c.sum() for c in e.current) for e in events])


def reinforce(events):
    return -np.mean([e.advantage * c.sum() for e in events for c in e.current])


PRESET_ORACLES: dict[str, Callable] = {
    "srpo": srpo,
    "srpo_sum": lambda events: srpo(events, 0.0),
    "srpo_mean": lambda events: srpo(events, -1.0),
    "srpo_token_reduced": srpo_token_reduced,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "dr_mas": dr_mas,
    "magrpo": magrpo,
    "reinforce": reinforce,
    "rloo": reinforce,
}

# Points of the family without a preset: (switches, oracle).
OTHER_ORACLES: list[tuple[dict, Callable]] = [
    ({"loss_reduction": "member"}, srpo_member_weighted),
    ({"member_score": "mean"}, srpo_mean_score),
    ({"ratio_unit": "member", "loss_reduction": "event"}, member_event),
    ({"ratio_unit": "member", "loss_reduction": "token"}, member_token),
    ({"ratio_unit": "token", "loss_reduction": "event"}, token_event),
    (
        {"ratio_unit": "none", "loss_reduction": "token"},
        lambda events: (
            -sum(e.advantage * c.sum() for e in events for c in e.current)
            / sum(e.tokens for e in events)
        ),
    ),
    (
        {"ratio_unit": "none", "set_reduction": "mean"},
        lambda events: -np.mean([e.advantage * sum(map(np.sum, e.current)) / e.k for e in events]),
    ),
]


def gradient(loss: Callable, events: list[Ragged], step: float = 1e-6) -> list[np.ndarray]:
    """d loss / d current log-prob for each row, in event and member order."""
    rows = []
    for event in events:
        for member in event.current:
            row = np.zeros_like(member)
            for u in range(len(member)):
                kept = member[u]
                member[u] = kept + step
                up = loss(events)
                member[u] = kept - step
                down = loss(events)
                member[u] = kept
                row[u] = (up - down) / (2 * step)
            rows.append(row)
    return rows


def padded(
    events: list[Ragged], rows: int = 16, width: int = 7, slots: int = 8, fill: float = np.nan
) -> dict[str, np.ndarray]:
    """Arguments of the objective, one row a sequence; ``fill`` stands wherever nothing counts.

    Every row starts with one prompt position, so that no token of a row is at place 0.
    """
    args = _event_arrays(events, rows, slots)
    args |= {
        "current_logp": np.full((rows, width), fill),
        "old_logp": np.full((rows, width), fill),
        "loss_mask": np.zeros((rows, width), bool),
    }
    for r, (current, old) in enumerate(_rows(events)):
        args["current_logp"][r, 1 : 1 + len(current)] = current
        args["old_logp"][r, 1 : 1 + len(old)] = old
        args["loss_mask"][r, 1 : 1 + len(old)] = True
    return args


def packed(
    events: list[Ragged], sequences: int = 6, width: int = 16, rows: int = 16, slots: int = 8
) -> dict[str, np.ndarray]:
    """The same batch with several rows in a sequence, each after one prompt position."""
    args = _event_arrays(events, rows, slots)
    shape = (sequences, width)
    args |= {
        "current_logp": np.full(shape, np.nan),
        "old_logp": np.full(shape, np.nan),
        "loss_mask": np.zeros(shape, bool),
        "token_row": np.full(shape, rows, np.int32),
    }
    s, t = 0, 0
    for r, (current, old) in enumerate(_rows(events)):
        if t + 1 + len(old) > width:
            s, t = s + 1, 0
        args["token_row"][s, t : t + 1 + len(old)] = r
        place = slice(t + 1, t + 1 + len(old))
        args["current_logp"][s, place], args["old_logp"][s, place] = current, old
        args["loss_mask"][s, place] = True
        t += 1 + len(old)
    return args


def _rows(events):
    return [pair for e in events for pair in zip(e.current, e.old, strict=True)]


def _event_arrays(events, rows, slots):
    sizes = [e.k for e in events]
    row_event = np.full(rows, slots, np.int32)
    row_event[: sum(sizes)] = np.repeat(np.arange(len(events)), sizes)
    event_size = np.zeros(slots, np.int32)
    event_size[: len(events)] = sizes
    advantage = np.full(slots, np.nan)
    advantage[: len(events)] = [e.advantage for e in events]
    return {"row_event": row_event, "event_size": event_size, "event_advantage": advantage}
