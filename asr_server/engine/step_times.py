"""How long the steps of an engine take: a histogram that heartbeats carry to `/metrics`."""

from __future__ import annotations

from bisect import bisect_left

from asr_server.channel.messages import STEP_TIME_BOUNDS_S, StepTimes


class StepTimer:
    """Counts each step under the smallest bound that it keeps within. One thread writes, others may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)  # the last one: longer than every bound
        self._sum_s = 0.0

    def add(self, step_s: float) -> None:
        self._counts[bisect_left(STEP_TIME_BOUNDS_S, step_s)] += 1
        self._sum_s += step_s

    @property
    def times(self) -> StepTimes:
        return StepTimes(tuple(self._counts), self._sum_s)
