"""The package's own client, and one that writes bytes as it likes."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

with warnings.catch_warnings():  # the package imports audioop, which Python 3.13 no longer has
    warnings.simplefilter("ignore", DeprecationWarning)
    from wyoming.asr import Transcribe, Transcript
    from wyoming.audio import AudioChunk, AudioStart, AudioStop
    from wyoming.client import AsyncTcpClient
    from wyoming.event import Event, async_read_event

    from asr_server.annexes.wyoming.server import WyomingServer

from asr_server.core import SAMPLE_RATE, Samples
from tests.support.embedded import embedded
from tests.support.fake_replica import noise
from tests.unit.api.running_app import RunningApp, run_app

FORMAT = {"rate": SAMPLE_RATE, "width": 2, "channels": 1}
LIMIT_S = 60


def pcm16(samples: Samples) -> bytes:
    return bytes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


async def next_event(client: AsyncTcpClient) -> Event | None:
    async with asyncio.timeout(LIMIT_S):
        return await client.read_event()


async def say_to(client: AsyncTcpClient, audio: bytes, chunk_bytes: int = 2048, **audio_format: int) -> None:
    audio_format = FORMAT | audio_format
    await client.write_event(AudioStart(**audio_format).event())
    for at in range(0, len(audio), chunk_bytes):
        await client.write_event(AudioChunk(audio=audio[at : at + chunk_bytes], **audio_format).event())
    await client.write_event(AudioStop().event())


async def heard_by(client: AsyncTcpClient) -> Transcript:
    event = await next_event(client)
    assert event is not None
    assert Transcript.is_type(event.type), event
    return Transcript.from_event(event)


@asynccontextmanager
async def wyoming_port(app: RunningApp) -> AsyncIterator[int]:
    """The door in front of an app that runs in this process."""
    server = WyomingServer(app.app.state.server)
    _, port = await server.start()
    try:
        yield port
    finally:
        await server.close()


async def answers_to(port: int, data: bytes, leave: bool = False) -> list[Event]:
    """Everything that the server writes to who sends these bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if leave:
        writer.write_eof()
    events: list[Event] = []
    async with asyncio.timeout(LIMIT_S):
        while (event := await async_read_event(reader)) is not None:
            events.append(event)
    writer.close()
    return events


SECOND = pcm16(noise(1.0))


@asynccontextmanager
async def door(**wanted: Any) -> AsyncIterator[tuple[RunningApp, int]]:
    async with run_app(replace(embedded(), wyoming_port=0, **wanted)) as app, wyoming_port(app) as port:
        yield app, port


def client_at(port: int) -> AsyncTcpClient:
    return AsyncTcpClient("127.0.0.1", port)


def event_of(type: str, payload: bytes | None = None, /, **data: Any) -> Event:
    return Event(type, data, payload)


def wire(type: str, payload: bytes = b"", /, **data: Any) -> bytes:
    header = {"type": type, "data": data, "payload_length": len(payload)}
    return json.dumps(header).encode() + b"\n" + payload


__all__ = ["Transcribe", "WyomingServer"]
