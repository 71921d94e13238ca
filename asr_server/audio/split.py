"""Cut samples into chunks, in the latest long pause in reach.

Reads no file and knows no requests.

A cut is judged by the mean level of the 200 ms around it, which tells pauses (150 ms and more) from stop
consonants (60 ms).
"""

import copy

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, Chunk, Samples
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
    """Turn blocks into chunks; leave out silence. Wait for `min_rest_samples` behind a cut."""

    def __init__(self, max_chunk_samples: int, min_rest_samples: int = MIN_REST) -> None:
        self.num_chunks = 0  # given so far
        self._max_chunk = max(max_chunk_samples, MIN_MAX_CHUNK)
        self._min_rest = min(min_rest_samples, self._max_chunk // 3)
        self._size = self._max_chunk + self._min_rest
        self._buffer = np.empty(self._size, np.float32)
        self._num_held = 0  # samples at the start of `_buffer`
        self.num_settled = 0  # samples of the file before these: no chunk still to come begins there

    @property
    def num_samples(self) -> int:
        return self.num_settled + self._num_held

    @property
    def held_bytes(self) -> int:
        return 4 * self._num_held

    def drop(self) -> None:
        self.num_settled, self._num_held, self._buffer = self.num_samples, 0, np.empty(0, np.float32)

    def push(self, samples: Samples) -> list[Chunk]:
        """Return the chunks with known ends. Copies the samples."""
        chunks: list[Chunk] = []
        while len(samples):
            if self._num_held == self._size:
                chunks += self._split(last=False)
            taken = samples[: self._size - self._num_held]
            self._buffer[self._num_held : self._num_held + len(taken)] = taken
            self._num_held += len(taken)
            samples = samples[len(taken) :]
        return chunks

    def finish(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self._num_held:
            chunks += self._split(last=True)
        return chunks

    def peek(self) -> list[Chunk]:
        """Return what `finish` would, and keep the samples: the chunks may share the buffer's memory."""
        return copy.copy(self).finish()

    def _split(self, last: bool) -> list[Chunk]:
        held = self._buffer[: self._num_held]
        skip, take = self._next_chunk(held, last)
        self.num_settled += skip
        chunks = [self._chunk(held[skip : skip + take])] if take else []
        rest = held[skip + take :]
        self._buffer = np.empty(self._size, np.float32)  # the old one has left with the chunk
        self._buffer[: len(rest)] = rest
        self._num_held = len(rest)
        return chunks

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
        return 0, _trimmed(loud, best_cut(levels[: latest_cut // HOP]))

    def _chunk(self, samples: Samples) -> Chunk:
        if len(samples) < self._size // 2:
            samples = samples.copy()  # a short view would hold on to the whole buffer's memory
        chunk = Chunk(self.num_chunks, self.num_settled, samples)
        self.num_chunks += 1
        self.num_settled += len(samples)
        return chunk


def _trimmed(loud: npt.NDArray[np.intp], end: int) -> int:
    before = loud[loud * HOP < end]
    speech_end = (int(before[-1]) + HOPS_PER_LEVEL) * HOP if len(before) else 0
    return speech_end + MARGIN if end - speech_end >= MIN_SILENCE else end


def best_cut(powers: Powers) -> int:
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
