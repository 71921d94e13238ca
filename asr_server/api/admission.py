"""Limits how many requests are in flight, and tells the others when to try again.

`response.py` acquires a place for each request before it reads the request's body.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asr_server.config import naming
from asr_server.errors import Overloaded

MAX_RETRY_AFTER_S: Final = 120  # official clients honour no more
_WEIGHT: Final = 0.1  # of the newest request in the mean time that a request takes


class AdmissionLimiter:
    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_in_flight = 0
        self.num_rejected = 0
        self._max_requests = max_requests
        self._mean_request_s = 1.0
        self._clock = clock

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Raises Overloaded."""
        if self.num_in_flight >= self._max_requests:
            self.num_rejected += 1
            raise Overloaded(
                f"{self._max_requests} requests are in flight already: {naming('max_concurrent_requests')}.",
                self.retry_after_s,
            )
        self.num_in_flight += 1
        started_at = self._clock()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self._mean_request_s += _WEIGHT * (self._clock() - started_at - self._mean_request_s)

    @property
    def retry_after_s(self) -> int:
        """Half of the mean time that a request takes: by then half of those in flight have ended."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_request_s / 2)))
