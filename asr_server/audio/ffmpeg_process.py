"""The processes that decode with FFmpeg: one that forks the others, and what each of these does.

`ffmpeg_client.py` starts the first. It loads FFmpeg's libraries once and has no threads, so that forking it
is quick and safe. FFmpeg's own queue gathers frames into one array per second of audio, because an array for
each frame would cost as much as decoding. A block is an array of consecutive samples.

Runs in the FFmpeg processes alone: the API process never imports this file. Knows one file at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import av
import av.error
import av.logging
import msgspec
import numpy as np

from asr_server.audio.decoders import Block, CannotOpen
from asr_server.audio.ffmpeg_client import (
    END,
    HEADER,
    NEXT,
    OPENED,
    REFUSED,
    SAMPLES,
    STATUS,
    DecodeTask,
    Finished,
    Opened,
    Refused,
)
from asr_server.audio.limits import invalid_audio
from asr_server.audio.stream import DecodedStream
from asr_server.core import SAMPLE_RATE
from asr_server.errors import RequestError
from asr_server.machine import leave_stopping_to_the_parent

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
        """Whether a container holds less than the length that it states. Raw streams only guess theirs."""
        if not self._container.format.name.startswith(("mov", "matroska")):
            return False
        return bool((self.duration_s or 0.0) - self._num_frames / self.sample_rate > MISSING_S)

    def _promised_s(self) -> float | None:
        """The length that the container states; None where it states none, as a browser's WebM."""
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
    """A frame as [frames, channels] float32, full scale 1.0; planar samples stay planar underneath."""
    array = frame.to_ndarray()  # planar: [channels, frames]; packed: [1, frames * channels]
    samples: Block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.name.removesuffix("p")
    if kind == "flt":
        return samples
    middle = 128.0 if kind == "u8" else 0.0
    return ((samples.astype(np.float64) - middle) / _FULL_SCALES[kind]).astype(np.float32)


FORK_FAILED = -1
MAX_MESSAGE = 1 << 12
ANSWER_BYTES = 8 * SAMPLE_RATE * 4  # some 5 ms of work
# Work on one block takes milliseconds.
BLOCK_CPU_S = 3.0  # what takes so much processor time never ends: that is the file's fault
BLOCK_WALL_S = 30.0  # what only waits so long got no processor: that is the machine's
MAX_DATA_BYTES = 1 << 30  # for one decode process; a usual one needs 60 MB


def main(socket_fd: int) -> None:
    """Forks a decode process for each connection that arrives, until the server closes its end."""
    leave_stopping_to_the_parent()
    status_fds: dict[int, int] = {}  # by process: where the server reads how it ended
    signal.signal(signal.SIGCHLD, lambda *_: _report_ended(status_fds))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    av.logging.set_level(None)  # what is wrong with a file is told to its sender, not to the log
    with socket.socket(fileno=socket_fd) as server:
        while True:
            message, fds, _, _ = socket.recv_fds(server, 1, 2)
            if not message:
                return
            connection_fd, status_fd = fds
            if _fork(status_fds, status_fd) == 0:
                server.close()
                _run_decode_process(connection_fd)
            os.close(connection_fd)


def _fork(status_fds: dict[int, int], status_fd: int) -> int:
    """As os.fork, or FORK_FAILED: the server then sees its connection closed, and no status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until it is known whose status it would be
    try:
        pid = os.fork()
    except OSError:
        os.close(status_fd)
        pid = FORK_FAILED
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (status_fd, *status_fds.values()):
            os.close(fd)
    elif pid != FORK_FAILED:
        status_fds[pid] = status_fd
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return pid


def _report_ended(status_fds: dict[int, int]) -> None:
    while status_fds:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError), open(status_fds.pop(pid), "wb", buffering=0) as pipe:
            pipe.write(STATUS.pack(status))


def _run_decode_process(connection_fd: int) -> None:
    """Runs a decode process to its end; never returns into its parent's code."""
    try:
        with socket.socket(fileno=connection_fd) as connection:
            serve(connection)
    except OSError:
        pass  # the server has turned away
    finally:
        os._exit(0)


def serve(connection: socket.socket) -> None:
    """One file after another, until the server closes the connection."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1)
        if not message:
            return
        try:
            decode(connection, fds[0], msgspec.msgpack.decode(message, type=DecodeTask))
        finally:
            os.close(fds[0])


def decode(connection: socket.socket, fd: int, task: DecodeTask) -> None:
    """Answers each request for a block of one file.

    Raises:
        OSError: the server has closed the connection.
    """
    stream: DecodedStream | None = None
    started_at_s = time.process_time()
    try:
        while _asked(connection):
            set_alarms(BLOCK_CPU_S, BLOCK_WALL_S)
            if stream is None:
                stream = _open(fd, task)
                _answer(connection, OPENED, msgspec.msgpack.encode(Opened(stream.duration_s)))
            answer = _gathered(stream)
            task.limits.check_work(time.process_time() - started_at_s)
            set_alarms(0, 0)
            if not answer:
                return _answer(connection, END, msgspec.msgpack.encode(Finished(stream.truncated)))
            _answer(connection, SAMPLES, answer)
    except RequestError as error:
        _refuse(connection, error)
    except (MemoryError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        # PyAV and numpy have many words for a file that makes no sense.
        _refuse(connection, invalid_audio("The file could not be decoded."))
    finally:
        set_alarms(0, 0)
        if stream is not None:
            stream.close()


def _gathered(stream: DecodedStream) -> bytearray:
    """Several blocks in one answer: to be woken for each costs more than to send it. Empty at the end."""
    answer = bytearray()
    while len(answer) < ANSWER_BYTES and (block := stream.read()) is not None:
        answer += block.data
    return answer


def set_alarms(cpu_s: float, wall_s: float) -> None:
    """Nobody handles these signals, so they end the process even within a codec's endless loop."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _asked(connection: socket.socket) -> bool:
    if connection.recv(1) != NEXT:
        raise ConnectionAbortedError
    return True


def _open(fd: int, task: DecodeTask) -> DecodedStream:
    try:
        return DecodedStream(FfmpegDecoder(f"/dev/fd/{fd}"), task.limits, task.split_channels)
    except CannotOpen as error:
        raise invalid_audio("The file is not audio, or damaged beyond reading.") from error


def _refuse(connection: socket.socket, error: RequestError) -> None:
    _answer(connection, REFUSED, msgspec.msgpack.encode(Refused(type(error).__name__, error.message)))


def _answer(connection: socket.socket, kind: int, content: bytes | bytearray) -> None:
    connection.sendall(HEADER.pack(kind, len(content)))
    connection.sendall(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
