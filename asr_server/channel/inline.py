"""Both ends of the connection for a replica in a thread of this process: two queues."""

from __future__ import annotations

import asyncio
import contextlib
import queue

from asr_server.channel.messages import Command, EngineServerClosed, Event, Heartbeat


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
