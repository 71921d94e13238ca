"""Read a file as 16 kHz blocks: mixed or with two channels apart, whole or in clips. Checks limits.

Mixing weights are film sound's: dialogue in the centre, effects in front and behind at half their power
(ITU-R BS.775). Unknown layouts count equally. If two sides cancel out, their difference is used. An offset
louder than the sound is subtracted.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import soxr

from asr_server.audio.decoder import Block, Decoder, DecodeTask, FileInfo
from asr_server.core import SAMPLE_RATE, Clip, Samples
from asr_server.errors import InvalidAudio, NotStereo

# By FFmpeg's names of channels; all others lie behind or above.
_WEIGHTS: Final = {"FC": 1.0, "LFE": 0.0, "LFE2": 0.0} | dict.fromkeys(
    ("FL", "FR", "FLC", "FRC", "DL", "DR"), 0.7
)
_WEIGHT_BEHIND: Final = 0.5
# Share of both sides' power in their sum. Where one side is inverted it has less; independent sides have all.
_CANCELLED: Final = 0.05

_JUDGED_STEP: Final = 16  # frames, of which one is looked at: all would cost a fifth of reading a WAV
_LEAST_OFFSET: Final = 0.01  # of full scale; the model takes a larger one for the loudest sound

_LOUDEST: Final = np.float32(2.0**15)  # far beyond any scale; keeps damaged float files from overflowing
_INTEGER_SCALES: Final = (2.0**15, 2.0**23, 2.0**31)
_OVERSHOOT: Final = 1.5  # a resampled file goes beyond its scale
_BEYOND: Final = 4.0  # 12 dB over full scale: no mix is so loud
_SHARE_BEYOND: Final = 0.01
_THOUSANDS: Final = 1000.0  # far beyond what speech into a microphone at full level reaches as float
_MOST: Final = 0.5  # a bump against the microphone is shorter than half a block
_AUDIBLE: Final = 0.02
_LOUD_POWER: Final = 0.05


class FloatScale:
    """Scale floats at the scale of integers (numpy without dividing) to 1.0.

    Each block shows its own scale, or is too quiet to do so: then most of the blocks before decide.
    """

    def __init__(self) -> None:
        self._scale = 1.0  # of integers
        self._num_more = 0  # blocks of integers than of others, since the first one

    def push(self, block: Block) -> Block:
        """Return the block without NaN and huge values, which would silence the filter."""
        flat = block.ravel(order="K")  # no copy
        with np.errstate(over="ignore", invalid="ignore"):
            if not self._num_more and np.einsum("i,i->", flat, flat) <= _LOUD_POWER * len(flat):
                return block
            self._judge(flat)
            if self._num_more:
                block = block * np.float32(1 / self._scale)
                flat = block.ravel(order="K")
            if np.einsum("i,i->", flat, flat) <= _LOUDEST**2:  # then none of them is larger
                return block
        return np.clip(np.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0), -_LOUDEST, _LOUDEST)

    def _judge(self, flat: Samples) -> None:
        scale = _scale_of(flat)
        if scale == 1.0:
            self._num_more = max(0, self._num_more - 1)
        elif scale is not None:
            self._scale = max(self._scale, scale) if self._num_more else scale
            self._num_more += 1


def _scale_of(flat: Samples) -> float | None:
    """Return the scale that a block shows: 1.0, that of integers, or None if it could be either."""
    levels = np.abs(flat[np.isfinite(flat)])
    loudest = float(levels.max(initial=0.0))
    are_whole = all(np.array_equal(part, np.round(part)) for part in (flat[:512], flat))
    share = _SHARE_BEYOND if loudest >= _THOUSANDS else _MOST
    if (are_whole and loudest >= 2) or np.mean(levels > _BEYOND) >= share:
        return next((scale for scale in _INTEGER_SCALES if loudest <= _OVERSHOOT * scale), 1.0)
    return 1.0 if not are_whole and _AUDIBLE <= loudest <= 2 else None


class SteadyOffset:
    """Subtract an offset that is larger than the sound itself, as cheap sound cards add."""

    def __init__(self, num_judged: int) -> None:
        self._num_judged = num_judged  # samples of a block, at least
        self._offset = np.float32(0.0)

    def push(self, samples: Samples) -> Samples:
        """Return the same array where there is no offset."""
        if len(samples) >= self._num_judged and self._has_moved(samples[::_JUDGED_STEP]):
            self._offset = np.float32(samples.mean(dtype=np.float64))
        return samples - self._offset if self._offset else samples

    def _has_moved(self, judged: Samples) -> bool:
        rest = float(judged.mean(dtype=np.float64)) - float(self._offset)
        return abs(rest) > _LEAST_OFFSET and rest**2 > float(judged.var(dtype=np.float64))


class To16k:
    """Resample [frames] or [frames, 2] with soxr's HQ filter (linear phase); 16 kHz passes unchanged."""

    def __init__(self, sample_rate: int, num_channels: int) -> None:
        self._none = np.empty(0 if num_channels == 1 else (0, num_channels), np.float32)
        self._filter = None
        if sample_rate != SAMPLE_RATE:
            self._filter = soxr.ResampleStream(
                sample_rate, SAMPLE_RATE, num_channels, dtype="float32", quality="HQ"
            )

    def push(self, block: Block) -> Samples:
        """Return what the filter does not hold back until `finish`."""
        return np.ascontiguousarray(block) if self._filter is None else self._filter.resample_chunk(block)

    def finish(self) -> Samples:
        return self._none if self._filter is None else self._filter.resample_chunk(self._none, last=True)


class Mono16k:
    """Mix channels, then resample. The next `push` may reuse the memory."""

    def __init__(
        self, sample_rate: int, num_channels: int, layout: Sequence[str] = (), channel: int | None = None
    ) -> None:
        self._channel = 0 if num_channels == 1 else channel
        self._num_channels = num_channels
        self._weights = mix_weights(num_channels, layout)
        self._mono = np.empty(0, np.float32)
        self._term = np.empty(0, np.float32)
        self._num_judged = sample_rate // 10  # frames of a block that show whether sides cancel out
        self._is_inverted = False  # one side of a stereo recording against the other
        self._offset = SteadyOffset(self._num_judged)
        self._to_16k = To16k(sample_rate, 1)

    def push(self, block: Block) -> Samples:
        """Turn [frames, channels] into [samples]; the filter holds some back until `finish`."""
        mono = self._mixed(block) if self._channel is None else block[:, self._channel]
        return self._to_16k.push(self._offset.push(mono))

    def finish(self) -> Samples:
        return self._to_16k.finish()

    def _mixed(self, block: Block) -> Samples:
        if len(block) > len(self._mono):
            self._mono, self._term = np.empty((2, len(block)), np.float32)
        mono = self._mono[: len(block)]
        return self._mixed_sides(block, mono) if self._num_channels == 2 else self._weighted(block, mono)

    def _mixed_sides(self, block: Block, mono: Samples) -> Samples:
        """Return half the sum of both sides, or half their difference if they cancel out."""
        if len(block) >= self._num_judged and self._cancel_out(block[::_JUDGED_STEP]):
            self._is_inverted = not self._is_inverted
        (np.subtract if self._is_inverted else np.add)(block[:, 0], block[:, 1], out=mono)
        return np.multiply(mono, np.float32(0.5), out=mono)

    def _cancel_out(self, block: Block) -> bool:
        left, right = block[:, 0], block[:, 1]
        common = float(np.einsum("i,i->", left, right)) * (-1 if self._is_inverted else 1)
        if common >= 0:
            return False
        both = float(np.einsum("i,i->", left, left) + np.einsum("i,i->", right, right))
        return both + 2 * common < _CANCELLED * both

    def _weighted(self, block: Block, mono: Samples) -> Samples:
        """Avoid `block.mean(axis=1)`, slower than MP3 decoding, and BLAS's own threads."""
        mono[:] = 0.0
        for channel, weight in enumerate(self._weights):
            if weight:
                np.add(mono, np.multiply(block[:, channel], weight, out=self._term[: len(block)]), out=mono)
        return mono


def mix_weights(num_channels: int, layout: Sequence[str]) -> list[np.float32]:
    weights = [_WEIGHTS.get(name, _WEIGHT_BEHIND) for name in layout]
    if len(weights) != num_channels or not sum(weights):
        weights = [1.0] * num_channels
    return [np.float32(weight / sum(weights)) for weight in weights]


# -- Streams -------------------------------------------------------------------------------------------------


class Stream(Protocol):
    @property
    def info(self) -> FileInfo: ...

    def read(self) -> Samples | None:
        """Return the next block, [samples] or [samples, 2], perhaps empty, in memory used again; or None."""

    def close(self) -> None: ...


class DecodedStream:
    def __init__(self, decoder: Decoder, task: DecodeTask) -> None:
        self._decoder, self._limits = decoder, task.limits
        self._limits.check_layout(decoder.sample_rate, decoder.num_channels)
        self._scale = FloatScale() if decoder.is_float else None
        mono = decoder.sample_rate, decoder.num_channels, decoder.layout, task.channel
        self._to_16k = _stereo(decoder) if task.split_channels else Mono16k(*mono)
        self._num_bytes = self._num_samples = 0
        self._has_ended = False

    @property
    def info(self) -> FileInfo:
        decoder = self._decoder
        return FileInfo(decoder.duration_s, decoder.num_channels, decoder.tracks_read, decoder.truncated)

    def read(self) -> Samples | None:
        if self._has_ended:
            return None
        block = self._decoder.read()
        self._has_ended = not len(block)
        if self._has_ended:
            samples = self._to_16k.finish()
        else:
            samples = self._to_16k.push(block if self._scale is None else self._scale.push(block))
        self._num_bytes += block.nbytes
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples

    def close(self) -> None:
        self._decoder.close()


def _stereo(decoder: Decoder) -> To16k:
    if decoder.num_channels != 2:
        plural = "" if decoder.num_channels == 1 else "s"
        raise NotStereo(
            f"channels=split takes files of two channels, a speaker in each; this one has "
            f"{decoder.num_channels} channel{plural}."
        )
    return To16k(decoder.sample_rate, 2)


class ClippedStream:
    """The parts of a recording within clips, which are in order; silence lies between, so that times stay."""

    def __init__(self, stream: Stream, clips: Sequence[Clip]) -> None:
        self._stream = stream
        self._first_s, self._end_s = clips[0].start_s, clips[-1].end_s
        self._spans = [(_sample_at(clip.start_s), _sample_at(clip.end_s)) for clip in clips]
        self._num_read = 0
        self._has_ended = False

    @property
    def info(self) -> FileInfo:
        info = self._stream.info
        duration_s = info.duration_s if info.duration_s is None else min(info.duration_s, self._end_s)
        is_truncated = self._has_ended and info.truncated
        return msgspec.structs.replace(info, duration_s=duration_s, truncated=is_truncated)

    def close(self) -> None:
        self._stream.close()

    def read(self) -> Samples | None:
        start = self._num_read
        if start >= self._spans[-1][1]:
            return None
        samples = self._stream.read()
        if samples is None:
            self._has_ended = True
            if start <= self._spans[0][0]:
                begin, length = f"{self._first_s:g} s", f"{start / SAMPLE_RATE:.1f} s"
                raise InvalidAudio(f"The first clip begins at {begin}, and the recording is {length} long.")
            return None
        self._num_read += len(samples)
        kept = np.zeros_like(samples)
        for first, end in self._spans:
            inside = slice(max(0, first - start), max(0, end - start))
            kept[inside] = samples[inside]
        return kept[: self._spans[-1][1] - start]


def _sample_at(time_s: float) -> int:
    return np.iinfo(np.int64).max if math.isinf(time_s) else round(time_s * SAMPLE_RATE)
