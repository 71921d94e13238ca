"""Cuts samples into a chunk for each stretch of speech, where a request asks for that (`chunking_strategy`).

Used by `recording.py` in place of `split.py`'s rule, whose buffer it shares. OpenAI's `chunking_strategy`
normalises loudness before it looks for voices, and so does this, for the detector and the model alike; the
default way leaves samples as they are. The level of a place is that of the vowels around it: the
morphological closing of the levels of 50 ms, which bridges pauses (the quieter of both sides counts) and
still jumps just where the loudness does. Sound is lifted by no more than it stands above the quiet around it,
so that noise stays what it is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from asr_server.audio.split import Splitter, quietest_cut
from asr_server.audio.voice import FRAME, VoiceDetector, is_speech
from asr_server.core import SAMPLE_RATE, Piece, Samples, VoiceChunking
from asr_server.levels import HOP, decibels, powers, runs

BLOCK: Final = SAMPLE_RATE // 20  # 50 ms, of which each has a level and a gain
REACH: Final = 15  # blocks to each side: pauses of up to 1.5 s are bridged
EDGE: Final = 5  # blocks by which a word's level reaches beyond it: its faint beginning and end are its own
SEEN: Final = 2 * REACH + EDGE  # blocks to each side by which the gain of one is decided
TARGET_DB: Final = -20.0
MAX_GAIN_DB: Final = 30.0
MIN_GAIN_DB: Final = -10.0
STEADY_DB: Final = 6.0  # that the levels of steady noise lie apart
MAX_PEAK: Final = 0.95
STEPS: Final = np.linspace(0, 1, BLOCK, endpoint=False, dtype=np.float32)  # from a block to the next

PerBlock = npt.NDArray[np.float32]


class LoudnessNormalizer:
    """Takes consecutive samples, gives as many back, 1.9 s later, which is what it holds of them."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.float32)  # samples not given back yet
        self._levels = np.empty(0, np.float32)  # of blocks given back that those held still see
        self._last_gain: float | None = None  # of the last block given back

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, samples: Samples) -> Samples:
        self._held = np.concatenate([self._held, samples])
        num_whole = len(self._held) // BLOCK
        return self._give_back(self._held, num_whole, max(0, num_whole - SEEN - 1))

    def finish(self) -> Samples:
        num_samples, num_blocks = len(self._held), -(-len(self._held) // BLOCK)
        padded = np.pad(self._held, (0, num_blocks * BLOCK - num_samples))
        return self._give_back(padded, num_blocks, num_blocks)[:num_samples]

    def _give_back(self, held: Samples, num_known: int, num_given: int) -> Samples:
        """The first `num_given` blocks of those held, by the levels of the first `num_known`."""
        if not num_given:
            return np.empty(0, np.float32)
        blocks = held[: num_known * BLOCK].reshape(-1, BLOCK)
        levels = np.concatenate([self._levels, decibels(_variances(blocks))])
        gains = _gains(levels)[len(self._levels) :]
        peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        gains = np.minimum(gains, MAX_PEAK / np.maximum(peaks, 1e-6))
        given = self._ramps(gains, num_given)
        given *= blocks[:num_given]
        self._levels = levels[: len(levels) - num_known + num_given][-SEEN:]
        self._held = self._held[num_given * BLOCK :]
        return given.reshape(-1)

    def _ramps(self, gains: PerBlock, num_given: int) -> npt.NDArray[np.float32]:
        """[num_given, BLOCK]: between two blocks the gain is the lower of both, which keeps every peak in."""
        before = gains[0] if self._last_gain is None else self._last_gain
        self._last_gain = float(gains[num_given - 1])
        around = np.concatenate([[before], gains[: num_given + 1]])
        if len(around) == num_given + 1:  # the last block of all
            around = np.append(around, around[-1])
        edges = np.minimum(around[1:], around[:-1]).astype(np.float32)
        ramps: npt.NDArray[np.float32] = np.multiply.outer(np.diff(edges), STEPS)
        ramps += edges[:-1, None]
        return ramps


def _variances(blocks: npt.NDArray[np.float32]) -> PerBlock:
    centred = blocks - (np.einsum("ij->i", blocks) / BLOCK)[:, None]  # half the time of `blocks.var(axis=1)`
    return np.asarray(np.einsum("ij,ij->i", centred, centred) / BLOCK, np.float32)


def _gains(levels: PerBlock) -> PerBlock:
    """By which the samples of each block are to be multiplied."""
    speech = _greatest(-_greatest(-_greatest(levels, REACH), REACH), EDGE)
    quiet = -_greatest(-levels, REACH)
    lift_db = np.clip(speech - quiet - STEADY_DB, 0.0, MAX_GAIN_DB)
    gain_db = np.clip(TARGET_DB - speech, MIN_GAIN_DB, lift_db)
    return np.asarray(10 ** (gain_db / 20), np.float32)


def _greatest(values: PerBlock, reach: int) -> PerBlock:
    """Within `reach` of each."""
    outside = np.full(reach, -np.inf, np.float32)
    greatest = np.concatenate([outside, values, outside])
    reached = 1  # values from each on, of which it is the greatest
    while 2 * reached <= 2 * reach:
        greatest = np.maximum(greatest[:-reached], greatest[reached:])
        reached *= 2
    return np.asarray(np.maximum(greatest[: len(values)], greatest[2 * reach + 1 - reached :]), np.float32)


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
