"""Messages to frames and back: msgpack for what is small, arrays in frames of their own. No pickle.

An array below `INLINE_BYTES` rides inside the message; a larger one becomes a frame beside it, so that
nothing is packed twice and the reader looks at the received bytes without copying them. The idea and the
threshold are those of vLLM's tensor transport (pull request 16432).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from asr_server.core import Command, Event

INLINE_BYTES: Final = 256

Frame = bytes | memoryview
T = TypeVar("T")


class Wire(Generic[T]):
    """Encodes and decodes one family of messages."""

    def __init__(self, message_type: Any) -> None:
        self._message_type = message_type

    def encode(self, message: T) -> list[Frame]:
        """The header frame, then a frame for each large array. The frames alias the arrays' memory."""
        frames: list[Frame] = [b""]
        frames[0] = msgspec.msgpack.encode(message, enc_hook=_array_writer(frames))
        return frames

    def decode(self, frames: Sequence[Frame]) -> T:
        """Arrays of the result are read-only views of `frames`.

        Raises msgspec.ValidationError when the header is not such a message.
        """
        message: T = msgspec.msgpack.decode(
            frames[0], type=self._message_type, dec_hook=_array_reader(frames)
        )
        return message


def _array_writer(frames: list[Frame]) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} does not cross the wire")
        array = np.ascontiguousarray(value)
        if array.nbytes < INLINE_BYTES:
            return (array.dtype.str, array.shape, array.tobytes())
        frames.append(array.data.cast("B"))
        return (array.dtype.str, array.shape, len(frames) - 1)

    return write


def _array_reader(frames: Sequence[Frame]) -> Callable[[type, Any], Any]:
    def read(_: type, value: Any) -> Any:
        dtype, shape, body = value
        data = frames[body] if isinstance(body, int) else body
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)

    return read


commands: Final[Wire[Command]] = Wire(Command)
events: Final[Wire[Event]] = Wire(Event)
