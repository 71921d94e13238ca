"""A replica in another process: how to talk to it while it lives. The base of those of `multiprocess` and
`ray_executor`, which know how to end theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import Any

import zmq

from asr_server.core import Command, Drain, Event
from asr_server.transport.zeromq import ZmqEngineClient
from asr_server.workers.executor import ReplicaGone


class RemoteReplica(ABC):
    def __init__(self, name: str, client: ZmqEngineClient, end: asyncio.Future[Any]) -> None:
        """`end` is done once the process has ended."""
        self.name = name
        self._client = client
        self._end = end

    @abstractmethod
    def _exit_message(self) -> str:
        """How it ended. Only once it has."""

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

    async def receive(self) -> Event:
        """Raises ReplicaGone, once all that it has sent has been received."""
        await asyncio.sleep(0)  # many events that have come together must not hold up all else
        if (come := self._client.receive_now()) is not None:
            return come
        event = asyncio.ensure_future(self._client.receive())
        try:
            await asyncio.wait((event, self._end), return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                return event.result()
            raise ReplicaGone(self._exit_message())
        finally:
            event.cancel()

    async def _drain(self, limit_s: float) -> None:
        """Lets it leave by itself, for so long."""
        if limit_s > 0 and not self._end.done():
            with contextlib.suppress(zmq.Again):
                self._client.send(Drain())
            await asyncio.wait((self._end,), timeout=limit_s)
