"""The server's side of FFmpeg: a process a file, forked by a nursery that has loaded the libraries.

What a codec does to its process (a crash, a hang, a gigabyte) stays there. The nursery is started with the
first file that needs it and ends when `shutdown` is called or this process is gone: its socket then closes.
Decode processes that are done are kept for the next file, a few of them.
"""

from __future__ import annotations

import atexit
import contextlib
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

from asr_server import errors
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.core import Samples
from asr_server.errors import RequestError

HEADER: Final = struct.Struct("<BI")  # kind, bytes that follow
SAMPLES, END, REFUSED = 0, 1, 2
NEXT: Final = b"n"  # asks for a block
MAX_IDLE = 4
POLL_MS = 20  # how soon a closed recording is noticed while its decode process works


class Finished(msgspec.Struct):
    truncated: bool


class Refused(msgspec.Struct):
    error: str  # the name of a class in `errors`
    message: str


class DecodeProcesses:
    """Owns the nursery. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._to_nursery: socket.socket | None = None
        self._idle: list[socket.socket] = []

    def take(self) -> socket.socket:
        """A connection to a decode process that nobody else uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._send_to_nursery(theirs)
                except OSError:  # it died: once more, with a new one
                    self._stop()
                    self._send_to_nursery(theirs)
            return ours

    def give_back(self, connection: socket.socket) -> None:
        """Only one whose last file is done: it answers nothing any more."""
        with self._lock:
            if len(self._idle) < MAX_IDLE and self._nursery is not None:
                self._idle.append(connection)
                return
        connection.close()

    def shutdown(self) -> None:
        with self._lock:
            self._stop()

    def _send_to_nursery(self, theirs: socket.socket) -> None:
        if self._to_nursery is None:
            self._start()
        assert self._to_nursery is not None
        socket.send_fds(self._to_nursery, [b"f"], [theirs.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        package_parent = str(Path(__file__).parents[2])
        # One thread each: parallelism is between files. BLAS would otherwise start its own at import.
        threads = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "asr_server.audio.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | {"PYTHONPATH": path},
            )
        self._to_nursery = ours

    def _stop(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if self._to_nursery is not None:
            self._to_nursery.close()
        if self._nursery is not None:
            with contextlib.suppress(OSError):
                self._nursery.kill()
            self._nursery.wait()
        self._nursery = self._to_nursery = None


decode_processes = DecodeProcesses()
atexit.register(decode_processes.shutdown)


class RemoteStream:
    """A file decoded, mixed and resampled in a decode process; see `stream.Stream`."""

    def __init__(self, fd: int, limits: AudioLimits, closed: threading.Event) -> None:
        self.truncated = False
        self._closed = closed
        self._ended = False
        self._connection = decode_processes.take()
        try:
            socket.send_fds(self._connection, [msgspec.msgpack.encode(limits)], [fd])
        except OSError:  # an idle one that died meanwhile
            self._connection.close()
            self._connection = decode_processes.take()
            socket.send_fds(self._connection, [msgspec.msgpack.encode(limits)], [fd])

    def read(self) -> Samples | None:
        if self._ended:
            return None
        try:
            self._connection.sendall(NEXT)
            kind, size = HEADER.unpack(self._receive(HEADER.size))
            content = self._receive(size)
        except OSError as error:
            raise invalid_audio("The file could not be decoded.") from error
        return self._understand(kind, content)

    def close(self) -> None:
        if self._ended:
            decode_processes.give_back(self._connection)
        else:
            self._connection.close()  # the process sees it at its next block, and ends

    def _understand(self, kind: int, content: bytearray) -> Samples | None:
        if kind == SAMPLES:
            return np.frombuffer(content, np.float32)
        self._ended = True
        if kind == END:
            self.truncated = msgspec.msgpack.decode(content, type=Finished).truncated
            return None
        refused = msgspec.msgpack.decode(content, type=Refused)
        error: type[RequestError] = getattr(errors, refused.error)
        raise error(refused.message)

    def _receive(self, size: int) -> bytearray:
        """Exactly `size` bytes, giving up when the recording is closed."""
        content = bytearray(size)
        view = memoryview(content)
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
