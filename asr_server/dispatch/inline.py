"""Run a replica in a thread of this process, for tests and debugging. Imports torch."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

from asr_server.channel.messages import Command, Drain, Event, InlineEngineClient, InlineEngineServer
from asr_server.config import Settings
from asr_server.dispatch.supervisor import ReplicaGone
from asr_server.replica.loop import load_engine, run

CLOSE_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


class InlineExecutor:
    def __init__(self, settings: Settings) -> None:
        # All of them are on the first GPU: a thread has no environment of its own to see another one in.
        self._settings = replace(settings, replicas=settings.replicas or settings.replicas_per_device)

    async def start(self) -> int:
        return self._settings.replicas

    async def stop(self) -> None:
        pass

    async def launch(self, index: int) -> InlineReplica:
        return InlineReplica(f"replica {index}", self._settings)


class InlineReplica:
    pid: int | None = None  # it is a thread

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._client = InlineEngineClient()
        self._thread = threading.Thread(target=self._run, args=(settings,), name=name, daemon=True)
        self._thread.start()

    def _run(self, settings: Settings) -> None:
        try:
            run(
                InlineEngineServer(self._client),
                lambda: load_engine(settings, num_on_device=settings.num_replicas),
            )
        except Exception:
            logger.exception("%s has failed", self.name)
        finally:
            self._client.deliver(None)

    def send(self, command: Command) -> None:
        if not self._thread.is_alive():
            raise ReplicaGone(self.name)
        self._client.send(command)

    async def receive(self) -> list[Event]:
        if (event := await self._client.receive()) is None:
            raise ReplicaGone(f"{self.name} has ended")
        return [event]

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop once running chunks end: threads cannot be killed, so a hung one is left behind."""
        self._client.send(Drain())
        await asyncio.to_thread(self._thread.join, CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.error("%s does not end: its thread is left behind", self.name)
