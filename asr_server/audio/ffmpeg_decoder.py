"""Decode one audio track with FFmpeg, on the container's time line.

Runs in the FFmpeg processes alone. FFmpeg's queue gathers frames into arrays of a second; one array a
frame would cost as much as decoding. Gaps in the time stamps, and a late start, become silence, so that
times are a player's.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import av
import av.error
import av.logging
import numpy as np
from av.stream import Disposition

from asr_server.audio.decoder import (
    DEFAULT_TRACK,
    AudioLimits,
    Block,
    CannotOpen,
    TrackChoice,
    id3_size,
    invalid_audio,
    ranked,
)
from asr_server.core import Track

# Demuxers that open one plain file. Playlists (hls, dash, concat ...) could name other files and hosts.
CONTAINERS = (
    "aac,ac3,aiff,alac,amr,amrnb,amrwb,ape,asf,au,avi,caf,dss,dts,eac3,flac,flv,gsm,loas,matroska,mov,mp3,mp4,"
    "mpeg,mpegts,mxf,nistsphere,nut,ogg,oma,opus,rm,rso,sln,sox,spdif,tak,tta,voc,w64,wav,webm,wv"
)
GROUP_S = 1.0
MISSING_S = 0.5  # shorter than the container says by more than this: cut short
MAX_DAMAGED = 100  # places at which a demuxer gives up and may go on
_SEARCHING = ("ogg", "matroska,webm")  # demuxers that pass over damage without an error
_END_BYTES = 64
_TAGS = (b"ID3", b"TAG", b"APE")  # between MP3s that were joined
_MAX_PAUSE_BYTES = 6  # AMR's frames without speech, which FFmpeg cannot decode (3GPP TS 26.101 and 26.201)
_EXTRA = Disposition.comment | Disposition.visual_impaired
_DAMAGE = (av.error.FFmpegError, OSError, ValueError)  # how PyAV reports it


class _DemuxerErrors(logging.Handler):
    """Note which demuxers report damage."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.sources: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.sources.add(record.name)


demuxer_errors = _DemuxerErrors()
logging.getLogger("libav").addHandler(demuxer_errors)
logging.getLogger("libav").propagate = False
av.logging.set_level(av.logging.ERROR)
av.logging.set_skip_repeated(False)


class FfmpegDecoder:
    has_exact_duration = False

    def __init__(
        self, fd: int, choice: TrackChoice = DEFAULT_TRACK, limits: AudioLimits | None = None
    ) -> None:
        """Raises CannotOpen for unknown files, InvalidAudio without audio, and NoSuchTrack."""
        self._fd, self._choice, self._limits = fd, choice, limits or AudioLimits()
        self.truncated = self.has_more = False
        self._start, self._end = id3_size(os.pread(fd, 10, 0)), os.fstat(fd).st_size
        self._container = self._open()
        try:
            track = self._open_track()
        except BaseException:
            self._container.close()
            raise
        first, stated_s = self._first, self._track_s()
        self.tracks_read: tuple[Track, ...] = (track,) if len(self.tracks) > 1 else ()
        self.layout: tuple[str, ...] = tuple(channel.name for channel in first.layout.channels)
        self.sample_rate, self.num_channels = first.sample_rate, first.layout.nb_channels
        self.is_float = first.format.name.startswith(("flt", "dbl"))
        lead_s = self._time_line.lead_s
        self.duration_s: float | None = self._container_s() if stated_s is None else lead_s + stated_s
        self._adapter = Adapter(first)
        self._blocks = self._read()

    def read(self) -> Block:
        try:
            block = next(self._blocks, None)
        except _DAMAGE:
            block, self.truncated = None, True
        return np.empty((0, self.num_channels), np.float32) if block is None else block

    def close(self) -> None:
        self._container.close()

    def _open(self) -> Any:
        os.lseek(self._fd, 0, os.SEEK_SET)
        options = {"fd": str(self._fd), "format_whitelist": CONTAINERS, "protocol_whitelist": "fd,subfile"}
        name = f"subfile,,start,{self._start},end,{self._end},,:fd:" if self._start else "fd:"
        try:
            container = av.open(name, container_options=options)
        except _DAMAGE as error:
            raise CannotOpen(str(error)) from error
        demuxer_errors.sources.clear()
        return container

    def _open_track(self) -> Track:
        self.tracks = tracks_of(self._container)
        if not self.tracks:
            raise invalid_audio("The file has no audio stream.")
        for position, track in enumerate(ranked(self.tracks, self._choice)):
            if position:  # the track before was empty: all has been read
                self._container.close()
                self._container = self._open()
            if self._has_sound(track):
                return track
        raise invalid_audio("No audio could be decoded from the file.")

    def _has_sound(self, track: Track) -> bool:
        self._stream = self._container.streams.audio[track.number - 1]
        self._stream.codec_context.thread_count = 1
        self._others_end_s = 0.0
        self._packets = self._decode()
        for frames in self._packets:
            for first in frames:
                self._packets = itertools.chain(((first,), frames), self._packets)
                self._first, self._time_line = first, TimeLine(self._container, self._stream, first)
                return True
        return False

    def _read(self) -> Iterator[Block]:
        yield from self._gather()
        self.truncated = self.truncated or self._is_damaged() or self._falls_short()

    def _decode(self) -> Iterator[Iterable[Any]]:
        streams = self._watched_streams()
        for _ in range(MAX_DAMAGED):
            try:
                for packet in self._container.demux(*streams):
                    if packet.stream_index == self._stream.index:
                        yield self._frames(packet)
                    elif packet.pts is not None:
                        end = (packet.pts + (packet.duration or 0)) * packet.time_base
                        self._others_end_s = max(self._others_end_s, float(end))
                return
            except _DAMAGE:
                self.truncated = True

    def _frames(self, packet: Any) -> Iterator[Any]:
        try:
            return iter(packet.decode())
        except _DAMAGE:
            is_pause = self._stream.codec_context.name.startswith("amr") and packet.size <= _MAX_PAUSE_BYTES
            self.truncated = self.truncated or not (is_pause or bytes(packet)[:3] in _TAGS)
            return iter(())

    def _watched_streams(self) -> list[Any]:
        """Return the other streams if the file states only its total length: they may be longer."""
        return [self._stream] if self._track_s() is not None else list(self._container.streams)

    def _is_damaged(self) -> bool:
        """Return whether the demuxer met what it could not read."""
        has_lost_end = not any(os.pread(self._fd, _END_BYTES, self._end - _END_BYTES))
        name = self._container.format.name
        return name in _SEARCHING and (has_lost_end or f"libav.{name}" in demuxer_errors.sources)

    def _falls_short(self) -> bool:
        """Return whether a container holds less than it states; raw streams only guess."""
        line = self._time_line
        if self._track_s() is not None:
            return line.lead_s + (self._track_s() or 0.0) - (line.end_s - line.start_s) > MISSING_S
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

    def _gather(self) -> Iterator[Block]:
        """Yield blocks of about GROUP_S. The body runs once a frame, so it must be cheap."""
        adapter, time_line = self._adapter, self._time_line
        fifo = av.AudioFifo()
        group = int(GROUP_S * self.sample_rate)
        for frames in self._packets:
            for frame in frames:
                if gap_s := time_line.gap_before(frame):
                    if fifo.samples:
                        yield to_block(fifo.read())
                    yield from self._silence(gap_s)
                for part in adapter.adapt(frame) if adapter.is_needed(frame) else (frame,):
                    part.pts = None  # the queue refuses frames that do not follow each other
                    fifo.write(part)
            if fifo.samples >= group:
                yield to_block(fifo.read())
        for part in adapter.flush():
            fifo.write(part)
        if fifo.samples:
            yield to_block(fifo.read())

    def _silence(self, duration_s: float) -> Iterator[Block]:
        """Raise AudioTooLong before any silence if time stamps exceed the limit."""
        self._limits.check_decoded(0, self._time_line.end_s - self._time_line.start_s)
        num_left = round(duration_s * self.sample_rate)
        block = np.zeros((min(num_left, int(GROUP_S * self.sample_rate)), self.num_channels), np.float32)
        while num_left > 0:
            yield block[:num_left]
            num_left -= len(block)


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


# -- Frames --------------------------------------------------------------------------------------------------

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
        self._surplus_s = 0.0  # of samples for which the time stamps leave no room

    def gap_before(self, frame: Any) -> float:
        """Return the silence to insert before a frame, less than the time by which samples run ahead."""
        silence_s, self._pending_lead_s = self._pending_lead_s, 0.0
        gap_s = 0.0
        if self._is_clocked and frame.pts is not None:
            gap_s = frame.pts * self._tick_s - self.end_s
        if abs(gap_s) > MIN_GAP_S:
            self.end_s += gap_s
            if not self._is_new_clock(gap_s):
                late_s = self._surplus_s - gap_s
                silence_s += max(0.0, -late_s)
                self._surplus_s = max(0.0, late_s)
        self.end_s += frame.samples / frame.sample_rate
        return silence_s

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
