"""Read parts of a recording: what lies outside of them is silence, so that times stay those of the file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asr_server.audio.stream import AroundSource, Stream
from asr_server.core import SAMPLE_RATE, Clip, Samples
from asr_server.errors import InvalidAudio


class ClippedStream(AroundSource):
    """Ends with the last clip. The clips are in order and do not overlap."""

    def __init__(self, stream: Stream, clips: Sequence[Clip]) -> None:
        super().__init__(stream)
        self._stream = stream
        self._first_s, self._end_s = clips[0].start_s, clips[-1].end_s
        self._spans = [(_sample_at(clip.start_s), _sample_at(clip.end_s)) for clip in clips]
        self._num_read = 0
        self._has_ended = False

    @property
    def truncated(self) -> bool:
        return self._has_ended and self._stream.truncated

    @property
    def duration_s(self) -> float | None:
        duration_s = self._stream.duration_s
        return duration_s if duration_s is None else min(duration_s, self._end_s)

    def read(self) -> Samples | None:
        start = self._num_read
        if start >= self._spans[-1][1]:
            return None
        samples = self._stream.read()
        if samples is None:
            self._has_ended = True
            self._require_some()
            return None
        self._num_read += len(samples)
        kept = np.zeros_like(samples)
        for first, end in self._spans:
            inside = slice(max(0, first - start), max(0, end - start))
            kept[inside] = samples[inside]
        return kept[: self._spans[-1][1] - start]

    def _require_some(self) -> None:
        if self._num_read <= self._spans[0][0]:
            length_s = self._num_read / SAMPLE_RATE
            raise InvalidAudio(
                f"The first clip begins at {self._first_s:g} s, and the recording is {length_s:.1f} s long."
            )


def _sample_at(time_s: float) -> int:
    return np.iinfo(np.int64).max if math.isinf(time_s) else round(time_s * SAMPLE_RATE)
