"""Keeps the latest samples of a session, because a turn begins a little before its speech was noticed."""

from __future__ import annotations

from collections import deque

import numpy as np

from asr_server.core import Samples


class AudioBuffer:
    """Holds at least the last `num_kept` samples (or all there are), and at most one block more."""

    def __init__(self, num_kept: int = 0) -> None:
        self.num_kept = num_kept
        self.end = 0  # samples written so far
        self._blocks: deque[Samples] = deque()
        self._start = 0  # of the first block

    @property
    def num_held(self) -> int:
        return self.end - self._start

    def push(self, samples: Samples) -> None:
        self._blocks.append(samples)
        self.end += len(samples)
        while self._blocks and self.num_held - len(self._blocks[0]) >= self.num_kept + len(samples):
            self._start += len(self._blocks.popleft())

    def since(self, start: int) -> Samples:
        """The samples from `start` on; from the oldest one held where that is later."""
        held = np.concatenate([*self._blocks, np.empty(0, np.float32)])
        return held[max(0, start - self._start) :]
