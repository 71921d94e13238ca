"""An executor whose replicas do just what the test says: for the dispatcher's rules alone."""

from __future__ import annotations

import asyncio

import numpy as np

from asr_server.core import Cancel, Chunk, ChunkId, ChunkResult, Command, Credit, Event, Result, Submit
from asr_server.workers.executor import ReplicaGone


class ScriptedReplica:
    def __init__(self, name: str, credit: int) -> None:
        self.name = name
        self.commands: list[Command] = []
        self.closed = False
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        if credit:
            self.say(Credit(credit))

    @property
    def submitted(self) -> list[ChunkId]:
        return [command.id for command in self.commands if isinstance(command, Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [command.request_id for command in self.commands if isinstance(command, Cancel)]

    def say(self, event: Event) -> None:
        self._events.put_nowait(event)

    def answer(self, id: ChunkId, credit: int = 1) -> None:
        self.say(Result(id, result(id.chunk)))
        self.say(Credit(credit))

    def die(self) -> None:
        self.closed = True
        self._events.put_nowait(None)

    def send(self, command: Command) -> None:
        if self.closed:
            raise ReplicaGone(self.name)
        self.commands.append(command)

    async def receive(self) -> Event:
        event = await self._events.get()
        if event is None:
            raise ReplicaGone(self.name)
        return event

    async def close(self, drain_s: float = 0.0) -> None:
        self.closed = True


class ScriptedExecutor:
    def __init__(self, credit: int = 1) -> None:
        self.credit = credit
        self.launched: list[ScriptedReplica] = []

    async def launch(self, index: int) -> ScriptedReplica:
        replica = ScriptedReplica(f"replica {index}", self.credit)
        self.launched.append(replica)
        return replica


def result(chunk: int) -> ChunkResult:
    return ChunkResult((chunk,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop")


def chunk(index: int, duration_s: float = 30.0) -> Chunk:
    return Chunk(index, index * 480_000, np.zeros(int(duration_s * 16_000), np.float32))
