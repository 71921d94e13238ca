"""End the work for a request after its client has left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from asr_server.transcription import task_group


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves; the body must have been read.

    Send the last message behind the block: a server may call a complete reply a disconnect.

    Raises ClientDisconnect.
    """
    async with task_group() as group:
        watch = group.create_task(_wait_for_disconnect(receive))
        yield
        watch.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
