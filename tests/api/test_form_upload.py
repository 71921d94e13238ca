"""Uploads in memory and on disk: bounded together, held once, and refused in order where there is no room."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from asr_server.api import form as form_module
from asr_server.api.form import Upload, UploadMemory
from asr_server.audio.recording import open_source
from asr_server.config import MIB
from tests.api.running_app import RunningApp, run_app
from tests.embedded import embedded

ON_DISK = replace(embedded(), max_upload_memory_bytes=0)


def full_disk() -> BinaryIO:
    return open("/dev/full", "w+b")


def is_on_disk(file: BinaryIO) -> bool:
    return "memfd" not in os.readlink(f"/proc/self/fd/{file.fileno()}")


async def filled(memory: UploadMemory, num_bytes: int, piece: int = 65536) -> Upload:
    upload = Upload(100 * MIB, memory)
    for _ in range(num_bytes // piece):
        upload.add(bytes(piece))
        await upload.spill_to_disk()
    return upload


async def test_uploads_beyond_the_memory_of_all_go_to_disk() -> None:
    memory = UploadMemory(4 * MIB)
    uploads = [await filled(memory, MIB) for _ in range(8)]
    assert [is_on_disk(await upload.source()) for upload in uploads] == [False] * 3 + [True] * 5
    assert memory.num_bytes <= 4 * MIB
    for upload in uploads:
        upload.close()
        upload.close()
    assert memory.num_bytes == 0


async def test_one_large_upload_goes_to_disk_though_there_is_memory_left() -> None:
    memory = UploadMemory(1 << 40)
    upload = await filled(memory, form_module.MEMORY_BYTES + MIB)
    assert is_on_disk(await upload.source())
    assert memory.num_bytes == 0
    upload.close()


@pytest.mark.slow
async def test_an_upload_in_pieces_of_a_byte_costs_no_more_than_its_bytes() -> None:
    before = psutil.Process().memory_full_info().uss
    upload = await filled(UploadMemory(1 << 40), MIB, piece=1)
    assert psutil.Process().memory_full_info().uss - before < 8 * MIB
    upload.close()


async def test_an_upload_is_decoded_from_the_memory_that_it_arrived_in() -> None:
    upload = await filled(UploadMemory(1 << 40), MIB)
    source = await upload.source()
    with open_source(source) as opened:
        assert os.path.sameopenfile(opened.fileno(), source.fileno())
    upload.close()


async def test_an_upload_on_disk_is_heard_as_one_in_memory() -> None:
    async with run_app(ON_DISK) as app:
        assert await app.still_works()
        assert app.app.state.server.upload_memory.num_bytes == 0


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
