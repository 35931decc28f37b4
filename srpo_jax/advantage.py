"""Advantages: group-relative estimators over event records, on the host.

Source: arXiv 2609.08452, eq. 6, ``A_e = (R_e - mu_g) / (sigma_g + 1e-6)``; the other settings are
those of the methods that SRPO is compared with. An estimator is a function from event records to
one scalar per event, so that any action-independent baseline can stand in for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from srpo_jax.events import Event
from srpo_jax.objective_config import PRESETS, check_names, unknown_name

EPSILON = 1e-6
Scale = Literal["std", "none"]
Std = Literal["population", "sample"]
Singleton = Literal["zero", "raw"]


def group_advantages(
    returns: Sequence[float] | np.ndarray,
    groups: Sequence[Hashable],
    *,
    scale: Scale = "std",
    std: Std = "population",
    singleton: Singleton = "zero",
    leave_one_out: bool = False,
    scale_floor: float = 0.0,
) -> np.ndarray:
    """Returns normalised inside their groups (eq. 6).

        A = (R - mean) / (max(std, scale_floor) + 1e-6)

    A group whose returns are all equal gets exactly 0 (max == min; a float std would be noise).

    Args:
        returns: [E] numbers; a non-finite one is left out of its group's statistics and gets 0.
        groups: [E] hashable keys.
        scale: Divide by the group's standard deviation, or only centre.
        std: Of the population (over n) or of a sample (over n - 1).
        singleton: A return alone in its group gets 0, or stays as it is.
        leave_one_out: The baseline of a return is the mean of the others in its group.
        scale_floor: The least that a deviation counts as.

    Returns:
        [E] float32 for float32 returns, otherwise float64.

    Raises:
        ValueError: On a wrong shape or an unknown switch.
    """
    check_names(AdvantageConfig, {"scale": scale, "std": std, "singleton": singleton})
    given = np.asarray(returns)
    if given.ndim != 1 or len(groups) != len(given):
        raise ValueError(f"returns {given.shape} and groups ({len(groups)},) must be [E] both")
    values = given.astype(np.float64)
    finite = np.isfinite(values)
    places: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(groups):
        if finite[i]:
            places[key].append(i)
    advantages = np.zeros(len(values))
    for where in places.values():
        members = values[where]
        n = len(members)
        if n == 1:
            advantages[where] = members if singleton == "raw" else 0.0
        elif members.max() > members.min():
            centred = members - members.mean()
            if leave_one_out:  # R_i - mean of the others = n / (n - 1) (R_i - mean)
                centred = centred * (n / (n - 1))
            if scale == "std":
                deviation = members.std(ddof=1 if std == "sample" else 0)
                centred = centred / (max(deviation, scale_floor) + EPSILON)
            advantages[where] = centred
    return advantages.astype(np.float32) if given.dtype == np.float32 else advantages


@dataclass(frozen=True)
class AdvantageConfig:
    """Switches of the advantage; the defaults are SRPO (eq. 6).

    Attributes:
        group: What comparable items share, out of task, event_type, role, turn; () compares the
            whole batch.
        statistics: What is normalised, each counting once: ``events`` by their return; ``episodes``
            by the mean over their rows in the group, shared by their events; ``rows``.
        scale: As in :func:`group_advantages`, and so the next four.
        invalid_penalty: Taken off a return for malformed outputs: of an event, times their share
            malformed / K; of a row, whole.
    """

    group: tuple[Literal["task", "event_type", "role", "turn"], ...] = ("task", "event_type")
    statistics: Literal["events", "episodes", "rows"] = "events"
    scale: Scale = "std"
    std: Std = "population"
    singleton: Singleton = "zero"
    leave_one_out: bool = False
    scale_floor: float = 0.0
    invalid_penalty: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", tuple(self.group))
        check_names(type(self), vars(self))
        for name in ("scale_floor", "invalid_penalty"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise ValueError(
                    f"{name} must be a finite number, at least 0, got {getattr(self, name)}"
                )
        if self.scale == "none" and self.scale_floor:
            raise ValueError("scale_floor bounds the std; with scale 'none' leave it at 0")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> AdvantageConfig:
        """The advantage that belongs to ``ObjectiveConfig.preset(name)``.

        Args:
            name: A key of ``PRESETS``.
            **overrides: Switches that replace the preset's.

        Raises:
            ValueError: On an unknown name or value.
        """
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                raise unknown_name("advantage switch", key, known)
        return cls(**{**PRESETS[name][1], **overrides})


def event_return(event: Event, invalid_penalty: float = 0.0) -> float:
    """R_e: the team reward less the penalty for this event's own malformed members."""
    malformed = sum(not member.well_formed for member in event.members)
    return event.reward - invalid_penalty * malformed / event.expected


def event_advantages(
    events: Sequence[Event], config: AdvantageConfig = AdvantageConfig()
) -> tuple[np.ndarray, dict[str, float]]:
    """One advantage per event record, and statistics to log.

    Incomplete events take part in no statistics and get 0. With ``statistics="rows"`` the rows of
    one event may differ: :func:`row_advantages` keeps them apart, here an event gets their mean.

    Returns:
        ([E] float64 in the order of ``events``, the statistics of :func:`row_advantages`).
    """
    rows, stats = row_advantages(events, config)
    advantages = np.array([row.mean() if len(row) else 0.0 for row in rows], np.float64)
    return advantages, stats


def row_advantages(
    events: Sequence[Event], config: AdvantageConfig = AdvantageConfig()
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Advantages by member. Unless ``statistics="rows"``, the members of an event share one value.

    Returns:
        (for each event a float64 array [K] in member order, statistics to log:
        zero_advantage_fraction (of complete events), groups, singleton_groups, equal_groups (no
        variance), penalty_only_groups (only a penalty separates them), nonfinite_returns).
    """
    units = _units(events, config)
    advantages = group_advantages(
        [unit.value for unit in units],
        [unit.group for unit in units],
        scale=config.scale,
        std=config.std,
        singleton=config.singleton,
        leave_one_out=config.leave_one_out,
        scale_floor=config.scale_floor,
    )
    rows = [np.zeros(len(event.members)) for event in events]
    for unit, advantage in zip(units, advantages, strict=True):
        for event, member in unit.rows:
            rows[event][member] = advantage
    complete = [row for row, event in zip(rows, events, strict=True) if event.complete]
    zero = sum(not np.any(row) for row in complete)
    return rows, {
        "zero_advantage_fraction": zero / len(complete) if complete else float("nan"),
        **_group_statistics(units),
    }


@dataclass
class _Unit:
    """What is normalised: its group, its return with and without penalty, its (event, member)s."""

    group: Hashable
    value: float
    unpenalised: float
    rows: list[tuple[int, int]]


def _units(events: Sequence[Event], config: AdvantageConfig) -> list[_Unit]:
    penalty = config.invalid_penalty
    units: list[_Unit] = []
    episodes: dict[tuple[str, tuple[object, ...]], list[tuple[int, int]]] = defaultdict(list)
    for e, event in enumerate(events):
        if not event.complete:
            continue
        team = tuple(member.role for member in event.members)
        task = (event.slot, event.task)  # a step may hold a task twice, at an epoch's boundary
        shared = {"task": task, "event_type": event.type, "turn": event.turn, "role": team}
        places = [(e, m) for m in range(len(event.members))]
        group = tuple(shared[key] for key in config.group)
        if config.statistics == "events":
            units.append(_Unit(group, event_return(event, penalty), event.reward, places))
        elif config.statistics == "episodes":
            episodes[(event.episode, group)].extend(places)
        else:
            for place, member in zip(places, event.members, strict=True):
                own = {**shared, "role": member.role}
                value = event.reward - penalty * (not member.well_formed)
                group = tuple(own[key] for key in config.group)
                units.append(_Unit(group, value, event.reward, [place]))
    for (_, group), places in episodes.items():
        raw = [events[e].reward for e, _ in places]
        taken = [penalty * (not events[e].members[m].well_formed) for e, m in places]
        # The penalties apart from the rewards: equal rewards must stay equal to the last bit.
        reward = raw[0] if max(raw) == min(raw) else float(np.mean(raw))
        units.append(_Unit(group, reward - float(np.mean(taken)), reward, places))
    return units


def _group_statistics(units: Sequence[_Unit]) -> dict[str, float]:
    values: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    nonfinite = 0
    for unit in units:
        if np.isfinite(unit.value):
            values[unit.group].append((unit.value, unit.unpenalised))
        else:
            nonfinite += 1
    counts: Counter[str] = Counter()
    for pairs in values.values():
        distinct, unpenalised = (len(set(column)) for column in zip(*pairs, strict=True))
        counts["singleton_groups"] += len(pairs) == 1
        counts["equal_groups"] += len(pairs) > 1 and distinct == 1
        counts["penalty_only_groups"] += distinct > 1 and unpenalised == 1
    return {
        "groups": float(len(values)),
        "singleton_groups": float(counts["singleton_groups"]),
        "equal_groups": float(counts["equal_groups"]),
        "penalty_only_groups": float(counts["penalty_only_groups"]),
        "nonfinite_returns": float(nonfinite),
    }
