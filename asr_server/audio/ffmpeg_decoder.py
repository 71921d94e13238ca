"""Decode one audio track with FFmpeg, on the container's time line.

Runs in the FFmpeg processes alone. FFmpeg's queue gathers frames into arrays of a second; one array a
frame would cost as much as decoding. Gaps in the time stamps, and a late start, become silence, so that
times are a player's.
"""

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
from asr_server.audio.ffmpeg_frames import Adapter, TimeLine, to_block
from asr_server.core import Track
from asr_server.errors import RequestError

# Demuxers that open one plain file. Playlists (hls, dash, concat ...) could name other files and hosts.
CONTAINERS = (
    "aac,ac3,aiff,alac,amr,amrnb,amrwb,ape,asf,au,avi,caf,dss,dts,eac3,flac,flv,gsm,loas,matroska,mov,mp3,mp4,"
    "mpeg,mpegts,mxf,nistsphere,nut,ogg,oma,opus,rm,rso,sln,sox,spdif,tak,tta,voc,w64,wav,webm,wv"
)
GROUP_S = 1.0
MISSING_S = 0.5  # shorter than the container says by more than this: cut short
MISSING_OF_EXACT_S = 0.01
_EXACT = ("flac", "aiff")  # formats that count their samples, and have no gaps of their own
_MP3_COUNT = re.compile(rb"(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f](....)", re.DOTALL)  # of its frames
_MP3_HEAD = 200  # bytes of the first frame that may have it
MAX_BOXES = 10_000  # looked at for another file behind an MP4; a fragment has two
MAX_JOINED = 1000
MAX_DAMAGED = 100  # places at which a demuxer gives up and may go on
_SEARCHING = ("ogg", "matroska,webm")  # demuxers that pass over damage without an error
_END_BYTES = 64
_TAGS = (b"ID3", b"TAG", b"APE")  # between MP3s that were joined
_MAX_PAUSE_BYTES = 6  # AMR's frames without speech, which FFmpeg cannot decode (3GPP TS 26.101 and 26.201)
_OGG_BEGINS = b"OggS\0\2"  # a page that begins a stream
_FLAC_BEGINS = (b"fLaC\0\0\0\x22", b"fLaC\x80\0\0\x22")
_SCANNED_BYTES = 1 << 20
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
    def __init__(
        self, fd: int, choice: TrackChoice = DEFAULT_TRACK, limits: AudioLimits | None = None
    ) -> None:
        """Raises CannotOpen for unknown files, InvalidAudio without audio, and NoSuchTrack."""
        self._fd, self._choice, self._limits = fd, choice, limits or AudioLimits()
        self.truncated = False
        self._start = id3_size(os.pread(fd, 10, 0))
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
        self._end = end_of_joined(self._fd, self._start)
        is_whole = (self._start, self._end) == (0, os.fstat(self._fd).st_size)
        name = "fd:" if is_whole else f"subfile,,start,{self._start},end,{self._end},,:fd:"
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
        """Yield the blocks of the file, and of those that are joined to it."""
        for _ in range(MAX_JOINED):
            yield from self._gather()
            self.truncated = self.truncated or self._is_damaged() or self._falls_short()
            if self._end >= os.fstat(self._fd).st_size:
                return
            self._container.close()
            self._start = self._end
            try:
                self._container = self._open()
                self._open_track()
            except (CannotOpen, RequestError):
                break
        self.truncated = True

    def _decode(self) -> Iterator[Iterable[Any]]:
        # The other streams too if the file states only its total length: they may be longer.
        streams = [self._stream] if self._track_s() is not None else list(self._container.streams)
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
            data = bytes(packet)
            is_mp3 = self._container.format.name == "mp3"
            is_padding = data[:3] in _TAGS or (is_mp3 and not any(data))  # some writers end an MP3 with zeros
            self.truncated = self.truncated or not (is_pause or is_padding)
            return iter(())

    def _is_damaged(self) -> bool:
        """Return whether the demuxer met what it could not read."""
        has_lost_end = not any(os.pread(self._fd, _END_BYTES, self._end - _END_BYTES))
        name = self._container.format.name
        return name in _SEARCHING and (has_lost_end or f"libav.{name}" in demuxer_errors.sources)

    def _falls_short(self) -> bool:
        """Return whether a container holds less than it states; raw streams only guess."""
        line, name, track_s = self._time_line, self._container.format.name, self._track_s()
        if track_s is not None:
            missing_s = line.lead_s + track_s - (line.end_s - line.start_s)
            return missing_s > (MISSING_OF_EXACT_S if name in _EXACT else MISSING_S)
        if not name.startswith("matroska"):
            return False
        # Its length counts from zero, wherever the first time stamp lies.
        return (self._container_s() or 0.0) - max(line.end_s, self._others_end_s) > MISSING_S

    def _track_s(self) -> float | None:
        stream, name = self._stream, self._container.format.name
        if name == "mp3":  # FFmpeg guesses by the size of a file that is longer than its count
            count = _MP3_COUNT.search(os.pread(self._fd, _MP3_HEAD, self._start))
            codec = stream.codec_context
            return int.from_bytes(count[1], "big") * codec.frame_size / codec.sample_rate if count else None
        if not stream.duration or not name.startswith(("mov", *_EXACT)):
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
                    self.truncated = self.truncated or self._container.format.name in _EXACT
                    if fifo.samples:
                        yield to_block(fifo.read())
                    yield from self._silence(gap_s)
                for part in adapter.adapt(frame) if adapter.is_needed(frame) else (frame,):
                    part.pts = None  # the queue refuses frames that do not follow each other
                    fifo.write(part)
            if fifo.samples >= group:
                yield time_line.shorten(to_block(fifo.read()), self.sample_rate)
        for part in adapter.flush():
            fifo.write(part)
        if fifo.samples:
            yield time_line.shorten(to_block(fifo.read()), self.sample_rate)

    def _silence(self, duration_s: float) -> Iterator[Block]:
        """Raise AudioTooLong before any silence if time stamps exceed the limit."""
        self._limits.check_decoded(0, self._time_line.end_s - self._time_line.start_s)
        num_left = round(duration_s * self.sample_rate)
        block = np.zeros((min(num_left, int(GROUP_S * self.sample_rate)), self.num_channels), np.float32)
        while num_left > 0:
            yield block[:num_left]
            num_left -= len(block)


def end_of_joined(fd: int, start: int) -> int:
    """Return where the file at `start` ends, or another one begins that is joined to it."""
    length = os.fstat(fd).st_size
    head = os.pread(fd, 8, start)
    if head.startswith(b"OggS"):
        return _find(fd, _behind_first_pages(fd, start), [_OGG_BEGINS], length)
    if head.startswith(b"fLaC"):
        return _find(fd, start + 4, _FLAC_BEGINS, length)
    return _next_mp4(fd, start, length) if head[4:] == b"ftyp" else length


def _behind_first_pages(fd: int, start: int) -> int:
    """Step over the pages that begin the streams of one Ogg (RFC 3533)."""
    at = start
    while len(head := os.pread(fd, 282, at)) >= 27 and head.startswith(_OGG_BEGINS):
        at += 27 + head[26] + sum(head[27 : 27 + head[26]])
    return at


def _find(fd: int, at: int, marks: Sequence[bytes], length: int) -> int:
    while len(data := os.pread(fd, _SCANNED_BYTES, at)) >= len(marks[0]):
        places = [data.find(mark) for mark in marks if mark in data]
        if places:
            return at + min(places)
        at += len(data) - len(marks[0]) + 1
    return length


def _next_mp4(fd: int, start: int, length: int) -> int:
    at = start
    for _ in range(MAX_BOXES):
        head = os.pread(fd, 16, at)
        if head[4:8] == b"ftyp" and at > start:
            return at
        size = int.from_bytes(head[:4], "big")
        size = int.from_bytes(head[8:16], "big") if size == 1 else size
        if not 8 <= size < length - at:
            break
        at += size
    return length


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
