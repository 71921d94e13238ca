"""Reads multipart/form-data as it arrives, so that a body over the limit is refused before all of it is here.

The bytes of an upload are held once: in a file in memory while they are few, beyond that in one on disk.
Neither file has a name. Used by `transcribe.py`, which hands it to a `Recording`, and by `wyoming.py`. Runs
in the API process; writes to the disk in threads, never on the event loop. Decodes no audio. Starlette's own
parser spools through a thread for every piece above 1 MB and knows no limit on a file.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from asr_server.audio.recording import memory_file
from asr_server.config import MIB, in_mebibytes, naming
from asr_server.errors import InvalidAudio, InvalidValue, StorageUnavailable, UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB  # of one upload
WRITE_BYTES: Final = MIB // 4  # gathered before a thread is asked to write them to disk

logger = logging.getLogger(__name__)


class UploadMemory:
    """Counts the bytes that all uploads together hold in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self._max_bytes


class Upload:
    """Every method but `close` raises StorageUnavailable where there is no room, or no temporary folder."""

    def __init__(self, max_bytes: int, memory: UploadMemory) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._memory = memory
        self._num_in_memory = 0
        self._file: BinaryIO | None = None
        self._is_on_disk = False
        self._unwritten = bytearray()  # on their way to the disk

    def add(self, data: bytes | memoryview) -> None:
        """Raises UploadTooLarge as soon as the limit is passed."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._count_memory(len(data))
        if self._is_on_disk:
            self._unwritten += data
            return
        with _storing():
            if self._file is None:
                self._file = memory_file()
            self._file.write(data)

    async def spill_to_disk(self) -> None:
        """Moves the upload to the disk, in a thread, if it or all uploads together take too much memory."""
        limit = WRITE_BYTES if self._is_on_disk else MEMORY_BYTES
        if self._num_in_memory and (self._num_in_memory >= limit or self._memory.is_full):
            await _in_thread(self._append if self._is_on_disk else self._move)
            self._count_memory(-self._num_in_memory)

    async def source(self) -> BinaryIO:
        """Returns the whole upload. Valid until `close`."""
        if self._is_on_disk:
            await _in_thread(self._append)
            self._count_memory(-self._num_in_memory)
        assert self._file is not None
        return self._file

    def _move(self) -> None:
        assert self._file is not None
        on_disk = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._file.seek(0)
            shutil.copyfileobj(self._file, on_disk)
            on_disk.flush()
        except BaseException:
            on_disk.close()
            raise
        self._file.close()
        self._file, self._is_on_disk = on_disk, True

    def _append(self) -> None:
        assert self._file is not None
        self._file.write(self._unwritten)
        self._file.flush()
        self._unwritten.clear()

    def _count_memory(self, num_bytes: int) -> None:
        self._num_in_memory += num_bytes
        self._memory.num_bytes += num_bytes

    def close(self) -> None:
        """Frees the memory or the file. May be called more than once."""
        self._unwritten.clear()
        self._count_memory(-self._num_in_memory)
        if self._file is not None:
            with _storing(quietly=True):  # closing writes what is still in its buffer
                self._file.close()


async def _in_thread(function: Callable[[], None]) -> None:
    with _storing():
        await asyncio.to_thread(function)


@contextmanager
def _storing(quietly: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if quietly:
            return
        logger.error("an upload cannot be stored: %s", error)
        raise StorageUnavailable("The server has no room for the upload.") from error


def too_large(max_bytes: int) -> UploadTooLarge:
    return UploadTooLarge(
        f"The file is larger than {in_mebibytes(max_bytes)}, the most that this server takes "
        f"({naming('max_upload_bytes')}). A compressed format, such as mp3 or opus, is smaller."
    )


FILE: Final = "file"
MAX_FIELDS: Final = 512
MAX_NAME_BYTES: Final = 256
MAX_VALUE_BYTES: Final = 64 * 1024
VOICE_FIELD: Final = "known_speaker_references"
MAX_VOICE_BYTES: Final = MIB  # of one such value, as base64: 10 s of 16 bits at 37 kHz
MAX_HEADER_BYTES: Final = 4096  # of one part
MAX_OVERHEAD_BYTES: Final = 6 * MIB  # of the body beyond the file: fields, boundaries


class Form:
    """The fields of a request's form: the file, and the text fields in their order."""

    def __init__(self, max_upload_bytes: int, memory: UploadMemory) -> None:
        self.upload = Upload(max_upload_bytes, memory)
        self.fields: list[tuple[str, str]] = []
        self.has_file = False

    def close(self) -> None:
        self.upload.close()


class ReadingTurns:
    """Lets one upload read on in each round of the event loop, in the order in which they ask.

    A piece is up to 256 KiB and takes the loop some tenths of a millisecond, to read and to store. With many
    fast clients a round would be as long as the pieces of all of them, and a probe would wait for it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Waits for this upload's turn to read a piece. Waiting for the client's bytes uses no turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._give, loop)
        self._waiting.append(turn)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once a round of the loop, for as long as somebody waits."""
        turn = self._waiting.popleft()
        if not turn.done():  # the request may have been cancelled
            turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._give, loop)


async def read_form(request: Request, form: Form, max_upload_bytes: int, turns: ReadingTurns) -> None:
    """Fills `form`.

    Raises InvalidValue, InvalidAudio, UploadTooLarge; ClientDisconnect when the client leaves meanwhile.
    """
    _check_not_compressed(request)
    max_body_bytes = max_upload_bytes + MAX_OVERHEAD_BYTES
    if _announced_bytes(request) > max_body_bytes:
        raise too_large(max_upload_bytes)
    reader = _PartReader(form)
    parser = _parser(_boundary(request), reader)
    num_bytes = 0
    await turns.next()
    async for data in request.stream():
        num_bytes += len(data)
        if num_bytes > max_body_bytes:
            raise too_large(max_upload_bytes)
        _write(parser, data)
        await form.upload.spill_to_disk()
        await turns.next()
    reader.check_complete()


def _check_not_compressed(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidValue(f"The body has Content-Encoding '{encoding[:80]}': send it without.")


def _announced_bytes(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _boundary(request: Request) -> bytes:
    content_type, options = parse_options_header(request.headers.get("content-type"))
    if content_type != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidValue("The request must be multipart/form-data with a boundary.", FILE)
    return options[b"boundary"]


def _parser(boundary: bytes, reader: _PartReader) -> MultipartParser:
    try:
        return MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
    except FormParserError as error:  # longer than any client's
        raise InvalidValue("The multipart boundary is too long.") from error


def _write(parser: MultipartParser, data: bytes) -> None:
    try:
        parser.write(data)
    except FormParserError as error:
        raise _malformed() from error


def _malformed() -> InvalidValue:
    return InvalidValue("The multipart body is malformed or incomplete.")


class _PartReader:
    """Takes the parser's callbacks, one part at a time."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""
        self._is_sent_as_file = False
        self._value = bytearray()
        self._is_complete = False

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def check_complete(self) -> None:
        if not self._is_complete:
            raise _malformed()
        if not self._form.has_file:
            raise InvalidValue("'file' is required.", FILE)
        if not self._form.upload.num_bytes:
            raise InvalidAudio("The file is empty.")

    def _on_part_begin(self) -> None:
        self._disposition = b""
        self._value = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > MAX_HEADER_BYTES:
            raise _malformed()

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name = bytearray()
        self._header_value = bytearray()

    def _on_headers_finished(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"")
        self._is_sent_as_file = b"filename" in options
        if not name or len(name) > MAX_NAME_BYTES:
            raise _malformed()
        self._name = name.decode("utf-8", "replace")
        if self._name == FILE and self._form.has_file:
            raise InvalidValue("'file' was given more than once.", FILE)
        if len(self._form.fields) >= MAX_FIELDS:
            raise InvalidValue(f"More than {MAX_FIELDS} fields.", self._name)
        self._form.has_file |= self._name == FILE

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._form.upload.add(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        limit = MAX_VOICE_BYTES if self._name.startswith(VOICE_FIELD) else MAX_VALUE_BYTES
        if len(self._value) > limit:
            raise self._invalid_text(f"is longer than {limit} bytes")

    def _on_part_end(self) -> None:
        if self._name == FILE:
            return
        try:
            self._form.fields.append((self._name, self._value.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise self._invalid_text("is not UTF-8 text") from error

    def _invalid_text(self, what: str) -> InvalidValue:
        """Makes the error for a text field that is not valid: mostly it is a recording under a wrong name."""
        if self._is_sent_as_file and not self._form.has_file:
            return InvalidValue(f"'file' is missing: a file was sent as '{self._name}'.", FILE)
        return InvalidValue(f"'{self._name}' {what}.", self._name)

    def _on_end(self) -> None:
        self._is_complete = True
