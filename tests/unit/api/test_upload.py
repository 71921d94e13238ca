"""Uploads in memory and on disk: bounded together, held once, and refused in order where there is no room."""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from asr_server.api import upload as form_module
from asr_server.api import upload as upload_module
from asr_server.api.upload import Form, Upload, UploadStore, read_form
from asr_server.audio.recording import open_source
from asr_server.config import MIB
from asr_server.errors import InvalidAudio, InvalidValue, RequestError, StorageUnavailable, UploadTooLarge
from asr_server.server import app as app_module
from asr_server.server.run import warn_of_small_disk
from tests.support.raw_client import RawClient
from tests.support.until import until
from tests.unit.api.running_app import RunningApp, run_app

SetFree = Callable[[int, UploadStore], None]


def full_disk() -> BinaryIO:
    return open("/dev/full", "w+b")


def is_on_disk(file: BinaryIO) -> bool:
    return "memfd" not in os.readlink(f"/proc/self/fd/{file.fileno()}")


async def filled(memory: UploadStore, num_bytes: int, piece: int = 65536) -> Upload:
    upload = Upload(100 * MIB, memory)
    try:
        for _ in range(num_bytes // piece):
            upload.add(bytes(piece))
            await upload.spill_to_disk()
    except BaseException:
        upload.close()
        raise
    return upload


async def test_uploads_beyond_the_memory_of_all_go_to_disk() -> None:
    memory = UploadStore(4 * MIB)
    uploads = [await filled(memory, MIB) for _ in range(8)]
    assert [is_on_disk(await upload.source()) for upload in uploads] == [False] * 3 + [True] * 5
    assert memory.memory_bytes <= 4 * MIB
    for upload in uploads:
        upload.close()
        upload.close()
    assert memory.memory_bytes == 0


async def test_one_large_upload_goes_to_disk_though_there_is_memory_left() -> None:
    memory = UploadStore(1 << 40)
    upload = await filled(memory, upload_module.MEMORY_BYTES + MIB)
    assert is_on_disk(await upload.source())
    assert memory.memory_bytes == 0
    upload.close()


@pytest.mark.slow
async def test_an_upload_in_pieces_of_a_byte_costs_no_more_than_its_bytes() -> None:
    before = psutil.Process().memory_full_info().uss
    upload = await filled(UploadStore(1 << 40), MIB // 4, piece=1)
    assert psutil.Process().memory_full_info().uss - before < 8 * MIB  # an object a byte is 14
    upload.close()


async def test_an_upload_is_decoded_from_the_memory_that_it_arrived_in() -> None:
    upload = await filled(UploadStore(1 << 40), MIB)
    source = await upload.source()
    with open_source(source) as opened:
        assert os.path.sameopenfile(opened.fileno(), source.fileno())
    upload.close()


@pytest.fixture
async def app_on_disk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningApp]:
    """A server whose memory has no room for uploads."""
    monkeypatch.setattr(app_module, "UploadStore", partial(UploadStore, 0))
    async with run_app() as app:
        yield app


async def test_an_upload_on_disk_is_heard_as_one_in_memory(app_on_disk: RunningApp) -> None:
    assert await app_on_disk.still_works()
    assert app_on_disk.app.state.server.uploads.memory_bytes == 0


@pytest.mark.parametrize(("name", "value"), [("TemporaryFile", full_disk), ("tempdir", "/vanished/folder")])
async def test_a_full_disk_and_a_vanished_folder_are_503_with_a_line_in_the_log(
    app_on_disk: RunningApp,
    name: str,
    value: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(tempfile, name, value)
        reply = await app_on_disk.post()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
    assert reply.headers["retry-after"]
    assert "an upload cannot be stored" in caplog.text
    assert "Traceback" not in caplog.text
    assert await app_on_disk.still_works()


# -- The disk --


@pytest.fixture
def little_disk(monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """A temporary folder of 100 MiB with so many free, as uploads fill it."""

    def set_free(num_bytes: int, store: UploadStore) -> None:
        of_folder = shutil.disk_usage(tempfile.gettempdir())._replace(total=100 * MIB)

        def usage(_: str) -> tuple[int, int, int]:
            return of_folder._replace(free=num_bytes - store.disk_bytes)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return set_free


async def test_uploads_leave_a_twentieth_of_the_disk_free(little_disk: SetFree) -> None:
    store = UploadStore(0)
    little_disk(15 * MIB, store)
    uploads = [await filled(store, 5 * MIB) for _ in range(2)]
    with pytest.raises(StorageUnavailable, match="Try again later"):
        await filled(store, MIB)
    uploads.pop().close()
    uploads.append(await filled(store, 5 * MIB))
    for upload in uploads:
        upload.close()
    assert store.disk_bytes == 0


async def test_an_upload_that_can_never_fit_on_the_disk_is_413_at_once(
    app: RunningApp, little_disk: SetFree, caplog: pytest.LogCaptureFixture
) -> None:
    """It was 503, and official clients sent it three times."""
    little_disk(25 * MIB, app.app.state.server.uploads)
    models = (await app.client.get("/v1/models")).json()["data"]
    assert {model["max_upload_bytes"] for model in models} == {20 * MIB}
    warn_of_small_disk(app.app.state.server)
    assert "has room for uploads of 20 MiB, and --max-upload-bytes" in caplog.text
    client = await RawClient.connect(app.host, app.port)
    client.begin_upload(30 * MIB)
    reply = await client.reply()
    await client.close()
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert "20 MiB" in reply.error["message"]
    assert "TMPDIR" in reply.error["message"]


async def test_an_upload_of_unknown_length_that_cannot_fit_is_413_if_too_long(little_disk: SetFree) -> None:
    store = UploadStore(0)
    little_disk(15 * MIB, store)
    with pytest.raises(UploadTooLarge, match="10 MiB"):
        await filled(store, 11 * MIB)


async def test_a_client_that_leaves_during_a_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, disk and the file stayed taken until a restart."""
    store, is_writing, may_write = UploadStore(0), threading.Event(), threading.Event()
    append = Upload._append

    def append_slowly(upload: Upload) -> None:
        with memoryview(upload._unwritten):
            is_writing.set()
            assert may_write.wait(60)
        append(upload)

    upload = await filled(store, MIB)
    file = await upload.source()
    monkeypatch.setattr(Upload, "_append", append_slowly)
    upload.add(bytes(MIB))
    writing = asyncio.create_task(upload.source())
    await until(is_writing.is_set)
    writing.cancel()
    with closing(upload), pytest.raises(asyncio.CancelledError):
        await writing
    may_write.set()
    await until(lambda: file.closed)
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)


@pytest.mark.parametrize(("num_left", "code"), [(0, "storage_unavailable"), (1, "decoding_unavailable")])
async def test_a_server_out_of_file_descriptors_says_so(app: RunningApp, num_left: int, code: str) -> None:
    assert await app.still_works()  # the connection is open
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + num_left, hard))
    try:
        reply = await app.post()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
    assert "ulimit -n" in reply.json()["error"]["message"]
    assert await app.still_works()


async def test_an_upload_on_disk_is_whole_and_counted_until_it_is_closed() -> None:
    store = UploadStore(100 * MIB)
    upload = Upload(100 * MIB, store)
    content = np.random.default_rng(0).bytes(9 * MIB)
    for at in range(0, len(content), 100_000):
        upload.add(memoryview(content)[at : at + 100_000])
        await upload.spill_to_disk()
    file = await upload.source()
    file.seek(0)
    assert file.read() == content
    assert (store.memory_bytes, store.disk_bytes) == (0, len(content))
    for _ in range(2):
        upload.close()
    assert file.closed
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)


BOUNDARY = "limit"
LIMIT = 1000
MEMORY_LIMIT = 1 << 20


def part(name: str, value: bytes, more: str = "") -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", b"sound", '; filename="a.wav"')


class Client:
    """Sends a body piece by piece, and counts how much of it was taken."""

    def __init__(
        self, data: bytes, piece: int = 64, content_type: str | None = None, first_piece: int | None = None
    ) -> None:
        self.num_taken = 0
        self._data = data
        self._piece, self._first_piece = piece, first_piece or piece
        self._type = content_type or f"multipart/form-data; boundary={BOUNDARY}"

    async def receive(self) -> Message:
        piece = self._piece if self.num_taken else self._first_piece
        data = self._data[self.num_taken : self.num_taken + piece]
        self.num_taken += len(data)
        return {"type": "http.request", "body": data, "more_body": self.num_taken < len(self._data)}

    def request(self, **headers: str) -> Request:
        raw = [(b"content-type", self._type.encode())]
        raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "headers": raw}, self.receive)


@pytest.fixture
async def form() -> AsyncIterator[Form]:
    form = Form(LIMIT, UploadStore(MEMORY_LIMIT))
    yield form
    form.close()


async def read(form: Form, data: bytes, piece: int = 64, first_piece: int | None = None) -> None:
    await read_form(Client(data, piece, first_piece=first_piece).request(), form)


async def contents(form: Form) -> bytes:
    source = await form.upload.source()
    source.seek(0)
    return source.read()


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_fields_and_file_arrive_however_they_are_cut(form: Form, piece: int) -> None:
    data = b"\r\n--limi" + bytes(range(256))
    parts = (part("model", "é".encode()), part("file", data, '; filename="x"'), part("a[]", b"1"))
    await read(form, body(*parts, part("a[]", b"")), piece)
    assert form.fields == [("model", "é"), ("a[]", "1"), ("a[]", "")]
    assert await contents(form) == data


def part_with_header(name: bytes, value: bytes) -> bytes:
    line = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n'.encode()
    return line + name + b": " + value + b"\r\n\r\nbase\r\n"


async def test_a_length_announced_over_the_limit_is_refused_before_it_arrives(form: Form) -> None:
    client = Client(body(FILE))
    with pytest.raises(UploadTooLarge):
        await read_form(client.request(content_length=str(10**9)), form)
    assert client.num_taken == 0


@pytest.mark.parametrize(
    ("head", "error"),
    [(b"", (UploadTooLarge, InvalidValue)), (part("file", b"", '; filename="a"')[:-2], UploadTooLarge)],
)
async def test_a_body_that_grows_without_end_is_refused_in_the_file_and_beside_it(
    form: Form, head: bytes, error: type[Exception]
) -> None:
    piece, most = 10_000, LIMIT + form_module.MAX_OVERHEAD_BYTES
    client = Client(head + b"x" * 2 * most + body(FILE), piece)
    with pytest.raises(error):
        await read_form(client.request(), form)
    assert client.num_taken <= most + piece


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (body(FILE, FILE), "file"),
        (body(part("model", b"m")), "file"),
        (body(FILE, part("prompt", b"\xff")), "prompt"),
        (body(FILE)[:-8], None),
        (body(FILE)[:30], None),
        (b"", None),
        (b"not multipart at all", None),
        (body(part("prompt", b"\xff"), FILE), "prompt"),
        (f"--{BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(), None),
    ],
)
async def test_a_form_that_cannot_be_is_refused(form: Form, data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidValue) as caught:
        await read(form, data, piece=1000)
    assert caught.value.param == param


@pytest.mark.parametrize("content", [b"\xff\xfb" * 10, b"x" * (form_module.MAX_VALUE_BYTES + 1)])
async def test_a_recording_in_another_field_is_told_which_one_is_missing(form: Form, content: bytes) -> None:
    with pytest.raises(InvalidValue, match="'file' is missing: a file was sent as 'audio'") as caught:
        await read(form, body(part("audio", content, '; filename="a.mp3"')), piece=1000)
    assert caught.value.param == "file"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"content_type": "application/json"}, "multipart/form-data"),
        ({"content_type": "multipart/form-data"}, "multipart/form-data"),
        ({"content_type": "multipart/form-data; boundary="}, "multipart/form-data"),
        ({"content_type": f"multipart/form-data; boundary={'x' * 300}"}, "boundary is too long"),
        ({"content_encoding": "gzip"}, "Content-Encoding 'gzip'"),
        ({"content_encoding": "x" * 81}, f"Content-Encoding '{'x' * 80}': send"),
    ],
)
async def test_a_body_that_is_no_form_is_refused(form: Form, headers: dict[str, str], told: str) -> None:
    client = Client(body(FILE), content_type=headers.pop("content_type", None))
    with pytest.raises(InvalidValue, match=told):
        await read_form(client.request(**headers), form)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
async def test_no_body_whatever_brings_anything_but_a_form_or_a_refusal(data: st.DataObject) -> None:
    whole = body(part("model", b"m"), FILE, part("a[]", b"1"))
    cut = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=40))
    skip = data.draw(st.integers(0, 40))
    form = Form(LIMIT, UploadStore(MEMORY_LIMIT))
    with contextlib.suppress(RequestError):
        await read(form, whole[:cut] + junk + whole[cut + skip :], data.draw(st.integers(1, 300)))
        assert form.has_file
    form.close()


async def test_a_file_made_of_what_looks_like_boundaries_is_refused_early(form: Form) -> None:
    client = Client(body(part("file", f"\r\n--{BOUNDARY}X".encode() * 100_000)), piece=10_000)
    with pytest.raises(InvalidValue, match="boundaries"):
        await read_form(client.request(), form)
    assert client.num_taken <= 10_000


async def test_a_piece_that_takes_long_to_parse_leaves_the_loop_to_others_meanwhile(form: Form) -> None:
    padded = FILE + f"--{BOUNDARY}".encode() + b" " * (1 << 20)  # the parser looks at each by itself
    rounds = 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_rounds())
    with pytest.raises(InvalidValue):
        await read(form, padded, piece=len(padded))
    counting.cancel()
    assert rounds > 20


def header(num_bytes: int) -> bytes:
    return body(part_with_header(b"x" * 96, b"y" * (num_bytes - 98)), FILE)  # ": " is between


@pytest.mark.parametrize(
    ("make", "most", "param"),
    [
        (lambda num: body(FILE, *[part("a", b"1")] * num), form_module.MAX_FIELDS, "a"),
        (lambda num: body(FILE, part("n" * num, b"")), form_module.MAX_NAME_BYTES, None),
        (lambda num: body(FILE, part("prompt", b"x" * num)), form_module.MAX_VALUE_BYTES, "prompt"),
        (
            lambda num: body(FILE, part("known_speaker_references[]", b"x" * num)),
            form_module.MAX_LONG_BYTES,
            "known_speaker_references[]",
        ),
        (header, form_module.MAX_HEADER_BYTES, None),
    ],
    ids=["fields", "name", "value", "voice", "header"],
)
async def test_a_form_is_bounded_in_all(make: Callable[[int], bytes], most: int, param: str | None) -> None:
    with contextlib.closing(Form(MIB, UploadStore(16 * MIB))) as form:
        await read(form, make(most), piece=MIB)
        assert form.has_file
    with contextlib.closing(Form(MIB, UploadStore(16 * MIB))) as form:
        with pytest.raises(InvalidValue) as caught:
            await read(form, make(most + 1), piece=MIB)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("speech.wav", "curl sends a file by an @, file=@speech.wav."),
        ("https://example.com/a.mp3", "send the recording itself."),
    ],
)
async def test_a_path_in_place_of_the_file_is_told_of_curls_at(form: Form, text: str, hint: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        await read(form, body(part("file", text.encode())))
    assert caught.value.param == "file"
    assert caught.value.message == f"'file' is the text '{text}' and no recording: {hint}"


async def test_an_empty_file_is_no_audio(form: Form) -> None:
    with pytest.raises(InvalidAudio, match="empty"):
        await read(form, body(part("file", b"", '; filename="a.wav"')))


async def test_uploads_of_many_clients_leave_each_round_of_the_event_loop_short() -> None:
    memory = UploadStore(1 << 30)
    clients = [Client(body(part("file", bytes(2000), '; filename="a.wav"'))) for _ in range(50)]
    with contextlib.ExitStack() as closing_all:
        forms = [closing_all.enter_context(contextlib.closing(Form(4 * LIMIT, memory))) for _ in clients]
        both = zip(clients, forms, strict=True)
        reading = asyncio.gather(*(read_form(own.request(), form) for own, form in both))
        read_in_a_round = []
        while not reading.done():
            before = sum(client.num_taken for client in clients)
            await asyncio.sleep(0)
            read_in_a_round.append(sum(client.num_taken for client in clients) - before)
        await reading
    assert max(read_in_a_round) <= 2 * 64  # a turn may be given while the one before is being used
    assert all(form.upload.num_bytes == 2000 for form in forms)


async def test_an_upload_that_is_given_up_while_it_waits_holds_nobody_up() -> None:
    uploads = UploadStore()
    waiting = [asyncio.ensure_future(uploads.next_turn()) for _ in range(10)]
    await asyncio.sleep(0)
    for each in waiting[:9]:
        each.cancel()
    await asyncio.wait_for(waiting[9], timeout=60)
    await asyncio.wait_for(uploads.next_turn(), timeout=60)
