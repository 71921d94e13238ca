"""Bound one WebSocket's frames, unreadable handshakes and bytes behind its close. Knows no events."""

from __future__ import annotations

import logging
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError
from websockets.frames import Frame

from asr_server import metrics
from asr_server.api.connections import raw_reply
from asr_server.api.errors import response_to
from asr_server.api.frames import FrameCutter
from asr_server.api.middleware import UNKNOWN_ROUTE, new_request_id
from asr_server.errors import HeadersTooLarge, InvalidValue

MAX_FRAMES_AHEAD: Final = 1024.0  # small frames that may come in a burst
FRAMES_PER_S: Final = 50.0  # small frames that may come all the time
BYTES_PER_FRAME: Final = 64  # a frame of so many bytes pays for itself
MAX_BYTES_AFTER_CLOSE: Final = 64 * 1024
LARGE_BYTES: Final = 512 * 1024  # a longer message is handed over in its pieces, not as one text
PIECES: Final = "pieces"  # in the event of such a message: of text as bytes; none of a binary one

logger = logging.getLogger(__name__)


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cutter = FrameCutter(self.config.ws_max_size)
        self._frames_left = MAX_FRAMES_AHEAD
        self._refilled_at = self.loop.time()
        self._num_bytes_after_close = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop unread messages: 40 MB would wait for the garbage collector."""
        super().connection_lost(exc)
        self.frames = []
        self.conn.reader.buffer = bytearray()
        left = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for message in left:  # the client's close comes before the end of its connection
            if message["type"] == "websocket.disconnect":
                self.queue.put_nowait(message)

    def data_received(self, data: bytes) -> None:
        """Parse in parts: small frames cost more than bytes."""
        for part in self._cutter.cut(data) if self.handshake_initiated else (data,):
            if self.transport.is_closing():
                return
            self._receive_part(part)

    def _receive_part(self, data: bytes) -> None:
        super().data_received(data)
        if self.close_sent:
            self._num_bytes_after_close += len(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake(self.conn.handshake_exc)
        elif self._frames_left < 0 or self._num_bytes_after_close > MAX_BYTES_AFTER_CLOSE:
            logger.info("closed the WebSocket of %s: it sends too many small frames", self.client)
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

    def send_receive_event_to_app(self) -> None:
        if self.close_sent or sum(map(len, self.frames)) <= LARGE_BYTES:
            super().send_receive_event_to_app()
            return
        pieces = self.frames if self.curr_msg_data_type == "text" else []
        self.frames = []
        event: Any = {"type": "websocket.receive", PIECES: pieces}
        self.queue.put_nowait(event)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _refuse_handshake(self, reason: Exception) -> None:
        """Refuse an upgrade that is no handshake: a POST, or a line too long."""
        causes = (reason, reason.__cause__)
        is_too_large = any(isinstance(cause, SecurityError) for cause in causes)
        text = f"No WebSocket handshake: {reason.__cause__ or reason}."
        error = HeadersTooLarge(text) if is_too_large else InvalidValue(text)
        response = response_to(error)
        metrics.requests.labels(UNKNOWN_ROUTE, str(response.status_code)).inc()
        self.transport.write(raw_reply(response, new_request_id()))
        self.transport.close()
