"""Uploads in memory and on disk: bounded together, held once, and refused in order where there is no room."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import shutil
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np
import psutil
import pytest

from asr_server.api import connections
from asr_server.api import upload as upload_module
from asr_server.api.upload import Upload, UploadStore
from asr_server.audio.recording import open_source
from asr_server.config import MIB
from asr_server.errors import StorageUnavailable, UploadTooLarge
from tests.api.raw_client import RawClient
from tests.api.running_app import RunningApp, run_app, until
from tests.embedded import embedded
from tests.fake_replica import noise, wav

ON_DISK = replace(embedded(), max_upload_memory_bytes=0)
LITTLE_DISK = replace(ON_DISK, max_upload_disk_bytes=MIB, client_grace_s=100.0)


def full_disk() -> BinaryIO:
    return open("/dev/full", "w+b")


def is_on_disk(file: BinaryIO) -> bool:
    return "memfd" not in os.readlink(f"/proc/self/fd/{file.fileno()}")


async def filled(memory: UploadStore, num_bytes: int, piece: int = 65536) -> Upload:
    upload = Upload(100 * MIB, memory)
    for _ in range(num_bytes // piece):
        upload.add(bytes(piece))
        await upload.spill_to_disk()
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
    upload = await filled(UploadStore(1 << 40), MIB, piece=1)
    assert psutil.Process().memory_full_info().uss - before < 8 * MIB
    upload.close()


async def test_an_upload_is_decoded_from_the_memory_that_it_arrived_in() -> None:
    upload = await filled(UploadStore(1 << 40), MIB)
    source = await upload.source()
    with open_source(source) as opened:
        assert os.path.sameopenfile(opened.fileno(), source.fileno())
    upload.close()


async def test_an_upload_on_disk_is_heard_as_one_in_memory() -> None:
    async with run_app(ON_DISK) as app:
        assert await app.still_works()
        assert app.app.state.server.uploads.memory_bytes == 0


async def is_told_503_and_logged(app: RunningApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        reply = await app.post()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
    assert reply.headers["retry-after"]
    assert "an upload cannot be stored" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_full_disk_is_503_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_app(ON_DISK) as app:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "TemporaryFile", full_disk)
            await is_told_503_and_logged(app, caplog)
        assert await app.still_works()


async def test_a_temporary_folder_that_has_vanished_is_503_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with run_app(ON_DISK) as app:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
            await is_told_503_and_logged(app, caplog)
        assert await app.still_works()


class Line:
    """A connection of a given speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.closed_because = ""

    def make_room(self, full: str) -> None:
        self.closed_because = full


async def arriving(store: UploadStore, line: Line, num_bytes: int) -> Upload:
    upload = Upload(100 * MIB, store, line)
    upload.add(bytes(num_bytes))
    try:
        await upload.spill_to_disk()
    except StorageUnavailable:
        upload.close()
        raise
    return upload


async def test_the_slowest_upload_leaves_the_full_disk_to_a_faster_one() -> None:
    store = UploadStore(0, 3 * MIB)
    lines = [Line(2000), Line(1000), Line(3000)]
    with ExitStack() as open_uploads:
        for line in lines:
            open_uploads.enter_context(closing(await arriving(store, line, MIB)))
        assert [bool(line.closed_because) for line in lines] == [False] * 3
        open_uploads.enter_context(closing(await arriving(store, Line(1e6), MIB)))
        assert [bool(line.closed_because) for line in lines] == [False, True, False]
        assert store.disk_bytes == 3 * MIB
    assert store.disk_bytes == 0


async def test_an_upload_no_faster_than_the_others_is_refused_where_the_disk_is_full() -> None:
    store = UploadStore(0, 2 * MIB)
    with closing(await arriving(store, Line(2000), MIB)), closing(await arriving(store, Line(2000), MIB)):
        with pytest.raises(StorageUnavailable, match="--max-upload-disk-bytes"):
            await arriving(store, Line(2000), MIB)
        assert store.disk_bytes == 2 * MIB


async def test_an_upload_that_is_complete_keeps_its_place_on_the_full_disk() -> None:
    store = UploadStore(0, MIB)
    line = Line(1000)
    with closing(await arriving(store, line, MIB)) as upload:
        await upload.source()
        with pytest.raises(StorageUnavailable):
            await arriving(store, Line(1e6), MIB)
    assert not line.closed_because


async def test_uploads_take_half_of_what_the_temporary_folder_has_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = UploadStore(0)
    free = shutil.disk_usage(tempfile.gettempdir())._replace(free=5 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=5 * MIB - store.disk_bytes))
    uploads = [await arriving(store, Line(1), MIB) for _ in range(2)]
    with pytest.raises(StorageUnavailable, match=r"2\.5 MiB"):
        await arriving(store, Line(1), MIB)
    for upload in uploads:
        upload.close()


async def test_the_least_rate_grows_with_what_uploads_hold_of_the_disk() -> None:
    store = UploadStore(0, 4 * MIB)
    uploads, factors = [], [store.rate_factor]
    for _ in range(4):
        uploads.append(await arriving(store, Line(1000), MIB))
        factors.append(store.rate_factor)
    assert factors == pytest.approx([1, 4 / 3, 2, 4, 100])
    for upload in uploads:
        upload.close()
    assert store.rate_factor == 1


async def test_uploads_that_stall_on_a_full_disk_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TICK_S", 0.02)
    async with run_app(LITTLE_DISK) as app:
        stalled = [await RawClient.connect(app.host, app.port) for _ in range(2)]
        for client in stalled:
            client.begin_upload(10 * MIB)
            client.send(bytes(450_000))
        uploads, lines = app.app.state.server.uploads, app.server.server_state.connections
        await until(lambda: uploads.disk_bytes == 900_000)
        await until(lambda: all(line.bytes_per_s < math.inf for line in lines))  # type: ignore[union-attr]
        assert await app.still_works(wav(noise(10.0)))
        await until(lambda: uploads.disk_bytes == 450_000)
        replies = [asyncio.create_task(client.reply()) for client in stalled]
        (first,), (second,) = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
        assert (await first).status == 408
        assert "--max-upload-disk-bytes" in (await first).error["message"]
        second.cancel()
        for client in stalled:
            await client.close()
        await until(lambda: not uploads.disk_bytes)


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


# -- To the byte --


@pytest.mark.parametrize(("num_bytes", "goes_to_disk"), [(8 * MIB - 1, False), (8 * MIB, True)])
async def test_one_upload_has_8_mib_of_memory(num_bytes: int, goes_to_disk: bool) -> None:
    store = UploadStore(100 * MIB)
    upload = Upload(100 * MIB, store)
    upload.add(bytes(num_bytes))
    await upload.spill_to_disk()
    assert is_on_disk(await upload.source()) == goes_to_disk
    assert (store.memory_bytes, store.disk_bytes) == ((0, num_bytes) if goes_to_disk else (num_bytes, 0))
    upload.close()
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)


async def test_an_upload_on_disk_is_written_by_quarters_of_a_mebibyte_and_whole_at_its_end() -> None:
    store = UploadStore(100 * MIB)
    upload = Upload(100 * MIB, store)
    content = np.random.default_rng(0).bytes(9 * MIB)
    upload.add(content[: 8 * MIB])
    await upload.spill_to_disk()
    at = 8 * MIB
    for size, waits in ((MIB // 4 - 1, MIB // 4 - 1), (1, 0), (1, 1)):
        upload.add(memoryview(content)[at : at + size])
        at += size
        await upload.spill_to_disk()
        assert store.memory_bytes == waits
    assert upload in store.arriving
    file = await upload.source()
    assert upload not in store.arriving
    file.seek(0)
    assert file.read() == content[:at]
    assert (store.memory_bytes, store.disk_bytes) == (0, at)
    upload.close()
    upload.close()
    assert file.closed
    assert (store.memory_bytes, store.disk_bytes) == (0, 0)


@pytest.mark.parametrize(("held", "is_full"), [(99, False), (100, True)])
async def test_the_memory_of_all_is_full_at_its_limit(held: int, is_full: bool) -> None:
    store = UploadStore(100)
    upload = Upload(MIB, store)
    upload.add(bytes(held))
    assert store.is_memory_full == is_full
    await upload.spill_to_disk()
    assert (store.disk_bytes > 0) == is_full
    upload.close()


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(100, True), (101, False)])
def test_an_upload_has_so_many_bytes(num_bytes: int, is_taken: bool) -> None:
    upload = Upload(100, UploadStore(MIB))
    upload.add(bytes(60))
    if is_taken:
        upload.add(bytes(num_bytes - 60))
        assert upload.num_bytes == 100
    else:
        with pytest.raises(UploadTooLarge, match="--max-upload-bytes"):
            upload.add(bytes(num_bytes - 60))
    upload.close()


@pytest.mark.parametrize(("num_bytes", "has_room"), [(100, True), (101, False)])
async def test_the_disk_of_all_is_filled_to_its_limit(num_bytes: int, has_room: bool) -> None:
    store = UploadStore(0, 100)
    upload = Upload(MIB, store)
    upload.add(bytes(num_bytes))
    if has_room:
        await upload.spill_to_disk()
        assert store.disk_bytes == 100
        assert store.rate_factor == 100
    else:
        with pytest.raises(StorageUnavailable, match="Try again later"):
            await upload.spill_to_disk()
    upload.close()
    assert (store.disk_bytes, store.memory_bytes, store.arriving) == (0, 0, set())


@pytest.mark.parametrize(
    ("own", "others", "has_room"), [(10.0, 9.0, True), (10.0, 10.0, False), (9.0, 10.0, False)]
)
async def test_a_faster_upload_takes_the_place_of_a_slower_one(
    own: float, others: float, has_room: bool
) -> None:
    store, slow, fast = UploadStore(0, 100), Line(others), Line(own)
    first, second = Upload(MIB, store, slow), Upload(MIB, store, fast)
    first.add(bytes(100))
    await first.spill_to_disk()
    second.add(bytes(50))
    if has_room:
        await second.spill_to_disk()
        assert store.disk_bytes == 50
        assert store.arriving == {second}
        assert slow.closed_because.startswith("Uploads hold all of their ")
        assert "--max-upload-disk-bytes" in slow.closed_because
        first.add(bytes(10))  # what still comes of it stays in memory
        await first.spill_to_disk()
        assert store.disk_bytes == 50
    else:
        with pytest.raises(StorageUnavailable):
            await second.spill_to_disk()
        assert store.disk_bytes == 100
        assert slow.closed_because == ""
    for upload in (first, second):
        upload.close()
    assert (store.disk_bytes, store.memory_bytes) == (0, 0)


@pytest.mark.parametrize("num_more", [0, 7])
async def test_all_of_an_upload_on_disk_is_there_for_who_reads_it_by_its_number(num_more: int) -> None:
    upload = Upload(100 * MIB, UploadStore(100 * MIB))
    upload.add(bytes(8 * MIB + 7))
    await upload.spill_to_disk()
    upload.add(bytes(num_more))
    assert os.fstat((await upload.source()).fileno()).st_size == 8 * MIB + 7 + num_more
    upload.close()


def test_a_file_that_cannot_be_closed_is_no_error_of_the_request() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    upload = Upload(MIB, UploadStore(MIB))
    upload._file = SimpleNamespace(close=fail)  # type: ignore[assignment]
    upload.close()


async def test_an_upload_that_nobody_sends_is_never_the_slowest() -> None:
    assert Upload(MIB, UploadStore(0)).bytes_per_s == math.inf


@pytest.mark.parametrize(("free", "held", "limit"), [(1000, 0, 500), (900, 100, 500), (0, 1, 1), (1, 0, 1)])
async def test_without_a_setting_uploads_have_half_of_what_is_free_and_of_their_own(
    free: int, held: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UploadStore(0)
    store.disk_bytes = held

    def disk_usage(path: str) -> SimpleNamespace:
        return SimpleNamespace(free=free - (store.disk_bytes - held))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    upload = Upload(MIB, store)
    if limit > held:
        store.take_disk(upload, limit - held)
    with pytest.raises(StorageUnavailable):
        store.take_disk(upload, 1)
    assert store.disk_bytes == max(held, limit)
