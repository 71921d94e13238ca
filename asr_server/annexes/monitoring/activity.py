"""Remember the last 15 minutes of the server in bounded memory, for the page that shows them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from starlette.types import Scope

from asr_server.api.middleware import SAFE_METHODS
from asr_server.metrics import RequestStats
from asr_server.telemetry import current_request_id

WINDOW_S: Final = 900.0
SAMPLE_EVERY_S: Final = 5.0
SPEED_OVER_S: Final = 30.0
MAX_ANSWERS: Final = 4096


class Answer(NamedTuple):
    ended_at: float
    request_id: str
    route: str
    status: int
    duration_s: float
    audio_s: float
    first_text_s: float | None
    queue_s: float | None  # its chunks' mean wait for a slot
    key: str  # its name, if it has one


class Sample(NamedTuple):
    at: float
    audio_s: float  # transcribed since the start
    requests: int
    chunks_waiting: int
    slots: int
    slots_in_use: int
    sessions: int


class ActivityLog:
    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._answers: deque[Answer] = deque(maxlen=MAX_ANSWERS)
        self._samples: deque[Sample] = deque(maxlen=1 + round(WINDOW_S / SAMPLE_EVERY_S))

    @property
    def uptime_s(self) -> int:
        return int(time.monotonic() - self._began_at)

    def on_begun(self, scope: Scope, stats: RequestStats) -> None:
        pass

    def on_ended(self, what: str, stats: RequestStats, figures: Mapping[str, Any]) -> None:
        """Remember a request by the figures of its log line."""
        if figures.get("method") in SAFE_METHODS or "status" not in figures:
            return
        queued_s = figures.get("stages_s", {}).get("chunks_queued")
        self._answers.append(
            Answer(
                time.monotonic(),
                current_request_id.get(),
                figures["route"],
                figures["status"],
                figures["seconds"],
                figures.get("audio_s", 0.0),
                figures.get("first_text_s"),
                None if queued_s is None else queued_s / figures["chunks"],
                figures.get("key", ""),
            )
        )

    def add_sample(self, sample: Sample) -> None:
        self._samples.append(sample)

    def answers(self, now: float) -> list[Answer]:
        return [answer for answer in self._answers if now - answer.ended_at < WINDOW_S]

    def samples(self, now: float) -> list[Sample]:
        return [sample for sample in self._samples if now - sample.at < WINDOW_S]


def speeds(samples: list[Sample]) -> list[float]:
    """Return the seconds of audio transcribed a second before each sample."""
    num_back = round(SPEED_OVER_S / SAMPLE_EVERY_S)
    return [_speed_between(samples[max(0, index - num_back)], sample) for index, sample in enumerate(samples)]


def _speed_between(first: Sample, last: Sample) -> float:
    return (last.audio_s - first.audio_s) / (last.at - first.at) if last.at > first.at else 0.0
