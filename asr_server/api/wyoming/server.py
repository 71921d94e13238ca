"""Listens for Wyoming clients and owns their connections. `api.server` starts and closes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from asr_server.api.state import AppState
from asr_server.api.wyoming.connection import LAST_WORDS_S, WyomingConnection
from asr_server.api.wyoming.events import MAX_LINE_BYTES

logger = logging.getLogger(__name__)


class WyomingServer:
    """As many connections as `max_connections` says; more are closed as they come."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._listener: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Address and port. Raises OSError."""
        settings = self._state.settings
        self._listener = await asyncio.start_server(
            self._connect, settings.host, settings.wyoming_port, limit=MAX_LINE_BYTES
        )
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Ends every connection. What is still being transcribed has had its time: see `api.server`."""
        if self._listener is not None:
            self._listener.close()
        tasks = list(self._writers)
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * LAST_WORDS_S)
        for writer in self._writers.values():  # of clients that do not read
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= self._state.settings.max_connections:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._writers[task] = writer
        task.add_done_callback(self._writers.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await WyomingConnection(self._state, reader, writer).run()
        except Exception:
            logger.exception("wyoming: a connection has failed")
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._state.settings.client_grace_s):
                    await writer.wait_closed()
