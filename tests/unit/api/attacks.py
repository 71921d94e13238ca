"""What strangers send to a server, each from eight sockets at once, without its key and with it."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from tests.support.raw_client import RawClient
from tests.support.speech import say
from tests.unit.api.sample_files import sound_file
from tests.unit.api.test_websockets import BEGUN_TEXT, EMPTY_PIECE, EMPTY_PING, handshake

NUM_SOCKETS = 8
NUM_FRAMES = 400_000
A_MILLION_ENTRIES = ["en," * 21_000] * 90  # 5.7 MB
LIMIT_S = 120

Attack = Callable[[str, str], Awaitable[None]]


async def connect(url: str) -> RawClient:
    parts = httpx.URL(url)
    return await RawClient.connect(parts.host, parts.port or 0)


async def _frames_without_end(url: str, header: str, frames: bytes) -> None:
    """Keep sending behind the handshake, whatever its answer, until the server closes."""
    client = await connect(url)
    try:
        client.send(handshake(header=header))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101" if header.startswith("authorization") else b"HTTP/1.1 401"), (
            head
        )
        await client.send_for_ever(frames, len(frames))
        assert await client.is_closed()
    finally:
        await client.close()


async def pings_without_end(url: str, header: str) -> None:
    await _frames_without_end(url, header, EMPTY_PING * NUM_FRAMES)


async def pieces_without_end(url: str, header: str) -> None:
    await _frames_without_end(url, header, BEGUN_TEXT + EMPTY_PIECE * NUM_FRAMES)


async def _failed_handshake(url: str, request: bytes, status: int) -> None:
    client = await connect(url)
    try:
        client.send(request)
        assert (await client.reply()).status == status
        assert await client.is_closed()
    finally:
        await client.close()


async def handshakes_too_long(url: str, header: str) -> None:
    await _failed_handshake(url, handshake(header=f"{header}\r\nx: {'y' * 9000}"), 431)


async def handshakes_by_post(url: str, header: str) -> None:
    await _failed_handshake(url, handshake(method="POST", header=header), 400)


async def fields_of_a_million_entries(url: str, header: str) -> None:
    name, _, value = header.partition(": ")
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        reply = await client.post(
            "/v1/audio/transcriptions",
            files={"file": sound_file(say("1").samples)},
            data={"model": "whisper-1", "languages[]": A_MILLION_ENTRIES},
            headers={name: value},
        )
    assert reply.status_code == (400 if name == "authorization" else 401), reply.text


ATTACKS: tuple[Attack, ...] = (
    pings_without_end,
    pieces_without_end,
    handshakes_too_long,
    handshakes_by_post,
    fields_of_a_million_entries,
)


async def attack(url: str, key: str, name: Attack) -> None:
    for header in ("x: y", f"authorization: Bearer {key}"):
        await asyncio.gather(*(name(url, header) for _ in range(NUM_SOCKETS)))
