"""Record how far each slot has been written, so that a new text clears the rest.

A step reads all slots to the longest text. A shorter one is masked, but NaN would spoil it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TextEnds:
    """For each slot, an upper bound of the positions ever written."""

    def __init__(self, num_slots: int, num_positions: int) -> None:
        self._ends = np.zeros(num_slots, np.int64)
        self._num_positions = num_positions

    def on_step(self, num_rows: int) -> None:
        self._ends[:num_rows] += 1

    def extend(self, slots: Sequence[int], end: int) -> None:
        rows = list(slots)  # a tuple, as other ranks receive it, would be one index of numpy's
        self._ends[rows] = np.maximum(self._ends[rows], end)

    def restart(self, slots: Sequence[int], end: int) -> int:
        """Set the ends of new texts; return how far the old ones reach."""
        rows = list(slots)
        farthest = min(int(self._ends[rows].max()), self._num_positions)
        self._ends[rows] = end
        return farthest
