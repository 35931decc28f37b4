"""How a measured program times its work and reports it. Peers' programs import it too: no package.

Every program of a comparison is one module with a function from integer options to figures, which
``run_program`` calls; it prints them as one JSON object on the last line of its output.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Timing(NamedTuple):
    """Median seconds of a run, and the programs compiled after the warm-up."""

    seconds: float
    compiles: int


def elapsed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_seconds(work: Callable[[int], object], repeats: int) -> float:
    """The median time of ``work(1)`` to ``work(repeats)``, after a warm-up ``work(0)``."""
    return time_work(work, repeats).seconds


def time_work(
    work: Callable[[int], object], repeats: int, compile_count: Callable[[], int] = lambda: 0
) -> Timing:
    """Times a repeated work after a warm-up run, which compiles what it needs.

    Args:
        work: Called with 0 for the warm-up, then with 1 to ``repeats``; returns when it is done.
        repeats: Timed calls.
        compile_count: How many programs are compiled so far.

    Returns:
        The median over the timed calls, and the compiles during them: 0 where shapes are stable.
    """
    work(0)
    compiled = compile_count()
    seconds = [elapsed(partial(work, number)) for number in range(1, repeats + 1)]
    return Timing(statistics.median(seconds), compile_count() - compiled)


def run_program(measure: Callable[..., dict[str, Any]]) -> None:
    """The main function of a measured program: an option for every argument of ``measure``."""
    parser = argparse.ArgumentParser()
    for name in inspect.signature(measure).parameters:
        parser.add_argument(f"--{name}", type=int, required=True)
    print_json(measure(**vars(parser.parse_args())))


def print_json(figures: dict[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps(figures), flush=True)
