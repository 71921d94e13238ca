"""Bound each HTTP connection's headers, waiting and stalling, which uvicorn does not. Knows no routes.

Every connection checks itself once a second. Ticks are counted, not the clock, so a paused process makes
no client late.
"""

import asyncio
import enum
import logging
from typing import Any, Final

import httptools
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from asr_server import metrics
from asr_server.api.errors import response_to
from asr_server.api.middleware import OVER_LIMIT, REFUSED, UNKNOWN_ROUTE, new_request_id
from asr_server.api.schemas import REQUEST_ID, SAFE_HEADERS
from asr_server.config import Settings, naming
from asr_server.errors import HeadersTooLarge, InvalidValue, RequestError, TooManyHeaders, TooSlow
from asr_server.telemetry import logging_for

TICK_S: Final = 1.0
MAX_HEADERS: Final = 128  # header fields of one request
MAX_HEADER_BYTES: Final = 64 * 1024  # of one request
MIN_BYTES_PER_S: Final = 1000.0  # of a body, and of reading a reply: a modem sends several times as much
FRAMED_BYTES: Final = 8  # of a body, for each byte around its chunks: a tiny chunk costs half a microsecond
SLICE_BYTES: Final = 16 * 1024  # parsed before the bytes around chunks are counted
MAX_PIPELINED: Final = 8  # requests sent before the reply to an earlier one
RESERVED_CONNECTIONS: Final = 64  # beyond the limit, for requests without a body: probes

logger = logging.getLogger(__name__)
# What is no HTTP is a line of ours, with the id that the answer has.
logging.getLogger("uvicorn.error").addFilter(lambda line: line.msg != "Invalid HTTP request received.")


class _Phase(enum.Enum):
    HEADERS = "the headers of a request are being waited for or read"
    BODY = "the body of a request is being read"
    COMPLETE = "the last request has been read whole, and nothing of a next one has come"


class _Grace:
    """The time that a client has left: waiting uses it, moving bytes return it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.left_s = settings.client_grace_s

    def restart(self) -> None:
        self.left_s = self._settings.client_grace_s

    def on_moved(self, num_bytes: int) -> None:
        gained_s = num_bytes / MIN_BYTES_PER_S
        self.left_s = min(self._settings.client_grace_s, self.left_s + gained_s)

    def is_over_after(self, waited_s: float) -> bool:
        self.left_s -= waited_s
        return self.left_s <= 0


# The connections of one port that have no request under way, in the order of their waiting: idle ones, and
# those that have sent no whole headers for a tick.
Waiting = dict["BoundedHttpProtocol", None]


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, settings: Settings, waiting: Waiting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parser = ParserIgnoringUpgrades(self)
        self.parser = self._parser  # type: ignore[assignment]  # uvicorn only calls it
        self._settings = settings
        self._phase = _Phase.HEADERS
        self._num_header_bytes = 0  # of the request under way
        self._body = bytearray()  # of the data just received
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # around the chunks of the body, with its trailers
        self._waited_for_headers_s = 0.0
        self._sender, self._reader = _Grace(settings), _Grace(settings)
        self._num_unsent = 0  # bytes of replies in the transport's buffer at the last tick
        self._refusal: RequestError | None = None
        self._last_reply: RequestError | None = None  # behind the replies that are owed
        self._running: RequestResponseCycle | None = None  # whose reply is made now
        self._next_tick: asyncio.TimerHandle | None = None
        self._is_websocket = False
        self._waiting = waiting

    @property
    def _is_replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered_early(self) -> bool:
        return self._phase is _Phase.BODY and self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._next_tick is None:  # else TLS has been agreed on
            self._next_tick = self.loop.call_later(TICK_S, self._tick)
            self._bound_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_ticks()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._is_websocket = True
        self._end_ticks()
        super().handle_websocket_upgrade()

    def _end_ticks(self) -> None:
        self._wait_for_request(False)
        if self._next_tick is not None:
            self._next_tick.cancel()

    def _bound_connections(self) -> None:
        """Close one waiting connection for each beyond the limit; else take few more."""
        num_over = len(self.connections) - self._settings.max_connections
        if num_over <= 0:
            return
        if (leaving := next(iter(self._waiting), None)) is not None:
            leaving._wait_for_request(False)
            leaving.transport.close()
        elif num_over > RESERVED_CONNECTIONS:
            self.transport.abort()
        else:
            self.app_state = self.app_state | {OVER_LIMIT: True}

    def _wait_for_request(self, is_waiting: bool = True) -> None:
        if is_waiting:
            self._waiting.setdefault(self)
        else:
            self._waiting.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._wait_for_request(False)
        if self._phase is _Phase.BODY:
            if not self._is_answered_early:
                self._sender.on_moved(len(data))
            self._parse(data)
            return
        self._phase = _Phase.HEADERS
        room = MAX_HEADER_BYTES - self._num_header_bytes
        self._num_header_bytes += len(data)
        self._parse(data[:room])
        if self._phase is _Phase.HEADERS and len(data) > room:
            self._refuse(HeadersTooLarge(f"The request's headers are larger than {MAX_HEADER_BYTES} bytes."))
        elif len(data) > room:
            self._parse(data[room:])

    def _parse(self, data: bytes) -> None:
        for first in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing() or self._is_websocket or self._last_reply is not None:
                return
            self._parse_slice(data[first : first + SLICE_BYTES])
        self._hand_body_over()

    def _parse_slice(self, data: bytes) -> None:
        num_body_bytes, in_body = self._num_body_bytes, self._phase is _Phase.BODY
        super().data_received(data)
        if not in_body or self._phase is not _Phase.BODY or self.transport.is_closing():
            return
        self._num_framing_bytes += len(data) - (self._num_body_bytes - num_body_bytes)
        if self._num_framing_bytes > MAX_HEADER_BYTES + self._num_body_bytes // FRAMED_BYTES:
            self._refuse(
                InvalidValue(
                    f"The body's chunks are too small: what frames them has more than "
                    f"{MAX_HEADER_BYTES} bytes and a byte for each {FRAMED_BYTES} of the body."
                )
            )

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
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
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = InvalidValue(f"More than {MAX_PIPELINED} requests were sent ahead of replies.")
            raise self._refusal
        if num_hosts > 1 or (not num_hosts and self._parser.get_http_version() != "1.0"):
            self._refusal = InvalidValue(f"The request has {num_hosts} Host headers; it must have one.")
            raise self._refusal
        self._phase = _Phase.BODY
        self._num_header_bytes, self._waited_for_headers_s = 0, 0.0
        self._num_body_bytes = self._num_framing_bytes = 0
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

    def _tick(self) -> None:
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        if self._reader_is_too_slow():
            logger.info("closed the connection of %s: it does not read its reply", self.client)
            self.transport.abort()
        elif self.transport.is_closing():
            self._wait_for_request(False)
        elif self._phase is _Phase.BODY:
            self._wait_for_body()
        elif self._phase is _Phase.HEADERS and not self._is_replying:
            self._wait_for_request()
            self._wait_for_headers()
        else:
            self._wait_for_request(self._is_idle)

    @property
    def _is_idle(self) -> bool:
        is_answered = self._phase is _Phase.COMPLETE and not self._is_replying
        return is_answered and not self.transport.get_write_buffer_size()

    def _wait_for_headers(self) -> None:
        self._waited_for_headers_s += TICK_S
        limit_s = self._settings.client_grace_s
        if self._waited_for_headers_s >= limit_s:
            self._refuse(TooSlow(f"No whole request within {limit_s:g} seconds: {naming('client_grace_s')}."))

    def _wait_for_body(self) -> None:
        is_held_up = self.flow.read_paused or self.cycle.waiting_for_100_continue
        if not is_held_up and self._sender.is_over_after(TICK_S):
            rate = f"{MIN_BYTES_PER_S:.0f} bytes a second"
            allowed = f"{naming('client_grace_s')} allows"
            self._refuse(TooSlow(f"The body arrives at less than {rate} for longer than {allowed}."))

    def _reader_is_too_slow(self) -> bool:
        """Return whether the client reads too slowly: bytes wait here if the system's buffer is full."""
        before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if not before or not self._num_unsent:
            self._reader.restart()
            return False
        self._reader.on_moved(abs(self._num_unsent - before))
        return self._reader.is_over_after(TICK_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = until_close(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_answered_early and self.expect_100_continue and not self._num_body_bytes:
            self.transport.close()  # the body may never come: what comes next would be taken for it
        elif self._last_reply is None:
            self._wait_for_request(self._is_idle)
        elif self._is_replying:
            self.flow.pause_reading()
        else:
            self._refuse(self._last_reply)

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        is_shaking_hands = self._settings.ssl_certfile and self.scheme == "http"
        if is_shaking_hands or self._is_answered_early:
            self.transport.close()
            return
        if self._phase is _Phase.BODY and self.pipeline:  # forget the last request
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
            self._phase = _Phase.COMPLETE
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


class ParserIgnoringUpgrades:
    """A parser that reads the head again without Upgrade: httptools drops bodies behind `Upgrade: h2c`."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)

    @property
    def ignores_upgrade(self) -> bool:
        is_upgrade = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        return is_upgrade and not self._protocol._should_upgrade()

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.ignores_upgrade:
                raise
            rest = data[upgrade.args[0] :]
            version = self.get_http_version().encode()
            head = [b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, version)]
            head += [name + b": " + value for name, value in self._protocol.headers if name != b"upgrade"]
            self._parser = httptools.HttpRequestParser(self._protocol)
            self._parser.feed_data(b"\r\n".join([*head, b"", b""]))
            self.feed_data(rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def raw_reply(response: Response, request_id: str) -> bytes:
    head = [f"HTTP/1.1 {response.status_code} \r\n".encode(), b"connection: close\r\n"]
    head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    head += [f"{name}: {value}\r\n".encode() for name, value in SAFE_HEADERS.items()]
    head.append(f"{REQUEST_ID}: {request_id}\r\n\r\n".encode())
    return b"".join([*head, bytes(response.body)])


def until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Send replies of unknown length without chunks, ended by the connection, as HTTP/1.0 requires."""
    has_length = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_chunks(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = "content-length" in Headers(raw=message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length and scope["method"] != "HEAD":
                cycle.expected_content_length = len(message.get("body", b""))  # all that was announced
            await send(message)

        await app(scope, receive, send_without_chunks)

    return serve
