"""A manifest's job from its checks to its status, with a transcriber that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server.audio.recording import Source
from asr_server.config import Settings
from asr_server.core import Transcript
from asr_server.errors import EngineUnavailable, InvalidAudio, InvalidValue
from asr_server.offline import manifest_run
from asr_server.offline.local import OnProgress, TranscribeJob
from asr_server.offline.manifest import LineReport, Reports
from asr_server.offline.manifest_run import transcribe_manifest
from asr_server.offline.outputs import OutputError
from tests.embedded import embedded
from tests.formats.samples import transcript


class Scripted:
    """Reads a recording's text from its file: "bad" cannot be read, "dead" ends the engine."""

    running = contextlib.nullcontext
    waits_for = 1  # no recording is done before so many are under way

    def __init__(self, settings: Settings, job: TranscribeJob) -> None:
        self.num_running = self.most_running = 0
        self.are_enough = asyncio.Event()
        self.asked_for: list[tuple[str | None, str | None]] = []

    def options_for(self, language: str | None, prompt: str | None) -> None:
        if language == "klingon":
            raise InvalidValue("not known")
        self.asked_for.append((language, prompt))

    async def transcribe(self, source: Source, on_progress: OnProgress, options: None) -> Transcript:
        assert isinstance(source, Path)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == self.waits_for:
            self.are_enough.set()
        await self.are_enough.wait()
        await asyncio.sleep(0.001)  # one more than are awaited would begin now
        self.num_running -= 1
        match text := source.read_text():
            case "bad":
                raise InvalidAudio("no audio")
            case "dead":
                raise EngineUnavailable("the engine\x07 is gone")
            case "stop":
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
        return transcript(text=text, duration_s=3600.0)


class Job:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._manifest, self.out = folder / "files.jsonl", folder / "out"
        self.plain = TranscribeJob((), output_dir=self.out, manifest=self._manifest)
        self.transcribers: list[Scripted] = []
        monkeypatch.setattr(manifest_run, "LocalTranscriber", self._make)

    def _make(self, settings: Settings, job: TranscribeJob) -> Scripted:
        self.transcribers.append(Scripted(settings, job))
        return self.transcribers[-1]

    def lines(self, *lines: Mapping[str, str] | str) -> None:
        """Write the manifest; recordings hold their own names, up to a dot."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self._manifest.write_text("".join(f"{text}\n" for text in texts))
        for line in lines:
            if not isinstance(line, str):
                path = self._manifest.parent / line["audio"]
                path.write_text(path.stem)

    def run(self, **changes: Any) -> int:
        return transcribe_manifest(embedded(), replace(self.plain, **changes))

    def results(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in self.out.glob("*/*.txt")}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("FORCE_COLOR", "")
    return Job(tmp_path, monkeypatch)


def test_what_fails_is_counted_and_the_rest_is_done_once(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.lines(
        {"audio": "one.wav", "id": "1", "language": "de", "prompt": "Anna"},
        {"audio": "bad.wav", "id": "2"},
        "no json",
        {"audio": "two.wav", "id": "1"},
        json.dumps({"audio": ".", "id": "4"}),
        {"audio": "two.wav", "id": "3", "language": "klingon"},
    )
    assert job.run() == 1
    assert job.results() == {"1": "one\n"}
    assert capsys.readouterr().err == "1 transcribed, 5 failed, 1.0 h of audio\n"
    errors = map(json.loads, (job.out / "errors.jsonl").read_text().splitlines())
    wrong = {error["id"] or "no line": error["error"] for error in errors}
    assert (wrong["2"], wrong["3"]) == ("no audio", "not known")
    assert wrong["4"] == "neither a file nor a folder"
    assert wrong["1"].startswith("its result would replace that of the line at byte 0")
    assert wrong["no line"].startswith("not a line of a manifest")
    assert job.transcribers[0].asked_for == [("de", "Anna"), (None, None), (None, None)]

    job.lines({"audio": "one.wav", "id": "1"}, {"audio": "two.wav", "id": "3"})
    assert job.run() == 0
    assert capsys.readouterr().err == "1 transcribed, 1 skipped, 1.0 h of audio\n"
    assert job.results() == {"1": "one\n", "3": "two\n"}
    assert job.run(quiet=True, existing="overwrite") == 0
    assert capsys.readouterr().err == ""


def test_an_empty_manifest_is_done(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.lines()
    assert job.run() == 0
    assert capsys.readouterr().err == "nothing done, 0.0 h of audio\n"


def test_a_bounded_number_of_recordings_is_under_way_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "waits_for", 16)
    job.lines(*({"audio": f"{number}.wav"} for number in range(40)))
    assert job.run(quiet=True) == 0
    assert len(job.results()) == 40
    assert job.transcribers[0].most_running == 16


@pytest.mark.parametrize(
    ("name", "status", "reason"), [("dead", 1, "the engine\\x07 is gone"), ("stop", 143, "terminated")]
)
def test_what_ends_the_engine_or_the_job_ends_it_in_a_line(
    job: Job, name: str, status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        job.lines({"audio": f"{name}.wav"})
        assert job.run() == status
    finally:
        signal.signal(signal.SIGTERM, before)
    left = "nothing done, 0.0 h of audio, 1 lines not begun or not finished\n"
    assert capsys.readouterr().err == f"stopped: {reason}\n{left}"


def test_what_cannot_be_read_or_written_is_known_before_an_engine_starts(job: Job, tmp_path: Path) -> None:
    job.lines()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write to the output folder"):
        job.run(output_dir=tmp_path / "file" / "out")
    assert job.transcribers == []
    with pytest.raises(OutputError, match=r"cannot read the manifest .*: Is a directory"):
        job.run(manifest=tmp_path)


@pytest.mark.parametrize(
    ("ends_with", "status", "reason"),
    [(None, 0, ""), (OutputError("no cluster"), 1, "no cluster"), (signal.SIGTERM, 143, "terminated")],
)
def test_over_ray_the_same_reports_and_statuses_come_from_elsewhere(
    job: Job,
    ends_with: Exception | signal.Signals | None,
    status: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_on_ray(
        settings: Settings, job: TranscribeJob, reports: Reports, repeats: Mapping[int, int], address: str
    ) -> None:
        assert (address, dict(repeats)) == ("head:6379", {})
        reports.add(LineReport(0, "transcribed", "a", "a.wav", duration_s=3600.0))
        if isinstance(ends_with, Exception):
            raise ends_with
        if ends_with:
            os.kill(os.getpid(), ends_with)

    monkeypatch.setitem(
        sys.modules, "asr_server.offline.manifest_ray", SimpleNamespace(run_on_ray=run_on_ray)
    )
    monkeypatch.setattr("asr_server.dispatch.ray_cluster.check_answers", lambda address: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        job.lines({"audio": "a.wav"})
        settings = embedded(executor="ray", ray_address="head:6379")
        assert transcribe_manifest(settings, job.plain) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    stopped = f"stopped: {reason}\n" if reason else ""
    assert capsys.readouterr().err == f"{stopped}1 transcribed, 1.0 h of audio\n"
