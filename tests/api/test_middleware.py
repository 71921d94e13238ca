"""Replies to requests whose body is still being sent: they arrive, and what is read after them is bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest
from openai import AsyncOpenAI
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from asr_server.api import middleware
from asr_server.api.form import ReadingTurns
from asr_server.api.middleware import UnreadBodyMiddleware
from asr_server.config import MIB
from tests.api.official_client import transcribe
from tests.api.raw_client import RawClient
from tests.api.running_app import RunningApp, run_app, until
from tests.embedded import embedded

SMALL = replace(embedded(), max_upload_bytes=MIB)


def official_client(app: RunningApp) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{app.host}:{app.port}/v1", api_key="none", max_retries=0, timeout=60)


async def test_the_official_client_sees_the_413_of_an_upload_far_over_the_limit() -> None:
    async with run_app(SMALL) as app, official_client(app) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await transcribe(client, bytes(40 * MIB))
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        assert await app.still_works()


async def test_what_is_read_after_a_413_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_DISCARDED_BYTES", 2 * MIB)
    async with run_app(SMALL) as app:
        client = await RawClient.connect(app.host, app.port)
        client.begin_upload(1 << 40)
        assert (await client.reply()).status == 413
        num_sent = await client.send_for_ever(bytes(65536), 100 * MIB)
        assert num_sent < 20 * MIB  # what was discarded, and what the system's buffers took
        await client.close()


async def test_a_client_that_sends_no_more_after_its_413_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "MAX_DISCARD_S", 0.2)
    async with run_app(SMALL) as app:
        client = await RawClient.connect(app.host, app.port)
        client.begin_upload(1 << 40)
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert await client.is_closed()
        await client.close()


async def test_a_refusal_of_a_body_that_has_come_whole_keeps_the_connection() -> None:
    async with run_app(SMALL) as app:
        reply = await app.post(b"no audio")
        assert (reply.status_code, reply.headers.get("connection")) == (400, None)


async def test_bodies_that_are_discarded_leave_each_round_of_the_event_loop_short() -> None:
    taken_in_a_round: list[int] = []

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("no", 400)(scope, receive, send)

    async def receive() -> Message:
        taken_in_a_round[-1] += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Message) -> None:
        pass

    async def count_rounds() -> None:
        while True:
            taken_in_a_round.append(0)
            await asyncio.sleep(0)

    refusing = UnreadBodyMiddleware(refuse, ReadingTurns())
    scope = {"type": "http", "headers": [(b"content-length", b"9")]}
    counting = asyncio.create_task(count_rounds())
    discarding = [asyncio.create_task(refusing(scope, receive, send)) for _ in range(50)]
    await until(lambda: len(taken_in_a_round) > 100)
    for task in (counting, *discarding):
        task.cancel()
    assert 1 <= max(taken_in_a_round) <= 2  # a turn may be given while the one before is being used
