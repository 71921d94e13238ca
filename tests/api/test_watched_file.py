"""A file changes while it is in use: its last content counts until a new one is complete and sound."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asr_server.api import watched_file
from asr_server.api.watched_file import WatchedFile
from tests.api.running_app import until


def words_of(path: Path) -> tuple[str, ...]:
    words = tuple(path.read_text().split())
    if "bad" in words:
        raise ValueError("a word is bad")
    return words


class Words(WatchedFile[tuple[str, ...]]):
    def __init__(self, path: Path, read: Callable[[Path], tuple[str, ...]] = words_of) -> None:
        self.taken: list[tuple[str, ...]] = []
        super().__init__(path, read)

    def _take(self, content: tuple[str, ...]) -> None:
        self.taken.append(content)

    def has_taken(self, words: tuple[str, ...]) -> bool:
        return self.taken[-1] == words


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "words"
    path.write_text("one two")
    return path


def look_twice(file: Words) -> None:
    for _ in range(2):
        file.refresh()


def test_it_is_read_at_the_start_and_again_when_it_changes(path: Path) -> None:
    file = Words(path)
    look_twice(file)
    assert file.taken == [("one", "two")]
    path.write_text("three")
    look_twice(file)
    assert file.taken == [("one", "two"), ("three",)]


def test_a_shorter_list_that_is_still_being_written_does_not_count(path: Path) -> None:
    file = Words(path)
    with path.open("w") as writer:
        for word in ("three ", "one ", "two "):
            writer.write(word)
            writer.flush()
            file.refresh()
            assert file.taken == [("one", "two")]
    file.refresh()
    assert file.taken[1:] == [("three", "one", "two")]


def test_a_file_that_is_replaced_at_once_counts_at_the_second_look(path: Path, tmp_path: Path) -> None:
    file = Words(path)
    (tmp_path / "next").write_text("one six")  # as long as the first
    (tmp_path / "next").rename(path)
    file.refresh()
    assert len(file.taken) == 1
    file.refresh()
    assert file.taken[1:] == [("one", "six")]


def test_rights_that_change_alone_are_a_new_version(path: Path) -> None:
    file = Words(path)
    path.chmod(0o640)
    look_twice(file)
    assert len(file.taken) == 2


def test_a_file_that_changes_while_it_is_read_counts_once_it_rests(path: Path) -> None:
    def read_late(path: Path) -> tuple[str, ...]:
        words = words_of(path)
        if words == ("three",):
            path.write_text("three four")
        return words

    file = Words(path, read_late)
    path.write_text("three")
    look_twice(file)
    assert file.taken == [("one", "two")]
    look_twice(file)
    assert file.taken[1:] == [("three", "four")]


@pytest.mark.parametrize("break_it", [Path.unlink, lambda path: path.write_text("one bad")])
def test_a_broken_file_keeps_its_last_content_and_is_reported_once(
    break_it: Callable[[Path], object], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Words(path)
    break_it(path)
    for _ in range(2):
        look_twice(file)
        assert file.is_stale
    assert file.taken == [("one", "two")]
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "its last keys are still taken" in line.getMessage()
    path.write_text("three")
    look_twice(file)
    assert (file.taken[1:], file.is_stale) == ([("three",)], False)


def test_a_file_that_comes_back_as_it_was_is_no_longer_stale(path: Path) -> None:
    file = Words(path)
    away = path.rename(path.with_name("away"))
    file.refresh()
    assert file.is_stale
    away.rename(path)
    file.refresh()
    assert not file.is_stale
    assert file.taken == [("one", "two")]


def test_the_file_may_be_a_link_that_kubernetes_swaps(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "words").write_text(version)
    current = tmp_path / "current"
    current.symlink_to("v1")
    file = Words(current / "words")
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(current)
    shutil.rmtree(tmp_path / "v1")
    look_twice(file)
    assert file.taken == [("v1",), ("v2",)]


async def test_it_is_watched_until_that_is_cancelled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 0.001)
    file = Words(path)
    watching = asyncio.create_task(file.watch())
    for words in (("three",), ("four", "five")):
        path.write_text(" ".join(words))
        await until(partial(file.has_taken, words))
    watching.cancel()
    assert file.taken[1:] == [("three",), ("four", "five")]


async def test_it_is_looked_at_twice_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)
        if len(waits) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    file = Words(path)
    assert not file.is_stale
    with pytest.raises(asyncio.CancelledError):
        await file.watch()
    assert waits == [0.5] * 3
