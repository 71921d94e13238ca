"""Everything else through FFmpeg's libraries. Runs in a decode process, never in the server's own.

Frames are gathered by FFmpeg's own queue and turned into one array a second of audio: an array a frame
would cost more than decoding.
"""

from __future__ import annotations

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
GROUP_S = 1.0
_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "flt": 1.0, "dbl": 1.0}


class FfmpegDecoder:
    def __init__(self, path: str) -> None:
        """Raises CannotOpen where FFmpeg does not know the file, InvalidAudio where no audio is in it."""
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
        try:
            self._container = av.open(path, container_options=options)
        except (av.error.FFmpegError, ValueError, OSError) as error:
            raise CannotOpen(str(error)) from error
        self.truncated = False
        try:
            self._open_stream()
        except BaseException:
            self._container.close()
            raise

    def _open_stream(self) -> None:
        if not self._container.streams.audio:
            raise invalid_audio("The file has no audio stream.")
        self._stream = self._container.streams.audio[0]
        self._stream.codec_context.thread_count = 1
        self._frames = self._decode()
        first = next(self._frames, None)
        if first is None:
            raise invalid_audio("No audio could be decoded from the file.")
        self.sample_rate, self.num_channels = first.sample_rate, first.layout.nb_channels
        self._first = first
        self._adapter: Any = None
        self._blocks = self._gather()

    def read(self) -> Block:
        return next(self._blocks, np.empty((0, self.num_channels), np.float32))

    def close(self) -> None:
        self._container.close()

    def _decode(self) -> Iterator[Any]:
        """Frames, stepping over packets that are damaged."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except (av.error.FFmpegError, OSError, ValueError):
                self.truncated = True
                return
            try:
                yield from packet.decode()
            except (av.error.FFmpegError, ValueError):
                self.truncated = True

    def _gather(self) -> Iterator[Block]:
        """Blocks of about a second."""
        first, fifo = self._first, av.AudioFifo()
        group = max(1, int(GROUP_S * first.sample_rate))
        for frame in self._alike(first):
            frame.pts = None  # gaps in time stamps are not gaps in sound
            fifo.write(frame)
            if fifo.samples >= group:
                yield _to_block(fifo.read())
        if fifo.samples:
            yield _to_block(fifo.read())

    def _alike(self, first: Any) -> Iterator[Any]:
        """All frames in the first one's format: some streams change theirs on the way."""
        yield first
        key = _key(first)
        for frame in self._frames:
            if _key(frame) == key:
                yield frame
            else:
                adapter = av.AudioResampler(first.format.name, first.layout.name, first.sample_rate)
                frame.pts = None
                yield from adapter.resample(frame)
                yield from adapter.resample(None)


def _key(frame: Any) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _to_block(frame: Any) -> Block:
    """[frames, channels] float32, full scale 1.0; planar samples stay so underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return block
    offset = 128 if kind == "u8" else 0
    return ((block - np.float64(offset)) / _SCALES[kind]).astype(np.float32)
