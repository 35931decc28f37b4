"""The few sizes that shapes are rounded up to, so that programs are compiled once."""

from __future__ import annotations


def bucket(n: int, floor: int = 1) -> int:
    """The smallest of floor, 1.5 floor, 2 floor, 3 floor, 4 floor, ... that holds n."""
    size = floor
    while size < n:
        if size * 3 // 2 >= n and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size
