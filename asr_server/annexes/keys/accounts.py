"""What one key may use, and what it has used.

A bucket refills evenly, as OpenAI's do: a key may use a whole minute's worth at once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asr_server.annexes.keys.keys_file import Key
from asr_server.api.headers import LIMIT_UNITS
from asr_server.config import naming
from asr_server.errors import RateLimited

PLACE_WAIT_S: Final = 1.0  # for one of the key's own requests to end


class Bucket:
    """Refill `per_minute` units a minute; 0: no limit. An overdrawn bucket has none until it is paid back."""

    def __init__(self, unit: str, clock: Callable[[], float]) -> None:
        self.per_minute = 0
        self._unit = unit
        self._used = 0.0
        self._clock, self._measured_at = clock, clock()

    def set_limit(self, per_minute: int) -> None:
        self._used = self._in_use() if self.per_minute and per_minute else 0.0
        self.per_minute = per_minute

    def spend(self, amount: float) -> None:
        if self.per_minute:
            self._used = self._in_use() + amount

    def wait_s(self) -> float:
        """Return the seconds until a unit is left."""
        missing = round(self._in_use() + 1 - self.per_minute, 6)
        return max(0.0, missing) * self._unit_s if self.per_minute else 0.0

    def headers(self) -> dict[str, str]:
        if not self.per_minute:
            return {}
        used = self._in_use()
        return {
            f"x-ratelimit-limit-{self._unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{self._unit}": str(max(0, math.floor(self.per_minute - used))),
            f"x-ratelimit-reset-{self._unit}": format_duration(used * self._unit_s),
        }

    @property
    def _unit_s(self) -> float:
        return 60 / self.per_minute

    def _in_use(self) -> float:
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._measured_at) * self.per_minute / 60)
        self._measured_at = now
        return self._used


def format_duration(duration_s: float) -> str:
    """Write a duration as OpenAI's headers do: `20ms`, `8.64s`, `6m0s`."""
    if duration_s < 1:
        return f"{math.ceil(1000 * duration_s)}ms"
    minutes, seconds = divmod(round(duration_s, 2), 60)
    return f"{minutes:.0f}m{seconds:.4g}s" if minutes else f"{seconds:.4g}s"


class Account:
    """One name's limits and use. It outlives the versions of the file that have the name."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self.audio_s = 0.0
        self.answers = Counter[int]()  # by status
        self._requests, self._audio = (Bucket(unit, clock) for unit in LIMIT_UNITS)
        self.set_key(key)

    def set_key(self, key: Key) -> None:
        self.key = key
        self._requests.set_limit(key.requests_per_minute)
        self._audio.set_limit(key.audio_seconds_per_minute)

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def models(self) -> tuple[str, ...] | None:
        return self.key.models

    @property
    def is_admin(self) -> bool:
        return self.key.admin

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request or a session while the block runs. Raises RateLimited."""
        self.require_room()
        self._requests.spend(1)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def require_room(self) -> None:
        """Raises RateLimited."""
        limit = self.key.concurrent_requests
        if 0 < limit <= self.num_open:
            raise self._refusal(f"{limit} requests at once", "concurrent_requests", PLACE_WAIT_S)
        if wait_s := self._requests.wait_s():
            limit = self.key.requests_per_minute
            raise self._refusal(f"{limit} requests a minute", "requests_per_minute", wait_s)
        self.require_audio()

    def require_audio(self) -> None:
        """Raises RateLimited."""
        if wait_s := self._audio.wait_s():
            limit = self.key.audio_seconds_per_minute
            raise self._refusal(f"{limit} seconds of audio a minute", "audio_seconds_per_minute", wait_s)

    def _refusal(self, limit: str, field: str, wait_s: float) -> RateLimited:
        return RateLimited(
            f"Rate limit reached for the key '{self.name}': {limit} ('{field}' in {naming('keys_file')}). "
            f"Please try again in {format_duration(wait_s)}.",
            wait_s,
        )

    def spend_audio(self, duration_s: float) -> None:
        self.audio_s += duration_s
        self._audio.spend(duration_s)

    def headers(self) -> dict[str, str]:
        return self._requests.headers() | self._audio.headers()
