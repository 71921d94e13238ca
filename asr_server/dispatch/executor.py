"""The protocol of executors, which start replicas: `inline`, `processes` and `ray`."""

from __future__ import annotations

from typing import Protocol

from asr_server.channel.messages import Command, Event


class ReplicaGone(Exception):
    """The replica has ended, wanted or not."""


class StartImpossible(ReplicaGone):
    """It will not start however often it is tried."""


class Replica(Protocol):
    """The API side's hold on one running replica."""

    name: str

    def send(self, command: Command) -> None:
        """Never blocks. Raises ReplicaGone."""

    async def receive(self) -> Event:
        """The next event. Raises ReplicaGone once there is nobody left to send one."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Lets it finish for `drain_s`, then ends it. After this nothing of it remains."""


class Executor(Protocol):
    async def start(self) -> int:
        """Called once, before any launch. How many replicas there are to be. Raises StartImpossible."""

    async def launch(self, index: int) -> Replica:
        """Starts replica `index`; it is ready when its first `Credit` comes."""

    async def stop(self) -> None:
        """Called once, when every replica has been closed, or when `start` has raised."""
