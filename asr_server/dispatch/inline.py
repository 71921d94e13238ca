"""Run a replica in a thread of this process, for tests and debugging. Imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from dataclasses import replace

from asr_server.channel.messages import Command, Drain, Event
from asr_server.config import Settings
from asr_server.dispatch.supervisor import ReplicaGone
from asr_server.replica.main import load_engine, run

CLOSE_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


class InlineExecutor:
    def __init__(self, settings: Settings) -> None:
        # All of them are on the first GPU: a thread has no environment of its own to see another one in.
        self._settings = replace(settings, replicas=settings.replicas or 1)

    async def start(self) -> int:
        return self._settings.replicas

    async def stop(self) -> None:
        pass

    async def launch(self, index: int) -> InlineReplica:
        return InlineReplica(f"replica {index}", self._settings)


class InlineServer:
    """The replica's end: commands from a queue, events into the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()

    def receive(self, wait_s: float) -> list[Command]:
        received: list[Command] = []
        with contextlib.suppress(queue.Empty):
            if wait_s > 0:
                received.append(self.commands.get(timeout=wait_s))
            while True:
                received.append(self.commands.get_nowait())
        return received

    def send(self, event: Event | None) -> None:
        """Send None at the end. Events are dropped once the loop has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def close(self) -> None:
        pass


class InlineReplica:
    pid: int | None = None  # it is a thread

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._server = InlineServer()
        self._thread = threading.Thread(target=self._run, args=(settings,), name=name, daemon=True)
        self._thread.start()

    def _run(self, settings: Settings) -> None:
        try:
            run(self._server, lambda: load_engine(settings, num_on_device=settings.num_replicas))
        except Exception:
            logger.exception("%s has failed", self.name)
        finally:
            self._server.send(None)

    def send(self, command: Command) -> None:
        if not self._thread.is_alive():
            raise ReplicaGone(self.name)
        self._server.commands.put(command)

    async def receive(self) -> list[Event]:
        if (event := await self._server.events.get()) is None:
            raise ReplicaGone(f"{self.name} has ended")
        return [event]

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop once running chunks end: threads cannot be killed, so a hung one is left behind."""
        self._server.commands.put(Drain())
        await asyncio.to_thread(self._thread.join, CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.error("%s does not end: its thread is left behind", self.name)
