"""Sockets that attack a server without end, in a process of their own.

python -m tests.unit.api.attackers NAME URL SECONDS
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from asr_server.config import MIB
from tests.support.raw_client import FILE_PART, MULTIPART, RawClient
from tests.unit.api.test_websockets import BEGUN_TEXT, EMPTY_PIECE, EMPTY_PING, handshake

NUM_SOCKETS = 8
ELSEWHERE = ("nice", "-n", "10")  # an attacker has a processor of his own, and needs one for masks of 20 MB
PAUSE_S = 0.05  # before a socket that was closed is opened again
CHUNKED = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _pour(client: RawClient, data: bytes) -> None:
    while True:
        client.send(data)
        await client.writer.drain()


async def trailers(client: RawClient) -> None:
    client.send(CHUNKED + MULTIPART + b"\r\n0\r\nx: ")
    await _pour(client, b"y" * (1 << 16))


async def slow_uploads(client: RawClient) -> None:
    """Hold 8 MiB each, then trickle a little faster than the least rate."""
    client.begin_upload(1 << 30)
    client.send(bytes(8 * MIB))
    while True:
        client.send(bytes(130))
        await client.writer.drain()
        await asyncio.sleep(0.1)


async def silent(client: RawClient) -> None:
    await client.is_closed()


async def near_boundaries(client: RawClient) -> None:
    client.send(CHUNKED + MULTIPART + b"\r\n" + chunk(FILE_PART))
    await _pour(client, chunk(b"\r\n--limitX" * 6000))


async def padded_boundary(client: RawClient) -> None:
    client.send(CHUNKED + MULTIPART + b"\r\n" + chunk(FILE_PART + b"\r\n--limit"))
    await _pour(client, chunk(b" " * (1 << 16)))


async def tiny_chunks(client: RawClient) -> None:
    client.send(CHUNKED + MULTIPART + b"\r\n" + chunk(FILE_PART))
    await _pour(client, b"1\r\nx\r\n" * 10_000)


async def pings(client: RawClient) -> None:
    client.send(handshake())
    await _pour(client, EMPTY_PING * 10_000)


async def empty_pieces(client: RawClient) -> None:
    client.send(handshake() + BEGUN_TEXT)
    await _pour(client, EMPTY_PIECE * 10_000)


HTTP: dict[str, Callable[[RawClient], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        *(trailers, slow_uploads, silent, near_boundaries, padded_boundary, tiny_chunks),
        *(pings, empty_pieces),
    )
}


async def long_names(url: str) -> None:
    """Send realtime events whose unknown field has a name of 20 MB."""
    event = json.dumps({"type": "session.update", "session": {"x" * 20 * MIB: 1}})
    async with connect(f"{url.replace('http', 'ws')}/v1/realtime", max_size=None) as socket:
        while True:
            await socket.send(event)
            await socket.recv()


NAMES = [*HTTP, "long_names"]


async def attack_from_elsewhere(name: str, url: str, duration_s: float) -> None:
    command = (sys.executable, "-m", "tests.unit.api.attackers", name, url, str(duration_s))
    attackers = await asyncio.create_subprocess_exec(*ELSEWHERE, *command)
    assert await attackers.wait() == 0


async def attack_until(name: str, url: str, end: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(end - time.monotonic()):
            while True:
                with contextlib.suppress(OSError, WebSocketException):
                    await _attack_once(name, url)
                await asyncio.sleep(PAUSE_S)


async def _attack_once(name: str, url: str) -> None:
    if name not in HTTP:
        return await long_names(url)
    address = httpx.URL(url)
    client = await RawClient.connect(address.host, address.port or 0)
    try:
        await HTTP[name](client)
    finally:
        client.writer.transport.abort()


async def main(name: str, url: str, duration_s: str) -> None:
    end = time.monotonic() + float(duration_s)
    await asyncio.gather(*(attack_until(name, url, end) for _ in range(NUM_SOCKETS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
