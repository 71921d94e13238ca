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
        self._ends[slots] = np.maximum(self._ends[slots], end)

    def restart(self, slots: Sequence[int], end: int) -> int:
        """Set the ends of new texts; return how far the ones before them reach."""
        farthest = min(int(self._ends[slots].max()), self._num_positions)
        self._ends[slots] = end
        return farthest
