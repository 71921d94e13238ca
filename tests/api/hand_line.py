"""A connection of the API without a network: its bytes, and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from asr_server.api.connections import BoundedHttpProtocol
from asr_server.api.upload import UploadStore
from asr_server.api.websockets import BoundedWebSocketProtocol
from asr_server.config import MIB, Settings
from tests.embedded import embedded

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n"
UPLOAD = POST + b"content-length: 1000000\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Timer:
    def __init__(self, at_s: float, callback: Callable[[], object]) -> None:
        self.at_s, self.callback = at_s, callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """The running event loop, whose clock stands still between `pass_s`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self._now_s

    def create_task(self, work: Coroutine[Any, Any, None], **options: Any) -> asyncio.Task[None]:
        return self._loop.create_task(work, **options)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        self._timers.append(Timer(self._now_s + delay_s, callback))
        return self._timers[-1]

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self._timers if not timer.is_cancelled]

    async def pass_s(self, duration_s: float) -> None:
        end_s = self._now_s + duration_s
        while due := [timer for timer in self.waiting if timer.at_s <= end_s]:
            timer = min(due, key=lambda each: each.at_s)
            self._now_s = timer.at_s
            self._timers.remove(timer)
            timer.callback()
            await settle()
        self._now_s = end_s


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Wire(asyncio.Transport):
    """What the server writes and does to one connection."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        super().__init__({"peername": (address, 4000), "sockname": ("10.0.0.9", 80)})
        self.written = b""
        self.num_unsent = 0  # bytes that wait for their reader
        self.was_aborted = self.was_closed = self.is_paused = False
        self.protocol: asyncio.BaseProtocol | None = None  # set since

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.was_closed or self.was_aborted

    def close(self) -> None:
        self.was_closed = True

    def abort(self) -> None:
        self.was_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


class App:
    """Answers with the size of the body once it may."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.may_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_read.set()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await self.may_read.wait()
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
        await self.may_answer.wait()
        body = b"%d" % num_bytes
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Line:
    """One server's connections."""

    def __init__(self, settings: Settings, app: ASGIApp | None = None, **config: Any) -> None:
        self.settings, self.app, self.loop = settings, App(), HandLoop()
        self.uploads = UploadStore(MIB, 4 * MIB)
        self.server = ServerState()
        self._config = uvicorn.Config(
            app or self.app,
            ws=BoundedWebSocketProtocol,
            log_config=None,
            timeout_keep_alive=1000,
            lifespan="off",
            access_log=False,
            **config,
        )

    def connect(self, address: str = "10.0.0.1") -> tuple[BoundedHttpProtocol, Wire]:
        protocol = BoundedHttpProtocol(
            self._config, self.server, {}, self.loop, settings=self.settings, uploads=self.uploads
        )
        wire = Wire(address)
        protocol.connection_made(wire)
        return protocol, wire


def line(**changes: Any) -> Line:
    values = {"max_header_bytes": 1024, "header_timeout_s": 3.0, "client_grace_s": 2.0}
    return Line(embedded(**values | {"min_client_bytes_per_s": 100.0} | changes))
