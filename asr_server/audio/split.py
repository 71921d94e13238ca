"""Cut samples into chunks: at the quietest point in reach or, on request, around stretches of speech.

Reads no file and knows no requests.

A cut is judged by the mean level of the 200 ms around it, which tells pauses (150 ms and more) from stop
consonants (60 ms).

A `chunking_strategy` looks for speech, and first evens loudness (`loudness.py`), as OpenAI's does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asr_server.audio.loudness import LoudnessNormalizer
from asr_server.audio.voice import FRAME, VoiceDetector, is_speech
from asr_server.core import SAMPLE_RATE, Chunk, Piece, Samples, Silence, VoiceChunking
from asr_server.levels import HOP, HOPS_PER_LEVEL, SILENCE_POWER, Powers, decibels, powers, runs

HOPS_PER_PAUSE = 40  # 200 ms
REACH_HOPS = 8 * SAMPLE_RATE // HOP  # how far before the latest place a pause is looked for
QUIET_SHARE = 0.05  # of the places within reach are taken to be pauses
MAX_ABOVE_DB = 15.0  # the quietest place
LONG_SHARE = 0.5  # of the longest pause within reach
MIN_SILENCE = 1 * SAMPLE_RATE  # shorter pauses stay within their chunk
MIN_MAX_CHUNK = 3 * SAMPLE_RATE  # in less there is no room to choose
# Left behind a cut, but at most a third of the longest chunk: a short end invites the model to invent more.
MIN_REST = 10 * SAMPLE_RATE
MARGIN = SAMPLE_RATE // 4  # of silence kept around speech


class Splitter:
    """Turn blocks of samples into pieces that tile them exactly.

    Args:
        min_rest_samples: samples to wait for behind a cut.
    """

    def __init__(self, max_chunk_samples: int, min_rest_samples: int = MIN_REST) -> None:
        self.num_chunks = 0  # given so far
        self._max_chunk = max(max_chunk_samples, MIN_MAX_CHUNK)
        self._min_rest = min(min_rest_samples, self._max_chunk // 3)
        self._size = self._max_chunk + self._min_rest
        self._buffer = np.empty(self._size, np.float32)
        self._num_held = 0  # samples at the start of `_buffer`
        self._start = 0  # where they begin in the file
        self._num_silent = 0  # samples just before them, in a silence not yet reported

    @property
    def num_samples(self) -> int:
        return self._start + self._num_held

    @property
    def num_settled(self) -> int:
        """Return the samples before the first chunk still to come."""
        return self._start

    @property
    def held_bytes(self) -> int:
        return 4 * self._num_held

    def drop(self) -> None:
        self._start, self._num_held, self._buffer = self.num_samples, 0, np.empty(0, np.float32)

    def push(self, samples: Samples) -> list[Piece]:
        """Return the pieces with known ends. Copies the samples."""
        pieces: list[Piece] = []
        while len(samples):
            if self._num_held == self._size:
                pieces += self._split(last=False)
            taken = samples[: self._size - self._num_held]
            self._buffer[self._num_held : self._num_held + len(taken)] = taken
            self._num_held += len(taken)
            samples = samples[len(taken) :]
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._num_held:
            pieces += self._split(last=True)
        return pieces + self._report_silence()

    def _split(self, last: bool) -> list[Piece]:
        held = self._buffer[: self._num_held]
        skip, take = self._next_chunk(held, last)
        self._num_silent += skip
        self._start += skip
        pieces = [*self._report_silence(), self._chunk(held[skip : skip + take])] if take else []
        rest = held[skip + take :]
        self._buffer = np.empty(self._size, np.float32)  # the old one has left with the chunk
        self._buffer[: len(rest)] = rest
        self._num_held = len(rest)
        return pieces

    def _next_chunk(self, held: Samples, last: bool) -> tuple[int, int]:
        """Return the samples of silence to skip, and of the chunk behind it.

        Unless this is the `last` call, a leading silence is taken alone.
        """
        # Where more follows, what lies behind the longest chunk need not be measured yet.
        near = held if last else held[: self._max_chunk + HOPS_PER_LEVEL * HOP]
        levels = powers(near)
        loud = np.flatnonzero(levels > SILENCE_POWER)
        if not len(loud):
            return (len(held), 0) if last else (len(near) - MARGIN, 0)
        speech_start = int(loud[0]) * HOP
        if speech_start >= MIN_SILENCE:
            return speech_start - MARGIN, 0
        end = _trimmed(loud, len(held)) if last else len(held)
        if end <= self._max_chunk:
            return 0, end
        latest_cut = min(self._max_chunk, end - self._min_rest)
        return 0, _trimmed(loud, quietest_cut(levels[: latest_cut // HOP]))

    def _chunk(self, samples: Samples) -> Chunk:
        if len(samples) < self._size // 2:
            samples = samples.copy()  # a short view would hold on to the whole buffer's memory
        chunk = Chunk(self.num_chunks, self._start, samples)
        self.num_chunks += 1
        self._start += len(samples)
        return chunk

    def _report_silence(self) -> list[Piece]:
        num_samples, self._num_silent = self._num_silent, 0
        return [Silence(self._start - num_samples, num_samples)] if num_samples else []


def _trimmed(loud: npt.NDArray[np.intp], end: int) -> int:
    before = loud[loud * HOP < end]
    speech_end = (int(before[-1]) + HOPS_PER_LEVEL) * HOP if len(before) else 0
    return speech_end + MARGIN if end - speech_end >= MIN_SILENCE else end


def quietest_cut(powers: Powers) -> int:
    """Return the best cut: in the latest long pause of the second half.

    A pause is where 200 ms are not much louder than the recording's quiet, relative to its range. It is
    long if at least half as long as the longest: sentences end there. At its end, cut amid the quietest
    20 ms.
    """
    reach = decibels(powers[-min(REACH_HOPS, len(powers) // 2) :])
    means = np.convolve(reach, np.full(HOPS_PER_PAUSE, 1 / HOPS_PER_PAUSE), mode="valid")
    ranks = [round(QUIET_SHARE * (len(means) - 1)), len(means) // 2]
    quiet, middle = np.partition(means, ranks)[ranks]
    limit = quiet + min(8.0, max(1.0, (middle - quiet) / 5))
    limit = min(limit, float(means.min()) + MAX_ABOVE_DB)  # one pause alone is less than the share
    pauses = runs(means <= limit)
    durations = pauses[:, 1] - pauses[:, 0]
    pause = int(pauses[durations >= LONG_SHARE * durations.max(), 1][-1]) - 1
    within = reach[pause : pause + HOPS_PER_PAUSE - HOPS_PER_LEVEL]
    # Among equally quiet places the middle one is farthest from the words on both sides.
    candidates = np.flatnonzero(within <= within.min() + 1.0)
    best = int(candidates[np.argmin(np.abs(candidates - len(within) / 2))])
    return (len(powers) - len(reach) + pause + best) * HOP + HOPS_PER_LEVEL * HOP // 2


class VoiceSplitter(Splitter):
    """Begin a chunk `prefix_padding_ms` before speech; end it after `silence_duration_ms` without.

    Longer ones are cut at the quietest place.
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
        end = stretches[0][1]
        if len(stretches) == 1:
            return end + self._silence
        next_start = stretches[1][0]
        return min(end + self._silence, max(next_start - self._padding, (end + next_start) // 2))

    def _stretches(self, num_held: int) -> list[tuple[int, int]]:
        edges = (runs(self._speech) + self._first_frame) * FRAME - self._start
        joined: list[tuple[int, int]] = []
        for start, end in edges.clip(0, num_held).tolist():
            before = joined.pop() if joined and start - joined[-1][1] < self._silence else (start, end)
            joined.append((before[0], end))
        return [stretch for stretch in joined if stretch[1] > 0]

    def _score(self, held: Samples, last: bool) -> None:
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
