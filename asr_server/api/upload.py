"""Read multipart/form-data as it arrives, and hold its file within bounds. Decodes no audio.

Of a file few bytes lie in memory, more in the temporary folder. Starlette's parser has no file limit.
"""

import asyncio
import errno
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartState, parse_options_header
from starlette.requests import Request

from asr_server.audio.decoder import TOO_MANY_FILES
from asr_server.audio.recording import memory_file
from asr_server.config import MIB, in_mebibytes, naming
from asr_server.errors import InvalidAudio, InvalidValue, StorageUnavailable, UploadTooLarge

MEMORY_BYTES: Final = 8 * MIB  # of one upload
ALL_MEMORY_BYTES: Final = 256 * MIB  # of all uploads: 32 of 8 MiB
WRITE_BYTES: Final = MIB // 4  # gathered before a thread is asked to write them to disk
FREE_SHARE: Final = 20  # a twentieth of a disk is left free

logger = logging.getLogger(__name__)


class UploadStore:
    def __init__(self, max_memory_bytes: int = ALL_MEMORY_BYTES) -> None:
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.max_memory_bytes = max_memory_bytes
        self._reading = asyncio.Lock()

    async def next_turn(self) -> None:
        """Let one upload read in each round of the event loop: a probe waits for one, not for all."""
        async with self._reading:
            await asyncio.sleep(0)

    @property
    def largest_bytes(self) -> int:
        return max(MEMORY_BYTES, free_bytes(tempfile.gettempdir()) + self.disk_bytes)


def free_bytes(folder: str | Path) -> int:
    disk = shutil.disk_usage(folder)
    return max(0, disk.free - disk.total // FREE_SHARE)


class Upload:
    """Every method but `close` raises StorageUnavailable without room or folder."""

    def __init__(self, max_bytes: int, store: UploadStore) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self.store = store
        self._num_in_memory = 0
        self._num_on_disk = 0
        self._file: BinaryIO | None = None
        self._is_on_disk = False
        self._unwritten = bytearray()  # on their way to the disk
        self._writing: asyncio.Future[None] | None = None  # in a thread

    def require_room(self, num_bytes: int) -> None:
        """Raises UploadTooLarge for a size that the server can never take."""
        if num_bytes > self.max_bytes:
            raise too_large(self.max_bytes)
        if num_bytes > MEMORY_BYTES:
            with _storing():
                largest_bytes = self.store.largest_bytes
            if num_bytes > largest_bytes:
                raise too_large(largest_bytes, _OF_DISK)

    def add(self, data: bytes | memoryview) -> None:
        """Raises UploadTooLarge."""
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            raise too_large(self.max_bytes)
        self._count_memory(len(data))
        if self._is_on_disk:
            self._unwritten += data
            return
        with _storing():
            if self._file is None:
                self._file = memory_file()
            self._file.write(data)

    def check_not_empty(self) -> None:
        """Raises InvalidAudio."""
        if not self.num_bytes:
            raise InvalidAudio("The file is empty.")

    async def spill_to_disk(self) -> None:
        """Move to the disk, in a thread, if memory exceeds its limits. Raises UploadTooLarge."""
        limit = WRITE_BYTES if self._is_on_disk else MEMORY_BYTES
        is_memory_full = self.store.memory_bytes >= self.store.max_memory_bytes
        if self._num_in_memory and (self._num_in_memory >= limit or is_memory_full):
            await self._to_disk(self._append if self._is_on_disk else self._move)

    async def source(self) -> BinaryIO:
        if self._is_on_disk:
            await self._to_disk(self._append)
        assert self._file is not None
        return self._file

    async def _to_disk(self, write: Callable[[], None]) -> None:
        self.require_room(self.num_bytes)
        num_bytes = self._num_in_memory
        with _storing():
            if num_bytes > free_bytes(tempfile.gettempdir()):
                raise StorageUnavailable("The temporary folder is full of other uploads. Try again later.")
            self.store.disk_bytes += num_bytes
            self._num_on_disk += num_bytes
            self._writing = asyncio.get_running_loop().run_in_executor(None, write)
            await asyncio.shield(self._writing)  # a client that leaves does not end the thread
        self._count_memory(-num_bytes)

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
        self.store.memory_bytes += num_bytes

    def close(self) -> None:
        """Give everything back, behind the thread that still writes."""
        if self._writing is not None and not self._writing.done():
            self._writing.add_done_callback(lambda _: self._release())
        else:
            self._release()

    def _release(self) -> None:
        self._unwritten.clear()
        self._count_memory(-self._num_in_memory)
        self.store.disk_bytes -= self._num_on_disk
        self._num_on_disk = 0
        if self._file is not None:
            with suppress(OSError):  # closing writes what is still in its buffer
                self._file.close()


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.error("an upload cannot be stored: %s", error)
        is_out_of_files = error.errno in (errno.EMFILE, errno.ENFILE)
        reason = TOO_MANY_FILES if is_out_of_files else "The server has no room for the upload."
        raise StorageUnavailable(reason) from error


_OF_SERVER: Final = f"this server takes ({naming('max_upload_bytes')})"
_OF_DISK: Final = "the server's temporary folder (TMPDIR) has room for"


def too_large(max_bytes: int, whose: str = _OF_SERVER) -> UploadTooLarge:
    return UploadTooLarge(
        f"The file is larger than {in_mebibytes(max_bytes)}, the most that {whose}. "
        "A compressed format, such as mp3 or opus, is smaller."
    )


Pairs = list[tuple[str, str]]  # names of fields and their values, as they are sent
FILE: Final = "file"
MAX_FIELDS: Final = 512
MAX_NAME_BYTES: Final = 256
MAX_VALUE_BYTES: Final = 64 * 1024
VOICE_FIELD: Final = "known_speaker_references"
TEXT_FIELD: Final = "text"  # that is aligned
MAX_LONG_BYTES: Final = MIB  # of one such value: 10 s of 16 bits at 37 kHz in base64, 16 hours of speech
MAX_HEADER_BYTES: Final = 4096  # one header of a part
MAX_PATH_BYTES: Final = 256  # a longer file is not looked at as a path
MAX_DELIMITERS: Final = MAX_FIELDS + 16  # also of those that stand within a part
SLICE_BYTES: Final = 8 * 1024  # parsed in one go
PLAIN_SLICE_BYTES: Final = 64 * 1024  # of a part's content, which is only searched
MAX_TURN_S: Final = 0.001  # of parsing
MAX_OVERHEAD_BYTES: Final = 6 * MIB  # of the body beyond the file: fields, boundaries


class Form:
    """A form's fields and its file. Methods named `on_` are the parser's callbacks."""

    def __init__(self, max_upload_bytes: int, store: UploadStore, file_name: str = FILE) -> None:
        self.upload = Upload(max_upload_bytes, store)
        self.fields: Pairs = []
        self.file_name = file_name
        self.has_file = False
        self.sent_name = ""  # of the file
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""  # of the part
        self._is_sent_as_file = False
        self._value = bytearray()
        self._is_complete = False

    def close(self) -> None:
        self.upload.close()

    def check_complete(self) -> None:
        if not self._is_complete:
            raise _malformed()
        if not self.has_file:
            raise InvalidValue(f"'{self.file_name}' is required.", self.file_name)
        self.upload.check_not_empty()

    def on_part_begin(self) -> None:
        self._disposition = b""
        self._value = bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name = bytearray()
        self._header_value = bytearray()

    def on_headers_finished(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"")
        self._is_sent_as_file = b"filename" in options
        if not name or len(name) > MAX_NAME_BYTES:
            raise _malformed()
        self._name = name.decode("utf-8", "replace")
        if self._name == self.file_name and self.has_file:
            raise InvalidValue(f"'{self._name}' was given more than once.", self._name)
        if len(self.fields) >= MAX_FIELDS:
            raise InvalidValue(f"More than {MAX_FIELDS} fields.", self._name)
        if self._name == self.file_name:
            self.has_file = True
            self.sent_name = options.get(b"filename", b"").decode("utf-8", "replace")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self.file_name:
            self.upload.add(memoryview(data)[start:end])
            self._value += data[start : min(end, start + MAX_PATH_BYTES - len(self._value) + 1)]
            return
        self._value += data[start:end]
        is_long = self._name == TEXT_FIELD or self._name.startswith(VOICE_FIELD)
        limit = MAX_LONG_BYTES if is_long else MAX_VALUE_BYTES
        if len(self._value) > limit:
            raise self._invalid_text(f"is longer than {limit} bytes")

    def on_part_end(self) -> None:
        if self._name == self.file_name:
            self._refuse_path()
            return
        try:
            self.fields.append((self._name, self._value.decode("utf-8")))
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
        if self._is_sent_as_file and not self.has_file:
            message = f"'{self.file_name}' is missing: a file was sent as '{self._name}'."
            return InvalidValue(message, self.file_name)
        return InvalidValue(f"'{self._name}' {what}.", self._name)

    def on_end(self) -> None:
        self._is_complete = True


async def read_form(request: Request, form: Form) -> None:
    """Fill `form`. Raises InvalidValue, InvalidAudio, UploadTooLarge, ClientDisconnect."""
    _check_not_compressed(request)
    form.upload.require_room(_announced_bytes(request) - MAX_OVERHEAD_BYTES)
    parser, next_turn = _Parser(_boundary(request), form), form.upload.store.next_turn
    num_bytes = 0
    await next_turn()
    async for data in request.stream():
        num_bytes += len(data)
        if num_bytes > form.upload.max_bytes + MAX_OVERHEAD_BYTES:
            raise too_large(form.upload.max_bytes)
        await parser.write(data)
        await form.upload.spill_to_disk()
        await next_turn()
    form.check_complete()


async def read_body(request: Request, form: Form) -> AsyncIterator[bytes]:
    """Fill `form` with a body that is the recording itself; yield what is read.

    Raises InvalidValue, InvalidAudio, UploadTooLarge, ClientDisconnect.
    """
    _check_not_compressed(request)
    form.upload.require_room(_announced_bytes(request))
    await form.upload.store.next_turn()
    async for data in request.stream():
        form.upload.add(data)
        yield data
        await form.upload.spill_to_disk()
        await form.upload.store.next_turn()
    form.upload.check_not_empty()


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

    def __init__(self, boundary: bytes, form: Form) -> None:
        self._next_turn = form.upload.store.next_turn
        self._delimiter = b"\r\n--" + boundary
        self._num_delimiters = 0
        try:
            callbacks: Any = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
            self._parser = MultipartParser(boundary, callbacks, max_header_size=MAX_HEADER_BYTES)
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
            try:
                self._parser.write(data[start:end])
            except FormParserError as error:
                raise _malformed() from error
            start = end
            if time.perf_counter() - began_at > MAX_TURN_S:
                await self._next_turn()
                began_at = time.perf_counter()

    def _end_of_slice(self, data: bytes, start: int) -> int:
        end, plain_end = start + SLICE_BYTES, start + PLAIN_SLICE_BYTES
        if self._parser.state is not MultipartState.PART_DATA or self._parser.index:
            return end  # no content, or perhaps within a delimiter
        found = data.find(self._delimiter, start, plain_end)
        return max(end, found) if found >= 0 else plain_end


def _malformed() -> InvalidValue:
    return InvalidValue("The multipart body is malformed or incomplete.")
