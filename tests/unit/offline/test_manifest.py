"""A manifest's job: its lines, its results and reports."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asr_server.annexes.offline import run as run_module
from asr_server.annexes.offline.local import Existing, OnProgress, TranscribeJob
from asr_server.annexes.offline.manifest import (
    Entry,
    LineReport,
    LineTranscriber,
    Reports,
    read_entries,
    result_name,
    survey,
)
from asr_server.annexes.offline.outputs import OutputError
from asr_server.annexes.offline.run import transcribe_manifest
from asr_server.audio.recording import Source
from asr_server.config import Settings
from asr_server.core import Transcript
from asr_server.errors import EngineUnavailable, InvalidAudio, InvalidValue
from asr_server.formats.render import FileFormat
from tests.support.embedded import embedded
from tests.unit.formats.samples import transcript

# -- Lines ----------------------------------------------------------------------------------------------


def write(folder: Path, content: bytes) -> Path:
    manifest = folder / "files.jsonl"
    manifest.write_bytes(content)
    return manifest


def test_a_line_names_a_recording_from_the_manifests_folder(tmp_path: Path) -> None:
    manifest = write(tmp_path, b'{"audio": "a/b.wav", "duration": 3, "text": "of another tool"}\n')
    assert list(read_entries(manifest)) == [Entry(0, "a/b.wav", tmp_path / "a/b.wav")]


def test_a_line_has_an_id_a_language_and_a_prompt_of_its_own(tmp_path: Path) -> None:
    manifest = write(tmp_path, b'{"audio": "/x.wav", "id": "7", "language": "de", "prompt": "Anna"}')
    assert list(read_entries(manifest)) == [Entry(0, "7", Path("/x.wav"), "de", "Anna")]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"audio": ""}',
        b'{"audio": 3}',
        b'{"audio": "a", "id": ""}',
        b'{"audio": "a", "language": ["de"]}',
        b'{"audio": "\xff"}',
        b'{"audio": "\\ud800"}',
        b"\x00",
    ],
)
def test_a_bad_line_has_a_reason_and_harms_no_other(tmp_path: Path, line: bytes) -> None:
    good = b'{"audio": "a.wav"}\n'
    before, bad, after = read_entries(write(tmp_path, good + line + b"\n \n" + good))
    assert isinstance(before, Entry)
    assert isinstance(bad, LineReport)
    assert bad.offset == len(good)
    assert bad.error
    assert after == Entry(len(good + line) + 3, "a.wav", tmp_path / "a.wav")


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000])
def test_the_parts_of_a_manifest_are_each_line_once(tmp_path: Path, part_bytes: int) -> None:
    lines = [json.dumps({"audio": "x" * (index % 50 + 1)}) for index in range(60)]
    manifest = write(tmp_path, "\n".join(lines).encode())
    size = manifest.stat().st_size
    parts = [
        entry
        for start in range(0, size, part_bytes)
        for entry in read_entries(manifest, start, start + part_bytes)
    ]
    assert parts == list(read_entries(manifest))
    assert len(parts) == 60


@pytest.mark.parametrize(
    ("content", "count"), [(b"", 0), (b"{}", 1), (b"{}\n", 1), (b"{}\n{}", 2), (b"\n{}\n \r\n{}\n\n", 2)]
)
def test_lines_are_counted_without_blank_ones_with_or_without_a_last_line_break(
    tmp_path: Path, content: bytes, count: int
) -> None:
    assert survey(write(tmp_path, content))[0] == count


def test_a_line_whose_id_an_earlier_one_has_is_named_with_that_one(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "A", "b", "a"]
    lines = [json.dumps({"audio": "x.wav", "id": id}) + "\n" for id in ids]
    size = len(lines[0])
    _, repeats = survey(write(tmp_path, "".join(lines).encode()))
    assert repeats == {2 * size: 0, 5 * size: size, 6 * size: 0}


# -- Results --------------------------------------------------------------------------------------------


IDS = ["a", "A", "a/b.wav", "a%2Fb.wav", "..", ".", "/etc/passwd", "ü" * 300, "ü" * 301, "\n", "a b"]


def results_of(folder: Path, *formats: FileFormat, existing: Existing = "refuse") -> LineTranscriber:
    """Its results alone are asked for: there is no transcriber."""
    return LineTranscriber(cast(Any, None), TranscribeJob((), formats, folder, existing), {})


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_id_has_results_of_its_own_within_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    results = results_of(folder, "text", "json")
    for count, id in enumerate(IDS):
        assert not results.is_done(id)
        results.write(id, transcript(text=id))
        assert results.is_done(id)
        assert len(files_in(folder)) == 2 * (count + 1)
    assert files_in(tmp_path) == files_in(folder)
    assert {len(path.relative_to(folder).parts) for path in files_in(folder)} == {2}


def test_of_several_formats_all_have_to_be_there(tmp_path: Path) -> None:
    results_of(tmp_path, "text").write("a", transcript())
    assert not results_of(tmp_path, "text", "srt").is_done("a")
    assert not results_of(tmp_path, "text", existing="overwrite").is_done("a")


def test_a_result_has_the_place_where_an_earlier_version_left_it() -> None:
    assert result_name("a") == "eb1/a"
    assert re.fullmatch("[0-9a-f]{3}/(ü){100}", result_name("ü" * 100))
    assert re.fullmatch("[0-9a-f]{3}/x(ü){89}-[0-9a-f]{20}", result_name("x" + "ü" * 100))


# -- Reports --------------------------------------------------------------------------------------------

DONE = LineReport(0, "transcribed", "a", "a.wav", duration_s=1800.0)
FAILED = LineReport(30, "failed", "b", "b.wav", "damaged")


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "")


def test_each_line_is_counted_and_those_that_failed_are_written_down(tmp_path: Path) -> None:
    reports = Reports(tmp_path, 7, quiet=True)
    with reports.bars.progress:
        assert reports.numbers() == "nothing done, 0.0 h of audio, 7 lines not begun or not finished"
        reports.add(DONE)
        reports.add(LineReport(60, "skipped", "c", "c.wav"))
        reports.add(FAILED)
        line = {"offset": 30, "id": "b", "audio": "b.wav", "error": "damaged"}
        assert json.loads((tmp_path / "errors.jsonl").read_text()) == line, "it is there at once"
        reports.add(LineReport(90, "failed", error="no line"))
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 2
    assert reports.counts == {"transcribed": 1, "skipped": 1, "failed": 2}
    expected = "1 transcribed, 1 skipped, 2 failed, 0.5 h of audio"
    assert FAILED.duration_s == 0.0, "what failed has no audio"
    assert reports.numbers() == f"{expected}, 3 lines not begun or not finished"


def test_without_a_terminal_the_numbers_are_a_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lines = []
    reports = Reports(tmp_path, 9, quiet=False)
    with reports.bars.progress:
        for clock[0] in (159.9, 160.0, 219.9, 220.0):
            reports.add(DONE)
            lines.append(capsys.readouterr().err)
    left = "h of audio, {} lines not begun or not finished\n"
    assert lines == ["", f"2 transcribed, 1.0 {left.format(7)}", "", f"4 transcribed, 2.0 {left.format(5)}"]


def test_a_file_of_failures_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*errors\.jsonl: Is a directory"):
        Reports(tmp_path, 1, quiet=True)


def test_a_failure_that_cannot_be_written_down_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "errors.jsonl").symlink_to("/dev/full")
    reports = Reports(tmp_path, 1, quiet=True)
    with pytest.raises(OutputError, match=r"cannot write .*errors\.jsonl: No space left on device"):
        reports.add(FAILED)


# -- The job --------------------------------------------------------------------------------------------


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
        monkeypatch.setattr(run_module, "LocalTranscriber", self._make)

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
    return Job(tmp_path, monkeypatch)


def test_what_fails_is_counted_and_the_rest_done_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_bounded_number_of_recordings_is_under_way(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
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
        sys.modules, "asr_server.annexes.offline.manifest_ray", SimpleNamespace(run_on_ray=run_on_ray)
    )
    monkeypatch.setattr("asr_server.annexes.ray.cluster.check_answers", lambda address: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        job.lines({"audio": "a.wav"})
        settings = embedded(executor="ray", ray_address="head:6379")
        assert transcribe_manifest(settings, job.plain) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    stopped = f"stopped: {reason}\n" if reason else ""
    assert capsys.readouterr().err == f"{stopped}1 transcribed, 1.0 h of audio\n"
