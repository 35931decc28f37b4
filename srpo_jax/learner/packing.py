"""Which rows share a sequence: best fit, longest first."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most ``capacity`` tokens, each a list of row indices in ascending order.

    Rows are placed longest first into the fullest bin that still holds them, so equal inputs give
    equal bins. Bins come in the order of their first rows. Raises ValueError for a longer row.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), ascending
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        length = lengths[row]
        if length > capacity:
            raise ValueError(f"a row has {length} tokens, a sequence {capacity}")
        place = bisect.bisect_left(open_bins, (length, -1))
        if place < len(open_bins):
            room, chosen = open_bins.pop(place)
            bins[chosen].append(row)
        else:
            room, chosen = capacity, len(bins)
            bins.append([row])
        bisect.insort(open_bins, (room - length, chosen))
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])
