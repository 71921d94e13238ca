"""Start replicas on this machine: as processes, the default, or as threads, for tests and debugging.

`RemoteReplica` is also the base of `annexes/ray/`'s. Knows no requests. Imports torch only for a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from typing import Any

import zmq

from asr_server.config import Settings
from asr_server.dispatch.supervisor import Executor, ReplicaGone
from asr_server.machine import exit_reason, visible_gpus
from asr_server.process import child_environment
from asr_server.replica import load_engine, run
from asr_server.transport.messages import Command, Drain, EngineServer, Event
from asr_server.transport.zeromq import ReplicaSpec, ZmqEngineClient

KILL_LIMIT_S = 10.0  # a process in a call of a device's driver cannot be killed: it is left behind
CLOSE_LIMIT_S = 10.0  # of a thread

logger = logging.getLogger(__name__)


def create_local_executor(settings: Settings) -> Executor:
    return InlineExecutor(settings) if settings.executor == "inline" else MultiprocessExecutor(settings)


class RemoteReplica(ABC):
    pid: int | None = None

    def __init__(self, name: str, client: ZmqEngineClient, end: asyncio.Future[Any]) -> None:
        self.name = name
        self._client = client
        self._end = end

    @abstractmethod
    def _exit_message(self) -> str: ...

    @abstractmethod
    async def close(self, drain_s: float = 0.0) -> None: ...

    def send(self, command: Command) -> None:
        """Raises ReplicaGone."""
        if self._end.done():
            raise ReplicaGone(self._exit_message())
        try:
            self._client.send(command)
        except zmq.Again:
            raise ReplicaGone(f"{self.name} is not connected") from None

    async def receive(self) -> list[Event]:
        """Raises ReplicaGone after the last event."""
        await asyncio.sleep(0)  # more events that have come together must not hold up all else
        while not (events := self._client.receive_now()):
            if self._end.done():
                raise ReplicaGone(self._exit_message())
            coming = asyncio.ensure_future(self._client.wait())
            try:
                await asyncio.wait((coming, self._end), return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()
        return events

    async def _drain(self, limit_s: float) -> None:
        if limit_s > 0 and not self._end.done():
            with contextlib.suppress(zmq.Again):
                self._client.send(Drain())
            await asyncio.wait((self._end,), timeout=limit_s)


class MultiprocessExecutor(Executor):
    module = "asr_server.replica"

    def __init__(self, settings: Settings) -> None:
        self._settings = replace(
            settings.core, replicas=settings.num_replicas, cpu_threads=settings.threads_per_rank
        )
        gpus, size = visible_gpus() if settings.device != "cpu" else [], settings.tensor_parallel_size
        self._devices = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]

    async def start(self) -> int:
        return self._settings.replicas

    async def launch(self, index: int) -> ProcessReplica:
        """Raises OSError: no file handles, memory, space or temporary folder."""
        client = ZmqEngineClient()
        address, num_on_device = client.address, self.num_on_device(index)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.module,
                stdin=PIPE,
                env=child_environment() | self.device_of(index),
                pass_fds=() if address.shared_fd is None else (address.shared_fd,),
                start_new_session=True,  # Ctrl-C is the server's business
            )
        except BaseException:
            client.close()
            raise
        assert process.stdin is not None
        spec = ReplicaSpec(index, address, self._settings, num_on_device, computes_on_cpu=not self._devices)
        with contextlib.suppress(OSError, RuntimeError):  # it has ended: its exit status says more
            process.stdin.write(spec.to_line())
        return ProcessReplica(f"replica {index}", process, client)

    def device_of(self, index: int) -> dict[str, str]:
        if not self._devices:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._devices[index % len(self._devices)])}

    def num_on_device(self, index: int) -> int:
        num_devices = max(1, len(self._devices))
        return len(range(index % num_devices, self._settings.replicas, num_devices))


class ProcessReplica(RemoteReplica):
    pid: int

    def __init__(self, name: str, process: Process, client: ZmqEngineClient) -> None:
        super().__init__(name, client, asyncio.ensure_future(process.wait()))
        self.pid = process.pid
        self._process = process

    def _exit_message(self) -> str:
        return f"{self.name} (pid {self.pid}) {exit_reason(self._process.returncode or 0)}"

    async def close(self, drain_s: float = 0.0) -> None:
        await self._drain(drain_s)
        if not self._end.done():
            # Where it has ended, `_end` hears of it a moment later.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait((self._end,), timeout=KILL_LIMIT_S)
        if not self._end.done():
            logger.error("%s (pid %d) does not end although it was killed", self.name, self.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._client.close()


# -- Threads -------------------------------------------------------------------------------------------------


class InlineExecutor(Executor):
    def __init__(self, settings: Settings) -> None:
        # All of them are on the first GPU: a thread has no environment of its own to see another one in.
        self._settings = replace(settings, replicas=settings.replicas or 1)

    async def start(self) -> int:
        return self._settings.replicas

    async def launch(self, index: int) -> InlineReplica:
        return InlineReplica(f"replica {index}", self._settings)


class InlineServer(EngineServer):
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
