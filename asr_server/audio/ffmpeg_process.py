"""The processes that decode with FFmpeg: one that forks the others, and the forks.

The first loads the libraries once and has no threads, so forking is quick and safe. The API process never
imports this file.
"""

import contextlib
import importlib
import os
import pkgutil
import resource
import signal
import socket
import sys
import time

import av
import msgspec
import numpy as np

from asr_server.audio.decoder import CannotOpen, DecodeTask, FileInfo, TrackChoice, invalid_audio
from asr_server.audio.ffmpeg_client import ENDED_BY_FILE, HEADER, NEXT, NUM_OPENED, Answer
from asr_server.audio.ffmpeg_decoder import FfmpegDecoder
from asr_server.audio.stream import DecodedStream, Stream
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.errors import RequestError
from asr_server.process import (
    be_killed_with_the_parent,
    confine,
    gain_no_privileges,
    hide_from_other_processes,
    leave_stopping_to_the_parent,
)

# What is not the file's fault: out of memory, waiting without processor time.
SIGNALS_OF_THE_SYSTEM = (signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)
MAX_MESSAGE = 1 << 12
ANSWER_BYTES = 8 * SAMPLE_RATE * 4  # some 5 ms of work
# Work on one block takes milliseconds.
BLOCK_CPU_S = 3.0  # what takes so much processor time never ends: that is the file's fault
BLOCK_WALL_S = 20.0  # what only waits so long got no processor: that is the machine's
MAX_DATA_BYTES = 1 << 30  # for one decode process; a usual one needs 60 MB
# Beside our own, PyAV and numpy have many words for a file that makes no sense.
FILE_ERRORS = (
    *(RequestError, MemoryError, ValueError),
    *(ArithmeticError, LookupError, TypeError, AttributeError),
)


def main(socket_fd: int) -> None:
    _import_all_of_pyav()
    leave_stopping_to_the_parent()
    be_killed_with_the_parent()
    gain_no_privileges()
    hide_from_other_processes()
    connections: dict[int, socket.socket] = {}  # those of its processes
    signal.signal(signal.SIGCHLD, lambda *_: _report_ended(connections))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=socket_fd) as server:
        while True:
            message, fds, _, _ = socket.recv_fds(server, 1, 1)
            if not message:
                return
            connection = socket.socket(fileno=fds[0])
            if _forked(connections, connection):
                server.close()
                _run_decode_process(connection)


def _import_all_of_pyav() -> None:
    """PyAV imports some modules at the first stream that needs them; a confined process reads no file."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if module.name not in ("av.__main__", "av.datasets"):
            importlib.import_module(module.name)


def _forked(connections: dict[int, socket.socket], connection: socket.socket) -> bool:
    """Fork; return True in the new process. Where that fails, the server sees a closed connection."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until it is known whose end it would be
    try:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in connections.values():
                other.close()
        else:
            connections[pid] = connection
        return pid == 0
    except OSError:
        connection.close()
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _report_ended(connections: dict[int, socket.socket]) -> None:
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        by_system = os.WIFSIGNALED(status) and os.WTERMSIG(status) in SIGNALS_OF_THE_SYSTEM
        with connections.pop(pid) as connection, contextlib.suppress(OSError):  # the server has turned away
            if not by_system:
                connection.send(HEADER.pack(ENDED_BY_FILE), socket.MSG_DONTWAIT)


def _run_decode_process(connection: socket.socket) -> None:
    try:
        confine()
        be_killed_with_the_parent()  # even while stopped
        with connection:
            serve(connection)
    except OSError:
        pass  # the server has turned away
    finally:
        os._exit(0)


def serve(connection: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, NUM_OPENED)
        if not message:
            return
        try:
            decode(connection, fds, msgspec.msgpack.decode(message, type=DecodeTask))
        finally:
            for fd in fds:
                os.close(fd)


def decode(connection: socket.socket, fds: list[int], task: DecodeTask) -> None:
    """Answer each request for a block of one file. Raises OSError: the server has closed the connection."""
    stream: Stream | None = None
    started_at_s = time.process_time()
    try:
        while True:
            if connection.recv(1) != NEXT:
                raise ConnectionAbortedError
            set_alarms(BLOCK_CPU_S, BLOCK_WALL_S)
            if stream is None:
                stream = _open(fds, task)
            samples = _gathered(stream)
            task.limits.check_work(time.process_time() - started_at_s)
            set_alarms(0, 0)
            _answer(connection, Answer(stream.info, len(samples)), samples)
            if not samples:
                return
    except FILE_ERRORS as error:
        told = error if isinstance(error, RequestError) else invalid_audio("The file could not be decoded.")
        _answer(connection, Answer(error=type(told).__name__, message=told.message))
    finally:
        set_alarms(0, 0)
        if stream is not None:
            stream.close()


def _gathered(stream: Stream) -> bytearray:
    """Return several blocks at once, because each wake-up costs more than sending; empty at the end."""
    answer = bytearray()
    while len(answer) < ANSWER_BYTES and (block := stream.read()) is not None:
        answer += block.data
    return answer


def set_alarms(cpu_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _open(fds: list[int], task: DecodeTask) -> Stream:
    try:
        numbers = task.choice.numbers
        first = task.choice if len(numbers) < 2 else TrackChoice(numbers[:1])
        decoder = FfmpegDecoder(fds[0], first, task.limits)
        has_two_voices = decoder.num_channels == 1 and len(decoder.tracks) == 2
        if len(numbers) == 2 or (task.split_channels and not numbers and has_two_voices):
            decoder.close()
            both = zip(fds, numbers or (1, 2), strict=True)
            decoders = (FfmpegDecoder(fd, TrackChoice((number,)), task.limits) for fd, number in both)
            return PairedStream(*(DecodedStream(each, DecodeTask(task.limits)) for each in decoders))
        return DecodedStream(decoder, task)
    except CannotOpen as error:
        raise invalid_audio("The file is not audio, or damaged beyond reading.") from error


class PairedStream:
    def __init__(self, *streams: DecodedStream) -> None:
        self._streams = streams
        self._held: list[Samples] = [np.empty(0, np.float32) for _ in streams]

    @property
    def info(self) -> FileInfo:
        infos = [stream.info for stream in self._streams]
        durations = [info.duration_s for info in infos if info.duration_s is not None]
        tracks = tuple(track for info in infos for track in info.tracks_read)
        is_truncated = any(info.truncated for info in infos)
        return FileInfo(max(durations, default=None), len(infos), tracks, is_truncated)

    def read(self) -> Samples | None:
        going_on = [number for number in range(len(self._streams)) if self._fill(number)]
        if not going_on:
            return None
        num_samples = min(len(self._held[number]) for number in going_on)
        taken = [np.pad(held[:num_samples], (0, max(0, num_samples - len(held)))) for held in self._held]
        self._held = [held[num_samples:] for held in self._held]
        return np.ascontiguousarray(np.stack(taken, axis=1))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _fill(self, number: int) -> bool:
        if len(self._held[number]):
            return True
        samples = self._streams[number].read()
        if samples is not None:
            self._held[number] = samples.copy()
        return samples is not None


def _answer(connection: socket.socket, answer: Answer, samples: bytes | bytearray = b"") -> None:
    encoded = msgspec.msgpack.encode(answer)
    connection.sendall(HEADER.pack(len(encoded)) + encoded)
    connection.sendall(samples)


if __name__ == "__main__":
    main(int(sys.argv[1]))
