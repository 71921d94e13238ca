"""Find where speech begins, pauses and ends (`server_vad`), from Silero's probability of each 32 ms
frame.
"""

from __future__ import annotations

from typing import Final

from asr_server.annexes.realtime.server_events import SessionVad
from asr_server.annexes.realtime.turn_types import (
    SAMPLES_PER_MS,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
    VoiceStopped,
)
from asr_server.audio.voice import FRAME, HYSTERESIS, VoiceDetector
from asr_server.core import Samples

ONSET_FRAMES: Final = 2  # of speech before it counts
PAUSE_SHARE: Final = 0.5  # of the silence that ends a turn: then it is read ahead
ONSET_MARGIN_MS: Final = 200  # speech is noticed no later than this after it began

VoiceEvent = VoiceStarted | VoicePaused | VoiceResumed | VoiceStopped


class VoiceActivity:
    """Turn samples into events; positions are the session's samples."""

    def __init__(self, vad: SessionVad, position: int = 0) -> None:
        self._detector = VoiceDetector()
        self._position = position  # behind the last whole frame
        self.configure(vad)
        self.restart()

    def configure(self, vad: SessionVad) -> None:
        """Follow new settings; keep who speaks and for how long."""
        self._threshold = vad.threshold
        # Rounded down: the detector notices the end of speech a frame or two late.
        self._stop_frames = max(1, vad.silence_duration_ms * SAMPLES_PER_MS // FRAME)
        self._pause_frames = max(1, round(self._stop_frames * PAUSE_SHARE))

    def restart(self) -> None:
        """Forget the current speech; if it goes on, it starts again."""
        self._is_speaking = self._is_paused = False
        self._num_loud = self._num_silent = 0  # frames in a row

    def push(self, samples: Samples) -> list[VoiceEvent]:
        probabilities = self._detector.push(samples).tolist()
        return [event for probability in probabilities for event in self._on_frame(probability)]

    def _on_frame(self, probability: float) -> list[VoiceEvent]:
        self._position += FRAME
        is_speech = probability >= self._threshold - (HYSTERESIS if self._is_speaking else 0.0)
        self._num_loud = self._num_loud + 1 if is_speech else 0
        if not self._is_speaking:
            return self._start() if self._num_loud >= ONSET_FRAMES else []
        if self._num_loud >= ONSET_FRAMES:
            self._num_silent = 0
            return self._resume() if self._is_paused else []
        self._num_silent += 1
        return self._on_silence()

    def _start(self) -> list[VoiceEvent]:
        self._is_speaking, self._num_silent = True, 0
        return [VoiceStarted(self._position - self._num_loud * FRAME)]

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
