from __future__ import annotations

import os
import re
import threading
from pathlib import Path, PurePath

import pytest

from asr_server.offline.inputs import Input, collect_inputs, result_paths

OUT = Path("out")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(
    *arguments: str,
    endings: tuple[str, ...] = (".txt",),
    files: tuple[str, ...] = (),
    ignores_case: bool = False,
) -> list[str]:
    """Return the paths of these arguments' results; the arguments exist, as do `files`."""
    for name in files or arguments:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"?")
    inputs, failures = collect_inputs(arguments, recursive=True)
    assert failures == []
    paths = result_paths(inputs, OUT, endings, ignores_case)
    return [str(path.relative_to(OUT)) for group in paths for path in group]


def test_a_result_is_named_after_its_recording() -> None:
    assert results("talks/a.wav", "b.m4a") == ["a.txt", "b.txt"]


def test_each_format_has_its_ending() -> None:
    assert results("a.wav", endings=(".srt", ".json")) == ["a.srt", "a.json"]


def test_recordings_with_the_longest_names_have_results_that_can_be_written(folder: Path) -> None:
    names = [f"{'ö' * 100}{'x' * 50}{letter}.wav" for letter in "ab"]  # 255 bytes, as a name can have
    first, second = results(*names, endings=(".diarized.json",))
    assert first != second
    for name in (first, second):
        (folder / name).write_bytes(b"{}")


def test_two_kinds_of_one_recording_keep_their_whole_names() -> None:
    assert results("a.wav", "a.mp3", "b.wav") == ["a.wav.txt", "a.mp3.txt", "b.txt"]


def test_the_same_name_in_two_folders_keeps_the_folders() -> None:
    assert results("monday/a.wav", "tuesday/a.wav") == ["monday/a.wav.txt", "tuesday/a.wav.txt"]


def test_names_do_not_depend_on_the_working_directory(folder: Path) -> None:
    """Whoever goes on from another folder finds the results of before."""
    from_here = results("monday/a.wav", "tuesday/a.wav")
    os.chdir(folder / "monday")
    inputs, _ = collect_inputs(["a.wav", "../tuesday/a.wav"], recursive=False)
    paths = result_paths(inputs, OUT, [".txt"], ignores_case=False)
    assert [str(path.relative_to(OUT)) for group in paths for path in group] == from_here


def test_a_file_elsewhere_and_one_of_the_same_path_here_have_each_a_result(folder: Path) -> None:
    elsewhere = folder / "a.wav"
    here = folder / "here"
    here.mkdir()
    os.chdir(here)
    below_root = str(elsewhere.relative_to("/"))
    assert len(set(results(str(elsewhere), below_root))) == 2


def test_two_pipes_of_one_name_have_each_a_result(folder: Path) -> None:
    pipes = [folder / "monday" / "pipe", folder / "tuesday" / "pipe"]
    writers = []
    for pipe in pipes:
        pipe.parent.mkdir()
        os.mkfifo(pipe)
        writers.append(threading.Thread(target=pipe.write_bytes, args=(b"?",)))
        writers[-1].start()
    inputs, failures = collect_inputs([str(pipe.relative_to(folder)) for pipe in pipes], recursive=False)
    assert failures == []
    names = [path for paths in result_paths(inputs, OUT, [".txt"], False) for path in paths]
    assert names == [OUT / "monday/pipe.txt", OUT / "tuesday/pipe.txt"]
    for writer in writers:
        writer.join()  # before the pipes are closed: a writer that comes later would find nobody there
    for input in inputs:
        assert not isinstance(input.source, Path)
        input.source.close()


def test_names_that_differ_in_case_alone_are_kept_where_the_disk_keeps_them_apart() -> None:
    assert results("x/Talk.wav", "y/talk.mp3") == ["Talk.txt", "talk.txt"]
    assert results("x", files=("x/Talk.wav", "x/talk.wav")) == ["Talk.txt", "talk.txt"]


def test_a_disk_that_ignores_case_loses_nothing_either() -> None:
    assert results("x/Talk.wav", "y/talk.mp3", ignores_case=True) == ["Talk.wav.txt", "talk.mp3.txt"]
    in_one_folder = results("x", files=("x/Talk.wav", "x/talk.wav", "x/TALK.wav"), ignores_case=True)
    assert len({name.casefold() for name in in_one_folder}) == 3


def test_a_folder_is_mirrored() -> None:
    files = ("in/a.wav", "in/deep/a.wav", "in/deep/a.mp3")
    assert results("in", files=files) == ["a.txt", "deep/a.mp3.txt", "deep/a.wav.txt"]


def test_a_name_that_another_one_had_to_take_is_not_used_twice() -> None:
    paths = results("a.wav", "a.mp3", "a.wav.flac")
    assert paths == ["a.wav.txt", "a.mp3.txt", "a.wav.flac.txt"]


def test_endings_cannot_make_two_names_alike() -> None:
    paths = results("a.wav", "a.verbose.wav", endings=(".json", ".verbose.json"))
    assert len(set(paths)) == 4


def test_a_recording_is_never_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.OUT", Path())
    assert results("a.txt", "b.wav") == ["a.txt.txt", "b.txt"]


def test_a_recording_has_longer_and_longer_names_and_last_one_that_no_other_has(folder: Path) -> None:
    recording = folder / "a.wav"
    recording.touch()
    ((found,), _) = collect_inputs([str(recording)], recursive=False)
    *names, last = found.result_names
    parts = recording.parts[1:]
    assert names == [PurePath("a"), *(PurePath(*parts[-count:]) for count in range(1, len(parts) + 1))]
    assert re.fullmatch(r"a\.wav-[0-9a-f]{20}", str(last)), "another version finds the results of this one"


def test_whoever_has_no_further_name_keeps_the_last(folder: Path) -> None:
    only = Input("x.txt", OUT / "x.txt", (PurePath("x"),))
    assert result_paths([only], OUT, [".txt"], ignores_case=False) == [[OUT / "x.txt"]]
