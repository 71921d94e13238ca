"""The server's side of the FFmpeg processes, one for each open file. Never imports FFmpeg.

A codec may crash, hang or take gigabytes: it does so in its own process. A forkserver has the libraries
loaded and forks these processes; some idle ones wait for the next file. It ends with `shutdown`, or with
the server.

`multiprocessing` has a forkserver too. That one hands down the server's environment with its secrets,
finds modules in the working directory, and imports the main module in each process.

The server sends a `DecodeTask` with the file, opened once for each possible track, then `NEXT` for each
block. The answer is a `HEADER` with the size of an `Answer`, which samples follow. A process that the
file has ended (a codec's crash, abort or endless loop) has `ENDED_BY_FILE` sent by the forkserver; one that
the system has ended has nothing.
"""

import atexit
import contextlib
import logging
import select
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server import errors, metrics
from asr_server.audio.decoder import DecodeTask, FileInfo, invalid_audio
from asr_server.core import Samples
from asr_server.errors import DecodingUnavailable, RequestError
from asr_server.process import child_environment

HEADER: Final = struct.Struct("<I")
ENDED_BY_FILE: Final = 0  # in the place of a size
NEXT: Final = b"n"  # asks for a block
NUM_OPENED: Final = 2  # descriptors of a file: two tracks are read side by side, each at its own place


class Answer(msgspec.Struct):
    info: FileInfo = FileInfo()
    num_bytes: int = 0  # of samples; 0 at the end
    error: str = ""  # the name of a class in `errors`
    message: str = ""


# More than a packet decodes to: only a process that a codec took over says so.
MAX_ANSWER_BYTES: Final = 256 << 20
MAX_IDLE = 4  # the first file costs a process 10 ms more than the next
SEND_BUFFER_BYTES = 1 << 20  # a whole block, so that its sender need not wait while it is being read
# One thread each: parallelism is between files. BLAS would otherwise start its own at import.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class DecodeProcesses:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._to_forkserver: socket.socket | None = None
        self._idle: list[socket.socket] = []  # connections to processes without a file

    @property
    def forkserver_pid(self) -> int | None:
        return self._forkserver.pid if self._forkserver else None

    def start(self) -> socket.socket:
        """Return the connection to the forkserver, a new one if none runs: its libraries load in 0.5 s."""
        with self._lock:
            if self._to_forkserver and self._forkserver and self._forkserver.poll() is None:
                return self._to_forkserver
            self.shutdown()
            ours, theirs = socket.socketpair()
            started: Future[subprocess.Popen[bytes]] = Future()
            with theirs:
                kept = theirs, started
                threading.Thread(target=_keep, args=kept, name="asr-forkserver", daemon=True).start()
                try:
                    self._forkserver = started.result()
                except OSError:
                    ours.close()
                    raise
            self._to_forkserver = ours
            return ours

    def take(self, message: bytes, fd: int) -> socket.socket:
        """Return the connection to a process that has been given this file: a free one, or a new one.

        Raises OSError: nothing is left for one. A process at work notices a close after its block, and ends.
        """
        with self._lock:
            while self._idle:
                with contextlib.suppress(OSError):  # it died while idle
                    return _given(self._idle.pop(), message, fd)
            process = self._new_process()
        return _given(process, message, fd)

    def give_back(self, process: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(process)
            else:
                process.close()

    def restart(self) -> None:
        """End all processes, frozen ones too; files that they decode are decoded once more."""
        with self._lock:
            self.shutdown()
            self.start()

    def shutdown(self) -> None:
        with self._lock:
            for process in self._idle:
                process.close()
            self._idle.clear()
            if self._to_forkserver is not None:
                self._to_forkserver.close()
            if self._forkserver is not None:
                self._forkserver.kill()
                self._forkserver.wait()
            self._forkserver = self._to_forkserver = None

    def _new_process(self) -> socket.socket:
        connection, other_end = socket.socketpair()
        try:
            with other_end:
                other_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                self._hand_over([other_end.fileno()])
        except BaseException:
            connection.close()
            raise
        return connection

    def _hand_over(self, fds: list[int]) -> None:
        try:
            socket.send_fds(self.start(), [b"f"], fds)
        except BrokenPipeError:  # it died just now: the thread that waits for it has not seen that yet
            self.shutdown()
            socket.send_fds(self.start(), [b"f"], fds)


def _keep(connection: socket.socket, started: Future[subprocess.Popen[bytes]]) -> None:
    """Start a forkserver, and live as long: Linux ends it with the thread that started it."""
    try:
        process = subprocess.Popen(  # nosec B603 # our own module, without a shell
            [sys.executable, "-m", "asr_server.audio.ffmpeg_process", str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            env=child_environment(computes=False) | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C is the server's business
        )
    except OSError as error:
        started.set_exception(error)
    else:
        started.set_result(process)
        process.wait()


def _given(process: socket.socket, message: bytes, fd: int) -> socket.socket:
    try:
        with contextlib.ExitStack() as opened:
            own = [opened.enter_context(open(f"/dev/fd/{fd}", "rb", buffering=0)) for _ in range(NUM_OPENED)]
            socket.send_fds(process, [message], [file.fileno() for file in own])
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


class EndedByFile(ConnectionError):
    pass


class RemoteStream:
    """A file decoded, mixed and resampled in a decode process; see `stream.Stream`.

    The process works only while a thread waits, so threads bound the load. A process that the system
    ended is replaced once; samples already read are skipped.
    """

    def __init__(self, fd: int, task: DecodeTask, closed: threading.Event) -> None:
        self.info = FileInfo()
        self._fd, self._task, self._closed = fd, task, closed
        self._shape = (-1, 2) if task.split_channels else (-1,)  # of a block
        self._ended = False
        self._content = np.empty(0, np.uint8)
        self._num_read = self._num_to_skip = 0
        self._was_replaced = False
        self._process = self._take()

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
        """Call it once: a process that has read to the end may then have another file."""
        if self._ended:
            decode_processes.give_back(self._process)
        else:
            self._process.close()

    def _read_block(self) -> Samples | None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: what is left to read says why
            self._process.sendall(NEXT)
        (size,) = HEADER.unpack(self._receive(HEADER.size).data)
        if size == ENDED_BY_FILE:
            raise EndedByFile
        answer = msgspec.msgpack.decode(self._receive(size).data, type=Answer)
        self._ended = answer.num_bytes == 0
        if answer.error:
            error: type[RequestError] = getattr(errors, answer.error)
            raise error(answer.message)
        self.info = answer.info
        if self._ended:
            return None
        return self._receive(answer.num_bytes).view(np.float32).reshape(self._shape)

    def _replace(self, error: ConnectionError) -> None:
        if self._closed.is_set():
            raise invalid_audio("The file was closed.") from error
        metrics.decode_process_deaths.inc()
        if isinstance(error, DecodeProcessSilent):
            logger.error("all decode processes are ended: one gave %s", error)
            decode_processes.restart()
        elif isinstance(error, EndedByFile):
            raise invalid_audio("The file could not be decoded.") from error
        self.close()
        if self._was_replaced:
            logger.error("a decode process was ended by the system for the second time with one file")
            raise DecodingUnavailable("The process that decoded the file was ended by the system.") from error
        logger.warning("a decode process was ended by the system: the file is decoded once more")
        self._was_replaced = True
        self._num_to_skip = self._num_read
        self._process = self._take()

    def _take(self) -> socket.socket:
        try:
            return decode_processes.take(msgspec.msgpack.encode(self._task), self._fd)
        except OSError as error:
            logger.error("no decode process can be started: %s", error)
            raise DecodingUnavailable("No process that decodes the file can be started.") from error

    def _receive(self, size: int) -> npt.NDArray[np.uint8]:
        if size > MAX_ANSWER_BYTES:
            raise invalid_audio("The file could not be decoded.")
        if size > len(self._content):
            self._content = np.empty(size, np.uint8)
        content = self._content[:size]
        view = content.data
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
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
            received = self._process.recv_into(view)
            if not received:
                raise ConnectionResetError("the decode process is gone")
            view = view[received:]
        return content
