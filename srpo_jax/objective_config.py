"""Switches of the objective, and the presets that set objective and advantage together.

Kept apart from the objective itself so that a recipe can be checked without loading jax. A switch
that chooses a function has a table of them, and its names are the table's keys: one more entry is
one more name, for the objective, recipes, errors and documentation alike.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# How a member joins the log-ratios of its tokens: from their sum and their number, [R] each.
MEMBER_SCORES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda total, tokens: total,
    "mean": lambda total, tokens: total / tokens.clip(1),
}
# How an event joins the scores of its K members: their sum times a function of K, floating [E].
SET_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sqrt": lambda k: k**-0.5,
    "sum": lambda k: 1.0,
    "mean": lambda k: 1 / k,
}
# The KL to a reference at a token, from d = log q_cur - log q_ref, any shape. ``exp`` is that of
# the objective, which holds a large exponent.
KL_ESTIMATORS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "k1": lambda d, exp: d,
    "k2": lambda d, exp: d**2 / 2,
    "k3": lambda d, exp: exp(-d) - 1 + d,
}


@dataclass(frozen=True)
class RatioUnit:
    """What can carry one ratio and one clip. The functions take the ``EventLayout`` first.

    Attributes:
        name: Which of the log-ratios (``objective_terms.LogRatios``) is the unit's.
        counts: Which of ``Counts`` counts such units.
        valid: The units that count, bool.
        advantage: The units' advantages from those of events [E] and rows [R].
        tokens: The generated tokens of each unit.
        any_of_event: Flags of units, bool -> [E] bool, whether any unit of an event has it.
    """

    name: str
    counts: Literal["events", "members", "tokens"]
    valid: Callable[[Any], Any]
    advantage: Callable[[Any, Any, Any], Any]
    tokens: Callable[[Any], Any]
    any_of_event: Callable[[Any, Any], Any]


RATIO_UNITS: dict[str, RatioUnit] = {
    "event": RatioUnit(
        "event",
        "events",
        valid=lambda batch: batch.valid,
        advantage=lambda batch, of_events, of_rows: of_events,
        tokens=lambda batch: batch.event_tokens,
        any_of_event=lambda batch, flags: flags,
    ),
    "member": RatioUnit(
        "member",
        "members",
        valid=lambda batch: batch.row_valid,
        advantage=lambda batch, of_events, of_rows: of_rows,
        tokens=lambda batch: batch.row_tokens,
        any_of_event=lambda batch, flags: batch.over_events(flags.astype("int32")) > 0,
    ),
    "token": RatioUnit(
        "token",
        "tokens",
        valid=lambda batch: batch.token_valid,
        advantage=lambda batch, of_events, of_rows: batch.to_tokens(of_rows),
        tokens=lambda batch: batch.token_valid,
        any_of_event=lambda batch, flags: (
            batch.over_events(batch.over_rows(flags.astype("int32"))) > 0
        ),
    ),
}
NO_RATIO = "none"  # a policy gradient, whose unit is that of the loss reduction

Weight = Callable[[Any, "ObjectiveConfig"], Any]  # from the EventLayout and the switches


def _share(counts: Any, batch: Any) -> Any:
    """1 / counts, where a count of 0 is taken for 1."""
    return 1 / counts.clip(1).astype(batch.k.dtype)


@dataclass(frozen=True)
class LossReduction:
    """J = sum over units of weight * surrogate, over a divisor.

    Attributes:
        divisor: Which of ``Counts`` divides the sum.
        weights: For each ratio unit that it goes with, what weighs the unit's surrogate: anything
            that broadcasts over the units.
        without_ratio: The unit of a policy gradient's surrogate; empty: it needs a ratio.
        gradient_over_tokens: Whether each unit's gradient (not its value) is divided by its tokens.
    """

    divisor: Literal["events", "members", "tokens"]
    weights: Mapping[str, Weight]
    without_ratio: str = ""
    gradient_over_tokens: bool = False

    def goes_with(self, ratio_unit: str) -> bool:
        """Whether surrogates of this ``ratio_unit`` can be averaged so."""
        unit = self.without_ratio if ratio_unit == NO_RATIO else ratio_unit
        return unit in self.weights


LOSS_REDUCTIONS: dict[str, LossReduction] = {
    "event": LossReduction(
        "events",
        {
            "event": lambda batch, config: 1.0,
            "member": lambda batch, config: batch.to_rows(1 / batch.k),
            "token": lambda batch, config: batch.to_tokens(
                batch.to_rows(_share(batch.event_tokens, batch))
            ),
        },
        without_ratio="event",
    ),
    "member": LossReduction(
        "members",
        {
            "event": lambda batch, config: batch.k,
            "member": lambda batch, config: 1.0,
        },
        without_ratio="member",
    ),
    "token": LossReduction(
        "tokens",
        {
            "event": lambda batch, config: batch.event_tokens,
            "member": lambda batch, config: batch.row_tokens,
            "token": lambda batch, config: 1.0,
        },
        without_ratio="token",
    ),
    "token_ratio": LossReduction(
        "tokens",
        {
            "event": lambda batch, config: batch.event_tokens,
            "member": lambda batch, config: batch.row_tokens,
        },
        gradient_over_tokens=True,
    ),
    "sequence_mean": LossReduction(
        "members",
        {"token": lambda batch, config: batch.to_tokens(_share(batch.row_tokens, batch))},
        without_ratio="token",
    ),
    "constant_length": LossReduction(
        "members", {"token": lambda batch, config: 1 / config.length}, without_ratio="token"
    ),
}

# Every recipe preset in one table: (objective switches, advantage switches). The second half is
# read by srpo_jax.advantage.AdvantageConfig; what is left out keeps its default.
_GRPO_GROUPS = {"group": ("task",), "statistics": "episodes", "std": "sample"}
_MEAN_BASELINE = {"group": ("task",), "statistics": "episodes", "scale": "none"}
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "srpo": ({}, {}),
    "srpo_sum": ({"set_reduction": "sum"}, {}),
    "srpo_mean": ({"set_reduction": "mean"}, {}),
    "srpo_token_reduced": ({"loss_reduction": "token"}, {}),
    "grpo": ({"ratio_unit": "token", "loss_reduction": "sequence_mean"}, _GRPO_GROUPS),
    "dr_grpo": ({"ratio_unit": "token", "loss_reduction": "constant_length"}, _MEAN_BASELINE),
    "dapo": ({"ratio_unit": "token", "loss_reduction": "token", "clip_high": 0.28}, _GRPO_GROUPS),
    "gspo": (
        {
            "ratio_unit": "member",
            "member_score": "mean",
            "loss_reduction": "member",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        _GRPO_GROUPS,
    ),
    "dr_mas": (
        {"ratio_unit": "token", "loss_reduction": "token", "dual_clip": 3.0},
        {"group": ("task", "role"), "statistics": "rows", "std": "sample", "singleton": "raw"},
    ),
    "magrpo": (
        {"ratio_unit": "none", "set_reduction": "sum"},
        {"group": ("task", "event_type", "turn"), "scale": "none"},
    ),
    "reinforce": (
        {"ratio_unit": "none", "loss_reduction": "member"},
        {"group": (), "statistics": "episodes", "scale": "none"},
    ),
    "rloo": (
        {"ratio_unit": "none", "loss_reduction": "member"},
        {**_MEAN_BASELINE, "leave_one_out": True},
    ),
}


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not among ``known``: it says the nearest one."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
    return ValueError(f"unknown {kind} {name!r}: did you mean {near!r}? Known: {', '.join(known)}")


@dataclass(frozen=True)
class KeyOf:
    """Marks the type of a switch whose names are the keys of a table."""

    table: Mapping[str, Any]


def names_in(hint: Any) -> tuple[str, ...] | None:
    """The names that a switch of this type may have, or each item of a list of them; None: it is
    no choice of names."""
    if get_origin(hint) is tuple:
        return names_in(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        return next((tuple(m.table) for m in hint.__metadata__ if isinstance(m, KeyOf)), None)
    return get_args(hint) if get_origin(hint) is Literal else None


@functools.cache
def switch_types(config: type) -> dict[str, Any]:
    """The type of each switch of a dataclass, by name."""
    return get_type_hints(config, include_extras=True)


def check_names(config: type, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a switch of ``config`` whose value is none of its names."""
    for name, hint in switch_types(config).items():
        known = names_in(hint)
        if known is None or name not in values:
            continue
        value = values[name]
        for item in value if get_origin(hint) is tuple else (value,):
            if item not in known:
                raise unknown_name(name, item, known)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Switches of the objective; the defaults are SRPO. Hashable, so usable as a static argument.

    A switch that cannot act beside the others must keep its default: ValueError otherwise.

    Attributes:
        ratio_unit: What carries one ratio and one clip: the event, each member output, each token,
            or ``none`` (policy gradient without a ratio: advantage times log-prob).
        set_reduction: How an event joins its K members' scores: over sqrt(K), their sum, their
            mean.
        member_score: A member's score: the sum of its token log-ratios, or their mean.
        loss_reduction: What weighs 1 in the average: ``event``, ``member`` (one output), ``token``;
            ``token_ratio``: the value of ``token``, each unit's gradient over its tokens;
            ``sequence_mean``: token mean of each output, then the mean over outputs;
            ``constant_length``: token sum of each output over ``length``, then that mean.
        length: The constant of ``constant_length``, tokens (the response budget of a call).
        clip_low: The ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: See ``clip_low``.
        dual_clip: None, or the bound c > 1 of the ratio where the advantage is negative.
        kl_coef: Weight of the KL to a reference, averaged over the generated tokens.
        kl_estimator: With d = log q_cur - log q_ref, k1 = d (a value to watch, refused with
            kl_coef: its gradient is that of the log-prob, of mean zero), k2 = d^2 / 2,
            k3 = exp(-d) + d - 1.
        entropy_coef: Weight of the entropy bonus, averaged over the generated tokens.
        sampler_cap: None, or the cap of truncated importance sampling: every surrogate is weighted
            by min(q_old / q_sampler, cap), the ratio taken over the same unit (for SRPO the event,
            with the same set reduction). For samplers whose log-probs differ from the learner's:
            another engine, or lower precision.
    """

    ratio_unit: Annotated[str, KeyOf({**RATIO_UNITS, NO_RATIO: None})] = "event"
    set_reduction: Annotated[str, KeyOf(SET_REDUCTIONS)] = "sqrt"
    member_score: Annotated[str, KeyOf(MEMBER_SCORES)] = "sum"
    loss_reduction: Annotated[str, KeyOf(LOSS_REDUCTIONS)] = "event"
    length: int = 4096
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Annotated[str, KeyOf(KL_ESTIMATORS)] = "k3"
    entropy_coef: float = 0.0
    sampler_cap: float | None = None

    def __post_init__(self) -> None:
        check_names(type(self), vars(self))
        unit, reduction = self.ratio_unit, self.loss_reduction
        if not LOSS_REDUCTIONS[reduction].goes_with(unit):
            known = [name for name, entry in LOSS_REDUCTIONS.items() if entry.goes_with(unit)]
            raise ValueError(
                f"loss_reduction {reduction!r} does not go with ratio_unit {unit!r}; "
                f"those that do: {', '.join(known)}"
            )
        if self.set_reduction != "sqrt" and self.unit.name != "event":
            raise ValueError(
                f"set_reduction {self.set_reduction!r} acts with ratio_unit 'event', or 'none' and "
                f"loss_reduction 'event'; with {unit!r} and {reduction!r} leave it at 'sqrt'"
            )
        if self.member_score != "sum" and unit not in ("event", "member"):
            raise ValueError(
                f"member_score {self.member_score!r} acts with ratio_unit 'event' or 'member'; "
                f"with {unit!r} leave it at 'sum'"
            )
        if self.length < 1:
            raise ValueError(f"length must be at least 1 token, got {self.length}")
        if self.length != 4096 and reduction != "constant_length":
            raise ValueError(
                f"length acts with loss_reduction 'constant_length', not with {reduction!r}"
            )
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must lie in [0, 1], got {self.clip_low}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        if self.dual_clip is not None and unit == NO_RATIO:
            raise ValueError("dual_clip bounds a ratio; ratio_unit 'none' has none: leave it off")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip must be more than 1, got {self.dual_clip}")
        if unit == NO_RATIO and (self.clip_low, self.clip_high) != (0.2, 0.2):
            raise ValueError(
                "clip_low and clip_high bound a ratio; ratio_unit 'none' has none: leave them out"
            )
        if self.kl_coef and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator 'k1' is no penalty: the mean of its gradient is zero whatever the "
                "reference; with kl_coef take 'k3' or 'k2'"
            )
        if self.sampler_cap is not None and not self.sampler_cap > 0.0:
            raise ValueError(f"sampler_cap must be more than 0, got {self.sampler_cap}")
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be a finite number, at least 0, got {value}")

    @property
    def unit(self) -> RatioUnit:
        """The unit that one surrogate belongs to; without a ratio the reduction decides it."""
        reduction = LOSS_REDUCTIONS[self.loss_reduction]
        has_ratio = self.ratio_unit != NO_RATIO
        return RATIO_UNITS[self.ratio_unit if has_ratio else reduction.without_ratio]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ObjectiveConfig:
        """The switches of a named recipe.

        Args:
            name: A key of ``PRESETS``.
            **overrides: Switches that replace the preset's.

        Raises:
            ValueError: On an unknown name, or switches that do not go together.
        """
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                raise unknown_name("objective switch", key, known)
        return cls(**{**PRESETS[name][0], **overrides})
