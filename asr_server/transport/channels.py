"""The two ends of the connection between the API process and a replica.

`EngineClient` is the API's end: it never blocks the event loop. `EngineServer` is the replica's end, used by
the thread that runs the engine's steps. Each end has a sibling for threads (inline) and one for ZeroMQ.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
from typing import Protocol

import zmq
import zmq.asyncio

from asr_server.core import Command, Event, Heartbeat, Released
from asr_server.transport import wire
from asr_server.transport.shared_memory import SharedMemoryReader, create_shared_memory
from asr_server.transport.socket_folder import SocketFolder

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """The API's end."""

    def send(self, command: Command) -> None:
        """Hands the command over at once. The dispatcher's credits bound what can be under way."""

    async def receive(self) -> Event: ...

    def close(self) -> None: ...


class EngineServer(Protocol):
    """The replica's end."""

    def receive(self, wait_s: float) -> list[Command]:
        """Every command that has come; waits up to `wait_s` for the first."""

    def send(self, event: Event) -> None: ...

    def heartbeat_sender(self) -> HeartbeatSender:
        """A sender for the heartbeat thread alone."""

    def close(self) -> None: ...


class HeartbeatSender(Protocol):
    def send_heartbeat(self, heartbeat: Heartbeat) -> None: ...

    def close(self) -> None: ...


class EngineServerClosed(Exception):
    """The replica's end sends nothing any more."""


# -- Inline: two queues between a thread and the event loop. -------------------------------------------------


class InlineEngineClient:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def send(self, command: Command) -> None:
        self.commands.put(command)

    async def receive(self) -> Event:
        """Raises EngineServerClosed."""
        event = await self._events.get()
        if event is None:
            raise EngineServerClosed
        return event

    def deliver(self, event: Event | None) -> None:
        """Called from the replica's thread, with None as its last word. What comes after the loop has closed
        is nobody's.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def close(self) -> None:
        pass


class InlineEngineServer:
    def __init__(self, client: InlineEngineClient) -> None:
        self._client = client

    def receive(self, wait_s: float) -> list[Command]:
        received: list[Command] = []
        with contextlib.suppress(queue.Empty):
            if wait_s > 0:
                received.append(self._client.commands.get(timeout=wait_s))
            while True:
                received.append(self._client.commands.get_nowait())
        return received

    def send(self, event: Event) -> None:
        self._client.deliver(event)

    def heartbeat_sender(self) -> InlineEngineServer:
        return self

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._client.deliver(heartbeat)

    def close(self) -> None:
        pass


# -- ZeroMQ over Unix sockets in a private folder. -----------------------------------------------------------


CONNECT_LIMIT_MS = 5000  # a replica whose other socket has not connected by then has died
FILE_HANDLES = 32  # more than the sockets of one replica need at this end


class ZmqEngineClient:
    """Binds a pair of sockets for one incarnation of a replica; a restarted one gets a new pair.

    Samples cross in memory that both processes share: one copy. What finds no room there goes along in
    frames, each of which is copied once into ZeroMQ's own memory, so that the sender holds nothing after it.
    """

    def __init__(self) -> None:
        """Raises OSError: no file handles, no space, or a folder whose path is too long for a socket."""
        _require_file_handles()
        self._folder = SocketFolder()
        self.address = f"ipc://{self._folder.path}/"
        self.shared = create_shared_memory()
        self._context = zmq.Context()
        self._events = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._commands = self._context.socket(zmq.PUSH)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        try:
            self._events.bind(self.address + "events")
            self._commands.bind(self.address + "commands")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error
        self._is_connected = False

    def send(self, command: Command) -> None:
        """Raises zmq.Again when the replica is not connected."""
        self._commands.send_multipart(
            wire.commands.encode(command, self.shared), flags=zmq.DONTWAIT, copy=True
        )

    async def receive(self) -> Event:
        """The next event; once it is here, commands can be sent too. Drops and logs what is no event."""
        while True:
            frames = await self._events.recv_multipart()
            try:
                event = wire.events.decode(frames)
            except wire.MalformedMessage as error:
                logger.warning("a message that is no event was dropped: %s", error)
                continue
            if not self._is_connected:
                await self._wait_until_connected()
            if not isinstance(event, Released):
                return event
            self._release(event)

    def _release(self, event: Released) -> None:
        if self.shared is not None:
            for offset in event.offsets:
                self.shared.release(offset)

    async def _wait_until_connected(self) -> None:
        """The two sockets connect each at its own pace: an event may come before commands can go."""
        poller = zmq.asyncio.Poller()
        poller.register(self._commands, zmq.POLLOUT)
        await poller.poll(CONNECT_LIMIT_MS)
        self._is_connected = True

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        self._folder.remove()
        if self.shared is not None:
            self.shared.close()


def _require_file_handles() -> None:
    """libzmq ends the whole process when it finds no file handle; this raises OSError before it tries."""
    with contextlib.ExitStack() as opened:
        for _ in range(FILE_HANDLES):
            opened.enter_context(open(os.devnull))


class ZmqEngineServer:
    def __init__(self, address: str, shared_fd: int | None = None) -> None:
        """`shared_fd` is the handle of the client's shared memory; it is closed here."""
        self._address = address
        self._shared: SharedMemoryReader | None = None
        if shared_fd is not None:
            self._shared = SharedMemoryReader(shared_fd)
            os.close(shared_fd)
        self._context = zmq.Context()
        self._events = self._connect(zmq.PUSH, "events")
        self._commands = self._connect(zmq.PULL, "commands")

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.connect(self._address + name)
        return socket

    def receive(self, wait_s: float) -> list[Command]:
        """Drops and logs what is no command."""
        self._tell_released()
        received: list[Command] = []
        if not self._commands.poll(timeout=int(wait_s * 1000)):
            return received
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._commands.recv_multipart(flags=zmq.DONTWAIT, copy=False)
                try:
                    received.append(wire.commands.decode([frame.buffer for frame in frames], self._shared))
                except wire.MalformedMessage as error:
                    logger.warning("a message that is no command was dropped: %s", error)
        return received

    def _tell_released(self) -> None:
        if self._shared is not None and (offsets := self._shared.take_released()):
            self.send(Released(tuple(offsets)))

    def send(self, event: Event) -> None:
        self._events.send_multipart(wire.events.encode(event))

    def heartbeat_sender(self) -> ZmqHeartbeatSender:
        """ZeroMQ's sockets belong to one thread each, so this one is of its own."""
        return ZmqHeartbeatSender(self._connect(zmq.PUSH, "events"))

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=1000)
        self._context.term()


class ZmqHeartbeatSender:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._socket.send_multipart(wire.events.encode(heartbeat))

    def close(self) -> None:
        self._socket.close(linger=100)
