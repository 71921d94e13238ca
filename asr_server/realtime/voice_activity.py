"""Finds where speech begins, pauses and ends in a session's audio (`server_vad`). Called by `session.py`.

A `VoiceScorer` says for each frame how likely it is speech; `VoiceActivity` makes events of that with the
session's threshold and durations. The scorer here goes by loudness over the background alone.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np

from asr_server.core import Samples
from asr_server.levels import decibels, powers
from asr_server.realtime.server_events import SessionVad
from asr_server.realtime.turn_types import (
    SAMPLES_PER_MS,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
    VoiceStopped,
)

ONSET_FRAMES: Final = 3  # of speech before it counts: a click is shorter
PAUSE_SHARE: Final = 0.5  # of the silence that ends a turn: then it is read ahead
HYSTERESIS: Final = 0.15  # speech goes on at a score lower by this than the one that starts it
ONSET_MARGIN_MS: Final = 200  # speech is noticed no later than this after it began

VoiceEvent = VoiceStarted | VoicePaused | VoiceResumed | VoiceStopped


class VoiceScorer(Protocol):
    frame_samples: int

    def score(self, frame: Samples) -> float:
        """How likely the next frame is speech, from 0 to 1."""
        ...


class LevelScorer:
    """Loudness over the background, which is the quietest level heard lately."""

    frame_samples = 20 * SAMPLES_PER_MS

    RISE_DB: Final = 0.05  # that the background may grow in a frame: 2.5 dB a second
    QUIETEST_DB: Final = -65.0
    LOUDEST_DB: Final = -35.0  # who begins to speak at once is not taken for the background
    MIDDLE_DB: Final = 12.0  # over the background: as likely speech as not
    SLOPE_DB: Final = 3.0

    def __init__(self) -> None:
        self._background_db = self.LOUDEST_DB

    def score(self, frame: Samples) -> float:
        level_db = float(decibels(powers(frame)[:1])[0])
        rising = self._background_db + self.RISE_DB
        self._background_db = min(max(min(level_db, rising), self.QUIETEST_DB), self.LOUDEST_DB)
        above_db = level_db - self._background_db - self.MIDDLE_DB
        return 1 / (1 + math.exp(-above_db / self.SLOPE_DB))


class VoiceActivity:
    """Takes samples as they come; each position is a sample of the session."""

    def __init__(self, vad: SessionVad, scorer: VoiceScorer, position: int = 0) -> None:
        self._scorer = scorer
        self._vad = vad
        self._rest = np.empty(0, np.float32)
        self._position = position  # behind the last whole frame
        frame_ms = scorer.frame_samples / SAMPLES_PER_MS
        self._stop_frames = max(1, math.ceil(vad.silence_duration_ms / frame_ms))
        self._pause_frames = max(1, round(self._stop_frames * PAUSE_SHARE))
        self.restart()

    def restart(self) -> None:
        """Speech that goes on will start again."""
        self._is_speaking = self._is_paused = False
        self._num_loud = self._num_silent = 0  # frames in a row

    def push(self, samples: Samples) -> list[VoiceEvent]:
        held = np.concatenate([self._rest, samples])
        size = self._scorer.frame_samples
        events: list[VoiceEvent] = []
        for first in range(0, len(held) - size + 1, size):
            self._position += size
            events += self._on_frame(self._scorer.score(held[first : first + size]))
        self._rest = held[len(held) // size * size :]
        return events

    def _on_frame(self, score: float) -> list[VoiceEvent]:
        is_loud = score >= self._vad.threshold - (HYSTERESIS if self._is_speaking else 0.0)
        self._num_loud = self._num_loud + 1 if is_loud else 0
        if not self._is_speaking:
            return self._start() if self._num_loud >= ONSET_FRAMES else []
        if self._num_loud >= ONSET_FRAMES:
            self._num_silent = 0
            return self._resume() if self._is_paused else []
        self._num_silent += 1
        return self._on_silence()

    def _start(self) -> list[VoiceEvent]:
        self._is_speaking, self._num_silent = True, 0
        return [VoiceStarted(self._position - self._num_loud * self._scorer.frame_samples)]

    def _resume(self) -> list[VoiceEvent]:
        self._is_paused = False
        return [VoiceResumed()]

    def _on_silence(self) -> list[VoiceEvent]:
        if self._num_silent >= self._stop_frames:
            self.restart()
            return [VoiceStopped()]
        if self._num_silent >= self._pause_frames and not self._is_paused:
            self._is_paused = True
            return [VoicePaused()]
        return []
