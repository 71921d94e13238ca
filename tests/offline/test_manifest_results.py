"""Where the results of a manifest's entries lie."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from asr_server.offline.local import TranscribeJob
from asr_server.offline.manifest import ManifestResults, result_name
from asr_server.offline.outputs import OutputError
from tests.formats.samples import transcript

IDS = ["a", "A", "a/b.wav", "a%2Fb.wav", "..", ".", "/etc/passwd", "ü" * 300, "ü" * 301, "\n", "a b"]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_id_has_results_of_its_own_within_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    results = ManifestResults(folder, TranscribeJob((), ("text", "json"), folder))
    for count, id in enumerate(IDS):
        assert not results.is_done(id)
        results.write(id, transcript(text=id))
        assert results.is_done(id)
        assert len(files_in(folder)) == 2 * (count + 1)
    assert files_in(tmp_path) == files_in(folder)
    assert {len(path.relative_to(folder).parts) for path in files_in(folder)} == {2}


def test_of_several_formats_all_have_to_be_there(tmp_path: Path) -> None:
    ManifestResults(tmp_path, TranscribeJob((), ("text",))).write("a", transcript())
    assert not ManifestResults(tmp_path, TranscribeJob((), ("text", "srt"))).is_done("a")
    assert not ManifestResults(tmp_path, TranscribeJob((), ("text",), existing="overwrite")).is_done("a")


def test_a_full_disk_ends_the_job_and_leaves_no_part_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OutputError, match="No space left"):
        ManifestResults(tmp_path, TranscribeJob((), ("text",))).write("a", transcript())
    assert [os.listdir(folder) for folder in tmp_path.iterdir()] == [[]]


def test_a_result_has_the_place_where_an_earlier_version_left_it() -> None:
    assert result_name("a") == "eb1/a"
    assert re.fullmatch("[0-9a-f]{3}/(ü){100}", result_name("ü" * 100))
    assert re.fullmatch("[0-9a-f]{3}/x(ü){89}-[0-9a-f]{20}", result_name("x" + "ü" * 100))
