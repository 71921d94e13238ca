"""Bounds what one connection may cost: headers, waiting and stalling. Given to uvicorn by `server.py`.

uvicorn limits neither the size of a request's headers nor the time that a client takes. In its protocol's
subclass here every connection looks at itself once a second. Time is counted in these ticks and not by the
clock, so that a pause of the whole process (a stopped container, a busy event loop) makes no client late:
after it there is one tick, and what has arrived meanwhile is read before the next.

`cancel_on_disconnect` ends the work for a request whose client has left; `transcribe.py` and `wyoming.py` use
it. Runs in the API process, on its event loop; never blocks it. Knows no routes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from asr_server.api.errors import response_to
from asr_server.api.middleware import REFUSED, REQUEST_ID, new_request_id
from asr_server.config import Settings, naming
from asr_server.errors import HeadersTooLarge, InvalidValue, RequestError, TooSlow
from asr_server.telemetry import logging_for
from asr_server.transcription import first_error

TICK_S: Final = 1.0
MAX_HEADERS: Final = 128  # header fields of one request
MAX_PIPELINED: Final = 8  # requests sent before the reply to an earlier one
RESERVED_CONNECTIONS: Final = 64  # beyond the limit, for requests without a body: probes
OVER_LIMIT: Final = "over_connection_limit"  # in the request's state: its connection is one of those

logger = logging.getLogger(__name__)


class _Phase(enum.Enum):
    HEADERS = "the headers of a request are being waited for or read"
    BODY = "the body of a request is being read"
    COMPLETE = "the last request has been read whole, and nothing of a next one has come"


class _MinimumRate:
    """The time that a client has left: waiting uses it up, and bytes that move give it back."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        self._left_s = self._settings.client_grace_s

    def on_moved(self, num_bytes: int) -> None:
        gained_s = num_bytes / self._settings.min_client_bytes_per_s
        self._left_s = min(self._settings.client_grace_s, self._left_s + gained_s)

    def is_too_slow_after(self, waited_s: float) -> bool:
        self._left_s -= waited_s
        return self._left_s <= 0


def bounded_http_protocol(settings: Settings) -> Callable[..., BoundedHttpProtocol]:
    """Makes the value of uvicorn's setting `http`."""
    return partial(BoundedHttpProtocol, settings=settings)


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._phase = _Phase.HEADERS
        self._num_header_bytes = 0
        self._waited_for_headers_s = 0.0
        self._sender, self._reader = _MinimumRate(settings), _MinimumRate(settings)
        self._num_unsent = 0  # bytes of replies in the transport's buffer at the last tick
        self._refusal: RequestError | None = None
        self._next_tick: asyncio.TimerHandle | None = None
        self._is_websocket = False
        self._silent_since = self.loop.time()  # in the phase of headers

    @property
    def is_idle(self) -> bool:
        return self._phase is _Phase.COMPLETE and not self._is_replying

    @property
    def is_silent(self) -> bool:
        """Whether no request has come whole and no reply is under way."""
        return self._phase is _Phase.HEADERS and not self._is_replying

    @property
    def _is_replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- The connection's course --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        if len(self.connections) > self._settings.max_connections:
            self._exceed_max_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_tick is not None:
            self._next_tick.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Stops the ticks: another protocol takes the connection over."""
        self._is_websocket = True
        if self._next_tick is not None:
            self._next_tick.cancel()
        super().handle_websocket_upgrade()

    def _exceed_max_connections(self) -> None:
        """Closes the idle connections, or else the one that has sent no whole request for longest. On the
        reserved connections beyond the limit only requests without a body are served.
        """
        open_now = [other for other in self.connections if not other.transport.is_closing()]
        others = [other for other in open_now if isinstance(other, BoundedHttpProtocol) and other is not self]
        idle = [other for other in others if other.is_idle]
        silent = [other for other in others if other.is_silent]
        leaving = idle or sorted(silent, key=lambda other: other._silent_since)[:1]
        for connection in leaving:
            connection.transport.close()
        num_over = len(open_now) - len(leaving) - self._settings.max_connections
        if num_over > RESERVED_CONNECTIONS:
            self.transport.abort()
        self.app_state = self.app_state | {OVER_LIMIT: num_over > 0}

    # -- What the client sends --

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.BODY:
            self._sender.on_moved(len(data))
            super().data_received(data)
            return
        if self._phase is _Phase.COMPLETE:
            self._phase, self._silent_since = _Phase.HEADERS, self.loop.time()
        room = self._settings.max_header_bytes - self._num_header_bytes
        super().data_received(data[:room])
        if self._phase is not _Phase.HEADERS:
            if len(data) > room and not self.transport.is_closing() and not self._is_websocket:
                super().data_received(data[room:])
            return
        self._num_header_bytes += len(data)
        if len(data) > room:
            self._refuse(self._headers_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers.")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = InvalidValue(f"More than {MAX_PIPELINED} requests were sent ahead of replies.")
            raise self._refusal
        self._phase = _Phase.BODY
        self._num_header_bytes, self._waited_for_headers_s = 0, 0.0
        self._sender.restart()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._phase = _Phase.COMPLETE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever the parser or one of its callbacks has raised."""
        self._refuse(self._refusal or InvalidValue(msg))

    def _headers_too_large(self) -> HeadersTooLarge:
        limit = self._settings.max_header_bytes
        return HeadersTooLarge(
            f"The request's headers are larger than {limit} bytes: {naming('max_header_bytes')}."
        )

    def _body_too_slow(self) -> TooSlow:
        rate = self._settings.min_client_bytes_per_s
        return TooSlow(
            f"The body arrives at less than {rate:g} bytes a second: {naming('min_client_bytes_per_s')}, "
            f"for longer than {naming('client_grace_s')} allows."
        )

    # -- Once a second --

    def _tick(self) -> None:
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        if self._reader_is_too_slow():
            logger.info("closed the connection of %s: it does not read its reply", self.client)
            self.transport.abort()
        elif self.is_silent:
            self._wait_for_headers()
        elif self._phase is _Phase.BODY and self._sender_is_too_slow():
            self._refuse(self._body_too_slow())

    def _wait_for_headers(self) -> None:
        self._waited_for_headers_s += TICK_S
        limit_s = self._settings.header_timeout_s
        if self._waited_for_headers_s >= limit_s:
            self._refuse(
                TooSlow(f"No whole request within {limit_s:g} seconds: {naming('header_timeout_s')}.")
            )

    def _sender_is_too_slow(self) -> bool:
        """Whether the client sends too slowly. Time in which this side reads no body does not count."""
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            return False
        return self._sender.is_too_slow_after(TICK_S)

    def _reader_is_too_slow(self) -> bool:
        """Whether the client reads too slowly. Bytes wait in this buffer only if the system's is full."""
        num_unsent = self.transport.get_write_buffer_size()
        self._reader.on_moved(abs(num_unsent - self._num_unsent))
        self._num_unsent = num_unsent
        if not num_unsent:
            self._reader.restart()
            return False
        return self._reader.is_too_slow_after(TICK_S)

    def _refuse(self, error: RequestError) -> None:
        """Sends the error without the application, if no other reply has begun, and closes the connection."""
        response = response_to(error)
        state = self.cycle.scope["state"] if self._is_replying else {}
        request_id = state.get(REQUEST_ID) or new_request_id()
        with logging_for(request_id):
            logger.info("closed the connection of %s: %s", self.client, error.message)
        if not self._is_replying or not self.cycle.response_started:
            state[REFUSED] = response.status_code
            head = [f"HTTP/1.1 {response.status_code} \r\n".encode(), b"connection: close\r\n"]
            head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
            head.append(f"{REQUEST_ID}: {request_id}\r\n\r\n".encode())
            self.transport.write(b"".join([*head, bytes(response.body)]))
        self.transport.close()


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client leaves; the body must have been read before.

    The last message must be sent behind the block: a server may call a reply that is complete a disconnect.

    Raises ClientDisconnect.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_wait_for_disconnect(receive))
            yield
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
