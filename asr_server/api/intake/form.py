"""Read multipart/form-data as it arrives; refuse a body over the limit early.

Starlette's parser spools each piece above 1 MB through a thread and has no file limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartState, parse_options_header
from starlette.requests import Request

from asr_server.api.intake.upload import Upload, UploadStore, too_large
from asr_server.config import MIB
from asr_server.errors import InvalidAudio, InvalidValue

FILE: Final = "file"
MAX_FIELDS: Final = 512
MAX_NAME_BYTES: Final = 256
MAX_VALUE_BYTES: Final = 64 * 1024
VOICE_FIELD: Final = "known_speaker_references"
MAX_VOICE_BYTES: Final = MIB  # of one such value, as base64: 10 s of 16 bits at 37 kHz
MAX_HEADER_BYTES: Final = 4096  # of one part
MAX_PATH_BYTES: Final = 256  # a longer file is not looked at as a path
MAX_DELIMITERS: Final = MAX_FIELDS + 16  # also of those that stand within a part
SLICE_BYTES: Final = 8 * 1024  # parsed in one go
PLAIN_SLICE_BYTES: Final = 64 * 1024  # of a part's content, which is only searched
MAX_TURN_S: Final = 0.001  # of parsing
MAX_OVERHEAD_BYTES: Final = 6 * MIB  # of the body beyond the file: fields, boundaries


class Form:
    def __init__(self, max_upload_bytes: int, store: UploadStore, file_name: str = FILE) -> None:
        self.upload = Upload(max_upload_bytes, store)
        self.fields: list[tuple[str, str]] = []
        self.file_name = file_name
        self.has_file = False

    def close(self) -> None:
        self.upload.close()


class ReadingTurns:
    """Let one upload read in each round of the event loop, in order.

    A piece takes some tenths of a millisecond; with many fast clients, a probe would wait for all of
    them.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._give, loop)
        self._waiting.append(turn)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._waiting.popleft()
        if not turn.done():  # the request may have been cancelled
            turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._give, loop)


async def read_form(request: Request, form: Form, max_upload_bytes: int, turns: ReadingTurns) -> None:
    """Fill `form`.

    Raises InvalidValue, InvalidAudio, UploadTooLarge, ClientDisconnect.
    """
    _check_not_compressed(request)
    max_body_bytes = max_upload_bytes + MAX_OVERHEAD_BYTES
    if _announced_bytes(request) > max_body_bytes:
        raise too_large(max_upload_bytes)
    form.upload.require_room(_announced_bytes(request) - MAX_OVERHEAD_BYTES)
    reader = _PartReader(form)
    parser = _Parser(_boundary(request), reader, turns)
    num_bytes = 0
    await turns.next()
    async for data in request.stream():
        num_bytes += len(data)
        if num_bytes > max_body_bytes:
            raise too_large(max_upload_bytes)
        await parser.write(data)
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


class _Parser:
    """Parse in slices and yield when these are slow: a byte behind a delimiter can cost 750 ns."""

    def __init__(self, boundary: bytes, reader: _PartReader, turns: ReadingTurns) -> None:
        self._turns = turns
        self._delimiter = b"\r\n--" + boundary
        self._num_delimiters = 0
        try:
            self._parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        except FormParserError as error:  # longer than any client's
            raise InvalidValue("The multipart boundary is too long.") from error

    async def write(self, data: bytes) -> None:
        self._num_delimiters += data.count(self._delimiter)
        if self._num_delimiters > MAX_DELIMITERS:
            raise InvalidValue(f"The multipart body has more than {MAX_DELIMITERS} boundaries.")
        began_at = time.perf_counter()
        start = 0
        while start < len(data):
            end = self._end_of_slice(data, start)
            self._write(data[start:end])
            start = end
            if time.perf_counter() - began_at > MAX_TURN_S:
                await self._turns.next()
                began_at = time.perf_counter()

    def _end_of_slice(self, data: bytes, start: int) -> int:
        end, plain_end = start + SLICE_BYTES, start + PLAIN_SLICE_BYTES
        if self._parser.state is not MultipartState.PART_DATA or self._parser.index:
            return end  # no content, or perhaps within a delimiter
        found = data.find(self._delimiter, start, plain_end)
        return max(end, found) if found >= 0 else plain_end

    def _write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed() from error


def _malformed() -> InvalidValue:
    return InvalidValue("The multipart body is malformed or incomplete.")


class _PartReader:
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
            raise InvalidValue(f"'{self._form.file_name}' is required.", self._form.file_name)
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
        if self._name == self._form.file_name and self._form.has_file:
            raise InvalidValue(f"'{self._name}' was given more than once.", self._name)
        if len(self._form.fields) >= MAX_FIELDS:
            raise InvalidValue(f"More than {MAX_FIELDS} fields.", self._name)
        self._form.has_file |= self._name == self._form.file_name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._form.file_name:
            self._form.upload.add(memoryview(data)[start:end])
            self._value += data[start : min(end, start + MAX_PATH_BYTES - len(self._value) + 1)]
            return
        self._value += data[start:end]
        limit = MAX_VOICE_BYTES if self._name.startswith(VOICE_FIELD) else MAX_VALUE_BYTES
        if len(self._value) > limit:
            raise self._invalid_text(f"is longer than {limit} bytes")

    def _on_part_end(self) -> None:
        if self._name == self._form.file_name:
            self._refuse_path()
            return
        try:
            self._form.fields.append((self._name, self._value.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise self._invalid_text("is not UTF-8 text") from error

    def _refuse_path(self) -> None:
        """Refuse the name of a file in place of its content, as curl sends it without an @."""
        if self._is_sent_as_file or not 0 < len(self._value) <= MAX_PATH_BYTES:
            return
        path = self._value.decode("utf-8", "replace")
        if path.isprintable() and "\ufffd" not in path:
            name = self._name
            how = (
                "send the recording itself" if "://" in path else f"curl sends a file by an @, {name}=@{path}"
            )
            raise InvalidValue(f"'{name}' is the text '{path}' and no recording: {how}.", name)

    def _invalid_text(self, what: str) -> InvalidValue:
        if self._is_sent_as_file and not self._form.has_file:
            file_name = self._form.file_name
            return InvalidValue(f"'{file_name}' is missing: a file was sent as '{self._name}'.", file_name)
        return InvalidValue(f"'{self._name}' {what}.", self._name)

    def _on_end(self) -> None:
        self._is_complete = True
