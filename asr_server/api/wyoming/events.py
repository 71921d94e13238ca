"""Reads events of the Wyoming protocol, each of a bounded size, and checks what they say.

An event is a line of JSON, more JSON if `data_length` says so, and bytes if `payload_length` says so. The
package's own reader takes lengths of any size, which is why this one is here; its types are used to write.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Annotated, Any, Final, TypeVar

import msgspec
from wyoming.event import Event

from asr_server.errors import InvalidValue

MAX_LINE_BYTES: Final = 64 * 1024
MAX_DATA_BYTES: Final = 64 * 1024
MAX_PAYLOAD_BYTES: Final = 256 * 1024  # clients send some thousand bytes at a time

T = TypeVar("T")


class _Header(msgspec.Struct):
    type: str
    data: dict[str, Any] | None = None
    data_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_DATA_BYTES)] | None = None
    payload_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_BYTES)] | None = None


class AudioFormat(msgspec.Struct, frozen=True):
    """As `audio-start` and each `audio-chunk` name it."""

    rate: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    width: Annotated[int, msgspec.Meta(ge=1, le=4)]  # bytes of a sample
    channels: Annotated[int, msgspec.Meta(ge=1, le=1024)]

    def wav_header(self) -> bytes:
        """Of a file whose length is not known yet, which decoders take."""
        frame_bytes = self.width * self.channels
        rates = (self.rate, self.rate * frame_bytes & 0xFFFFFFFF, frame_bytes, 8 * self.width)
        content = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, self.channels, *rates)
        return b"RIFF\xff\xff\xff\xffWAVE" + content + b"data\xff\xff\xff\xff"


class Transcribe(msgspec.Struct, frozen=True):
    """What a client may ask for beside its audio. Other fields mean nothing here and are let pass."""

    name: str | None = None  # of the model
    language: str | None = None
    transcript_names: tuple[str, ...] | None = None
    transcript_terms: tuple[str, ...] | None = None

    @property
    def keywords(self) -> tuple[str, ...]:
        return (*(self.transcript_names or ()), *(self.transcript_terms or ()))


def content_of(event: Event, content_type: type[T]) -> T:
    """Raises InvalidValue."""
    try:
        return msgspec.convert(event.data, content_type)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"The event '{event.type[:80]}' is not valid: {error}.") from None


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """None: the client has left, perhaps in the middle of an event. Raises InvalidValue."""
    try:
        header = msgspec.json.decode(await reader.readuntil(b"\n"), type=_Header)
        data = header.data or {}
        if header.data_length:
            data |= msgspec.json.decode(await reader.readexactly(header.data_length), type=dict[str, Any])
        payload = await reader.readexactly(header.payload_length) if header.payload_length else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError:
        raise InvalidValue(f"The line of an event is longer than {MAX_LINE_BYTES} bytes.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidValue(f"Not an event of the Wyoming protocol: {error}.") from None
    return Event(header.type, data, payload)
