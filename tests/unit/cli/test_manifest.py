"""`asr-server transcribe --manifest` as its user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.system.cli.test_transcribe import heard, record, said, transcribe_here


def write_manifest(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def results(out: Path) -> dict[str, str]:
    """The texts by the names of their files."""
    return {path.name: path.read_text() for path in out.rglob("*.txt")}


def errors(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]


def test_what_cannot_be_transcribed_is_a_line_in_the_error_file_and_the_rest_is_done_once(
    tmp_path: Path,
) -> None:
    record(tmp_path / "a.wav")
    (tmp_path / "empty.wav").write_bytes(b"")
    manifest = write_manifest(
        tmp_path / "files.jsonl",
        {"audio": "a.wav", "id": "first", "language": "en"},
        "no json",
        {"audio": "missing.wav"},
        {"audio": "empty.wav"},
        {"audio": "."},
        {"audio": "a.wav", "id": "klingon", "language": "klingon"},
        {"audio": str(tmp_path / "a.wav"), "id": "last"},
        {"audio": "other.wav", "id": "first"},
    )
    out = tmp_path / "out"
    done = transcribe_here("--manifest", manifest, "--output", out)
    assert done.returncode == 1
    assert done.stdout == b""
    assert sorted(results(out)) == ["first.txt", "last.txt"]
    assert all(heard(text) for text in results(out).values())
    wrong = {line["audio"].removeprefix(f"{tmp_path}/"): line["error"] for line in errors(out)}
    assert len(errors(out)) == 6
    assert sorted(wrong) == sorted(["", "missing.wav", "empty.wav", str(tmp_path), "a.wav", "other.wav"])
    assert wrong["missing.wav"] == "No such file or directory"
    assert "'klingon' is not known" in wrong["a.wav"]
    assert "its result would replace that of the line at byte 0" in wrong["other.wav"]
    assert errors(out)[0]["offset"] == len(manifest.read_text().splitlines()[0]) + 1
    assert said(done)[-1].startswith("2 transcribed, 6 failed, ")

    write_manifest(manifest, {"audio": "missing.wav", "id": "first"}, {"audio": "a.wav", "id": "new"})
    again = transcribe_here("--manifest", manifest, "--output", out)
    assert again.returncode == 0
    assert said(again)[-1].startswith("1 transcribed, 1 skipped, ")
    assert errors(out) == []
    assert sorted(results(out)) == ["first.txt", "last.txt", "new.txt"]
