"""Writes small files as CTranslate2 and whisper.cpp lay them out, byte by byte."""

import struct
from collections.abc import Sequence

SIZES = (51865, 1500, 384, 6, 4, 448, 384, 6, 4, 80, 1)


def ctranslate2(body: bytes, count: int, end: bytes = b"") -> bytes:
    """`count` variables in `body`, then `end`: their second names."""
    name = b"WhisperSpec\0"
    return struct.pack("<IH", 6, len(name)) + name + struct.pack("<2I", 3, count) + body + end


def text(name: str) -> bytes:
    encoded = name.encode() + b"\0"
    return struct.pack("<H", len(encoded)) + encoded


def variable(name: str, shape: tuple[int, ...], content: bytes = b"", dtype: int = 0) -> bytes:
    sizes = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    return text(name) + sizes + struct.pack("<BI", dtype, len(content)) + content


def ggml(*numbers: int, sizes: Sequence[int] = SIZES) -> bytes:
    return b"lmgg" + struct.pack(f"<{len(sizes) + len(numbers)}i", *sizes, *numbers)


def ggml_tensor(name: str, shape: tuple[int, ...], content: bytes, kind: int = 0) -> bytes:
    numbers = (len(shape), len(name), kind, *reversed(shape))
    return struct.pack(f"<{len(numbers)}i", *numbers) + name.encode() + content
