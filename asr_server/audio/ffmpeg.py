"""Decodes through FFmpeg's libraries whatever no other decoder reads. Runs in a decode process only.

FFmpeg's own queue gathers frames into one array per second of audio, because an array for each frame would
cost as much as decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import av
import av.error
import numpy as np

from asr_server.audio.decoders import Block, CannotOpen
from asr_server.audio.limits import invalid_audio

# Demuxers that open one plain file. Playlists (hls, dash, concat ...) could name other files and hosts.
CONTAINERS = (
    "aac,ac3,aiff,alac,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,eac3,flac,flv,gsm,loas,matroska,mov,mp3,mp4,mpeg,"
    "mpegts,nut,ogg,oma,opus,rm,rso,sln,sox,spdif,tak,tta,voc,w64,wav,webm,wv"
)
GROUP_S = 1.0
MAX_PLANES = 8  # of more, PyAV's frames show only the first ones
MISSING_S = 0.5  # shorter than the container says by more than this: cut short
_FULL_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}
_DAMAGE = (av.error.FFmpegError, OSError, ValueError)  # how PyAV reports it


class FfmpegDecoder:
    def __init__(self, path: str) -> None:
        """Raises CannotOpen where FFmpeg does not know the file, InvalidAudio where no audio is in it."""
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
        try:
            self._container = av.open(path, container_options=options)
        except _DAMAGE as error:
            raise CannotOpen(str(error)) from error
        self.truncated = self.has_more = False
        self._num_frames = 0
        try:
            self._open_stream()
        except BaseException:
            self._container.close()
            raise

    def read(self) -> Block:
        try:
            block = next(self._blocks, None)
        except _DAMAGE:
            block, self.truncated = None, True
        if block is None:
            self.truncated = self.truncated or self._falls_short()
            return np.empty((0, self.num_channels), np.float32)
        self._num_frames += len(block)
        return block

    def close(self) -> None:
        self._container.close()

    def _open_stream(self) -> None:
        if not self._container.streams.audio:
            raise invalid_audio("The file has no audio stream.")
        self._stream = self._container.streams.audio[0]
        self._stream.codec_context.thread_count = 1
        packets = self._decode()
        first = next((frame for frames in packets for frame in frames), None)
        if first is None:
            raise invalid_audio("No audio could be decoded from the file.")
        self.sample_rate, self.num_channels = first.sample_rate, first.layout.nb_channels
        self.duration_s: float | None = self._promised_s()
        self.is_float = first.format.name.startswith(("flt", "dbl"))
        self._blocks = _gather(first, packets)

    def _decode(self) -> Iterator[Iterator[Any]]:
        """The frames of each packet, stepping over packets that are damaged."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except _DAMAGE:
                self.truncated = True
                return
            try:
                yield iter(packet.decode())
            except _DAMAGE:
                self.truncated = True

    def _falls_short(self) -> bool:
        """Whether a container that knows its length holds less. Raw streams only guess theirs."""
        if not self._container.format.name.startswith(("mov", "matroska")):
            return False
        return bool((self.duration_s or 0.0) - self._num_frames / self.sample_rate > MISSING_S)

    def _promised_s(self) -> float | None:
        """The container's word for its length; None where it has none, as a browser's WebM."""
        if self._stream.duration and self._stream.time_base:
            return float(self._stream.duration * self._stream.time_base)
        return self._container.duration / av.time_base if self._container.duration else None


def _gather(first: Any, packets: Iterator[Iterator[Any]]) -> Iterator[Block]:
    """Blocks of about GROUP_S. The loop body runs once a frame, so it has to be cheap."""
    adapter = _Adapter(first)
    fifo = av.AudioFifo()
    group = int(GROUP_S * first.sample_rate)
    for frames in itertools.chain((iter((first,)),), packets):
        for frame in frames:
            for part in adapter.adapt(frame) if adapter.is_needed(frame) else (frame,):
                part.pts = None  # a gap in the time stamps is no gap in the sound
                fifo.write(part)
        if fifo.samples >= group:
            yield _to_block(fifo.read())
    for part in adapter.flush():
        fifo.write(part)
    if fifo.samples:
        yield _to_block(fifo.read())


class _Adapter:
    """Brings frames into one format: some streams change theirs on the way."""

    def __init__(self, first: Any) -> None:
        self._first = first
        self._format = first.format.name
        if first.format.is_planar and first.layout.nb_channels >= MAX_PLANES:
            self._format = first.format.packed.name
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
        if self._resampler is not None:
            yield from self._alike(self._resampler.resample(None))

    def _alike(self, parts: list[Any]) -> Iterator[Any]:
        for part in parts:
            part.time_base = self._first.time_base  # the queue compares it too
            part.pts = None
            yield part


def _kind(frame: Any) -> tuple[str, int, int]:
    return frame.format.name, frame.layout.nb_channels, frame.sample_rate


def _to_block(frame: Any) -> Block:
    """[frames, channels] float32, full scale 1.0; planar samples stay planar underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    samples: Block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return samples
    middle = 128.0 if kind == "u8" else 0.0
    return ((samples.astype(np.float64) - middle) / _FULL_SCALES[kind]).astype(np.float32)
