"""Whether a function of text takes time in proportion to the text's length."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(function: Callable[[str], object], *units: str, around: str = "{}") -> None:
    """Times ``function`` on each unit repeated to 1,024 ... 65,536 characters inside ``around``.

    Each doubling may take 2.5 times as long (best of 5) where the longer text takes over 2 ms.
    """
    for unit in units:
        before = None
        for exponent in range(10, 17):
            text = around.replace("{}", unit * (2**exponent // len(unit)))
            seconds = min(_seconds(function, text) for _ in range(5))
            if before is not None and seconds > 2e-3 and seconds > 2.5 * before:
                # The machine may have been busy for all five: a quadratic one stays so.
                seconds = min(_seconds(function, text) for _ in range(5))
                assert seconds <= 2.5 * before, (
                    f"{unit!r} to {len(text)} characters: {before:.4f} s, doubled {seconds:.4f} s"
                )
            before = seconds


def _seconds(function: Callable[[str], object], text: str) -> float:
    start = time.perf_counter()
    function(text)
    return time.perf_counter() - start
