"""Bound one WebSocket's frames, unreadable handshakes and bytes behind its close. Knows no events."""

import logging
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError
from websockets.frames import Frame

from asr_server import metrics
from asr_server.api.errors import response_to
from asr_server.api.middleware import BROKEN, CLOSED_BY_SERVER, UNKNOWN_ROUTE, new_request_id
from asr_server.errors import HeadersTooLarge, InvalidValue
from asr_server.protocols.http import raw_reply

SLICE_BYTES: Final = 4096  # parsed before frames are counted: 680 empty ones, some milliseconds
MAX_FRAMES_AHEAD: Final = 1024.0  # small frames that may come in a burst
FRAMES_PER_S: Final = 50.0  # small frames that may come all the time
BYTES_PER_FRAME: Final = 64  # a frame of so many bytes pays for itself

logger = logging.getLogger(__name__)


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._frames_left = MAX_FRAMES_AHEAD
        self._refilled_at = self.loop.time()
        self._num_bytes_after_close = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop unread messages: megabytes would wait for the garbage collector."""
        super().connection_lost(exc)
        self.frames = []
        self.conn.reader.buffer = bytearray()
        left = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for message in left:  # the client's close comes before the end of its connection
            if message["type"] == "websocket.disconnect":
                has_closed = self.conn.close_rcvd or self.conn.close_sent
                self.queue.put_nowait(message if has_closed else message | {"code": BROKEN})

    def data_received(self, data: bytes) -> None:
        if self.close_sent:
            self._num_bytes_after_close += len(data)
        for first in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[first : first + SLICE_BYTES])
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                self._refuse_handshake(self.conn.handshake_exc)
            elif self._frames_left < 0 or self._num_bytes_after_close > self.config.ws_max_size:
                logger.info("closed the WebSocket of %s: it sends without end", self.client)
                self.transport.abort()

    async def send(self, message: Any) -> None:
        """Count a refusal by HTTP as an answer, or uvicorn logs an open handshake."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        now = self.loop.time()
        gained = FRAMES_PER_S * (now - self._refilled_at)
        gained += sum(len(frame.data) / BYTES_PER_FRAME - 1 for frame in frames)
        self._frames_left, self._refilled_at = min(MAX_FRAMES_AHEAD, self._frames_left + gained), now
        super().handle_events()

    def handle_parser_exception(self) -> None:
        self.scope["state"][CLOSED_BY_SERVER] = True
        super().handle_parser_exception()

    def _refuse_handshake(self, reason: Exception) -> None:
        is_too_large = isinstance(reason, SecurityError) or isinstance(reason.__cause__, SecurityError)
        text = f"No WebSocket handshake: {reason.__cause__ or reason}."
        error = HeadersTooLarge(text) if is_too_large else InvalidValue(text)
        response = response_to(error)
        metrics.requests.labels(UNKNOWN_ROUTE, str(response.status_code)).inc()
        self.transport.write(raw_reply(response, new_request_id()))
        self.transport.close()
