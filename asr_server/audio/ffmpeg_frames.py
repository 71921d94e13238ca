"""Bring FFmpeg's frames onto the time line of their container, and into one format.

Runs in the FFmpeg processes alone.
"""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from asr_server.audio.decoder import Block

# Demuxers whose time stamps are the file's own. Others count bytes, which is wrong once the rate changes.
_CLOCKED = (
    *("amr", "asf", "flac", "flv", "matroska,webm", "mov,mp4,m4a,3gp,3g2,mj2"),
    *("mxf", "nut", "ogg", "rm"),
)
_TRANSPORTS = ("mpeg", "mpegts")
MIN_GAP_S = 0.1  # encoder delays and rounded time stamps are smaller
RESTART_S = 1.0  # time stamps that go back by more, to the file's start, are of another stream that is joined
# A transport stream's clock jumps where it wraps, or where recordings are joined. FFmpeg's own limit.
MAX_CLOCK_JUMP_S = 10.0
_HOPS_PER_S = 50
_PAUSE_RATIO = 300.0  # of a block's loudest power to a pause: 25 dB
MAX_PLANES = 8  # of more, PyAV's frames show only the first ones
_FULL_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


class TimeLine:
    """Compare the time stamps of frames with their samples."""

    def __init__(self, container: Any, stream: Any, first: Any) -> None:
        name = container.format.name
        self._tick_s = float(stream.time_base)
        self._is_transport = name in _TRANSPORTS
        self._is_clocked = self._is_transport or name in _CLOCKED
        first_s = 0.0 if first.pts is None else first.pts * self._tick_s
        self.start_s = first_s if container.start_time is None else container.start_time / av.time_base
        self.lead_s = first_s - self.start_s  # of the track behind the start of the file
        if not MIN_GAP_S < self.lead_s < (container.duration or 0) / av.time_base:
            self.start_s, self.lead_s = first_s, 0.0
        self._pending_lead_s = self.lead_s
        self.end_s = first_s  # of the frames so far
        self.surplus_s = 0.0  # of samples for which the time stamps leave no room

    def gap_before(self, frame: Any) -> float:
        """Return the silence to insert before a frame; add to `surplus_s` where it begins too early."""
        silence_s, self._pending_lead_s = self._pending_lead_s, 0.0
        gap_s = 0.0
        if self._is_clocked and frame.pts is not None:
            gap_s = frame.pts * self._tick_s - self.end_s
        if abs(gap_s) > MIN_GAP_S:
            self.end_s += gap_s
            if not self._is_new_clock(gap_s):
                late_s = self.surplus_s - gap_s
                silence_s += max(0.0, -late_s)
                self.surplus_s = max(0.0, late_s)
        self.end_s += frame.samples / frame.sample_rate
        return silence_s

    def shorten(self, block: Block, sample_rate: int) -> Block:
        """Leave out the quietest 20 ms of a block where time stamps run behind the samples.

        These are pauses, or at most a sixth of the block.
        """
        if self.surplus_s < 1 / _HOPS_PER_S:
            return block
        hop = sample_rate // _HOPS_PER_S
        hops, rest = np.split(block, [len(block) // hop * hop])
        hops = hops.reshape(-1, hop, block.shape[1])
        powers = np.square(hops).mean(axis=(1, 2))
        num_quiet = int(np.count_nonzero(powers < powers.max(initial=0.0) / _PAUSE_RATIO))
        num_left_out = min(max(num_quiet, len(hops) // 6), int(self.surplus_s * _HOPS_PER_S))
        self.surplus_s -= num_left_out / _HOPS_PER_S
        kept = np.delete(hops, np.argsort(powers)[:num_left_out], axis=0)
        return np.concatenate([kept.reshape(-1, block.shape[1]), rest])

    def _is_new_clock(self, gap_s: float) -> bool:
        if self._is_transport and abs(gap_s) > MAX_CLOCK_JUMP_S:
            return True
        return gap_s < -RESTART_S and (self._is_transport or self.end_s < self.start_s + RESTART_S)


class Adapter:
    """Bring frames to the format of the first: some streams change theirs."""

    def __init__(self, first: Any) -> None:
        self._first = first
        is_packed = first.format.is_planar and first.layout.nb_channels >= MAX_PLANES
        self._format = first.format.packed.name if is_packed else first.format.name
        self._wanted = (self._format, first.layout.nb_channels, first.sample_rate)
        self._adapted: tuple[str, int, int] | None = None
        self._resampler: Any = None

    def is_needed(self, frame: Any) -> bool:
        return self._resampler is not None or self._wanted != _kind(frame)

    def adapt(self, frame: Any) -> Iterator[Any]:
        if _kind(frame) != self._adapted:
            yield from self.flush()
            self._adapted = _kind(frame)
            self._resampler = av.AudioResampler(self._format, self._first.layout, self._first.sample_rate)
        yield from self._alike(self._resampler.resample(frame))

    def flush(self) -> Iterator[Any]:
        resampler, self._resampler, self._adapted = self._resampler, None, None
        if resampler is not None:
            yield from self._alike(resampler.resample(None))

    def _alike(self, parts: list[Any]) -> Iterator[Any]:
        for part in parts:
            part.time_base = self._first.time_base  # the queue compares it too
            part.pts = None
            yield part


def _kind(frame: Any) -> tuple[str, int, int]:
    return frame.format.name, frame.layout.nb_channels, frame.sample_rate


def to_block(frame: Any) -> Block:
    """Return a frame as [frames, channels] float32; planar samples stay planar underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    samples: Block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return samples
    middle = 128.0 if kind == "u8" else 0.0
    return ((samples.astype(np.float64) - middle) / _FULL_SCALES[kind]).astype(np.float32)
