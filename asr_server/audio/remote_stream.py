"""A file that a decode process reads, as the server's threads see it. Used by `recording.py`."""

from __future__ import annotations

import logging
import select
import threading
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server import errors, metrics
from asr_server.audio.decode_processes import (
    HEADER,
    NEXT,
    OPENED,
    REFUSED,
    SAMPLES,
    DecodeProcess,
    DecodeTask,
    Finished,
    Opened,
    Refused,
    decode_processes,
)
from asr_server.audio.limits import AudioLimits, invalid_audio
from asr_server.core import Samples
from asr_server.errors import DecodingUnavailable, RequestError

POLL_MS: Final = 20  # how soon a closed recording is noticed while its decode process works

logger = logging.getLogger(__name__)


class RemoteStream:
    """A file decoded, mixed and resampled in a decode process; see `stream.Stream`.

    The process works only while a thread waits for it, so that the number of threads bounds how many do. One
    that the system has ended is replaced once; what had been read already is decoded anew and left out.
    """

    def __init__(
        self, fd: int, limits: AudioLimits, closed: threading.Event, split_channels: bool = False
    ) -> None:
        """Raises DecodingUnavailable."""
        self.truncated = False
        self.duration_s: float | None = None
        self._fd, self._task, self._closed = fd, DecodeTask(limits, split_channels), closed
        self._shape = (-1, 2) if split_channels else (-1,)  # of a block
        self._ended = False
        self._content = np.empty(0, np.uint8)
        self._num_read = self._num_to_skip = 0
        self._was_replaced = False
        self._process: DecodeProcess | None = self._take()

    def read(self) -> Samples | None:
        """Raises DecodingUnavailable, RequestError."""
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
            self.duration_s = msgspec.msgpack.decode(content.data, type=Opened).duration_s
            kind, content = self._receive_answer()
        if kind == SAMPLES:
            return content.view(np.float32).reshape(self._shape)
        self._ended = True
        if kind == REFUSED:
            raise _error(content)
        self.truncated = msgspec.msgpack.decode(content.data, type=Finished).truncated
        return None

    def _replace(self, error: ConnectionError) -> None:
        """Raises InvalidAudio where the file is at fault, DecodingUnavailable the second time."""
        assert self._process is not None
        if self._closed.is_set():
            raise invalid_audio("The file was closed.") from error
        metrics.decode_process_deaths.inc()
        if self._process.ended_by_the_file():
            raise invalid_audio("The file could not be decoded.") from error
        self.close()
        if self._was_replaced:
            logger.error("a decode process was ended by the system for the second time with one file")
            raise DecodingUnavailable("The process that decoded the file was ended by the system.") from error
        logger.warning("a decode process was ended by the system: the file is decoded once more")
        self._was_replaced = True
        self._num_to_skip = self._num_read
        self._process = self._take()

    def _take(self) -> DecodeProcess:
        try:
            return decode_processes.take(msgspec.msgpack.encode(self._task), self._fd)
        except OSError as error:
            logger.error("no decode process can be started: %s", error)
            raise DecodingUnavailable("No process that decodes the file can be started.") from error

    def _receive_answer(self) -> tuple[int, npt.NDArray[np.uint8]]:
        kind, size = HEADER.unpack(self._receive(HEADER.size).data)
        return kind, self._receive(size)

    def _receive(self, size: int) -> npt.NDArray[np.uint8]:
        """Exactly `size` bytes, giving up when the recording is closed. Uses its memory again."""
        if size > len(self._content):
            self._content = np.empty(size, np.uint8)
        assert self._process is not None
        connection = self._process.connection
        content = self._content[:size]
        view = content.data
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while view:
            if not poll.poll(POLL_MS):
                if self._closed.is_set():
                    raise ConnectionAbortedError
                continue
            received = connection.recv_into(view)
            if not received:
                raise ConnectionResetError("the decode process is gone")
            view = view[received:]
        return content


def _error(content: npt.NDArray[np.uint8]) -> RequestError:
    refused = msgspec.msgpack.decode(content.data, type=Refused)
    error: type[RequestError] = getattr(errors, refused.error)
    return error(refused.message)
