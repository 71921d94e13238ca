"""From a client's bytes to turns: convert its audio to 16 kHz, keep the latest, find speech in it."""

from collections import deque
from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt
import soundfile

from asr_server.annexes.realtime import turn_types as turns
from asr_server.annexes.realtime.client_events import AlawFormat, AudioFormat, PcmFormat, UlawFormat
from asr_server.annexes.realtime.server_events import SessionVad
from asr_server.annexes.realtime.turn_types import SAMPLES_PER_MS
from asr_server.audio.stream import Mono16k
from asr_server.audio.voice import FRAME, HYSTERESIS, VoiceDetector
from asr_server.core import Samples


def _table(encoding: str) -> Samples:
    """Return the sample of each code of G.711."""
    codes = BytesIO(bytes(range(256)))
    samples: Samples
    samples, _ = soundfile.read(
        codes, dtype="float32", format="RAW", subtype=encoding, samplerate=8000, channels=1
    )
    return samples


_TABLES: Final[dict[type, Samples]] = {UlawFormat: _table("ULAW"), AlawFormat: _table("ALAW")}
_SCALE: Final = np.float32(1 / 2**15)


class AudioInput:
    """Convert bytes as they come, at the format's rate if none is given; appends may split a sample."""

    def __init__(self, format: AudioFormat, rate: int | None = None) -> None:
        self._format = format
        self._rate = rate or (24_000 if isinstance(format, PcmFormat) else 8_000)  # samples a second
        self._rest = b""  # half a sample
        self._resampler = Mono16k(self._rate, num_channels=1)

    def push(self, data: bytes) -> Samples:
        samples = self._decode(data)
        return self._resampler.push(samples[:, None]) if len(samples) else samples

    def flush(self) -> Samples:
        """Return the samples in the filter. The next `push` begins with a whole sample."""
        self._rest = b""
        samples = self._resampler.finish()
        self._resampler = Mono16k(self._rate, num_channels=1)
        return samples

    def _decode(self, data: bytes) -> Samples:
        if (table := _TABLES.get(type(self._format))) is not None:
            return table[np.frombuffer(data, np.uint8)]
        data = self._rest + data
        num_whole = len(data) // 2 * 2
        self._rest = data[num_whole:]
        values: npt.NDArray[np.int16] = np.frombuffer(data[:num_whole], "<i2")
        return values.astype(np.float32) * _SCALE


class AudioBuffer:
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
        held = np.concatenate([*self._blocks, np.empty(0, np.float32)])
        return held[max(0, start - self._start) :]


ONSET_FRAMES: Final = 2  # of speech before it counts
LATE_FRAMES: Final = 2  # the detector notices the end of speech so late
PAUSE_SHARE: Final = 1 / 3  # of the silence that ends a turn: then it is read ahead
ONSET_MARGIN_MS: Final = 200  # speech is noticed no later than this after it began

VoiceEvent = turns.VoiceStarted | turns.Signal


class VoiceActivity:
    """Turn samples into events; positions are the session's samples."""

    def __init__(self, vad: SessionVad, position: int = 0) -> None:
        self._detector = VoiceDetector()
        self._position = position  # behind the last whole frame
        self.configure(vad)
        self.restart()

    def configure(self, vad: SessionVad) -> None:
        self._threshold = vad.threshold
        # Within words one frame alone may be quiet, as outside them one may be loud.
        self._stop_frames = max(ONSET_FRAMES, vad.silence_duration_ms * SAMPLES_PER_MS // FRAME - LATE_FRAMES)
        self._pause_frames = max(1, round(self._stop_frames * PAUSE_SHARE))

    def restart(self) -> None:
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
            if self._num_loud < ONSET_FRAMES:
                return []
            self._is_speaking, self._num_silent = True, 0
            return [turns.VoiceStarted(self._position - self._num_loud * FRAME)]
        if self._num_loud >= ONSET_FRAMES:
            self._num_silent = 0
            was_paused, self._is_paused = self._is_paused, False
            return [turns.Signal.VOICE_RESUMED] if was_paused else []
        self._num_silent += not is_speech
        if self._num_silent >= self._stop_frames:
            self.restart()
            return [turns.Signal.VOICE_STOPPED]
        if self._num_silent >= self._pause_frames and not self._is_paused:
            self._is_paused = True
            return [turns.Signal.VOICE_PAUSED]
        return []
