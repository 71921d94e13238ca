"""Reads a file as 16 kHz mono blocks and checks the limits on the way. Used by `recording.py`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from asr_server.audio.decoders.base import Decoder
from asr_server.audio.limits import AudioLimits
from asr_server.audio.resample import Mono16k
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import InvalidAudio


class Stream(Protocol):
    """What `Recording` reads from, whether the decoder is here or in a process of its own."""

    @property
    def truncated(self) -> bool: ...

    @property
    def duration_s(self) -> float | None:
        """What the file's header says, once the first block is read."""
        ...

    def read(self) -> Samples | None:
        """The next block, perhaps empty; None is the end. The next call may use its memory again."""
        ...

    def close(self) -> None: ...


class DecodedStream:
    """A decoder in this process."""

    def __init__(self, decoder: Decoder, limits: AudioLimits) -> None:
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        self._decoder, self._limits = decoder, limits
        self._mono = Mono16k(decoder.sample_rate, decoder.num_channels, decoder.is_float)
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
            yield self._counted(self._mono.push(block))

    def tail(self) -> Iterator[Samples]:
        """The last few samples, which the resampling filter holds back until it knows what follows."""
        yield self._counted(self._mono.finish())

    def close(self) -> None:
        self._blocks = iter(())  # the generator and this object hold each other, and the decoder's memory
        self._decoder.close()

    def _counted(self, samples: Samples) -> Samples:
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples


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
