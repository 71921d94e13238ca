"""Uploads in memory and on disk: bounded together, held once, and refused in order where there is no room."""

import asyncio
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

from asr_server.api import upload as upload_module
from asr_server.api.upload import Upload, UploadStore
from asr_server.audio.recording import open_source
from asr_server.config import MIB
from asr_server.errors import StorageUnavailable, UploadTooLarge
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
