"""The server's two ways to bring arrays from one process to another, each with its two ends."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from asr_server.channel.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asr_server.channel.wire import Wire

Array = npt.NDArray[np.uint8]
CREDIT_BYTES: Final = 64 << 20  # 32 chunks; a message that is larger goes alone
SPAWN: Final = multiprocessing.get_context("spawn")
WIRE: Wire[Any] = Wire(list)


class Endpoint(NamedTuple):
    """What both ends are given: an address and the handle of shared memory."""

    folder: str
    shared_fd: int | None


class Sender(Protocol):
    def send(self, arrays: Sequence[Array]) -> None: ...


class Receiver(Protocol):
    def receive(self) -> list[Array]:
        """The arrays of the next message, which may be dropped at any time."""
        ...

    def dropped(self) -> None:
        """Called when the arrays of the last message have been dropped."""
        ...


class ZmqSender:
    """A message and its arrays in frames, as between hosts."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"ipc://{endpoint.folder}/messages")

    def send(self, arrays: Sequence[Array]) -> None:
        self._socket.send_multipart(WIRE.encode(list(arrays)))


class ZmqReceiver:
    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"ipc://{endpoint.folder}/messages")

    def receive(self) -> list[Array]:
        frames = self._socket.recv_multipart(copy=False)
        arrays: list[Array] = WIRE.decode([frame.buffer for frame in frames])
        return arrays

    def dropped(self) -> None:
        pass


class SharedSender:
    """Arrays in shared memory, the message by ZeroMQ: what the server does, whose credits bound what is under
    way. Memory that has been written before is written several times as fast as memory that is new.
    """

    def __init__(self, endpoint: Endpoint, shared: SharedMemoryWriter) -> None:
        self._shared = shared
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.bind(f"ipc://{endpoint.folder}/messages")
        self._released = self._context.socket(zmq.PULL)
        self._released.bind(f"ipc://{endpoint.folder}/released")

    def send(self, arrays: Sequence[Array]) -> None:
        num_bytes = sum(array.nbytes for array in arrays)
        while self._is_too_much(num_bytes) or self._released.poll(0):
            for offset in msgspec.msgpack.decode(self._released.recv()):
                self._shared.release(offset)
        self._socket.send_multipart(WIRE.encode(list(arrays), self._shared))

    def _is_too_much(self, num_bytes: int) -> bool:
        used = self._shared.num_bytes_used
        return used > 0 and used + num_bytes > CREDIT_BYTES


class SharedReceiver:
    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.shared_fd is not None
        self._shared = SharedMemoryReader(endpoint.shared_fd)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.connect(f"ipc://{endpoint.folder}/messages")
        self._released = self._context.socket(zmq.PUSH)
        self._released.connect(f"ipc://{endpoint.folder}/released")

    def receive(self) -> list[Array]:
        arrays: list[Array] = WIRE.decode(self._socket.recv_multipart(), self._shared)
        return arrays

    def dropped(self) -> None:
        self._released.send(msgspec.msgpack.encode(self._shared.take_released()))


FRAMES, SHARED = "ZeroMQ's frames", "shared memory"
VARIANTS: Final = (FRAMES, SHARED)


def make_endpoint() -> Endpoint:
    """For the process that starts both ends, which inherit nothing else."""
    return Endpoint(tempfile.mkdtemp(prefix="asr-benchmark-"), None)


def make_sender(variant: str, endpoint: Endpoint) -> tuple[Sender, int | None]:
    """The sending end, and the handle of its shared memory where it has any."""
    if variant == FRAMES:
        return ZmqSender(endpoint), None
    shared = SharedMemoryWriter()
    return SharedSender(endpoint, shared), shared.fd


def make_receiver(variant: str, endpoint: Endpoint, sender_pid: int) -> Receiver:
    """The receiving end. Shared memory, which a replica inherits, is opened by the sender's handle here."""
    if variant == FRAMES:
        return ZmqReceiver(endpoint)
    fd = os.open(f"/proc/{sender_pid}/fd/{endpoint.shared_fd}", os.O_RDWR)
    return SharedReceiver(endpoint._replace(shared_fd=fd))


def remove(endpoint: Endpoint) -> None:
    for path in Path(endpoint.folder).iterdir():
        path.unlink()
    Path(endpoint.folder).rmdir()
