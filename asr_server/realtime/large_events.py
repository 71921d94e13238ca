"""Read an event of megabytes piece by piece, so that the event loop goes on.

Only an append may be so large. Its base64 is decoded in place; the rest is parsed as an event without
audio.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from asr_server.api.websockets import LARGE_BYTES
from asr_server.errors import InvalidValue
from asr_server.realtime.client_events import APPEND, MAX_APPEND_BYTES, AppendAudio, parse_client_event

MAX_AROUND_BYTES: Final = 4096  # of the event before its audio, and behind it
GROUP: Final = 4  # characters of base64 that stand for three bytes
_AUDIO: Final = re.compile(rb'"audio"[ \t\r\n]*:[ \t\r\n]*"')


def check_begins_append(pieces: Sequence[bytes]) -> None:
    """Raise InvalidValue unless these first pieces of an event hold the begin of its audio."""
    _split_at_audio(pieces)


def large_append(pieces: Sequence[bytes]) -> Iterator[AppendAudio]:
    """Yield an append in parts. Raises InvalidValue first for any other event."""
    before, blocks = _split_at_audio(pieces)
    blocks, tail = _until_quote(blocks)
    if not isinstance(event := parse_client_event(before + b'"' + tail), AppendAudio):
        raise _too_large()
    if sum(map(len, blocks)) > MAX_APPEND_BYTES * GROUP // 3:
        raise InvalidValue(f"Invalid event at 'audio': it has more than {MAX_APPEND_BYTES} bytes.", "audio")
    for audio in _decoded(blocks):
        yield msgspec.structs.replace(event, audio=audio)


def _split_at_audio(pieces: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    first, rest = _joined(pieces)
    begin = _AUDIO.search(first, 0, MAX_AROUND_BYTES)
    if begin is None:
        raise _too_large()
    return first[: begin.end()], [first[begin.end() :], *rest]


def _joined(pieces: Sequence[bytes]) -> tuple[bytes, Sequence[bytes]]:
    """Return at least MAX_AROUND_BYTES, and the pieces behind."""
    first = bytearray()
    for place, piece in enumerate(pieces):
        if len(first) >= MAX_AROUND_BYTES:
            return bytes(first), pieces[place:]
        first += piece
    return bytes(first), ()


def _until_quote(blocks: list[bytes]) -> tuple[list[bytes], bytes]:
    """Split at the first quotation mark."""
    for place, block in enumerate(blocks):
        if (end := block.find(b'"')) >= 0:
            behind = [block[end + 1 :], *blocks[place + 1 :]]
            if sum(map(len, behind)) > MAX_AROUND_BYTES:
                break
            return [*blocks[:place], block[:end]], b"".join(behind)
    raise _too_large()


def _decoded(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Decode base64; some clients escape the slash."""
    rest = b""
    try:
        for block in blocks:
            coded = (rest + block).replace(b"\\/", b"/")
            end = (len(coded) - coded.endswith(b"\\")) // GROUP * GROUP
            yield binascii.a2b_base64(coded[:end], strict_mode=True)
            rest = coded[end:]
        yield binascii.a2b_base64(rest, strict_mode=True)
    except binascii.Error:
        raise InvalidValue("Invalid event at 'audio': it is no base64.", "audio") from None


def _too_large() -> InvalidValue:
    return InvalidValue(
        f"Only '{APPEND}' may have more than {LARGE_BYTES} bytes, and of these at most {MAX_AROUND_BYTES} on "
        f"either side of its audio."
    )
