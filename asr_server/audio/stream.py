"""Reads a file as blocks of 16 kHz, mixed or two channels apart, and checks the limits on the way.

Used by `recording.py`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from asr_server.audio.decoders.base import Decoder
from asr_server.audio.limits import AudioLimits
from asr_server.audio.resample import Mono16k, Stereo16k
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import InvalidAudio, NotStereo


class Stream(Protocol):
    """What `Recording` reads from, whether the decoder is here or in a process of its own."""

    @property
    def truncated(self) -> bool: ...

    @property
    def duration_s(self) -> float | None:
        """What the file's header says, once the first block is read."""
        ...

    def read(self) -> Samples | None:
        """The next block, [samples] or with channels apart [samples, 2], perhaps empty; None is the end. The
        next call may use its memory again.
        """
        ...

    def close(self) -> None: ...


class DecodedStream:
    """A decoder in this process."""

    def __init__(self, decoder: Decoder, limits: AudioLimits, split_channels: bool = False) -> None:
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        self._decoder, self._limits = decoder, limits
        self._to_16k = _stereo(decoder) if split_channels else _mono(decoder)
        self._num_bytes = self._num_samples = 0
        self._blocks: Iterator[Samples] = itertools.chain(self.body(), self.tail())

    @property
    def truncated(self) -> bool:
        return self._decoder.truncated

    @property
    def duration_s(self) -> float | None:
        return self._decoder.duration_s

    @property
    def has_more(self) -> bool:
        return self._decoder.has_more

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def body(self) -> Iterator[Samples]:
        """Everything but the last few samples."""
        while len(block := self._decoder.read()):
            self._num_bytes += block.nbytes
            yield self._counted(self._to_16k.push(block))

    def tail(self) -> Iterator[Samples]:
        """The last few samples, which the resampling filter holds back until it knows what follows."""
        yield self._counted(self._to_16k.finish())

    def close(self) -> None:
        self._blocks = iter(())  # the generator and this object hold each other, and the decoder's memory
        self._decoder.close()

    def _counted(self, samples: Samples) -> Samples:
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples


def _mono(decoder: Decoder) -> Mono16k:
    return Mono16k(decoder.sample_rate, decoder.num_channels, decoder.is_float)


def _stereo(decoder: Decoder) -> Stereo16k:
    if decoder.num_channels != 2:
        plural = "" if decoder.num_channels == 1 else "s"
        raise NotStereo(
            f"channels=split takes files of two channels, a speaker in each; this one has "
            f"{decoder.num_channels} channel{plural}."
        )
    return Stereo16k(decoder.sample_rate, decoder.is_float)


class FallbackStream:
    """A decoder in this process, and another stream that reads on where it stops before the file does.

    libsndfile gives up at damage, and at the end of the first of several MP3s joined together; FFmpeg goes
    on. The other stream starts again from the beginning: what has been read already is left out.
    """

    def __init__(self, stream: DecodedStream, open_fallback: Callable[[], Stream]) -> None:
        self._stream, self._open_fallback = stream, open_fallback
        self._fallback: Stream | None = None
        self._blocks = self._read()

    @property
    def truncated(self) -> bool:
        return self._stream.truncated or (self._fallback is not None and self._fallback.truncated)

    @property
    def duration_s(self) -> float | None:
        return self._stream.duration_s

    def read(self) -> Samples | None:
        return next(self._blocks, None)

    def close(self) -> None:
        self._blocks = iter(())
        self._stream.close()
        if self._fallback:
            self._fallback.close()

    def _read(self) -> Iterator[Samples]:
        num_read = num_fallback = 0
        for samples in self._stream.body():
            num_read += len(samples)
            yield samples
        for samples in self._read_fallback():
            num_already = min(len(samples), max(0, num_read - num_fallback))
            num_fallback += len(samples)
            yield samples[num_already:]
        if num_fallback <= num_read:
            yield from self._stream.tail()

    def _read_fallback(self) -> Iterator[Samples]:
        if not self._stream.has_more:
            return
        self._fallback = self._open_fallback()
        with contextlib.suppress(InvalidAudio):
            while (samples := self._fallback.read()) is not None:
                yield samples
