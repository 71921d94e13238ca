"""A watched folder: what is complete is transcribed once, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from asr_server.audio.recording import Source
from asr_server.core import Transcript
from asr_server.errors import InvalidAudio
from asr_server.offline.local import OnProgress, TranscribeJob
from asr_server.offline.outputs import OutputError
from asr_server.offline.watch import Arrivals, Watch, watch_folder
from tests.formats.samples import transcript


class Transcriber:
    running = contextlib.nullcontext
    model = "base"

    def __init__(self) -> None:
        self.read: list[str] = []
        self.num_running = self.most_running = 0

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        assert isinstance(source, Path)
        self.read.append(source.name)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        if source.read_bytes() == b"bad":
            raise InvalidAudio("not audio")
        return transcript(text=source.read_text())


def job_in(folder: Path) -> TranscribeJob:
    for name in ("in", "out"):
        (folder / name).mkdir(exist_ok=True)
    return TranscribeJob((), output_dir=folder / "out", watch=folder / "in", recursive=True)


@contextlib.asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[None]:
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(60):
            yield
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until_text(path: Path, text: str) -> None:
    while not path.exists() or path.read_text() != text:
        await asyncio.sleep(0.01)


def found_by(arrivals: Arrivals) -> list[str]:
    return [item.name.rpartition("/")[2] for item in arrivals.look()]


def test_a_recording_is_taken_once_it_has_stopped_growing(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path, recursive=False)
    growing = tmp_path / "a.wav"
    growing.write_bytes(b"1")
    assert found_by(arrivals) == []
    growing.write_bytes(b"12")
    assert found_by(arrivals) == []
    assert found_by(arrivals) == ["a.wav"]
    assert found_by(arrivals) == []


def test_what_is_empty_or_no_recording_or_hidden_is_left_alone(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path, recursive=False)
    (tmp_path / "a.wav").touch()
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / ".b.wav.part").write_bytes(b"1")
    (tmp_path / ".c.wav").write_bytes(b"1")
    assert [found_by(arrivals) for _ in range(3)] == [[], [], []]


def test_a_recording_that_changes_is_taken_again_and_one_that_left_is_forgotten(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path, recursive=False)
    path = tmp_path / "a.wav"
    path.write_bytes(b"1")
    assert [found_by(arrivals) for _ in range(2)] == [[], ["a.wav"]]
    path.write_bytes(b"123")
    assert [found_by(arrivals) for _ in range(3)] == [[], ["a.wav"], []]
    path.unlink()
    assert found_by(arrivals) == []
    path.write_bytes(b"123")
    assert [found_by(arrivals) for _ in range(2)] == [[], ["a.wav"]]


async def test_recordings_are_transcribed_as_they_come_and_not_again_after_a_restart(tmp_path: Path) -> None:
    job, first = job_in(tmp_path), Transcriber()
    (tmp_path / "in" / "a.wav").write_text("one")
    async with watching(Watch(first, job, look_s=0.01)):
        await until_text(tmp_path / "out" / "a.wav.txt", "one\n")
        (tmp_path / "in" / "deep").mkdir()
        (tmp_path / "in" / "deep" / "a.mp3").write_text("two")
        await until_text(tmp_path / "out" / "deep" / "a.mp3.txt", "two\n")
    again = Transcriber()
    watch = Watch(again, job, look_s=0.01)
    async with watching(watch):
        (tmp_path / "in" / "b.wav").write_text("three")
        await until_text(tmp_path / "out" / "b.wav.txt", "three\n")
    assert first.read == ["a.wav", "a.mp3"]
    assert again.read == ["b.wav"]
    assert watch.counts == {"transcribed": 1, "failed": 0}


async def test_a_recording_that_is_newer_than_its_result_is_transcribed_again(tmp_path: Path) -> None:
    job, path = job_in(tmp_path), tmp_path / "in" / "a.wav"
    path.write_text("half")
    async with watching(Watch(Transcriber(), job, look_s=0.01)):
        await until_text(tmp_path / "out" / "a.wav.txt", "half\n")
        path.write_text("the whole")
        result = (tmp_path / "out" / "a.wav.txt").stat()
        os.utime(path, ns=(result.st_atime_ns, result.st_mtime_ns + 10**9))
        await until_text(tmp_path / "out" / "a.wav.txt", "the whole\n")


async def test_what_fails_is_named_at_once_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, transcriber = job_in(tmp_path), Transcriber()
    (tmp_path / "in" / "a.wav").write_text("bad")
    watch = Watch(transcriber, job, look_s=0.01)
    async with watching(watch):
        while not watch.counts["failed"]:
            await asyncio.sleep(0.01)
        (tmp_path / "in" / "b.wav").write_text("two")
        await until_text(tmp_path / "out" / "b.wav.txt", "two\n")
    assert transcriber.read == ["a.wav", "b.wav"]
    assert f"failed: {tmp_path}/in/a.wav: not audio\n" in capsys.readouterr().err


async def test_a_bounded_number_of_recordings_is_under_way_at_once(tmp_path: Path) -> None:
    job, transcriber = job_in(tmp_path), Transcriber()
    for number in range(40):
        (tmp_path / "in" / f"{number}.wav").write_text("words")
    watch = Watch(transcriber, job, look_s=0.01)
    async with watching(watch):
        while watch.counts["transcribed"] < 40:
            await asyncio.sleep(0.01)
    assert 1 <= transcriber.most_running <= 16
    assert len(transcriber.read) == 40


@pytest.mark.parametrize(("newer_ns", "is_done"), [(0, True), (-1, True), (1, False)])
async def test_a_result_as_old_as_its_recording_is_of_it(
    tmp_path: Path, newer_ns: int, is_done: bool
) -> None:
    job, transcriber = job_in(tmp_path), Transcriber()
    recording, result, last = (tmp_path / name for name in ("in/a.wav", "out/a.wav.txt", "in/b.wav"))
    for path in (recording, result, last):
        path.write_text("words")
    os.utime(result, ns=(10**18, 10**18))
    os.utime(recording, ns=(10**18, 10**18 + newer_ns))
    async with watching(Watch(transcriber, job, look_s=0.01)):
        await until_text(tmp_path / "out" / "b.wav.txt", "words\n")
    assert ("a.wav" not in transcriber.read) == is_done


@pytest.mark.parametrize(
    ("texts", "status", "quiet", "last"),
    [
        ([], 143, False, "nothing transcribed"),
        (["one", "bad", "two"], 143, False, "2 transcribed, 1 failed"),
        (["one"], 143, True, "stopped: terminated"),
    ],
)
def test_at_its_end_a_watch_says_what_was_done(
    tmp_path: Path,
    texts: list[str],
    status: int,
    quiet: bool,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("asr_server.offline.watch.Watch", partial(Watch, look_s=0.01))

    class Ends(Transcriber):
        """Sends the signal once all are read, or at once where there is nothing."""

        @contextlib.asynccontextmanager
        async def running(self) -> AsyncIterator[None]:  # type: ignore[override]
            if not texts:
                os.kill(os.getpid(), signal.SIGTERM)
            yield

        async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
            if len(self.read) + 1 == len(texts):
                asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
            return await super().transcribe(source, on_progress)

    job = replace(job_in(tmp_path), quiet=quiet)
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.wav").write_text(text)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert watch_folder(lambda _: Ends(), job) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == last
    assert "stopped: terminated" in lines


async def test_a_folder_that_takes_long_to_look_through_is_looked_at_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.1, 10.0, 10.5, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    pauses: list[float] = []

    async def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr("asr_server.offline.watch.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Watch(Transcriber(), job_in(tmp_path)).run()
    assert pauses == [2.0, 5.0]


async def test_a_recording_whose_results_have_no_folder_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, transcriber = job_in(tmp_path), Transcriber()
    (tmp_path / "in" / "deep").mkdir()
    (tmp_path / "in" / "deep" / "a.wav").write_text("one")
    (tmp_path / "out" / "deep").touch()
    watch = Watch(transcriber, job, look_s=0.01)
    assert [task.visible for task in watch._bars._progress.tasks] == [False], "there is no number of files"
    async with watching(watch):
        while not watch.counts["failed"]:
            await asyncio.sleep(0.01)
    reason = f"cannot make the folder {tmp_path}/out/deep: File exists"
    assert f"failed: {tmp_path}/in/deep/a.wav: {reason}\n" in capsys.readouterr().err
    assert transcriber.read == []


def test_a_folder_that_cannot_be_written_is_refused_before_a_transcriber_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = replace(job_in(tmp_path), output_dir=tmp_path / "file" / "out")
    with pytest.raises(OutputError, match="cannot write to the output folder"):
        watch_folder(lambda _: pytest.fail("a transcriber was made"), job)
