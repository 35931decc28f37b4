"""Switches of the objective, and the presets that set objective and advantage together.

Kept apart from the objective itself so that a recipe can be checked without loading jax. The type
of a switch says its names, once: recipes and errors read them from there.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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

# What each ratio unit can be averaged over.
_REDUCTIONS = {
    "event": ("event", "token", "token_ratio", "member"),
    "member": ("member", "event", "token", "token_ratio"),
    "token": ("token", "sequence_mean", "constant_length", "event"),
    "none": ("event", "member", "token", "sequence_mean", "constant_length"),
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

    ratio_unit      what carries one ratio and one clip: the event, each member output, each token,
                    or ``none`` (policy gradient without a ratio: advantage times log-prob)
    set_reduction   how an event joins its K members' scores: over sqrt(K), their sum, their mean
    member_score    a member's score: the sum of its token log-ratios, or their mean
    loss_reduction  what weighs 1 in the average:
                    ``event``, ``member`` (one output), ``token``;
                    ``token_ratio``: the value of ``token``, each unit's gradient over its tokens;
                    ``sequence_mean``: token mean of each output, then the mean over outputs;
                    ``constant_length``: token sum of each output over ``length``, then that mean
    length          the constant of ``constant_length``, tokens (the response budget of a call)
    clip_low, clip_high   the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip       None, or the bound c > 1 of the ratio where the advantage is negative
    kl_coef, kl_estimator  weight of the KL to a reference, averaged over the generated tokens:
                    with d = log q_cur - log q_ref, k1 = d (a value to watch, refused with kl_coef:
                    its gradient is that of the log-prob, of mean zero), k2 = d^2 / 2,
                    k3 = exp(-d) + d - 1
    entropy_coef    weight of the entropy bonus, averaged over the generated tokens
    sampler_cap     None, or the cap of truncated importance sampling: every surrogate is weighted
                    by min(q_old / q_sampler, cap), the ratio taken over the same unit (for SRPO the
                    event, with the same set reduction). For samplers whose log-probs differ from
                    the learner's: another engine, or lower precision

    A switch that cannot act beside the others must keep its default: ValueError otherwise.
    """

    ratio_unit: Literal["event", "member", "token", "none"] = "event"
    set_reduction: Annotated[str, KeyOf(SET_REDUCTIONS)] = "sqrt"
    member_score: Literal["sum", "mean"] = "sum"
    loss_reduction: Literal[
        "event", "member", "token", "token_ratio", "sequence_mean", "constant_length"
    ] = "event"
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
        if reduction not in _REDUCTIONS[unit]:
            raise ValueError(
                f"loss_reduction {reduction!r} does not go with ratio_unit {unit!r}; "
                f"those that do: {', '.join(_REDUCTIONS[unit])}"
            )
        if self.set_reduction != "sqrt" and self.level != "event":
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
        if self.dual_clip is not None and unit == "none":
            raise ValueError("dual_clip bounds a ratio; ratio_unit 'none' has none: leave it off")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip must be more than 1, got {self.dual_clip}")
        if unit == "none" and (self.clip_low, self.clip_high) != (0.2, 0.2):
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
    def level(self) -> Literal["event", "member", "token"]:
        """The unit that one surrogate belongs to; without a ratio the reduction decides it."""
        if self.ratio_unit != "none":
            return self.ratio_unit
        return self.loss_reduction if self.loss_reduction in ("event", "member") else "token"

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ObjectiveConfig:
        """The switches of a named recipe, with some replaced. ValueError on an unknown name."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                raise unknown_name("objective switch", key, known)
        return cls(**{**PRESETS[name][0], **overrides})
