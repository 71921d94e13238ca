"""Cut a WebSocket client's large frames into fragments, so that each is parsed quickly.

A frame of 20 MB would be copied, unmasked and checked at once. Each fragment keeps the frame's mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 64 * 1024  # of a large frame's payload; a multiple of the mask's four bytes
SMALL_BYTES: Final = 2048  # of small frames that are parsed at once: 340 at most, some milliseconds
FINAL: Final = 0x80  # in a head's first byte, beside the kind of the frame
_KIND: Final = 0x0F
_CONTROL: Final = 0x08  # this kind and those above it have no fragments
MASKED: Final = 0x80  # in the second byte, beside the length
LENGTH_BEHIND: Final = {126: 2, 127: 8}  # its bytes, where it does not fit into that byte
MASK_BYTES: Final = 4


class FrameCutter:
    def __init__(self, max_bytes: int) -> None:
        """Leave a frame longer than `max_bytes` whole: the parser refuses it by its head."""
        self._max_bytes = max_bytes
        self._head = bytearray()  # of the next frame, as far as it is here
        self._num_passing = 0  # bytes of payload that come before the next head
        self._num_left = 0  # bytes behind them, of a large frame
        self._first = 0  # the first byte of its next fragment
        self._mask = b""
        self.drops_rest = False  # of large frames: nobody reads it

    def cut(self, data: bytes) -> Iterator[bytes]:
        part, at = bytearray(), 0
        while at < len(data):
            if self._num_passing:
                taken = data[at : at + self._num_passing]
                self._num_passing -= len(taken)
                at += len(taken)
                part += taken
            elif self._num_left and self.drops_rest:
                dropped = min(len(data) - at, self._num_left)
                self._num_left -= dropped
                at += dropped
            elif self._num_left:
                part += self._head_of_fragment()
            else:
                taken = data[at : at + self._head_bytes() - len(self._head)]
                at += len(taken)
                part += self._add_to_head(taken)
            if len(part) >= SMALL_BYTES:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)

    def _head_bytes(self) -> int:
        if len(self._head) < 2:
            return 2
        second = self._head[1]
        return 2 + LENGTH_BEHIND.get(second & ~MASKED, 0) + (MASK_BYTES if second & MASKED else 0)

    def _add_to_head(self, data: bytes) -> bytes:
        """Return the complete head, that of the first fragment if the frame is large."""
        self._head += data
        if len(self._head) < self._head_bytes():
            return b""
        head, self._head = bytes(self._head), bytearray()
        first, second = head[:2]
        num_more = LENGTH_BEHIND.get(second & ~MASKED, 0)
        length = int.from_bytes(head[2 : 2 + num_more], "big") if num_more else second & ~MASKED
        is_cut = PIECE_BYTES < length <= self._max_bytes and second & MASKED and first & _KIND < _CONTROL
        if not is_cut:
            self._num_passing = length
            return head
        self._num_left, self._first, self._mask = length, first, head[-MASK_BYTES:]
        return self._head_of_fragment()

    def _head_of_fragment(self) -> bytes:
        size = min(PIECE_BYTES, self._num_left)
        self._num_passing, self._num_left = size, self._num_left - size
        first = self._first & ~FINAL if self._num_left else self._first
        self._first &= FINAL  # those behind it go on with the message
        return bytes((first, MASKED | 127)) + size.to_bytes(8, "big") + self._mask
