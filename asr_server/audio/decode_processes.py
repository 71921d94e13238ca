"""The server's side of the processes that decode with FFmpeg, one for each file, and their messages.

Whatever a codec does (crash, hang, take a gigabyte of memory) happens in its own process. The forkserver
has FFmpeg's libraries loaded and forks these processes. It is started with the server, or with the first
file that needs it, and ends with `shutdown` or when this process is gone, because its socket then closes. A
few decode processes that are done wait for the next file.

The server sends a `DecodeTask` with the file's descriptor, and then `NEXT` for each block that it wants. Each
answer is a `HEADER`, which says of what kind it is, and its content.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from asr_server.audio.limits import AudioLimits
from asr_server.machine import child_environment

HEADER: Final = struct.Struct("<BI")  # kind, bytes that follow
SAMPLES, END, REFUSED, OPENED = 0, 1, 2, 3
NEXT: Final = b"n"  # asks for a block
STATUS: Final = struct.Struct("<i")  # as waitpid gives it; the forkserver tells it


class DecodeTask(msgspec.Struct):
    """Goes to a decode process with the file."""

    limits: AudioLimits
    split_channels: bool


class Opened(msgspec.Struct):
    """Comes before the first samples."""

    duration_s: float | None  # by the file's header


class Finished(msgspec.Struct):
    truncated: bool


class Refused(msgspec.Struct):
    error: str  # the name of a class in `errors`
    message: str


STATUS_WAIT_MS: Final = 2000
SIGNALS_OF_THE_SYSTEM: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP})
MAX_IDLE = 4
SEND_BUFFER_BYTES = 1 << 20  # a whole block, so that its sender need not wait while it is being read
# One thread each: parallelism is between files. BLAS would otherwise start its own at import.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class DecodeProcess:
    """The server's side of one decode process."""

    connection: socket.socket
    status_fd: int  # the read end of a pipe, into which the forkserver writes how the process ended

    def close(self) -> None:
        self.connection.close()
        os.close(self.status_fd)

    def ended_by_the_file(self) -> bool:
        """Why the process has ended: a codec's crash, abort or endless loop is the fault of the file.

        No fault of the file are SIGKILL (the system was out of memory, say), waiting that used no
        processor (SIGALRM), and a process that could not be forked or whose forkserver is gone too.
        """
        poll = select.poll()
        poll.register(self.status_fd, select.POLLIN)
        if not poll.poll(STATUS_WAIT_MS) or not (packed := os.read(self.status_fd, STATUS.size)):
            return False
        (status,) = STATUS.unpack(packed)
        return not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in SIGNALS_OF_THE_SYSTEM


class DecodeProcesses:
    """Owns the forkserver. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._to_forkserver: socket.socket | None = None
        self._idle: list[DecodeProcess] = []

    def start(self) -> None:
        """Returns at once; the forkserver then takes half a second to load its libraries."""
        with self._lock:
            self._start()

    def take(self, message: bytes, fd: int) -> DecodeProcess:
        """A process that nobody else uses and that has been given this file.

        Raises:
            OSError: the system has no handles, memory or processes left for one.
        """
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                try:
                    socket.send_fds(process.connection, [message], [fd])
                    return process
                except OSError:  # it died while idle
                    process.close()
            process = self._new_process()
        try:
            socket.send_fds(process.connection, [message], [fd])
        except OSError:
            process.close()
            raise
        return process

    def give_back(self, process: DecodeProcess) -> None:
        """Only one whose last file is done: it will say nothing more."""
        with self._lock:
            if len(self._idle) < MAX_IDLE and self._forkserver is not None:
                self._idle.append(process)
                return
        process.close()

    def shutdown(self) -> None:
        """Processes that are at work end with their recordings."""
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
        except OSError:
            process.close()
            raise
        finally:
            theirs.close()
            os.close(their_status)
        return process

    def _adopt(self, fds: list[int]) -> None:
        """Has a process forked behind these ends of its connection and of the pipe for its exit status."""
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
        package_parent = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        with theirs:
            try:
                self._forkserver = subprocess.Popen(
                    [sys.executable, "-m", "asr_server.audio.forkserver", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=child_environment() | _ONE_THREAD | {"PYTHONPATH": path},
                )
            except OSError:
                ours.close()
                raise
        self._to_forkserver = ours

    def _stop(self) -> None:
        for process in self._idle:
            process.close()
        self._idle.clear()
        if self._to_forkserver is not None:
            self._to_forkserver.close()
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.wait()
        self._forkserver = self._to_forkserver = None


decode_processes = DecodeProcesses()
atexit.register(decode_processes.shutdown)
