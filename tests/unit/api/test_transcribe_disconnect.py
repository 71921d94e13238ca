"""Work ends with its client, and the watch for the client with the work."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from asr_server.api.transcribe import cancel_on_disconnect


class Client:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.is_watched = False

    async def receive(self) -> Message:
        self.is_watched = True
        try:
            return await self.messages.get()
        finally:
            self.is_watched = False


async def test_the_block_is_cancelled_when_its_client_leaves() -> None:
    client, was_cancelled = Client(), False

    async def work() -> None:
        nonlocal was_cancelled
        async with cancel_on_disconnect(client.receive):
            client.messages.put_nowait({"type": "http.disconnect"})
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

    with pytest.raises(ClientDisconnect):
        await work()
    assert was_cancelled


async def test_other_messages_of_the_client_end_nothing_and_the_watch_ends_with_the_block() -> None:
    client = Client()
    for _ in range(3):
        client.messages.put_nowait({"type": "http.request"})
    async with cancel_on_disconnect(client.receive):
        while not (client.is_watched and client.messages.empty()):
            await asyncio.sleep(0)
    assert not client.is_watched


async def test_an_error_of_the_block_is_not_taken_for_the_clients_leave() -> None:
    client = Client()
    with pytest.raises(ValueError, match="ours"):
        async with cancel_on_disconnect(client.receive):
            raise ValueError("ours")
    assert not client.is_watched
