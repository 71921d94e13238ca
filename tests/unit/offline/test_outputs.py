import asyncio
import errno
import json
import os
import threading
from pathlib import Path, PurePath

import pytest

from asr_server.annexes.offline.inputs import Input
from asr_server.annexes.offline.local import Existing, TranscribeJob
from asr_server.annexes.offline.outputs import (
    FolderOutputs,
    OutputError,
    StandardOutput,
    check_writable,
    write_whole,
)
from asr_server.formats.render import ResponseFormat
from tests.unit.formats.samples import transcript

WORDS = transcript(text="grüße 你好")


def outputs(
    folder: Path, existing: Existing = "refuse", formats: tuple[ResponseFormat, ...] = ("text", "json")
) -> FolderOutputs:
    job = TranscribeJob(("a.wav",), formats, folder, existing)
    return FolderOutputs(folder, [Input("a.wav", Path("a.wav"), PurePath("sub/a.wav"))], job)


async def test_results_are_utf8_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    assert outputs(tmp_path).prepare(0) is None
    written = await outputs(tmp_path).write(0, WORDS)
    assert written == f"{tmp_path}/sub/a.txt, {tmp_path}/sub/a.json"
    assert (tmp_path / "sub/a.txt").read_bytes() == "grüße 你好\n".encode()
    assert sorted(os.listdir(tmp_path / "sub")) == ["a.json", "a.txt"]


@pytest.mark.parametrize("response_format", ["text", "json"])
async def test_a_terminal_s_commands_in_a_text_are_printed_escaped(
    response_format: ResponseFormat, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = TranscribeJob(("a.wav",), (response_format,))
    printed = StandardOutput([Input("a.wav", Path("a.wav"), PurePath("a"))], job)
    printed.begin([0])
    await printed.write(0, transcript(text="grüße\x1b]0;owned\x07\x9b2J\x7f"))
    written = capfdbinary.readouterr().out.decode()
    assert "grüße\\u001b]0;owned\\u0007\\u009b2J\\u007f" in written
    if response_format == "json":
        assert json.loads(written)["text"] == "grüße\x1b]0;owned\x07\x9b2J\x7f"


def several(response_format: ResponseFormat) -> StandardOutput:
    inputs = [Input(f"{name}\x07", Path(name), PurePath(name)) for name in "abc"]
    printed = StandardOutput(inputs, TranscribeJob(("a", "b", "c"), (response_format,)))
    printed.begin([0, 1, 2])
    return printed


async def test_several_results_have_their_names_in_a_header_or_as_a_field(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    await several("text").write(0, WORDS)
    assert capfdbinary.readouterr().out.decode() == "==> a\\x07 <==\ngrüße 你好\n\n"
    await several("json").write(0, WORDS)
    line = capfdbinary.readouterr().out.decode()
    assert list(json.loads(line))[:2] == ["file", "text"]
    assert (json.loads(line)["file"], line.count("\n"), "grüße 你好" in line) == ("a\x07", 1, True)


async def test_what_has_no_result_holds_up_none_and_at_the_end_the_rest_is_printed(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printed = several("json")
    await printed.leave_out(0)
    await printed.write(1, WORDS)
    assert json.loads(capfdbinary.readouterr().out)["file"] == "b\x07"
    printed = several("json")
    await printed.write(2, WORDS)
    assert capfdbinary.readouterr().out == b""
    printed.close()
    assert json.loads(capfdbinary.readouterr().out)["file"] == "c\x07"
    printed.close()
    assert capfdbinary.readouterr().out == b""
    assert not printed.is_done(0)
    assert printed.prepare(0) is None


def test_a_result_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    write_whole(tmp_path / "a.txt", b"text")
    assert sizes == [4]


def test_a_folder_that_cannot_be_made_is_the_reason_of_one_failure(tmp_path: Path) -> None:
    (tmp_path / "sub").touch()
    failure = outputs(tmp_path).prepare(0)
    assert failure is not None
    assert (failure.name, failure.reason) == ("a.wav", f"cannot make the folder {tmp_path}/sub: File exists")


async def test_what_exists_is_refused_skipped_or_replaced_as_asked(tmp_path: Path) -> None:
    await outputs(tmp_path).write(0, WORDS)
    (tmp_path / "sub/a.txt").write_text("edited")
    refused = outputs(tmp_path).prepare(0)
    assert refused is not None
    assert (
        refused.reason == f"{tmp_path}/sub/a.txt exists: --skip-existing leaves it, --overwrite replaces it"
    )
    assert not outputs(tmp_path).is_done(0)
    assert outputs(tmp_path, "skip").is_done(0)
    assert not outputs(tmp_path, "overwrite").is_done(0)
    await outputs(tmp_path, "overwrite").write(0, WORDS)
    assert (tmp_path / "sub/a.txt").read_text(encoding="utf-8") == "grüße 你好\n"


async def test_skipping_writes_only_the_formats_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.txt").write_text("edited")
    skipping = outputs(tmp_path, "skip")
    assert not skipping.is_done(0)
    assert skipping.prepare(0) is None
    assert await skipping.write(0, WORDS) == f"{tmp_path}/sub/a.json"
    assert (tmp_path / "sub/a.txt").read_text() == "edited"


async def test_a_write_that_is_interrupted_is_finished_and_told_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, told = threading.Event(), threading.Event(), []

    def slow_disk(_: int) -> None:
        begun.set()
        assert go_on.wait(30)

    async def write() -> None:
        told.append(await outputs(tmp_path, formats=("text",)).write(0, WORDS))
        await asyncio.sleep(30)

    monkeypatch.setattr(os, "fsync", slow_disk)
    task = asyncio.create_task(write())
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [f"{tmp_path}/sub/a.txt"]
    assert os.listdir(tmp_path / "sub") == ["a.txt"]


async def test_a_result_that_cannot_be_written_whole_is_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OutputError, match="No space left"):  # which ends the run: all others would fail
        await outputs(tmp_path).write(0, WORDS)
    assert os.listdir(tmp_path / "sub") == []


def test_what_a_killed_run_left_is_swept_and_a_running_one_is_left(tmp_path: Path) -> None:
    old, new = (tmp_path / "sub" / f".asr-server-{name}.partial" for name in ("old", "new"))
    old.parent.mkdir()
    for partial in (old, new):
        partial.write_bytes(b"half")
    os.utime(old, (0, 0))
    check_writable(tmp_path)
    assert list(old.parent.iterdir()) == [new]


async def test_waiting_results_are_bounded(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    inputs = [Input(f"{index}", Path(f"{index}"), PurePath(f"{index}")) for index in range(600)]
    printed = StandardOutput(inputs, TranscribeJob(("a", "b")))
    printed.begin(range(600))

    async def write(*indices: int) -> None:
        async with asyncio.timeout(60):
            for index in indices:
                await printed.write(index, transcript(text=str(index)))

    await write(*range(1, 256))
    late = asyncio.create_task(write(256))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not late.done(), "256 results are held"
    assert capfdbinary.readouterr().out == b""
    await write(0)
    await late
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert [line for line in lines if line.isdigit()] == [str(index) for index in range(257)]
    await write(*range(512, 256, -1))
    assert capfdbinary.readouterr().out.decode().count("==>") == 256


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
async def test_only_what_every_result_would_meet_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(fd: int) -> None:
        raise OSError(number, "reason")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(PermissionError if number == errno.EACCES else OutputError):
        await outputs(tmp_path).write(0, WORDS)


def test_a_recording_whose_result_another_one_has_is_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    inputs = [Input(f"{day}/a.wav", tmp_path / day / "a.wav", PurePath("a.wav")) for day in ("mon", "tue")]
    inputs.append(Input("b.txt", tmp_path / "b.txt", PurePath("b")))
    outputs = FolderOutputs(tmp_path, inputs, TranscribeJob(("a", "b"), existing="skip"))
    reasons = [failure and failure.reason for failure in map(outputs.prepare, range(3))]
    path = f"its result {tmp_path}"
    assert reasons == [
        None,
        f"{path}/a.wav.txt is the result of mon/a.wav: give it an output folder of its own",
        f"{path}/b.txt is a recording: give it an output folder of its own",
    ]
    for name in ("a.wav.txt", "b.txt"):
        (tmp_path / name).touch()
    assert [outputs.is_done(index) for index in range(3)] == [True, False, False]
