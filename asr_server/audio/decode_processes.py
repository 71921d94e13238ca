"""The server's side of the processes that decode with FFmpeg, one for each file.

Whatever a codec does (crash, hang, take a gigabyte of memory) happens in its own process. The forkserver
has FFmpeg's libraries loaded and forks these processes. It starts with the first file that needs it, and
ends with `shutdown` or when this process is gone, because its socket then closes. A few decode processes
that are done wait for the next file.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server import errors, metrics
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.child_process import child_environment
from asr_server.core import Samples
from asr_server.errors import RequestError

HEADER: Final = struct.Struct("<BI")  # kind, bytes that follow
SAMPLES, END, REFUSED, OPENED = 0, 1, 2, 3
NEXT: Final = b"n"  # asks for a block
MAX_IDLE = 4
SEND_BUFFER_BYTES = 1 << 20  # a whole block, so that its sender need not wait while it is being read
POLL_MS = 20  # how soon a closed recording is noticed while its decode process works
# One thread each: parallelism is between files. BLAS would otherwise start its own at import.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Opened(msgspec.Struct):
    """Comes before the first samples."""

    duration_s: float | None  # by the file's header


class Finished(msgspec.Struct):
    truncated: bool


class Refused(msgspec.Struct):
    error: str  # the name of a class in `errors`
    message: str


class DecodeProcesses:
    """Owns the forkserver. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._to_forkserver: socket.socket | None = None
        self._idle: list[socket.socket] = []

    def start(self) -> None:
        """Returns at once; the forkserver then takes half a second to load its libraries."""
        with self._lock:
            self._start()

    def take(self, message: bytes, fd: int) -> socket.socket:
        """A connection to a process that nobody else uses and that has been given this file."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                try:
                    socket.send_fds(connection, [message], [fd])
                    return connection
                except OSError:  # it died while idle
                    connection.close()
            ours, theirs = socket.socketpair()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            with theirs:
                self._adopt(theirs)
        socket.send_fds(ours, [message], [fd])
        return ours

    def give_back(self, connection: socket.socket) -> None:
        """Only one whose last file is done: it will say nothing more."""
        with self._lock:
            if len(self._idle) < MAX_IDLE and self._forkserver is not None:
                self._idle.append(connection)
                return
        connection.close()

    def shutdown(self) -> None:
        """Processes that are at work end with their recordings."""
        with self._lock:
            self._stop()

    def _adopt(self, theirs: socket.socket) -> None:
        """Has a process forked behind this end of a connection."""
        self._start()
        try:
            self._send(theirs)
        except OSError:  # the forkserver died: once more, with a new one
            self._stop()
            self._start()
            self._send(theirs)

    def _send(self, theirs: socket.socket) -> None:
        assert self._to_forkserver is not None
        socket.send_fds(self._to_forkserver, [b"f"], [theirs.fileno()])

    def _start(self) -> None:
        if self._forkserver is not None:
            return
        self._to_forkserver, theirs = socket.socketpair()
        package_parent = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._forkserver = subprocess.Popen(
                [sys.executable, "-m", "asr_server.audio.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment() | _ONE_THREAD | {"PYTHONPATH": path},
            )

    def _stop(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if self._to_forkserver is not None:
            self._to_forkserver.close()
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.wait()
        self._forkserver = self._to_forkserver = None


decode_processes = DecodeProcesses()
atexit.register(decode_processes.shutdown)


class RemoteStream:
    """A file decoded, mixed and resampled in a decode process; see `stream.Stream`.

    The process works only while a thread waits for it, so that the number of threads bounds how many do.
    """

    def __init__(self, fd: int, limits: AudioLimits, closed: threading.Event) -> None:
        self.truncated = False
        self.duration_s: float | None = None
        self._closed = closed
        self._ended = False
        self._content = np.empty(0, np.uint8)
        self._connection = decode_processes.take(msgspec.msgpack.encode(limits), fd)

    def read(self) -> Samples | None:
        if self._ended:
            return None
        try:
            self._connection.sendall(NEXT)
            kind, content = self._receive_answer()
            if kind == OPENED:
                self.duration_s = msgspec.msgpack.decode(content.data, type=Opened).duration_s
                kind, content = self._receive_answer()
        except ConnectionError as error:
            if not self._closed.is_set():
                metrics.decode_process_deaths.inc()
            raise invalid_audio("The file could not be decoded.") from error
        if kind == SAMPLES:
            return content.view(np.float32)
        self._ended = True
        if kind == REFUSED:
            raise _error(content)
        self.truncated = msgspec.msgpack.decode(content.data, type=Finished).truncated
        return None

    def close(self) -> None:
        if self._ended:
            decode_processes.give_back(self._connection)
        else:
            self._connection.close()  # the process notices after its block, and ends

    def _receive_answer(self) -> tuple[int, npt.NDArray[np.uint8]]:
        kind, size = HEADER.unpack(self._receive(HEADER.size).data)
        return kind, self._receive(size)

    def _receive(self, size: int) -> npt.NDArray[np.uint8]:
        """Exactly `size` bytes, giving up when the recording is closed. Uses its memory again."""
        if size > len(self._content):
            self._content = np.empty(size, np.uint8)
        content = self._content[:size]
        view = content.data
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while view:
            if not poll.poll(POLL_MS):
                if self._closed.is_set():
                    raise ConnectionAbortedError
                continue
            received = self._connection.recv_into(view)
            if not received:
                raise ConnectionResetError("the decode process is gone")
            view = view[received:]
        return content


def _error(content: npt.NDArray[np.uint8]) -> RequestError:
    refused = msgspec.msgpack.decode(content.data, type=Refused)
    error: type[RequestError] = getattr(errors, refused.error)
    return error(refused.message)
