"""A plain WebSocket client whose every event is checked against the official client's types."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import soxr
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus

from asr_server.core import SAMPLE_RATE, ChunkResult, Samples
from asr_server.transport.messages import Submit
from tests.support.fake_replica import noise, say
from tests.support.tokens import words

EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
MANUAL = {"turn_detection": None}


def pcm24(samples: Samples) -> bytes:
    resampled = soxr.resample(samples, SAMPLE_RATE, 24_000)
    return bytes((np.clip(resampled, -1, 1) * 32767).astype("<i2").tobytes())


SECOND = pcm24(noise(1.0))


def say_one(submit: Submit) -> ChunkResult:
    return say(*words("1"))


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, event: dict[str, Any] | str | bytes) -> None:
        await self.socket.send(json.dumps(event) if isinstance(event, dict) else event)

    async def append(self, data: bytes, size: int = 4800, pace_s: float = 0.0) -> None:
        for at in range(0, len(data), size):
            audio = base64.b64encode(data[at : at + size]).decode()
            await self.send({"type": "input_audio_buffer.append", "audio": audio})
            await asyncio.sleep(pace_s)

    async def update(self, **audio_input: Any) -> dict[str, Any]:
        session = {"type": "transcription", "audio": {"input": audio_input}}
        await self.send({"type": "session.update", "session": session})
        return (await self.until("session.updated"))[-1]

    async def commit(self) -> None:
        await self.send({"type": "input_audio_buffer.commit"})

    async def say(self, data: bytes) -> None:
        """Append the audio and commit it as a turn."""
        await self.append(data)
        await self.commit()

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            event: dict[str, Any] = json.loads(await self.socket.recv())
        EVENTS.validate_python(event)
        assert event["event_id"]
        return event

    async def until(self, *last_words: str, count: int = 1) -> list[dict[str, Any]]:
        """The events up to the `count`th whose type ends so."""
        events: list[dict[str, Any]] = []
        while count:
            events.append(await self.receive())
            count -= events[-1]["type"].endswith(last_words)
        return events

    async def closed(self) -> int | None:
        """Reads to the end; the close code."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await self.socket.recv()
        return self.socket.close_code


@asynccontextmanager
async def open_session(
    url: str, path: str = "/v1/realtime?intent=transcription", **options: Any
) -> AsyncIterator[Client]:
    address = url.replace("http", "ws", 1) + path
    async with connect(address, max_size=None, compression=None, **options) as socket:
        client = Client(socket)
        assert (await client.receive())["type"] == "session.created"
        yield client


@asynccontextmanager
async def open_manual(url: str) -> AsyncIterator[Client]:
    """A session whose turns end where the client commits them."""
    async with open_session(url) as client:
        await client.update(**MANUAL)
        yield client


class Refusal(NamedTuple):
    status: int
    error: dict[str, Any]
    headers: Headers


async def refused(url: str, path: str = "/v1/realtime?intent=transcription", **options: Any) -> Refusal:
    """The HTTP reply to a handshake that is not taken."""
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url.replace("http", "ws", 1) + path, **options):
            pass
    reply = caught.value.response
    return Refusal(reply.status_code, json.loads(reply.body)["error"], reply.headers)


def transcripts(events: list[dict[str, Any]]) -> dict[str, str]:
    """Of each item that is completed; checks that its deltas lead up to it."""
    completed = {
        e["item_id"]: e["transcript"] for e in events if e["type"].endswith("transcription.completed")
    }
    for item_id, text in completed.items():
        deltas = [e["delta"] for e in events if e["type"].endswith(".delta") and e["item_id"] == item_id]
        assert len("".join(deltas).split()) >= len(text.split())
    return completed


def of_type(events: list[dict[str, Any]], last_word: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"].endswith(last_word)]
