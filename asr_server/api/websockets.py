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
from asr_server.api.frames import PIECE_BYTES, FrameCutter
from asr_server.api.middleware import BROKEN, CLOSED_BY_SERVER, UNKNOWN_ROUTE, new_request_id
from asr_server.errors import HeadersTooLarge, InvalidValue

MAX_FRAMES_AHEAD: Final = 1024.0  # small frames that may come in a burst
FRAMES_PER_S: Final = 50.0  # small frames that may come all the time
BYTES_PER_FRAME: Final = 64  # a frame of so many bytes pays for itself
LARGE_BYTES: Final = 512 * 1024  # a longer message is handed over as it comes, in several events
# In these events:
PIECES: Final = "pieces"  # of text, as bytes; none of a binary message
MORE: Final = "more"  # whether others follow

logger = logging.getLogger(__name__)


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cutter = FrameCutter(self.config.ws_max_size)
        self._frames_left = MAX_FRAMES_AHEAD
        self._refilled_at = self.loop.time()
        self._num_bytes_after_close = 0
        self._num_held = 0  # bytes of the message under way that were not handed over
        self._is_large = False  # some were

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop unread messages: 40 MB would wait for the garbage collector."""
        super().connection_lost(exc)
        self.frames = []
        self.conn.reader.buffer = bytearray()
        left = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for message in left:  # the client's close comes before the end of its connection
            if message["type"] == "websocket.disconnect":
                has_closed = self.conn.close_rcvd or self.conn.close_sent
                self.queue.put_nowait(message if has_closed else message | {"code": BROKEN})

    def data_received(self, data: bytes) -> None:
        """Parse in parts: small frames cost more than bytes."""
        if self.close_sent:
            self._num_bytes_after_close += len(data)
        for part in self._cutter.cut(data) if self.handshake_initiated else (data,):
            if self.transport.is_closing():
                return
            self._receive_part(part)

    def _receive_part(self, data: bytes) -> None:
        super().data_received(data)
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
        self._cutter.drops_rest = self.close_sent

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

    def handle_text(self, event: Frame) -> None:
        self._num_held = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._num_held = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._num_held += len(event.data)
        super().handle_cont(event)
        if not event.fin and self._num_held > (PIECE_BYTES if self._is_large else LARGE_BYTES):
            self._hand_over(more=True)

    def send_receive_event_to_app(self) -> None:
        if self._is_large or self._num_held > LARGE_BYTES:
            self._hand_over(more=False)
        else:
            super().send_receive_event_to_app()

    def _hand_over(self, more: bool) -> None:
        """Hand over what is here of a large message, and read on when it was taken."""
        pieces = self.frames if self.curr_msg_data_type == "text" else []
        self.frames, self._num_held, self._is_large = [], 0, more
        if self.close_sent:
            return
        event: Any = {"type": "websocket.receive", PIECES: pieces, MORE: more}
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
