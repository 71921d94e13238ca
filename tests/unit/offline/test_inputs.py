import io
import os
import threading
from pathlib import Path

import pytest

from asr_server.annexes.offline.inputs import (
    MAX_NAME_BYTES,
    Failure,
    Input,
    buffered,
    collect_inputs,
    result_names,
    result_path,
)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"?")


def names(inputs: list[Input], folder: Path) -> list[str]:
    return [str(Path(found.name).relative_to(folder)) for found in inputs]


def test_a_folder_gives_its_recordings_in_order_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, "b.wav", "a.MP3", "notes.txt", "._b.wav", "film.mkv", "deep/c.flac")
    inputs, failures = collect_inputs([str(tmp_path)], recursive=False)
    assert names(inputs, tmp_path) == ["a.MP3", "b.wav", "film.mkv"]
    assert failures == []


def test_an_address_is_refused_with_the_command_that_fetches_it() -> None:
    address = "https://example.com/a talk.mp3?x=1&y=2"
    inputs, (failure,) = collect_inputs([address], recursive=False)
    assert inputs == []
    assert failure.reason == (f"addresses are not fetched: curl -L '{address}' | asr-server transcribe -")


def test_recursive_goes_into_the_folders_within(tmp_path: Path) -> None:
    make(tmp_path, "b.wav", "deep/c.flac", "deep/er/d.ogg", ".hidden/e.wav")
    inputs, _ = collect_inputs([str(tmp_path)], recursive=True)
    assert names(inputs, tmp_path) == ["b.wav", "deep/c.flac", "deep/er/d.ogg"]


def test_a_folder_without_recordings_is_a_failure_that_names_the_option(tmp_path: Path) -> None:
    make(tmp_path, "deep/c.flac")
    assert collect_inputs([str(tmp_path)], recursive=False) == (
        [],
        [
            Failure(
                str(tmp_path),
                "no recordings in this folder; --recursive looks into the folders within it too",
            )
        ],
    )


def test_a_file_that_is_named_needs_no_known_ending(tmp_path: Path) -> None:
    make(tmp_path, "voice-memo")
    inputs, failures = collect_inputs([str(tmp_path / "voice-memo")], recursive=False)
    assert (names(inputs, tmp_path), failures) == (["voice-memo"], [])


def test_what_is_named_twice_is_transcribed_once(tmp_path: Path) -> None:
    make(tmp_path, "a.wav")
    file = str(tmp_path / "a.wav")
    inputs, _ = collect_inputs([file, str(tmp_path), file], recursive=False)
    assert len(inputs) == 1


def test_one_missing_file_does_not_hide_the_others(tmp_path: Path) -> None:
    make(tmp_path, "a.wav")
    missing = str(tmp_path / "missing.wav")
    inputs, failures = collect_inputs([missing, str(tmp_path / "a.wav"), "/dev/null"], recursive=False)
    assert names(inputs, tmp_path) == ["a.wav"]
    assert failures == [
        Failure(missing, "No such file or directory"),
        Failure("/dev/null", "neither a file nor a folder"),
    ]


def test_a_pipe_is_read_to_its_end_into_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = os.urandom((1 << 20) + 7)
    threading.Thread(target=pipe.write_bytes, args=(content,)).start()
    inputs, failures = collect_inputs([str(pipe)], recursive=False)
    assert failures == []
    file = buffered(inputs[0]).source
    assert not isinstance(file, Path)
    with file:
        assert os.fstat(file.fileno()).st_size == len(content), "decoders read it by its number"
        file.seek(0)
        assert file.read() == content


def test_a_terminal_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert collect_inputs(["-"], recursive=False)[1] == [
        Failure("-", "it is a terminal: pipe a recording into it")
    ]


@pytest.mark.parametrize("closed", [None, "by its reader"])
def test_a_closed_standard_input_is_no_recording(monkeypatch: pytest.MonkeyPatch, closed: str | None) -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    monkeypatch.setattr("sys.stdin", closed and stream)
    assert collect_inputs(["-"], recursive=False)[1] == [Failure("-", "it is closed")]


def test_folders_behind_links_are_read_once_and_circles_are_left(tmp_path: Path) -> None:
    make(tmp_path, "here/a.wav", "elsewhere/b.wav")
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "here" / "circle").symlink_to(tmp_path / "here")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "elsewhere")
    inputs, failures = collect_inputs([str(tmp_path / "here")], recursive=True)
    assert names(inputs, tmp_path / "here") == ["a.wav", "linked/b.wav"]
    assert failures == []


def test_a_link_that_leads_nowhere_is_named_and_the_rest_of_its_folder_is_read(tmp_path: Path) -> None:
    make(tmp_path, "b.wav")
    (tmp_path / "a.wav").symlink_to(tmp_path / "gone.wav")
    inputs, failures = collect_inputs([str(tmp_path)], recursive=False)
    assert names(inputs, tmp_path) == ["b.wav"]
    assert failures == [Failure(str(tmp_path / "a.wav"), "No such file or directory")]


def test_an_empty_name_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.wav")
    monkeypatch.chdir(tmp_path)
    assert collect_inputs([""], recursive=False) == ([], [Failure("", "the name is empty")])


# -- Names of results ----------------------------------------------------------------------------------------


def results(folder: Path, *recordings: str) -> list[str]:
    make(folder, *recordings)
    inputs, failures = collect_inputs([str(folder)], recursive=True)
    assert failures == []
    return [str(name) for name in result_names(inputs)]


@pytest.mark.parametrize(
    ("recordings", "names"),
    [
        (["a.wav", "b.m4a"], ["a", "b"]),
        (["a.mp3", "a.wav", "b.wav"], ["a.mp3", "a.wav", "b"]),  # two kinds of one recording
        (["a.wav", "deep/a.mp3", "deep/a.wav"], ["a", "deep/a.mp3", "deep/a.wav"]),  # a folder is mirrored
        (["Talk.wav", "talk.mp3"], ["Talk.wav", "talk.mp3"]),  # which would be one on some disks
    ],
)
def test_a_result_is_named_after_its_recording_and_keeps_its_ending_beside_another(
    tmp_path: Path, recordings: list[str], names: list[str]
) -> None:
    assert results(tmp_path, *recordings) == names


def test_the_longest_names_have_results_that_can_be_written(tmp_path: Path) -> None:
    names = [f"{'ö' * 100}{'x' * 50}{letter}" for letter in "ab"]  # 251 bytes
    paths = [result_path(tmp_path, Path(name), ".diarized.json") for name in names]
    for path in paths:
        path.write_bytes(b"{}")
    assert (len({*paths}), max(len(os.fsencode(path.name)) for path in paths)) == (2, MAX_NAME_BYTES)
