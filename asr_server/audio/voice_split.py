"""Cuts samples into a chunk for each stretch of speech, where a request asks for that (`chunking_strategy`).

Used by `recording.py` in place of `split.py`'s rule, whose buffer it shares. Its chunks are of even loudness
(`loudness.py`), for the detector and the model alike.
"""

from __future__ import annotations

import numpy as np

from asr_server.audio.loudness import LoudnessNormalizer
from asr_server.audio.split import Splitter, quietest_cut
from asr_server.audio.voice import FRAME, VoiceDetector, is_speech
from asr_server.core import SAMPLE_RATE, Piece, Samples, VoiceChunking
from asr_server.levels import HOP, powers, runs


class VoiceSplitter(Splitter):
    """A chunk begins `prefix_padding_ms` before speech and ends once nobody has spoken for
    `silence_duration_ms`. One that would be longer than a window is cut at the quietest place in reach.
    """

    def __init__(self, max_chunk_samples: int, chunking: VoiceChunking) -> None:
        super().__init__(max_chunk_samples)
        self._threshold = chunking.threshold
        self._padding = min(chunking.prefix_padding_ms * SAMPLE_RATE // 1000, self._max_chunk // 2)
        self._silence = chunking.silence_duration_ms * SAMPLE_RATE // 1000
        self._loudness = LoudnessNormalizer()
        self._detector = VoiceDetector()
        self._speech: list[bool] = []  # by frame of the file, from `_first_frame` on
        self._first_frame = 0
        self._num_scored = 0  # samples of the file that the detector has had

    @property
    def num_samples(self) -> int:
        return super().num_samples + self._loudness.num_held

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + 4 * self._loudness.num_held

    def drop(self) -> None:
        super().drop()
        self._loudness = LoudnessNormalizer()

    def push(self, samples: Samples) -> list[Piece]:
        return super().push(self._loudness.push(samples))

    def finish(self) -> list[Piece]:
        return [*super().push(self._loudness.finish()), *super().finish()]

    def _next_chunk(self, held: Samples, last: bool) -> tuple[int, int]:
        self._score(held, last)
        stretches = self._stretches(len(held))
        if not stretches:
            return len(held) - (0 if last else self._padding), 0
        start, end = stretches[0]
        if start > self._padding:
            return start - self._padding, 0
        end = min(self._chunk_end(stretches), len(held))
        if end <= self._max_chunk:
            return 0, end
        return 0, quietest_cut(powers(held)[: min(self._max_chunk, len(held) - self._min_rest) // HOP])

    def _chunk_end(self, stretches: list[tuple[int, int]]) -> int:
        """Behind the first stretch. A pause too short for both paddings is shared."""
        end = stretches[0][1]
        if len(stretches) == 1:
            return end + self._silence
        next_start = stretches[1][0]
        return min(end + self._silence, max(next_start - self._padding, (end + next_start) // 2))

    def _stretches(self, num_held: int) -> list[tuple[int, int]]:
        """First and last sample of the buffer's speech; shorter pauses than asked for are part of it."""
        edges = (runs(self._speech) + self._first_frame) * FRAME - self._start
        joined: list[tuple[int, int]] = []
        for start, end in edges.clip(0, num_held).tolist():
            before = joined.pop() if joined and start - joined[-1][1] < self._silence else (start, end)
            joined.append((before[0], end))
        return [stretch for stretch in joined if stretch[1] > 0]

    def _score(self, held: Samples, last: bool) -> None:
        """Adds the frames that have come, and forgets those before the buffer."""
        new = held[self._num_scored - self._start :]
        self._num_scored += len(new)
        probabilities = self._detector.push(new)
        if last:
            probabilities = np.concatenate([probabilities, self._detector.finish()])
        was_speech = bool(self._speech) and self._speech[-1]
        self._speech += is_speech(probabilities, self._threshold, was_speech)
        num_past = min(self._start // FRAME - self._first_frame, len(self._speech) - 1)
        if num_past > 0:
            del self._speech[:num_past]
            self._first_frame += num_past
