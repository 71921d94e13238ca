"""Several keys in a file, which is read again when it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.api import watched_file
from asr_server.api.auth import NOBODY, ApiKeys, KeyFile, read_keys
from asr_server.errors import AdminOff, InvalidApiKey
from tests.api.named_keys import SHOP, WEB, entry, settings_with
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


# -- Who is asking -------------------------------------------------------------------------------------------

ADMIN = "the-key-of-an-administrator"


def test_without_keys_nobody_is_asked_and_the_door_to_loading_is_shut() -> None:
    open_to_all = ApiKeys(embedded())
    assert (open_to_all.required, open_to_all.files, open_to_all.accounts) == (False, [], ())
    assert open_to_all.check("") is open_to_all.check("Bearer any") is NOBODY
    for authorization in ("", f"Bearer {ADMIN}"):
        with pytest.raises(AdminOff, match="--admin-key"):
            open_to_all.check_admin(authorization)


def test_a_key_is_a_bearers_whatever_case_the_word_has(tmp_path: Path) -> None:
    settings = settings_with(tmp_path / "keys", entry("web", WEB), api_key="the-key-of-everybody")
    keys = ApiKeys(settings)
    assert keys.required
    assert keys.current == ("the-key-of-everybody",)
    account = keys.check(f"bearer  {WEB} ").account
    assert account is not None
    assert account.name == "web"
    assert keys.accounts == (account,)
    assert keys.check("BEARER the-key-of-everybody").account is None
    for authorization in ("", "Bearer", "Bearer ", f"Basic {WEB}", WEB):
        with pytest.raises(InvalidApiKey, match="No API key: send it"):
            keys.check(authorization)
    with pytest.raises(InvalidApiKey, match="Incorrect API key"):
        keys.check(f"Bearer {SHOP}")


def test_models_are_loaded_by_the_admins_key_or_a_named_one_with_admin(tmp_path: Path) -> None:
    named = [entry("web", WEB, admin=True), entry("shop", SHOP)]
    by_name = ApiKeys(settings_with(tmp_path / "keys", *named))
    account = by_name.check_admin(f"Bearer {WEB}").account
    assert account is not None
    assert account.name == "web"
    with_key = ApiKeys(settings_with(tmp_path / "more", named[1], admin_key=ADMIN, api_key="x" * 20))
    assert with_key.check_admin(f"Bearer {ADMIN}") is NOBODY
    for keys, given in ((by_name, SHOP), (by_name, ""), (with_key, SHOP), (with_key, "x" * 20)):
        with pytest.raises(InvalidApiKey, match="This needs the key of --admin-key"):
            keys.check_admin(f"Bearer {given}")


def test_a_signature_is_its_keys_for_its_message_alone(tmp_path: Path) -> None:
    keys = ApiKeys(settings_with(tmp_path / "keys", entry("web", WEB), entry("shop", SHOP)))
    web, shop = (keys.check(f"Bearer {key}") for key in (WEB, SHOP))
    signature = keys.sign(b"message", web)
    assert keys.signer_of(b"message", signature) is web
    assert keys.signer_of(b"message", keys.sign(b"message", shop)) is shop
    assert keys.signer_of(b"massage", signature) is None
    assert keys.signer_of(b"message", signature[:-1] + b"?") is None
    open_to_all = ApiKeys(embedded())
    assert open_to_all.signer_of(b"message", open_to_all.sign(b"message", NOBODY)) is NOBODY


def test_the_log_says_how_many_keys_were_read_and_which_can_be_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="asr_server.api")
    path = tmp_path / "keys"
    path.write_text(f"{'a' * 19}\n{'b' * 20}\n{'c' * 5}\n")
    path.chmod(0o600)
    KeyFile(path)
    settings_with(tmp_path / "named", entry("web", WEB))
    ApiKeys(settings_with(tmp_path / "named", entry("web", WEB), api_key="x" * 19, admin_key="x" * 20))
    guessed = "can be guessed: a key should have at least 20 random characters"
    assert [record.getMessage() for record in caplog.records if "signing" not in record.getMessage()] == [
        f"3 API keys read from {path}",
        f"2 keys in {path} {guessed}",
        f"1 keys with names read from {tmp_path / 'named'}",
        f"the key of --api-key {guessed}",
    ]


@pytest.mark.parametrize(("key", "num_warnings"), [("", 0), ("x", 1), ("x" * 19, 1), ("x" * 20, 0)])
def test_a_key_of_less_than_20_characters_can_be_guessed(
    key: str, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    ApiKeys(embedded(api_key=key))
    assert caplog.text.count("the key of --api-key can be guessed") == num_warnings


@pytest.mark.parametrize("named", [True, False])
def test_servers_with_one_file_of_keys_know_each_others_signatures(tmp_path: Path, named: bool) -> None:
    path = tmp_path / "keys"
    if named:
        settings = settings_with(path, entry("web", WEB))
    else:
        path.write_text(WEB)
        path.chmod(0o600)
        settings = embedded(api_key_file=str(path))
    one, other = ApiKeys(settings), ApiKeys(settings)
    signature = one.sign(b"until noon", one.check(f"Bearer {WEB}"))
    signer = other.signer_of(b"until noon", signature)
    assert signer is not None
    assert signer.digest == other.check(f"Bearer {WEB}").digest
