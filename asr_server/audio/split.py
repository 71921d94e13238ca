"""Where chunks end: at the quietest place near the end of a window, and around long silences.

Levels are the standard deviation within 20 ms, taken every 5 ms: a constant offset and slow rumble do not
count as sound. A place to cut is judged by the mean level in decibels of the fifth of a second around it,
which tells a pause between words (150 ms and more) from the closure of a stop consonant (60 ms).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asr_server.core import SAMPLE_RATE, WINDOW_SAMPLES, Chunk, Piece, Samples, Silence

HOP = SAMPLE_RATE // 200  # 5 ms
HOPS_PER_LEVEL = 4  # 20 ms
HOPS_PER_PAUSE = 40  # 200 ms
REACH_HOPS = (
    8 * SAMPLE_RATE // HOP
)  # how far before a window's end a pause is looked for, within its second half
QUIET_SHARE = 0.05  # of the places within reach are taken to be pauses
MAX_OFFSET = 1e-3
MAX_ABOVE_DB = 15.0  # the quietest place
FLOOR_DB = -90.0  # the last bit of 16
# Quiet speech that peaks at -50 dBFS has its vowels at -60: what stays under this is the recorder's noise.
SILENCE_DB = -72.0
MIN_SILENCE = 1 * SAMPLE_RATE  # shorter pauses stay within their chunk
MIN_WINDOW = 2 * SAMPLE_RATE  # in less there is no room to choose
MARGIN = SAMPLE_RATE // 4  # of silence kept around speech

Levels = npt.NDArray[np.float64]  # decibels, one every HOP samples, of the HOPS_PER_LEVEL hops from there


class Splitter:
    """Takes blocks of samples, gives pieces that tile them exactly."""

    def __init__(self, window_samples: int = WINDOW_SAMPLES) -> None:
        self._window = max(window_samples, MIN_WINDOW)  # no chunk is longer
        self._blocks: list[Samples] = []
        self._num_held = 0  # samples in `_blocks`
        self._start = 0  # where they begin in the file
        self._num_silent = 0  # samples just before them, in a silence not yet reported
        self._num_chunks = 0

    @property
    def num_samples(self) -> int:
        """Samples taken so far."""
        return self._start + self._num_held

    @property
    def held_bytes(self) -> int:
        return 4 * self._num_held

    def drop(self) -> None:
        """Forgets the samples it holds, but not how many there were."""
        self._start, self._num_held, self._blocks = self.num_samples, 0, []

    def push(self, samples: Samples) -> list[Piece]:
        """The pieces whose ends are known now: a chunk needs more than one window of samples."""
        self._blocks.append(samples)
        self._num_held += len(samples)
        return self._split(last=False) if self._num_held > self._window else []

    def finish(self) -> list[Piece]:
        pieces = self._split(last=True)
        return pieces + self._report_silence()

    def _split(self, last: bool) -> list[Piece]:
        held = np.concatenate(self._blocks) if self._blocks else np.empty(0, np.float32)
        pieces: list[Piece] = []
        while len(held) > self._window or (last and len(held)):
            skip, take = _next_chunk(held[: self._window], last=last and len(held) <= self._window)
            self._num_silent += skip
            self._start += skip
            if take:
                pieces += self._report_silence()
                pieces.append(self._chunk(held[skip : skip + take]))
            held = held[skip + take :]
        self._blocks, self._num_held = [held.copy()], len(held)
        return pieces

    def _chunk(self, samples: Samples) -> Chunk:
        chunk = Chunk(self._num_chunks, self._start, samples)
        self._num_chunks += 1
        self._start += len(samples)
        return chunk

    def _report_silence(self) -> list[Piece]:
        num_samples, self._num_silent = self._num_silent, 0
        return [Silence(self._start - num_samples, num_samples)] if num_samples else []


def _next_chunk(window: Samples, last: bool) -> tuple[int, int]:
    """Samples of silence to skip, and samples of a chunk after them; either may be 0, not both.

    With `last`, nothing follows the window. Otherwise a leading silence is all that is taken at once: the
    rest is looked at again when the window is full.
    """
    levels = levels_db(window)
    loud = np.flatnonzero(levels > SILENCE_DB)
    if not len(loud):
        return (len(window), 0) if last else (len(window) - MARGIN, 0)
    speech_start = int(loud[0]) * HOP
    if speech_start >= MIN_SILENCE:
        return speech_start - MARGIN, 0
    if not last:
        return 0, _trimmed(loud, quietest_cut(levels))
    return 0, _trimmed(loud, len(window))


def _trimmed(loud: npt.NDArray[np.intp], end: int) -> int:
    """Where a chunk that may go on to `end` ends: a silence before its end is left to the next piece."""
    before = loud[loud * HOP < end]
    speech_end = (int(before[-1]) + HOPS_PER_LEVEL) * HOP if len(before) else 0
    return speech_end + MARGIN if end - speech_end >= MIN_SILENCE else end


def levels_db(samples: Samples) -> Levels:
    """[len(samples) // HOP] standard deviations in decibels; the last few reach over fewer hops."""
    hops = samples[: len(samples) // HOP * HOP].reshape(-1, HOP)
    if not len(hops):
        return np.zeros(min(1, len(samples)))  # under 5 ms: nothing to tell, so not silent
    sums = np.einsum("ij->i", hops).astype(np.float64)  # three times as fast as `sum(axis=1)`
    offset = sums.mean() / HOP
    if abs(offset) > MAX_OFFSET:  # its square would drown what float32 knows of a whisper
        return levels_db(samples - np.float32(offset))
    squares = np.einsum("ij,ij->i", hops, hops).astype(np.float64)
    means, mean_squares = _sliding_mean(sums) / HOP, _sliding_mean(squares) / HOP
    return 10 * np.log10(np.maximum(mean_squares - means**2, 10 ** (FLOOR_DB / 10)))


def _sliding_mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean of HOPS_PER_LEVEL values from each place on, of fewer at the end."""
    starts = np.arange(len(values))
    ends = np.minimum(starts + HOPS_PER_LEVEL, len(values))
    total = np.concatenate(([0.0], np.cumsum(values)))
    return (total[ends] - total[:-1]) / (ends - starts)


def quietest_cut(levels: Levels) -> int:
    """The sample at which a full window is best cut: in the latest of the pauses within reach.

    A place counts as a pause when the fifth of a second around it is not much louder than the quiet of this
    recording; how much that is depends on how far apart its sound and its quiet are. Within the pause the
    cut falls in the middle of the quietest 20 ms.
    """
    reach = levels[-min(REACH_HOPS, len(levels) // 2) :]
    means = np.convolve(reach, np.full(HOPS_PER_PAUSE, 1 / HOPS_PER_PAUSE), mode="valid")
    quiet, middle = np.quantile(means, (QUIET_SHARE, 0.5))
    limit = quiet + min(8.0, max(1.0, (middle - quiet) / 5))
    limit = min(limit, float(means.min()) + MAX_ABOVE_DB)  # one pause alone is less than the share
    pause = int(np.flatnonzero(means <= limit)[-1])
    within = reach[pause : pause + HOPS_PER_PAUSE - HOPS_PER_LEVEL]
    # Among equally quiet places the middle one is farthest from the words on both sides.
    candidates = np.flatnonzero(within <= within.min() + 1.0)
    best = int(candidates[np.argmin(np.abs(candidates - len(within) / 2))])
    return (len(levels) - len(reach) + pause + best) * HOP + HOPS_PER_LEVEL * HOP // 2
