"""Whether a function of text takes time in proportion to the text's length."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(function: Callable[[str], object], *units: str, around: str = "{}") -> None:
    """Times ``function`` on each unit repeated to 1,024 ... 65,536 characters inside ``around``.

    Each doubling may take 2.5 times as long (best of 5) where the longer text takes over 2 ms. A
    ratio above is measured again, up to eight times over seven seconds: a busy machine passes, a
    quadratic pattern stays.
    """
    for unit in units:
        texts = [around.replace("{}", unit * (2**n // len(unit))) for n in range(10, 17)]
        times = [_best(function, text) for text in texts]
        for i in range(1, len(texts)):
            for pause in range(8):
                if times[i] <= max(2e-3, 2.5 * times[i - 1]):
                    break
                time.sleep(pause / 4)
                times[i - 1 : i + 1] = _best(function, texts[i - 1]), _best(function, texts[i])
            else:
                raise AssertionError(
                    f"{unit!r} to {len(texts[i])} characters: {times[i]:.4f} s, "
                    f"half of it {times[i - 1]:.4f} s"
                )


def _best(function: Callable[[str], object], text: str) -> float:
    """Seconds of this thread's processor time, the best of 5."""
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        function(text)
        best = min(best, time.thread_time() - start)
    return best
