"""How far the text of each slot has been written, so that a new text clears what lies behind it.

A decode step reads every slot as far as the longest text. What lies behind a shorter one is masked, but NaN
there would spoil it. Runs in a replica's process. Used by `cache.py`; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TextEnds:
    """For each slot a position before which everything was written that a text or a free row ever wrote."""

    def __init__(self, num_slots: int, num_positions: int) -> None:
        self._ends = np.zeros(num_slots, np.int64)
        self._num_positions = num_positions

    def on_step(self, num_rows: int) -> None:
        """Count one more position of these first slots: free ones among them run on."""
        self._ends[:num_rows] += 1

    def extend(self, slots: Sequence[int], end: int) -> None:
        rows = list(slots)  # a tuple, as other ranks receive it, would be one index of numpy's
        self._ends[rows] = np.maximum(self._ends[rows], end)

    def restart(self, slots: Sequence[int], end: int) -> int:
        """Set the ends of new texts; return how far the ones before them reach."""
        rows = list(slots)
        farthest = min(int(self._ends[rows].max()), self._num_positions)
        self._ends[rows] = end
        return farthest
