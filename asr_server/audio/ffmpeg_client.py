"""The server's side of the FFmpeg processes, one for each file. Never imports FFmpeg.

A codec may crash, hang or take gigabytes: it does so in its own process. A forkserver has the libraries
loaded and forks these processes; some idle ones wait for the next file. It ends with `shutdown`, or when
its socket closes.

The server sends a `DecodeTask` with the file, opened once for each possible track, then `NEXT` for each
block. An answer is a `HEADER` with its kind, and its content.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server import errors, metrics
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.audio.tracks import DEFAULT_TRACK, TrackChoice
from asr_server.core import Samples, Track
from asr_server.errors import DecodingUnavailable, RequestError
from asr_server.process import child_environment

HEADER: Final = struct.Struct("<BI")  # kind, bytes that follow
SAMPLES, END, REFUSED, OPENED = 0, 1, 2, 3
NEXT: Final = b"n"  # asks for a block
NUM_OPENED: Final = 2  # descriptors of a file: two tracks are read side by side, each at its own place
STATUS: Final = struct.Struct("<i")  # from the forkserver: the process's id, and its status as of waitpid


class DecodeTask(msgspec.Struct):
    limits: AudioLimits
    split_channels: bool
    choice: TrackChoice
    channel: int | None  # alone; None: all


class Opened(msgspec.Struct):
    duration_s: float | None  # by the file's header
    num_channels: int
    tracks_read: tuple[Track, ...]


class Finished(msgspec.Struct):
    truncated: bool


class Refused(msgspec.Struct):
    error: str  # the name of a class in `errors`
    message: str


# More than a packet decodes to: only a process that a codec took over says so.
MAX_ANSWER_BYTES: Final = 256 << 20
STATUS_WAIT_MS: Final = 2000
SIGNALS_OF_THE_SYSTEM: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP})
MAX_IDLE = 4
SEND_BUFFER_BYTES = 1 << 20  # a whole block, so that its sender need not wait while it is being read
# One thread each: parallelism is between files. BLAS would otherwise start its own at import.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class DecodeProcess:
    connection: socket.socket
    status_fd: int  # the read end of a pipe, into which the forkserver writes its id and how it ended
    forkserver: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        self.connection.close()
        os.close(self.status_fd)

    def ended_by_the_file(self) -> bool:
        """Return whether the file is at fault: a codec's crash, abort or endless loop.

        It is not after SIGKILL (out of memory), SIGALRM (waiting without processor time), a failed fork,
        or the end of the forkserver.
        """
        if self._number() is None:  # its id
            return False
        status = self._number()
        if status is None:
            return False
        return not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in SIGNALS_OF_THE_SYSTEM

    def kill(self) -> bool:
        pid = self._number()
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return self._number() is not None

    def _number(self) -> int | None:
        poll = select.poll()
        poll.register(self.status_fd, select.POLLIN)
        if not poll.poll(STATUS_WAIT_MS) or not (packed := os.read(self.status_fd, STATUS.size)):
            return None
        (number,) = STATUS.unpack(packed)
        return int(number)


class DecodeProcesses:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._to_forkserver: socket.socket | None = None
        self._idle: list[DecodeProcess] = []

    @property
    def forkserver_pid(self) -> int | None:
        """Return the parent of all decode processes, if it runs."""
        return self._forkserver.pid if self._forkserver else None

    def start(self) -> None:
        """Return at once; the libraries take half a second to load."""
        with self._lock:
            self._start()

    def take(self, message: bytes, fd: int) -> DecodeProcess:
        """Return a free process that has been given this file.

        Raises:
            OSError: no handles, memory or processes are left.
        """
        with self._lock:
            while self._idle:
                with contextlib.suppress(OSError):  # it died while idle
                    return _given(self._idle.pop(), message, fd)
            process = self._new_process()
        return _given(process, message, fd)

    def give_back(self, process: DecodeProcess) -> None:
        """Keep it, unless there are enough, or nobody would tell how it ended: its forkserver is gone."""
        with self._lock:
            is_ours = self._forkserver is not None and process.forkserver is self._forkserver
            if is_ours and len(self._idle) < MAX_IDLE:
                self._idle.append(process)
                return
        process.close()

    def restart(self) -> None:
        with self._lock:
            self._stop()
            self._start()

    def drop_idle(self) -> None:
        with self._lock:
            self._close_idle()

    def shutdown(self) -> None:
        with self._lock:
            self._stop()

    def _new_process(self) -> DecodeProcess:
        ours, theirs = socket.socketpair()
        try:
            status, their_status = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        process = DecodeProcess(ours, status)
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._adopt([theirs.fileno(), their_status])
            process.forkserver = self._forkserver
        except OSError:
            process.close()
            raise
        finally:
            theirs.close()
            os.close(their_status)
        return process

    def _adopt(self, fds: list[int]) -> None:
        self._start()
        try:
            self._send(fds)
        except OSError:  # the forkserver died: once more, with a new one
            self._stop()
            self._start()
            self._send(fds)

    def _send(self, fds: list[int]) -> None:
        assert self._to_forkserver is not None
        socket.send_fds(self._to_forkserver, [b"f"], fds)

    def _start(self) -> None:
        if self._forkserver is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._forkserver = subprocess.Popen(  # nosec B603 # our own module, without a shell
                    [sys.executable, "-m", "asr_server.audio.ffmpeg_process", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=child_environment(computes=False) | _ONE_THREAD,
                )
            except OSError:
                ours.close()
                raise
        self._to_forkserver = ours

    def _close_idle(self) -> None:
        for process in self._idle:
            process.close()
        self._idle.clear()

    def _stop(self) -> None:
        self._close_idle()
        if self._to_forkserver is not None:
            self._to_forkserver.close()
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.wait()
        self._forkserver = self._to_forkserver = None


def _given(process: DecodeProcess, message: bytes, fd: int) -> DecodeProcess:
    try:
        with contextlib.ExitStack() as opened:
            own = [opened.enter_context(open(f"/dev/fd/{fd}", "rb", buffering=0)) for _ in range(NUM_OPENED)]
            socket.send_fds(process.connection, [message], [file.fileno() for file in own])
    except OSError:
        process.close()
        raise
    return process


decode_processes = DecodeProcesses()
atexit.register(decode_processes.shutdown)


# More than the process's own limit on a block, which a frozen one does not keep.
MAX_SILENCE_MS: Final = 25_000
POLL_MS: Final = 20  # how soon a closed recording is noticed while its decode process works

logger = logging.getLogger(__name__)


class DecodeProcessSilent(ConnectionError):
    pass


class RemoteStream:
    """A file decoded, mixed and resampled in a decode process; see `stream.Stream`.

    The process works only while a thread waits, so threads bound the load. A process that the system
    ended is replaced once; samples already read are skipped.
    """

    def __init__(
        self,
        fd: int,
        limits: AudioLimits,
        closed: threading.Event,
        split_channels: bool = False,
        choice: TrackChoice = DEFAULT_TRACK,
        channel: int | None = None,
    ) -> None:
        self.truncated = False
        self.duration_s: float | None = None
        self.tracks_read: tuple[Track, ...] = ()
        self.num_channels = 1
        self._fd, self._closed = fd, closed
        self._task = DecodeTask(limits, split_channels, choice, channel)
        self._shape = (-1, 2) if split_channels else (-1,)  # of a block
        self._ended = False
        self._content = np.empty(0, np.uint8)
        self._num_read = self._num_to_skip = 0
        self._was_replaced = False
        self._process: DecodeProcess | None = self._take()

    def read(self) -> Samples | None:
        if self._ended:
            return None
        try:
            samples = self._read_block()
        except ConnectionError as error:
            self._replace(error)
            return np.empty(0, np.float32).reshape(self._shape)
        if samples is None:
            return None
        num_skipped = min(len(samples), self._num_to_skip)
        self._num_to_skip -= num_skipped
        self._num_read += len(samples) - num_skipped
        return samples[num_skipped:]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._ended:
            decode_processes.give_back(process)
        else:
            process.close()  # the process notices after its block, and ends

    def _read_block(self) -> Samples | None:
        assert self._process is not None
        self._process.connection.sendall(NEXT)
        kind, content = self._receive_answer()
        if kind == OPENED:
            opened = msgspec.msgpack.decode(content.data, type=Opened)
            self.duration_s, self.num_channels = opened.duration_s, opened.num_channels
            self.tracks_read = opened.tracks_read
            kind, content = self._receive_answer()
        if kind == SAMPLES:
            return content.view(np.float32).reshape(self._shape)
        self._ended = True
        if kind == REFUSED:
            refused = msgspec.msgpack.decode(content.data, type=Refused)
            error: type[RequestError] = getattr(errors, refused.error)
            raise error(refused.message)
        self.truncated = msgspec.msgpack.decode(content.data, type=Finished).truncated
        return None

    def _replace(self, error: ConnectionError) -> None:
        assert self._process is not None
        if self._closed.is_set():
            raise invalid_audio("The file was closed.") from error
        metrics.decode_process_deaths.inc()
        if isinstance(error, DecodeProcessSilent):
            logger.error("a decode process is killed: %s", error)
            self._kill()
        elif self._process.ended_by_the_file():
            raise invalid_audio("The file could not be decoded.") from error
        self.close()
        if self._was_replaced:
            logger.error("a decode process was ended by the system for the second time with one file")
            raise DecodingUnavailable("The process that decoded the file was ended by the system.") from error
        logger.warning("a decode process was ended by the system: the file is decoded once more")
        self._was_replaced = True
        self._num_to_skip = self._num_read
        self._process = self._take()

    def _kill(self) -> None:
        """Replace idle processes too: they may be frozen as well."""
        assert self._process is not None
        if self._process.kill():
            decode_processes.drop_idle()
        else:
            decode_processes.restart()

    def _take(self) -> DecodeProcess:
        try:
            return decode_processes.take(msgspec.msgpack.encode(self._task), self._fd)
        except OSError as error:
            logger.error("no decode process can be started: %s", error)
            raise DecodingUnavailable("No process that decodes the file can be started.") from error

    def _receive_answer(self) -> tuple[int, npt.NDArray[np.uint8]]:
        kind, size = HEADER.unpack(self._receive(HEADER.size).data)
        if size > MAX_ANSWER_BYTES:
            raise invalid_audio("The file could not be decoded.")
        return kind, self._receive(size)

    def _receive(self, size: int) -> npt.NDArray[np.uint8]:
        if size > len(self._content):
            self._content = np.empty(size, np.uint8)
        assert self._process is not None
        connection = self._process.connection
        content = self._content[:size]
        view = content.data
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        silent_ms = 0  # by waits, not by the clock: while all is paused nothing is counted
        while view:
            if not poll.poll(POLL_MS):
                if self._closed.is_set():
                    raise ConnectionAbortedError
                silent_ms += POLL_MS
                if silent_ms >= MAX_SILENCE_MS:
                    raise DecodeProcessSilent(f"no answer for {silent_ms / 1000:g} s")
                continue
            silent_ms = 0
            received = connection.recv_into(view)
            if not received:
                raise ConnectionResetError("the decode process is gone")
            view = view[received:]
        return content
