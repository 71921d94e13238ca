"""Messages to frames and back: msgpack, with arrays beside it. No pickle.

An array below `INLINE_BYTES` is part of the message; a larger one lies in shared memory or, without room
there, in its own frame. The threshold and frames follow vLLM's tensor transport (pull request 16432). The
reader does not copy. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from asr_server.channel.messages import Command, Event
from asr_server.channel.shared_memory import (
    SharedMemoryReader,
    SharedMemoryWriter,
    as_bytes,
    from_bytes,
    is_array,
    type_name,
)

INLINE_BYTES: Final = 256
ARRAY: Final = 1  # msgpack's extension type for the arrays of a message

Frame = bytes | memoryview
T = TypeVar("T")


class MalformedMessage(Exception):
    """The frames are no message of this family, or its arrays do not fit."""


class _Array(msgspec.Struct, array_like=True):
    type_name: str
    shape: tuple[int, ...]
    inline: bytes | None = None
    frame: int | None = None
    offset: int | None = None  # in shared memory


class Wire(Generic[T]):
    def __init__(self, message_type: Any) -> None:
        self._message_type = message_type

    def encode(self, message: T, shared: SharedMemoryWriter | None = None) -> list[Frame]:
        """Return the header frame, and a frame for each large array, which aliases its memory."""
        frames: list[Frame] = [b""]
        frames[0] = msgspec.msgpack.encode(message, enc_hook=_array_writer(frames, shared))
        return frames

    def decode(self, frames: Sequence[Frame], shared: SharedMemoryReader | None = None) -> T:
        """Return the message; its arrays are read-only views. Raises MalformedMessage."""
        try:
            message: T = msgspec.msgpack.decode(
                frames[0],
                type=self._message_type,
                ext_hook=_array_reader(frames, shared),
                dec_hook=_expect_array,
            )
        except (msgspec.MsgspecError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise MalformedMessage(str(error)) from error
        return message


def _array_writer(frames: list[Frame], shared: SharedMemoryWriter | None) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()  # a plain number
        if not is_array(value):
            raise NotImplementedError(f"{type(value).__name__} does not cross the wire")
        header = _Array(type_name(value), tuple(value.shape))
        if value.nbytes < INLINE_BYTES:
            header.inline = as_bytes(value).tobytes()
        elif shared is not None and (offset := shared.write(value)) is not None:
            header.offset = offset
        else:
            frames.append(as_bytes(value).data)
            header.frame = len(frames) - 1
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(header))

    return write


def _array_reader(
    frames: Sequence[Frame], shared: SharedMemoryReader | None
) -> Callable[[int, memoryview], Any]:
    def read(code: int, data: memoryview) -> Any:
        if code != ARRAY:
            raise ValueError(f"extension type {code} is unknown")
        header = msgspec.msgpack.decode(data, type=_Array)
        return from_bytes(_content(header), header.type_name, header.shape)

    def _content(header: _Array) -> Any:
        match header:
            case _Array(inline=bytes(content)):
                return content
            case _Array(frame=int(number)) if 0 < number < len(frames):
                return frames[number]
            case _Array(offset=int(offset)) if shared is not None:
                return shared.read(offset)
        raise ValueError("an array without content")

    return read


def _expect_array(_: type, value: Any) -> Any:
    if not is_array(value):
        raise ValueError(f"{type(value).__name__} where an array belongs")
    return value


commands: Final[Wire[Command]] = Wire(Command)
events: Final[Wire[Event]] = Wire(Event)
