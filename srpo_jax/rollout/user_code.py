"""Where a user's own code failed, and what its return values may be.

What one episode's data brings about drops that episode; what every episode would repeat ends the
run at once, as UserCodeError.
"""

from __future__ import annotations

import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import envs.tool_threads
import envs.workflow
from envs.workflow import EpisodeFailed, Outcome, Score

_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
_OURS = (str(Path(__file__).parents[1]), envs.workflow.__file__, envs.tool_threads.__file__)


class UserCodeError(Exception):
    """A workflow or reward that does not keep to its form, whatever the episode; one line."""

    exit_code = 2


def raised_at(error: BaseException) -> str:
    """The error's message and the innermost line of the user's code that it passed through; where
    it passed through none, the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((_STANDARD, *_OURS, "<"))
        and not any(name in Path(frame.filename).parts for name in _INSTALLED)
    ]
    place = next(reversed(own or frames), None)
    return str(error) if place is None else f"{error} ({place.filename}:{place.lineno})"


def defined_at(function: Callable[..., Any]) -> str:
    """``name (file:line)`` of a function, a method, a partial or an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def first_leaf(error: Exception) -> Exception:
    """The error itself, or the first of those that a task group gathered."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def checked_outcome(value: Any, run: Callable[..., Any]) -> Outcome:
    """The value itself, which ``run`` returned.

    Raises:
        EpisodeFailed: ("bad_outcome") unless it is an Outcome.
    """
    if not isinstance(value, Outcome):
        raise EpisodeFailed(
            "bad_outcome", f"{defined_at(run)} must return an Outcome, got {_short(value)}"
        )
    return value


def checked_score(value: Any, reward: Callable[..., Any]) -> Score:
    """What ``reward`` returned, a Score or a verdict (a bool, 0 or 1), as a Score.

    Raises:
        UserCodeError: For another number, because whether that is correct is the reward's to say.
        EpisodeFailed: ("bad_reward") for what is no finite number.
    """
    if isinstance(value, Score):
        return value
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EpisodeFailed(
            "bad_reward",
            f"{defined_at(reward)} must return a Score, a bool, 0 or 1, got {_short(value)}",
        )
    if number not in (0.0, 1.0):
        raise UserCodeError(
            f"{defined_at(reward)} returned {number:g}: a bare reward is 0 or 1; for any other say "
            f"what is correct: Score({number:g}, correct=...)"
        )
    return Score(number, number == 1.0)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text[:60]}" if value is not None else "None"
