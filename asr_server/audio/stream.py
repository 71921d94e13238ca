"""A file as a stream of 16 kHz mono blocks, with the limits checked on the way."""

from __future__ import annotations

from typing import Protocol

from asr_server.audio.decoders.base import Decoder
from asr_server.audio.limits import AudioLimits
from asr_server.audio.resample import Mono16k
from asr_server.core import SAMPLE_RATE, Samples


class Stream(Protocol):
    """What `Recording` reads from, whether the decoder is here or in a process of its own."""

    @property
    def truncated(self) -> bool: ...

    def read(self) -> Samples | None:
        """The next block, perhaps empty; None is the end."""
        ...

    def close(self) -> None: ...


class DecodedStream:
    """A decoder in this process."""

    def __init__(self, decoder: Decoder, limits: AudioLimits) -> None:
        limits.check_layout(decoder.sample_rate, decoder.num_channels)
        self._decoder, self._limits = decoder, limits
        self._mono = Mono16k(decoder.sample_rate, decoder.num_channels)
        self._num_bytes = 0
        self._num_samples = 0
        self._finished = False

    @property
    def truncated(self) -> bool:
        return self._decoder.truncated

    def read(self) -> Samples | None:
        if self._finished:
            return None
        block = self._decoder.read()
        self._finished = not len(block)
        samples = self._mono.finish() if self._finished else self._mono.push(block)
        self._num_bytes += block.nbytes
        self._num_samples += len(samples)
        self._limits.check_decoded(self._num_bytes, self._num_samples / SAMPLE_RATE)
        return samples

    def close(self) -> None:
        self._decoder.close()
