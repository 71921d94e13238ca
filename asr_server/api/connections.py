"""Bound each connection's headers, waiting and stalling, which uvicorn does not.

Every connection checks itself once a second. Ticks are counted, not the clock, so a paused process makes
no client late: after a pause there is one tick, and arrived data is read before the next. Knows no
routes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from typing import Any, Final

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from asr_server import metrics
from asr_server.api.errors import response_to
from asr_server.api.http10 import UntilClose
from asr_server.api.middleware import REFUSED, REQUEST_ID, SAFE_HEADERS, UNKNOWN_ROUTE, new_request_id
from asr_server.api.upgrades import ParserIgnoringUpgrades
from asr_server.api.upload import UploadStore
from asr_server.config import Settings, naming
from asr_server.errors import HeadersTooLarge, InvalidValue, RequestError, TooManyHeaders, TooSlow
from asr_server.telemetry import logging_for

TICK_S: Final = 1.0
MAX_HEADERS: Final = 128  # header fields of one request
SMALL_CHUNK_BYTES: Final = 64  # of a body sent in chunks: each costs half a microsecond
MAX_SMALL_CHUNKS: Final = 4096  # smaller ones in one body
SLICE_BYTES: Final = 16 * 1024  # of it that are parsed before its chunks are counted
MAX_PIPELINED: Final = 8  # requests sent before the reply to an earlier one
RESERVED_CONNECTIONS: Final = 64  # beyond the limit, for requests without a body: probes
SLOW_FACTOR: Final = 4.0  # times the least rate: slower clients may have to make room
RATE_MEMORY: Final = 0.8  # of a client's rate, the part that a further tick leaves
# In the request's state:
OVER_LIMIT: Final = "over_connection_limit"  # its connection is one of those
CONNECTION: Final = "connection"

logger = logging.getLogger(__name__)
# What is no HTTP is a line of ours, with the id that the answer has.
logging.getLogger("uvicorn.error").addFilter(lambda line: line.msg != "Invalid HTTP request received.")


class _Phase(enum.Enum):
    HEADERS = "the headers of a request are being waited for or read"
    BODY = "the body of a request is being read"
    COMPLETE = "the last request has been read whole, and nothing of a next one has come"


class _MinimumRate:
    """The time that a client has left: waiting uses it, moving bytes return it.

    `bytes_per_s` is the recent rate; None before any wait.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        self._left_s = self._settings.client_grace_s
        self._num_moved = 0
        self.bytes_per_s: float | None = None

    def on_moved(self, num_bytes: int, factor: float = 1.0) -> None:
        self._num_moved += num_bytes
        gained_s = num_bytes / (factor * self._settings.min_client_bytes_per_s)
        self._left_s = min(self._settings.client_grace_s, self._left_s + gained_s)

    def is_too_slow_after(self, waited_s: float) -> bool:
        rate, self._num_moved = self._num_moved / waited_s, 0
        before = rate if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = RATE_MEMORY * before + (1 - RATE_MEMORY) * rate
        self._left_s -= waited_s
        return self._left_s <= 0


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, settings: Settings, uploads: UploadStore, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._uploads = uploads
        self.app_state = self.app_state | {CONNECTION: self}
        self._parser = ParserIgnoringUpgrades(self)
        self.parser = self._parser  # type: ignore[assignment]  # uvicorn only calls it
        self._settings = settings
        self._phase = _Phase.HEADERS
        self._num_header_bytes = 0  # of the request under way, with trailers and what frames its chunks
        self._body = bytearray()  # of the data just received
        self._num_body_bytes, self._num_pieces = 0, 0
        self._waited_for_headers_s = 0.0
        self._sender, self._reader = _MinimumRate(settings), _MinimumRate(settings)
        self._num_unsent = 0  # bytes of replies in the transport's buffer at the last tick
        self._refusal: RequestError | None = None
        self._last_reply: RequestError | None = None  # behind the replies that are owed
        self._running: RequestResponseCycle | None = None  # whose reply is made now
        self._next_tick: asyncio.TimerHandle | None = None
        self._is_websocket = False
        self.silent_since = self.loop.time()  # when it began to wait for its last request

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        return self._phase is _Phase.COMPLETE and not self._is_replying

    @property
    def is_silent(self) -> bool:
        return self._phase is _Phase.HEADERS and not self._is_replying

    @property
    def is_slow(self) -> bool:
        """Return whether the client is hardly faster than the least rate."""
        return self.bytes_per_s < SLOW_FACTOR * self._settings.min_client_bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """Return the client's recent rate; infinity if nobody waits."""
        rate = self._reader.bytes_per_s if self._num_unsent else None
        if self._phase is _Phase.BODY and not self.flow.read_paused:
            rate = self._sender.bytes_per_s
        return math.inf if rate is None else rate

    @property
    def _is_shaking_hands(self) -> bool:
        return bool(self._settings.ssl_certfile) and self.scheme == "http"

    @property
    def _is_replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- The connection's course --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._next_tick is not None:
            return
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        if len(self.connections) > self._settings.max_connections:
            self._exceed_max_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_tick is not None:
            self._next_tick.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Stop the ticks: another protocol takes over."""
        self._is_websocket = True
        if self._next_tick is not None:
            self._next_tick.cancel()
        super().handle_websocket_upgrade()

    def _exceed_max_connections(self) -> None:
        open_now = [other for other in self.connections if not other.transport.is_closing()]
        others = [other for other in open_now if isinstance(other, BoundedHttpProtocol) and other is not self]
        num_over = len(open_now) - self._settings.max_connections
        leaving = _who_makes_room(others, num_over, self.loop.time() - TICK_S)
        for connection in leaving:
            connection.make_room(f"All connections are taken: {naming('max_connections')}")
        num_over -= len(leaving)
        if num_over > RESERVED_CONNECTIONS:
            self.transport.abort()
        self.app_state = self.app_state | {OVER_LIMIT: num_over > 0}

    def make_room(self, full: str) -> None:
        if self._num_unsent:
            self.transport.abort()
        elif self._phase is _Phase.BODY:
            rate = f"{self.bytes_per_s:.0f} B/s"
            self._refuse(TooSlow(f"{full}, and this connection's body arrives slowly, at {rate}."))
        else:
            self.transport.close()

    # -- What the client sends --

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.BODY:
            self._sender.on_moved(len(data), self._uploads.rate_factor)
            self._receive_body(data)
            return
        if self._phase is _Phase.COMPLETE:
            self._phase, self.silent_since = _Phase.HEADERS, self.loop.time()
        room = self._settings.max_header_bytes - self._num_header_bytes
        self._parse(data[:room])
        if self._phase is not _Phase.HEADERS:
            if len(data) > room and not self.transport.is_closing() and not self._is_websocket:
                self._parse(data[room:])
            return
        self._num_header_bytes += len(data)
        if len(data) > room:
            self._refuse(self._headers_too_large())

    def _receive_body(self, data: bytes) -> None:
        """Read a body; refuse trailers and extensions larger than headers may be."""
        num_body_bytes = self._num_body_bytes
        self._parse(data)
        if self._phase is _Phase.BODY and not self.transport.is_closing():
            is_body = self._num_body_bytes > num_body_bytes
            self._num_header_bytes = 0 if is_body else self._num_header_bytes + len(data)
            if self._num_header_bytes > self._settings.max_header_bytes:
                self._refuse(self._headers_too_large())

    def _parse(self, data: bytes) -> None:
        self._num_pieces = max(0, self._num_pieces - 1)  # each read may bring one, however small
        for first in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing() or self._is_websocket or self._last_reply is not None:
                return
            super().data_received(data[first : first + SLICE_BYTES])
            if self._num_pieces > MAX_SMALL_CHUNKS + self._num_body_bytes / SMALL_CHUNK_BYTES:
                self._refuse(InvalidValue(f"The body's chunks have less than {SMALL_CHUNK_BYTES} bytes."))
        self._hand_body_over()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_pieces += 1
        self._body += body

    def _hand_body_over(self) -> None:
        """Hand over each read's bytes at once: every call copies all that waits."""
        if self._body:
            super().on_body(bytes(self._body))
            self._body.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:
            return  # a trailer: what it says must not change who asks or what is asked for
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = TooManyHeaders(f"The request has more than {MAX_HEADERS} headers.")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._parser.ignores_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = InvalidValue(f"More than {MAX_PIPELINED} requests were sent ahead of replies.")
            raise self._refusal
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and self._parser.get_http_version() != "1.0"):
            self._refusal = InvalidValue(f"The request has {num_hosts} Host headers; it must have one.")
            raise self._refusal
        self._phase = _Phase.BODY
        self._num_header_bytes, self._waited_for_headers_s = 0, 0.0
        self._num_body_bytes, self._num_pieces = 0, 0
        self._sender.restart()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._parser.ignores_upgrade:
            return
        self._phase, self._num_header_bytes = _Phase.COMPLETE, 0
        self._hand_body_over()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidValue(msg))

    def _headers_too_large(self) -> HeadersTooLarge:
        limit = self._settings.max_header_bytes
        return HeadersTooLarge(
            f"The request's headers are larger than {limit} bytes: {naming('max_header_bytes')}."
        )

    def _body_too_slow(self) -> TooSlow:
        factor, setting = self._uploads.rate_factor, naming("min_client_bytes_per_s")
        if factor > 1:
            setting += f", grown with what uploads hold of {naming('max_upload_disk_bytes')}"
        rate = factor * self._settings.min_client_bytes_per_s
        return TooSlow(
            f"The body arrives at less than {rate:.0f} bytes a second: {setting}, "
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
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            return False
        return self._sender.is_too_slow_after(TICK_S)

    def _reader_is_too_slow(self) -> bool:
        """Return whether the client reads too slowly: bytes wait here only if the system's buffer is
        full.
        """
        before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if not before or not self._num_unsent:
            self._reader.restart()
            return False
        self._reader.on_moved(abs(self._num_unsent - before))
        return self._reader.is_too_slow_after(TICK_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = UntilClose(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_reply is None or self.transport.is_closing():
            return
        if self._is_replying:
            self.flow.pause_reading()
        else:
            self._refuse(self._last_reply)

    def _forget_last_request(self) -> None:
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
        self._phase = _Phase.COMPLETE

    def _refuse(self, error: RequestError) -> None:
        if self._is_shaking_hands:
            self.transport.abort()
            return
        if self._phase is _Phase.BODY and self.pipeline:
            self._forget_last_request()
        if self._phase is not _Phase.BODY and self._is_replying:
            self._last_reply = self._last_reply or error
            self.flow.pause_reading()
            return
        response = response_to(error)
        state = self.cycle.scope["state"] if self._is_replying else {}
        request_id = state.get(REQUEST_ID) or new_request_id()
        with logging_for(request_id):
            logger.info("closed the connection of %s: %s", self.client, error.message)
        if not self._is_replying:
            metrics.requests.labels(UNKNOWN_ROUTE, str(response.status_code)).inc()
        if not self._is_replying or not self.cycle.response_started:
            state[REFUSED] = response.status_code
            self.transport.write(raw_reply(response, request_id))
        self.transport.close()


def raw_reply(response: Response, request_id: str) -> bytes:
    head = [f"HTTP/1.1 {response.status_code} \r\n".encode(), b"connection: close\r\n"]
    head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    head += [f"{name}: {value}\r\n".encode() for name, value in SAFE_HEADERS.items()]
    head.append(f"{REQUEST_ID}: {request_id}\r\n\r\n".encode())
    return b"".join([*head, bytes(response.body)])


def _who_makes_room(
    others: list[BoundedHttpProtocol], num_wanted: int, now_but_a_tick: float
) -> list[BoundedHttpProtocol]:
    """Choose all idle connections and as many more as wanted: the longest silent, then slow ones.

    Those connected within the last tick come last.
    """
    idle = [other for other in others if other.is_idle]
    silent = sorted((other for other in others if other.is_silent), key=lambda other: other.silent_since)
    waiting = [other for other in silent if other.silent_since < now_but_a_tick]
    in_order = [*waiting, *_slow_ones(others), *silent[len(waiting) :]]
    return idle + in_order[: max(0, num_wanted - len(idle))]


def _slow_ones(others: list[BoundedHttpProtocol]) -> list[BoundedHttpProtocol]:
    """Return the slowest of the address with most slow ones, oldest first; each address keeps one."""
    of_address: dict[str, list[BoundedHttpProtocol]] = {}
    for other in others:
        if other.is_slow:
            of_address.setdefault(other.address, []).append(other)
    with_rest = [
        (len(own) - place, other)
        for own in of_address.values()
        for place, other in enumerate(
            sorted(own, key=lambda other: (other.bytes_per_s, other.silent_since)), 1
        )
    ]
    return [other for rest, other in sorted(with_rest, key=lambda ranked: -ranked[0]) if rest]
