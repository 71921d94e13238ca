"""Reads a manifest: JSON lines, each of which names a recording. Holds one line at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec

MAX_LINE_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 1 << 20


class _Line(msgspec.Struct):
    """What a line may say; other fields are let pass, since manifests of other tools have their own."""

    audio: Annotated[str, msgspec.Meta(min_length=1)]
    id: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    language: str | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class Entry:
    """One recording that a manifest names."""

    offset: int  # of its line in the manifest, in bytes
    id: str  # names its results
    audio: Path
    language: str | None = None  # None: as for the whole job
    prompt: str | None = None


@dataclass(frozen=True)
class BadLine:
    offset: int
    reason: str


def read_entries(manifest: Path, start: int = 0, stop: int | None = None) -> Iterator[Entry | BadLine]:
    """The lines that begin from byte `start` to before `stop`; blank ones are left out. Raises OSError."""
    decoder = msgspec.json.Decoder(_Line)
    for offset, line in _lines(manifest, start, stop):
        if line.strip():
            yield _parsed(decoder, manifest.parent, offset, line)


def count_lines(manifest: Path) -> int:
    """Those that are not blank, without parsing them: a gigabyte takes seconds. Raises OSError."""
    count, at_beginning = 0, True
    with manifest.open("rb") as file:
        while part := file.readline(_BLOCK_BYTES):  # of a long line the beginning decides
            count += at_beginning and not part.isspace()
            at_beginning = part.endswith(b"\n")
    return count


def _lines(manifest: Path, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Of a line that is too long only the beginning."""
    with manifest.open("rb") as file:
        if start > 0:  # the line that `start` lies within belongs to the bytes before, unless it begins there
            file.seek(start - 1)
            _skip_line(file)
        while stop is None or file.tell() < stop:
            offset = file.tell()
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                _skip_line(file)
            yield offset, line


def _skip_line(file: BinaryIO) -> None:
    """To the beginning of the next line, without holding the rest of this one."""
    while (part := file.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass


def _parsed(decoder: msgspec.json.Decoder[_Line], folder: Path, offset: int, text: bytes) -> Entry | BadLine:
    if len(text) > MAX_LINE_BYTES:
        return BadLine(offset, f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadLine(offset, f"not a line of a manifest: {error}")
    return Entry(offset, line.id or line.audio, folder / line.audio, line.language, line.prompt)
