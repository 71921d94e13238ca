"""How long a run takes, and how it ends: by a signal, or by a stream that cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path, PurePath

import pytest

from asr_server.audio.recording import Source
from asr_server.core import Transcript
from asr_server.offline.inputs import Input
from asr_server.offline.local import OnProgress, TranscribeJob
from asr_server.offline.outputs import StandardOutput
from asr_server.offline.progress import ProgressBars, Summary
from asr_server.offline.run import Batch, transcribe_files
from tests.formats.samples import transcript


class Reader:
    """Returns what a file holds; "stop" waits for another one and ends the run by a signal."""

    running = contextlib.nullcontext
    model = "base"

    def __init__(self, job: TranscribeJob) -> None:
        self._other_is_read = asyncio.Event()

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        assert isinstance(source, Path)
        if source.stem == "stop":
            await self._other_is_read.wait()
            for _ in range(20):  # until the other's result is held back
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        self._other_is_read.set()
        return transcript(text=source.stem, duration_s=6.0)


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


async def test_times_are_of_the_run_and_of_each_recording(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count(1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    job = TranscribeJob(("a.wav",))
    inputs, summary, bars = (
        [Input("a.wav", Path("a.wav"), (PurePath("a"),))],
        Summary(1),
        ProgressBars(1, False),
    )
    await Batch(inputs, Reader(job), StandardOutput(inputs, job), summary, bars).run([0])
    assert summary.elapsed_s == 3.0, "from its begin, over the recording's two, to its end"
    assert capsys.readouterr() == ("a\n", "a.wav: 6.0 s of audio in 1.0 s (6.0 x)\n")
    assert [task.description for task in bars._progress.tasks] == ["all"], "the recording's bar is gone"


def test_what_was_read_before_a_signal_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.wav" for name in ("stop", "b")]
    for path in paths:
        path.touch()
    assert transcribe_files(Reader, TranscribeJob(tuple(map(str, paths)))) == 143
    printed = capsys.readouterr()
    assert printed.out == f"==> {paths[1]} <==\nb\n\n"
    assert "stopped: terminated" in printed.err.splitlines()


def test_a_stream_that_cannot_be_read_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Broken())))
    assert transcribe_files(Reader, TranscribeJob(("-",))) == 1
    assert capsys.readouterr().err.splitlines()[0] == "failed: standard input: Input/output error"
