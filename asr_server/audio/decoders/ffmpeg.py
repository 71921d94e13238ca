"""Everything else through FFmpeg's libraries. Runs in a decode process, never in the server's own.

Frames are gathered by FFmpeg's own queue and turned into one array per two seconds of audio: an array per
frame would cost as much as decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import av
import av.error
import numpy as np

from asr_server.audio.decoders.base import Block, CannotOpen
from asr_server.audio.limits import invalid_audio

# Demuxers that open one plain file. Playlists (hls, dash, concat ...) could name other files and hosts.
CONTAINERS = (
    "aac,ac3,aiff,alac,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,eac3,flac,flv,gsm,loas,matroska,mov,mp3,mp4,mpeg,"
    "mpegts,nut,ogg,oma,opus,rm,rso,sln,sox,spdif,tak,tta,voc,w64,wav,webm,wv"
)
GROUP_S = 2.0
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
        frames = self._decode()
        first = next(frames, None)
        if first is None:
            raise invalid_audio("No audio could be decoded from the file.")
        self.sample_rate, self.num_channels = first.sample_rate, first.layout.nb_channels
        self._blocks = _gather(_alike(first, frames))

    def _decode(self) -> Iterator[Any]:
        """Frames of audio, stepping over packets that are damaged."""
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
                yield from packet.decode()
            except _DAMAGE:
                self.truncated = True

    def _falls_short(self) -> bool:
        """Whether a container that knows its length holds less. Raw streams only guess theirs."""
        if not self._container.format.name.startswith(("mov", "matroska")):
            return False
        promised_s = 0.0  # unknown, as in a browser's WebM
        if self._stream.duration and self._stream.time_base:
            promised_s = float(self._stream.duration * self._stream.time_base)
        elif self._container.duration:
            promised_s = self._container.duration / av.time_base
        return bool(promised_s - self._num_frames / self.sample_rate > MISSING_S)


def _alike(first: Any, frames: Iterator[Any]) -> Iterator[Any]:
    """All frames in one format: some streams change theirs on the way."""
    wanted = adapted = _key(first)
    if first.format.is_planar and first.layout.nb_channels >= MAX_PLANES:
        wanted = (first.format.packed.name, *wanted[1:])
    adapter: Any = None
    for frame in itertools.chain((first,), frames):
        if adapter is None and _key(frame) == wanted:
            yield frame
            continue
        if adapter is None or _key(frame) != adapted:
            yield from _flushed(adapter, first)
            adapted, adapter = _key(frame), av.AudioResampler(wanted[0], first.layout, first.sample_rate)
        for part in adapter.resample(frame):
            part.time_base = first.time_base
            yield part
    yield from _flushed(adapter, first)


def _flushed(adapter: Any, first: Any) -> Iterator[Any]:
    """What a resampler that is done still holds."""
    for part in adapter.resample(None) if adapter else ():
        part.time_base = first.time_base
        yield part


def _key(frame: Any) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _gather(frames: Iterator[Any]) -> Iterator[Block]:
    fifo = av.AudioFifo()
    for frame in frames:
        frame.pts = None  # a gap in the time stamps is no gap in the sound
        fifo.write(frame)
        if fifo.samples >= GROUP_S * frame.sample_rate:
            yield _to_block(fifo.read())
    if fifo.samples:
        yield _to_block(fifo.read())


def _to_block(frame: Any) -> Block:
    """[frames, channels] float32, full scale 1.0; planar samples stay planar underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    samples: Block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return samples
    middle = 128.0 if kind == "u8" else 0.0
    return ((samples.astype(np.float64) - middle) / _FULL_SCALES[kind]).astype(np.float32)
