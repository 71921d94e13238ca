"""An executor whose replicas do just what the test says: for the dispatcher's rules alone."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

import tests.support.until
from asr_server.config import Settings
from asr_server.core import AudioWindow, Chunk, ChunkId, ChunkResult, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import RequestHandle
from asr_server.dispatch.supervisor import ReplicaGone, ReplicaLimits
from asr_server.transport.messages import Cancel, Cancelled, Command, Credit, Event, Result, Submit


class ScriptedReplica:
    pid: int | None = None

    def __init__(self, name: str, credit: int) -> None:
        self.name = name
        self.commands: list[Command] = []
        self.closed = False
        self.obeys = True  # a cancelled chunk is dropped at once
        self.drained_s: float | None = None  # how long it might leave by itself, once it is closed
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        if credit:
            self.say(Credit(credit))

    @property
    def submitted(self) -> list[ChunkId]:
        return [command.id for command in self.commands if isinstance(command, Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [command.handle_id for command in self.commands if isinstance(command, Cancel)]

    def say(self, event: Event) -> None:
        self._events.put_nowait(event)

    def answer(self, id: ChunkId, credit: int = 1) -> None:
        self.say(Result(id, result(id.chunk)))
        self.say(Credit(credit))

    def die(self) -> None:
        self.closed = True
        self.say_gone()

    def say_gone(self) -> None:
        self._events.put_nowait(None)

    def send(self, command: Command) -> None:
        if self.closed:
            raise ReplicaGone(self.name)
        self.commands.append(command)
        if isinstance(command, Cancel) and self.obeys:
            self.say(Cancelled(command.handle_id, command.id))

    async def receive(self) -> list[Event]:
        event = await self._events.get()
        if event is None:
            raise ReplicaGone(self.name)
        return [event]

    async def close(self, drain_s: float = 0.0) -> None:
        self.closed, self.drained_s = True, drain_s


class ScriptedExecutor:
    def __init__(self, credit: int = 1, replicas: int = 1) -> None:
        self.credit = credit
        self.replicas = replicas
        self.stopped = False
        self.launched: list[ScriptedReplica] = []

    async def start(self) -> int:
        return self.replicas

    async def stop(self) -> None:
        self.stopped = True

    async def launch(self, index: int) -> ScriptedReplica:
        replica = ScriptedReplica(f"replica {index}", self.credit)
        self.launched.append(replica)
        return replica


def result(chunk: int) -> ChunkResult:
    return ChunkResult((chunk,), (0.0,), 0.0, 0.0, 1.0, 0.0, "en", "stop")


def chunk(index: int, duration_s: float = 30.0) -> Chunk:
    return Chunk(index, index * 480_000, np.zeros(int(duration_s * 16_000), np.float32))


OPTIONS = DecodingOptions(language="en")


until = partial(tests.support.until.until, pause_s=0)  # the rules of a dispatcher wait for no clock
WITHOUT_PAUSE = ReplicaLimits(pause_s=0.0)  # between a replica's end and the next launch


class RunningDispatcher:
    def __init__(self, credit: int = 1, replicas: int = 1, window: AudioWindow | None = None) -> None:
        self.executor = ScriptedExecutor(credit, replicas)
        settings = Settings(replicas=replicas)
        self.dispatcher = Dispatcher(settings, lambda _: self.executor, window, WITHOUT_PAUSE)

    async def open(self) -> RunningDispatcher:
        await self.dispatcher.start()
        await until(
            lambda: (
                len(self.dispatcher.supervisor.replica_states)
                and all(state.ready for state in self.dispatcher.supervisor.replica_states)
            )
        )
        return self

    @property
    def replica(self) -> ScriptedReplica:
        return self.executor.launched[-1]

    def send(self, handle: RequestHandle, index: int, duration_s: float = 30.0) -> asyncio.Task[ChunkResult]:
        return asyncio.create_task(handle.submit(chunk(index, duration_s), OPTIONS))
