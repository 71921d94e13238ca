"""Both ends of a connection on one host: ZeroMQ over Unix sockets in a private folder.

Samples cross in shared memory (`wire.py`), or in frames when it is full.
`annexes/ray/tcp.py` adds encryption.
`ChildSpec` and `ReplicaSpec` are a new process's settings.
"""

import contextlib
import logging
import os
import sys
import tempfile
import threading
from typing import Final, Self

import msgspec
import zmq
import zmq.asyncio

from asr_server.config import Settings
from asr_server.transport import wire
from asr_server.transport.messages import Command, Event, Released
from asr_server.transport.wire import SharedMemoryReader, SharedMemoryWriter, create_shared_memory

PREFIX: Final = "asr-ipc-"


class CurveKeys(msgspec.Struct, frozen=True):
    public: str
    secret: str
    peer: str

    def __repr__(self) -> str:
        return "CurveKeys()"  # a secret is for no log


CONNECT_LIMIT_MS: Final = 5000  # a replica whose other socket has not connected by then has died
FILE_HANDLES: Final = 32  # more than the sockets of one replica need at this end
MAX_EVENTS: Final = 32  # taken in one round of the event loop
MAX_EVENTS_QUEUED: Final = 10_000  # while the API process stands still; then the replica waits

logger = logging.getLogger(__name__)


class Address(msgspec.Struct, frozen=True):
    """Endpoints and keys of a connection. Secret: send it by pipe or as an argument only."""

    events: str
    commands: str
    shared_fd: int | None = None  # the handle of the memory that both processes share, inherited
    keys: CurveKeys | None = None


class ZmqEngineClient:
    address: Address

    def __init__(self) -> None:
        _require_file_handles()
        self.shared: SharedMemoryWriter | None = None
        self._context = zmq.Context()
        self._coming = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._coming.underlying)
        self._commands = self._context.socket(zmq.PUSH)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        self._is_connected = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._listen()
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.shared = create_shared_memory()
        prefix = f"ipc://{self._folder.name}/"
        shared_fd = self.shared.fd if self.shared is not None else None
        self.address = Address(prefix + "events", prefix + "commands", shared_fd)
        self._events.bind(self.address.events)
        self._commands.bind(self.address.commands)

    def send(self, command: Command) -> None:
        """Raises zmq.Again when the replica is not connected."""
        if not int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:  # before samples take room
            raise zmq.Again
        self._commands.send_multipart(wire.encode(command, self.shared), flags=zmq.DONTWAIT)

    async def wait(self) -> None:
        """Wait for an event, and for both sockets: an event may come before commands can go."""
        await self._coming.poll()
        if self._is_connected:
            return
        poller = zmq.asyncio.Poller()
        poller.register(self._commands, zmq.POLLOUT)
        await poller.poll(CONNECT_LIMIT_MS)
        self._is_connected = True
        self._remove_folder()  # the sockets' names are of no use any more, and none is left behind

    def receive_now(self) -> list[Event]:
        """Return the events that have come; none before the first `wait`."""
        events: list[Event] = []
        with contextlib.suppress(zmq.Again):
            while self._is_connected and len(events) < MAX_EVENTS:
                event: Event = wire.decode(self._events.recv_multipart(flags=zmq.DONTWAIT), Event)
                if not isinstance(event, Released):
                    events.append(event)
                elif self.shared is not None:
                    self.shared.release(*event.slots)
        return events

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        self._commands.close(linger=0)
        self._coming.close(linger=0)
        self._context.term()
        self._remove_folder()
        if self.shared is not None:
            self.shared.close()


def _require_file_handles() -> None:
    """Raise OSError without a free handle; libzmq would end the process."""
    with contextlib.ExitStack() as opened:
        for _ in range(FILE_HANDLES):
            opened.enter_context(open(os.devnull))


class ZmqEngineServer:
    def __init__(self, address: Address) -> None:
        self._shared: SharedMemoryReader | None = None
        if address.shared_fd is not None:
            self._shared = SharedMemoryReader(address.shared_fd)
            os.close(address.shared_fd)
        self._address = address
        self._context = zmq.Context()
        self._lock = threading.Lock()  # of `_events`: a socket belongs to one thread at a time
        self._events = self._connect(zmq.PUSH, address.events)
        self._commands = self._connect(zmq.PULL, address.commands)

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._configure(socket)
        socket.setsockopt(zmq.SNDHWM, MAX_EVENTS_QUEUED)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        return socket

    def _configure(self, socket: zmq.Socket[bytes]) -> None: ...

    def receive(self, wait_s: float) -> list[Command]:
        """Return all commands that have arrived."""
        if self._shared is not None and (slots := self._shared.take_released()):
            self.send(Released(tuple(slots)))
        received: list[Command] = []
        if not self._commands.poll(timeout=int(wait_s * 1000)):
            return received
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._commands.recv_multipart(flags=zmq.DONTWAIT, copy=False)
                received.append(wire.decode([frame.buffer for frame in frames], Command, self._shared))
        return received

    def send(self, event: Event) -> None:
        frames = wire.encode(event)
        with self._lock:
            self._events.send_multipart(frames)

    def close(self) -> None:
        self._commands.close(linger=0)
        with self._lock:
            self._events.close(linger=1000)
        self._context.term()


class ChildSpec(msgspec.Struct, frozen=True):
    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        return msgspec.json.decode(line, type=cls)

    @classmethod
    def from_parent(cls) -> Self:
        """Read standard input. End this process where the parent has ended before it wrote all."""
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            os._exit(1)
        return cls.from_line(line)


class ReplicaSpec(ChildSpec, frozen=True):
    index: int
    address: Address
    settings: Settings
    num_on_device: int = 1  # replicas that share this one's device
    computes_on_cpu: bool = False

    @property
    def name(self) -> str:
        return f"replica {self.index}"
