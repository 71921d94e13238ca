"""Decode one audio track with FFmpeg, on the container's time line.

Runs in the FFmpeg processes alone. FFmpeg's queue gathers frames into arrays of a second; one array a
frame would cost as much as decoding. Gaps in the time stamps, and a late start, become silence, so that
times are a player's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import av
import av.error
import numpy as np
from av.stream import Disposition

from asr_server.audio.decoder import Block, CannotOpen
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.audio.tracks import DEFAULT_TRACK, TrackChoice, ranked
from asr_server.core import Track

# Demuxers that open one plain file. Playlists (hls, dash, concat ...) could name other files and hosts.
CONTAINERS = (
    "aac,ac3,aiff,alac,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,eac3,flac,flv,gsm,loas,matroska,mov,mp3,mp4,mpeg,"
    "mpegts,nut,ogg,oma,opus,rm,rso,sln,sox,spdif,tak,tta,voc,w64,wav,webm,wv"
)
GROUP_S = 1.0
MAX_PLANES = 8  # of more, PyAV's frames show only the first ones
MISSING_S = 0.5  # shorter than the container says by more than this: cut short
MAX_BOXES = 10_000  # looked at for another file behind an MP4; a fragment has two
MIN_GAP_S = 0.1  # encoder delays and rounded time stamps are smaller
RESTART_S = 1.0  # time stamps that go back by more begin anew: streams joined together
# A transport stream's clock jumps where it wraps, or where recordings are joined. FFmpeg's own limit.
MAX_TRANSPORT_GAP_S = 10.0
_TRANSPORTS = ("mpeg", "mpegts")
_TAGS = (b"ID3", b"TAG", b"APE")  # between MP3s that were joined
_EXTRA = Disposition.comment | Disposition.visual_impaired
_FULL_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}
_DAMAGE = (av.error.FFmpegError, OSError, ValueError)  # how PyAV reports it


class FfmpegDecoder:
    has_exact_duration = False

    def __init__(
        self, fd: int, choice: TrackChoice = DEFAULT_TRACK, limits: AudioLimits | None = None
    ) -> None:
        """Raises CannotOpen for unknown files, InvalidAudio without audio, and NoSuchTrack."""
        self._fd, self._limits = fd, limits or AudioLimits()
        self.truncated = self.has_more = False
        self._container = self._open()
        try:
            self._open_track(choice)
        except BaseException:
            self._container.close()
            raise

    def read(self) -> Block:
        try:
            block = next(self._blocks, None)
        except _DAMAGE:
            block, self.truncated = None, True
        if block is None:
            self.truncated = self.truncated or self._falls_short() or another_file_follows(self._fd)
            return np.empty((0, self.num_channels), np.float32)
        return block

    def close(self) -> None:
        self._container.close()

    def _open(self) -> Any:
        os.lseek(self._fd, 0, os.SEEK_SET)
        options = {"fd": str(self._fd), "format_whitelist": CONTAINERS, "protocol_whitelist": "fd"}
        try:
            return av.open("fd:", container_options=options)
        except _DAMAGE as error:
            raise CannotOpen(str(error)) from error

    def _open_track(self, choice: TrackChoice) -> None:
        self.tracks = tracks_of(self._container)
        if not self.tracks:
            raise invalid_audio("The file has no audio stream.")
        for position, track in enumerate(ranked(self.tracks, choice)):
            if position:  # the track before was empty: all has been read
                self._container.close()
                self._container = self._open()
            first, packets = self._first_frame(track)
            if first is not None:
                return self._begin(track, first, packets)
        raise invalid_audio("No audio could be decoded from the file.")

    def _first_frame(self, track: Track) -> tuple[Any, Iterator[Iterator[Any]]]:
        self._stream = self._container.streams.audio[track.number - 1]
        self._stream.codec_context.thread_count = 1
        self._others_end_s = 0.0
        packets = self._decode()
        for frames in packets:
            for first in frames:
                return first, itertools.chain((frames,), packets)  # a packet may have several frames
        return None, packets

    def _begin(self, track: Track, first: Any, packets: Iterator[Iterator[Any]]) -> None:
        self.tracks_read: tuple[Track, ...] = (track,) if len(self.tracks) > 1 else ()
        self.layout: tuple[str, ...] = tuple(channel.name for channel in first.layout.channels)
        self.sample_rate, self.num_channels = first.sample_rate, first.layout.nb_channels
        self.is_float = first.format.name.startswith(("flt", "dbl"))
        self._time_line = _TimeLine(self._container, self._stream, first)
        lead_s = self._time_line.lead_s
        stated_s = self._track_s()
        self.duration_s: float | None = self._container_s() if stated_s is None else lead_s + stated_s
        self._blocks = self._gather(first, packets)

    def _decode(self) -> Iterator[Iterator[Any]]:
        index = self._stream.index
        packets = self._container.demux(*self._watched_streams())
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except _DAMAGE:
                self.truncated = True
                return
            if packet.stream_index != index:
                if packet.pts is not None:
                    end = (packet.pts + (packet.duration or 0)) * packet.time_base
                    self._others_end_s = max(self._others_end_s, float(end))
                continue
            try:
                yield iter(packet.decode())
            except _DAMAGE:
                self.truncated = self.truncated or bytes(packet)[:3] not in _TAGS

    def _watched_streams(self) -> list[Any]:
        """Return the other streams if the file states only its total length: they may be longer."""
        return [self._stream] if self._track_s() is not None else list(self._container.streams)

    def _falls_short(self) -> bool:
        """Return whether a container holds less than it states; raw streams only guess."""
        line = self._time_line
        if self._track_s() is not None:
            return (self.duration_s or 0.0) - (line.end_s - line.start_s) > MISSING_S
        if not self._container.format.name.startswith("matroska"):
            return False
        # Its length counts from zero, wherever the first time stamp lies.
        return (self._container_s() or 0.0) - max(line.end_s, self._others_end_s) > MISSING_S

    def _track_s(self) -> float | None:
        stream = self._stream
        if not self._container.format.name.startswith("mov") or not stream.duration:
            return None
        return float(stream.duration * stream.time_base)

    def _container_s(self) -> float | None:
        return self._container.duration / av.time_base if self._container.duration else None

    def _gather(self, first: Any, packets: Iterator[Iterator[Any]]) -> Iterator[Block]:
        """Yield blocks of about GROUP_S. The body runs once a frame, so it must be cheap."""
        adapter = _Adapter(first)
        time_line = self._time_line
        fifo = av.AudioFifo()
        group = int(GROUP_S * first.sample_rate)
        for frames in itertools.chain((iter((first,)),), packets):
            for frame in frames:
                if gap_s := time_line.gap_before(frame):
                    if fifo.samples:
                        yield _to_block(fifo.read())
                    yield from self._silence(gap_s)
                for part in adapter.adapt(frame) if adapter.is_needed(frame) else (frame,):
                    part.pts = None  # the queue refuses frames that do not follow each other
                    fifo.write(part)
            if fifo.samples >= group:
                yield _to_block(fifo.read())
        for part in adapter.flush():
            fifo.write(part)
        if fifo.samples:
            yield _to_block(fifo.read())

    def _silence(self, duration_s: float) -> Iterator[Block]:
        """Raise AudioTooLong before any silence if time stamps exceed the limit."""
        self._limits.check_decoded(0, self._time_line.end_s - self._time_line.start_s)
        num_left = round(duration_s * self.sample_rate)
        block = np.zeros((min(num_left, int(GROUP_S * self.sample_rate)), self.num_channels), np.float32)
        while num_left > 0:
            yield block[:num_left]
            num_left -= len(block)


def another_file_follows(fd: int) -> bool:
    length = os.fstat(fd).st_size
    at, num_ftyp = 0, 0
    for _ in range(MAX_BOXES):
        head = os.pread(fd, 16, at)
        if head[:4] == b"FORM":
            return os.pread(fd, 4, at + 8 + int.from_bytes(head[4:8], "big")) == b"FORM"
        num_ftyp += head[4:8] == b"ftyp"
        size = int.from_bytes(head[:4], "big")
        size = int.from_bytes(head[8:16], "big") if size == 1 else size
        if num_ftyp != 1 or not 8 <= size < length - at:
            break
        at += size
    return num_ftyp > 1


def tracks_of(container: Any) -> list[Track]:
    return [
        Track(
            number,
            _stated(stream.metadata.get("language")),
            _stated(stream.metadata.get("title")),
            bool(stream.disposition & Disposition.default),
            bool(stream.disposition & _EXTRA),
        )
        for number, stream in enumerate(container.streams.audio, start=1)
    ]


def _stated(text: str | None) -> str | None:
    return None if text in (None, "", "und") else text[:80]


class _TimeLine:
    def __init__(self, container: Any, stream: Any, first: Any) -> None:
        self._tick_s = float(stream.time_base)
        self._max_gap_s = MAX_TRANSPORT_GAP_S if container.format.name in _TRANSPORTS else np.inf
        first_s = 0.0 if first.pts is None else first.pts * self._tick_s
        self.start_s = first_s if container.start_time is None else container.start_time / av.time_base
        self.lead_s = first_s - self.start_s  # of the track behind the start of the file
        if not MIN_GAP_S < self.lead_s < (container.duration or 0) / av.time_base:
            self.start_s, self.lead_s = first_s, 0.0
        self._pending_lead_s = self.lead_s
        self.end_s = first_s  # of the frames so far

    def gap_before(self, frame: Any) -> float:
        gap_s = 0.0 if frame.pts is None else frame.pts * self._tick_s - self.end_s
        if not -RESTART_S <= gap_s <= MIN_GAP_S:
            self.end_s += gap_s
            gap_s = 0.0 if gap_s < 0 or gap_s > self._max_gap_s else gap_s
        else:
            gap_s = 0.0
        self.end_s += frame.samples / frame.sample_rate
        lead_s, self._pending_lead_s = self._pending_lead_s, 0.0
        return lead_s + gap_s


class _Adapter:
    """Bring frames to one format: some streams change theirs."""

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
    """Return a frame as [frames, channels] float32; planar samples stay planar underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    samples: Block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return samples
    middle = 128.0 if kind == "u8" else 0.0
    return ((samples.astype(np.float64) - middle) / _FULL_SCALES[kind]).astype(np.float32)
