"""What a line of a manifest may be, and that the parts of a manifest add up to the whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from asr_server.offline.manifest import MAX_LINE_BYTES, BadLine, Entry, read_entries, result_name, survey


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
        b'{"audio": "a\\u0000.wav"}',
        b'{"audio": "' + b"a" * MAX_LINE_BYTES + b'"}',
    ],
)
def test_a_bad_line_has_a_reason_and_harms_no_other(tmp_path: Path, line: bytes) -> None:
    good = b'{"audio": "a.wav"}\n'
    before, bad, after = read_entries(write(tmp_path, good + line + b"\n \n" + good))
    assert isinstance(before, Entry)
    assert isinstance(bad, BadLine)
    assert bad.offset == len(good)
    assert bad.reason
    assert after == Entry(len(good + line) + 3, "a.wav", tmp_path / "a.wav")


MIB = 1 << 20


@pytest.mark.parametrize(("num_bytes", "is_good"), [(MIB, True), (MIB + 1, False), (MIB + 2, False)])
def test_a_line_has_a_mebibyte_at_most_with_its_break_and_the_next_one_is_read(
    tmp_path: Path, num_bytes: int, is_good: bool
) -> None:
    before, behind = b'{"prompt": "', b'", "audio": "a.wav"}\n'
    line = before + b"x" * (num_bytes - len(before + behind)) + behind
    long, following = read_entries(write(tmp_path, line + b'{"audio": "b.wav"}\n'))
    assert isinstance(long, Entry if is_good else BadLine)
    assert following == Entry(num_bytes, "b.wav", tmp_path / "b.wav")


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
    ("content", "count"),
    [(b"", 0), (b"{}", 1), (b"{}\n", 1), (b"{}\n{}", 2), (b"\n{}\n \r\n{}\n\n", 2)],
)
def test_lines_are_counted_without_blank_ones_with_or_without_a_last_line_break(
    tmp_path: Path, content: bytes, count: int
) -> None:
    assert survey(write(tmp_path, content), ignores_case=False).num_lines == count


def test_a_line_whose_id_an_earlier_one_has_is_named_with_that_one(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "A", "b", "a"]
    lines = [json.dumps({"audio": "x.wav", "id": id}) + "\n" for id in ids]
    size = len(lines[0])
    repeats = survey(write(tmp_path, "".join(lines).encode()), ignores_case=False).repeats
    assert repeats == {2 * size: 0, 5 * size: size, 6 * size: 0}


def test_ids_share_a_result_where_the_disk_ignores_case_and_their_folder_is_one(tmp_path: Path) -> None:
    apart = ["talk", "Talk"]
    words = (f"talk{number}" for number in itertools.count())
    word = next(
        word for word in words if result_name(word).casefold() == result_name(word.upper()).casefold()
    )
    together = [word, word.upper()]
    lines = [json.dumps({"audio": "x.wav", "id": id}) + "\n" for id in apart + together]
    manifest = write(tmp_path, "".join(lines).encode())
    first, second = len("".join(lines[:2])), len("".join(lines[:3]))
    assert survey(manifest, ignores_case=True).repeats == {second: first}
    assert survey(manifest, ignores_case=False).repeats == {}
