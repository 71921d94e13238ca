"""How many requests may be in the building; who comes when it is full is told when to come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asr_server.config import naming
from asr_server.errors import Overloaded

MAX_RETRY_AFTER_S: Final = 120  # official clients honour no more
_WEIGHT: Final = 0.1  # of the newest request in the mean stay


class WaitingRoom:
    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_inside = 0
        self.num_refused = 0
        self._max_requests = max_requests
        self._mean_stay_s = 1.0
        self._clock = clock

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises Overloaded."""
        if self.num_inside >= self._max_requests:
            self.num_refused += 1
            raise Overloaded(
                f"{self._max_requests} requests are waiting already: {naming('max_waiting_requests')}.",
                self.retry_after_s,
            )
        self.num_inside += 1
        entered_at = self._clock()
        try:
            yield
        finally:
            self.num_inside -= 1
            self._mean_stay_s += _WEIGHT * (self._clock() - entered_at - self._mean_stay_s)

    @property
    def retry_after_s(self) -> int:
        """Half a mean stay, by when half of those inside have left."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_stay_s / 2)))
