"""A client that speaks HTTP byte by byte, for what no library does: it stalls, trickles and never ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any, NamedTuple

MULTIPART = b"content-type: multipart/form-data; boundary=limit\r\n"
FILE_PART = b'--limit\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
ENOUGH_S = 60.0


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, host: str, port: int, receive_buffer: int = 0, address: str = "") -> RawClient:
        """With a small receive buffer a reply soon waits for its reader. `address` is the client's own."""
        connection = socket.socket()
        connection.bind((address, 0))
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
        return cls(*await asyncio.open_connection(sock=connection, limit=1 << 14))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def begin_upload(self, content_length: int = 1 << 20) -> None:
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n" + MULTIPART
        self.send(head + b"content-length: %d\r\n\r\n" % content_length + FILE_PART)

    def ask(self, path: str) -> None:
        self.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())

    async def reply(self) -> Reply:
        """The next reply, which has a content-length."""
        async with asyncio.timeout(ENOUGH_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = [line.split(": ", 1) for line in head[1:] if line]
            headers = {name.lower(): value for name, value in fields}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(int(head[0].split()[1]), headers, body)

    async def is_closed(self) -> bool:
        """Waits until the server has closed the connection; what it sent before is dropped."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ENOUGH_S):
                while await self.reader.read(1 << 16):
                    pass
        return True

    async def send_for_ever(self, data: bytes, max_bytes: int) -> int:
        """Sends until the server closes or the limit is reached; how much was sent."""
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ENOUGH_S):
                while num_sent < max_bytes:
                    self.send(data)
                    await self.writer.drain()
                    num_sent += len(data)
        return num_sent

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
