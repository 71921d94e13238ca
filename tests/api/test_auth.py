"""Several keys in a file, which is read again when it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.api import watched_file
from asr_server.api.auth import KeyFile, read_keys
from tests.api.running_app import RunningApp, run_app, until
from tests.cli.test_options import problems
from tests.embedded import embedded


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 0.01)
    path = tmp_path / "keys"
    path.write_text("# of the web site\n  first \n\nsecond\n")
    path.chmod(0o600)
    return path


def test_a_key_is_a_line_and_comments_are_none(keys: Path) -> None:
    assert read_keys(keys) == ("first", "second")


def looked_at(file: KeyFile) -> tuple[str, ...]:
    for _ in range(2):  # it rests
        file.refresh()
    return file.keys


def test_while_the_file_cannot_be_read_its_last_keys_are_taken(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(keys)
    assert file.keys == ("first", "second")
    keys.unlink()
    assert [looked_at(file), looked_at(file)] == [("first", "second")] * 2
    assert caplog.text.count("cannot be used, its last keys are still taken") == 1
    keys.write_bytes(b"\xff\xfe")
    assert looked_at(file) == ("first", "second")
    keys.write_text("third")
    assert looked_at(file) == ("third",)


def test_a_line_that_no_client_could_send_is_named_and_the_last_keys_are_taken(keys: Path) -> None:
    file = KeyFile(keys)
    assert file.keys == ("first", "second")
    keys.write_text("third\nfour th\n")
    with pytest.raises(ValueError, match="the key in line 2 must be printable ASCII without spaces"):
        read_keys(keys)
    assert looked_at(file) == ("first", "second")


def test_a_file_that_everybody_can_write_is_refused(keys: Path) -> None:
    keys.chmod(0o646)
    with pytest.raises(ValueError, match="every user of this machine can write"):
        read_keys(keys)


def test_a_file_that_everybody_can_read_is_warned_of_once_a_version(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.chmod(0o600)
    file = KeyFile(keys)
    assert file.keys
    assert "can read the keys" not in caplog.text
    keys.write_text("third")
    keys.chmod(0o644)
    assert [looked_at(file), looked_at(file)] == [("third",)] * 2
    assert caplog.text.count("every user of this machine can read the keys") == 1


async def until_watched(app: RunningApp, keys: tuple[str, ...]) -> None:
    (file,) = app.app.state.server.api_keys.files
    await until(lambda: file.keys == keys)


async def test_a_key_is_rotated_without_a_restart(keys: Path) -> None:
    async with run_app(embedded(api_key="own", api_key_file=str(keys))) as app:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await app.client.get("/v1/models", headers=headers)).status_code

        assert [await status(key) for key in ("own", "first", "second", "third")] == [200, 200, 200, 401]
        keys.write_text("second\nthird\n")
        await until_watched(app, ("second", "third"))
        assert [await status(key) for key in ("own", "first", "second", "third")] == [200, 401, 200, 200]


async def test_a_file_without_keys_lets_nobody_in(keys: Path) -> None:
    async with run_app(embedded(api_key_file=str(keys))) as app:
        keys.write_text("")
        await until_watched(app, ())
        for headers in ({}, {"authorization": "Bearer first"}):
            assert (await app.client.get("/v1/models", headers=headers)).status_code == 401


def test_a_file_that_cannot_be_read_or_has_no_keys_is_told_at_the_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# none yet\n")
    assert "must have at least one key" in problems(api_key_file=str(empty))[0]
    assert "No such file" in problems(api_key_file=str(tmp_path / "missing"))[0]
