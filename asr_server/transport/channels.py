"""The two ends of the connection between the API process and a replica, as both sides know them.

`EngineClient` is the API's end: it never blocks the event loop. `EngineServer` is the replica's end, used by
the thread that runs the engine's steps. `inline.py` has them for threads, `zeromq.py` for processes of one
host, `tcp.py` for processes of several hosts.
"""

from __future__ import annotations

from typing import Protocol

from asr_server.core import Command, Event, Heartbeat


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
