"""`--keys-file`: what may stand in it, what its errors say, and its changes; who may ask and load models."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from asr_server.annexes.keys import api_keys
from asr_server.annexes.keys.accounts import MAX_KEYS, Key, read_keys_file
from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.api.state import NOBODY
from asr_server.errors import AdminRequired, InvalidApiKey
from tests.contract.test_documentation import ROOT, blocks_of
from tests.support.embedded import embedded
from tests.support.until import until
from tests.unit.api.figures import read
from tests.unit.api.named_keys import (
    NEW,
    SHOP,
    WEB,
    bearer,
    entry,
    hash_of,
    named,
    rewrite,
    settings_with,
    status,
    text_of,
    write,
)
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.cli.test_options import problems
from tests.unit.realtime.realtime_client import open_session, refused


def test_a_key_has_a_name_a_hash_and_limits_that_are_none_unless_given(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml")
    path.write_text(
        f"- name: web site\n  hash: {hash_of(WEB)}\n"
        f"- name: shop\n  hash:\n    - {hash_of(SHOP).upper()}\n    - {hash_of(NEW)}\n"
        "  models: [base, turbo]\n  requests_per_minute: 60\n  audio_seconds_per_minute: 600\n"
        "  concurrent_requests: 4\n  admin: true\n"
    )
    web, shop = read_keys_file(path)
    assert web == Key("web site", hash_of(WEB))
    assert (web.requests_per_minute, web.audio_seconds_per_minute, web.concurrent_requests) == (0, 0, 0)
    assert (web.models, web.admin) == (None, False)
    assert shop.digests == (bytes.fromhex(hash_of(SHOP)), bytes.fromhex(hash_of(NEW)))
    assert shop.models == ("base", "turbo")
    limits = (shop.requests_per_minute, shop.audio_seconds_per_minute, shop.concurrent_requests)
    assert (limits, shop.admin) == ((60, 600, 4), True)


WHOLE = text_of(entry("web", WEB), entry("shop", SHOP))
BROKEN = {
    "empty": ("", "must be a list of at most 1000 keys"),
    "cut within an entry": (WHOLE[:40], "is not YAML: line"),
    "no list": (f"web: {hash_of(WEB)}", "must be a list of at most 1000 keys"),
    "keys one a line": (f"- {WEB}\n", "key 1 must have fields of these names only: name, hash"),
    "no name": (f"- hash: {hash_of(WEB)}", "key 1 has no 'name'"),
    "no hash": (
        "- name: web",
        "key 1 ('web') has no 'hash': the SHA-256 of the key in 64 hexadecimal digits",
    ),
    "a key in place of its hash": (f"- {{name: web, hash: {WEB}}}", "key 1 ('web') has a wrong 'hash'"),
    "a key in place of a field": (
        f"- {{name: web, {WEB}: x}}",
        "key 1 ('web') must have fields of these names only",
    ),
    "a name of two lines": ('- {name: "a\\nb", hash: x}', "1 to 64 printable ASCII characters"),
    "a name with a line end": ('- {name: "a\\n", hash: x}', "1 to 64 printable ASCII characters"),
    "a limit below none": (
        text_of(entry("web", WEB, requests_per_minute=-1)),
        "'requests_per_minute': it must be a whole number from 0",
    ),
    "a limit in words": (text_of(entry("web", WEB, concurrent_requests="four")), "'concurrent_requests'"),
    "one name twice": (text_of(entry("web", WEB), entry("web", SHOP)), "'web' is the name of 2 keys"),
    "one hash twice": (text_of(entry("web", WEB), entry("shop", WEB)), "two keys have the same hash"),
    "too many": (
        text_of(*(entry(str(number), str(number)) for number in range(MAX_KEYS + 1))),
        "must be a list of at most 1000 keys",
    ),
    "a tag that does not fit": ('- name: !!int ""', "is not YAML"),
    "too deep": ("[" * 2000, "is not YAML"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_a_reason_without_hash_and_key(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN[case]
    path = write(tmp_path / "keys.yaml")
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        read_keys_file(path)
    assert reason in str(caught.value)
    for key in (WEB, SHOP):
        assert key not in str(caught.value)
        assert hash_of(key)[:12] not in str(caught.value)


def test_a_file_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry("web", WEB))
    path.chmod(0o646)
    with pytest.raises(ValueError, match="every user of this machine can write"):
        read_keys_file(path)


def test_a_wrong_file_and_one_without_keys_end_the_start_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    (missing,) = problems(keys_file=str(path))
    path.write_text("[]")
    (empty,) = problems(keys_file=str(path))
    path.write_text(f"- name: web\n  hash: {hash_of(WEB)}\n  burst: 3\n")
    (wrong,) = problems(keys_file=str(path))
    assert all("--keys-file (ASR_SERVER_KEYS_FILE) is" in line for line in (missing, empty, wrong))
    assert "No such file" in missing
    assert "must have at least one key" in empty
    assert "key 1 ('web') must have fields of these names only" in wrong
    assert hash_of(WEB) not in wrong


def test_the_example_of_the_docs_is_a_file_of_keys(tmp_path: Path) -> None:
    (example,) = blocks_of(ROOT / "docs" / "keys.md", "yaml")
    path = write(tmp_path / "keys.yaml")
    path.write_text(example)
    assert [(key.name, key.admin) for key in read_keys_file(path)] == [
        ("web-site", False),
        ("operators", True),
    ]


def test_without_keys_nobody_is_asked_and_nobody_loads_models() -> None:
    open_to_all = ApiKeys(embedded())
    assert not open_to_all.required
    assert open_to_all.check("") is open_to_all.check("Bearer any") is NOBODY
    with pytest.raises(AdminRequired, match="'admin: true' in --keys-file"):
        open_to_all.check_admin("Bearer any")


def test_a_key_is_a_bearers_whatever_case_the_word_has(tmp_path: Path) -> None:
    keys = ApiKeys(settings_with(tmp_path / "keys", entry("web", WEB), api_key="the-key-of-everybody"))
    account = keys.check(f"bearer  {WEB} ").account
    assert (account and account.name, keys.accounts) == ("web", (account,))
    assert keys.check("BEARER the-key-of-everybody").account is None
    for authorization in ("", "Bearer", "Bearer ", f"Basic {WEB}", WEB):
        with pytest.raises(InvalidApiKey, match="No API key: send it"):
            keys.check(authorization)
    with pytest.raises(InvalidApiKey, match="Incorrect API key"):
        keys.check(f"Bearer {SHOP}")


def test_a_signature_is_its_keys_for_its_message_alone_at_every_server_with_that_key(tmp_path: Path) -> None:
    settings = settings_with(tmp_path / "keys", entry("web", WEB), entry("shop", SHOP))
    keys, elsewhere = ApiKeys(settings), ApiKeys(settings)
    web, shop = (keys.check(f"Bearer {key}") for key in (WEB, SHOP))
    signature = keys.sign(b"message", web)
    for each in (keys, elsewhere):
        signer = each.signer_of(b"message", signature)
        assert signer is not None
        assert signer.digest == web.digest
    assert keys.signer_of(b"message", keys.sign(b"message", shop)) is shop
    assert keys.signer_of(b"massage", signature) is None
    open_to_all = ApiKeys(embedded())
    assert open_to_all.signer_of(b"message", open_to_all.sign(b"message", NOBODY)) is NOBODY


def test_a_key_that_can_be_guessed_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ApiKeys(embedded(api_key="x" * 20))
    assert not caplog.messages
    ApiKeys(embedded(api_key="x" * 19))
    assert "at least 20 random characters" in caplog.text


def test_a_model_that_is_not_served_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = (entry("web", WEB, models=["base"]), entry("shop", SHOP, models=["base", "turbo"]))
    ApiKeys(settings_with(tmp_path / "keys", *entries), ("base", "whisper-1"))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == "key 'shop' names the model 'turbo', which is not served"


STALE = "asr_keys_file_stale"
BOTH = (entry("web", WEB), entry("shop", SHOP))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(api_keys, "LOOK_EVERY_S", 0.01)
    return tmp_path / "keys.yaml"


async def test_a_key_that_is_added_is_let_in_and_one_that_is_removed_stays_out(path: Path) -> None:
    async with run_app(settings_with(path, *BOTH)) as app:
        assert [await status(app, key) for key in (WEB, SHOP, NEW)] == [200, 200, 401]
        await rewrite(app, path, entry("web", WEB), entry("new", NEW))
        assert [await status(app, key) for key in (WEB, SHOP, NEW)] == [200, 401, 200]
        await rewrite(app, path)  # an explicit list of none
        assert [await status(app, key) for key in (WEB, SHOP, NEW)] == [401, 401, 401]


async def test_while_a_key_is_rotated_both_open_the_server_with_one_account(path: Path) -> None:
    async with run_app(settings_with(path, entry("web", WEB, requests_per_minute=2))) as app:
        assert (await app.client.get("/v1/models", headers=bearer(NEW))).status_code == 401
        (account,) = named(app).accounts
        await rewrite(app, path, entry("web", WEB, NEW, requests_per_minute=2))
        assert [await status(app, key) for key in (WEB, NEW)] == [200, 200]
        for key, left in ((WEB, "1"), (NEW, "0")):
            app.client.headers.update(bearer(key))
            assert (await app.post()).headers["x-ratelimit-remaining-requests"] == left
        await rewrite(app, path, entry("web", NEW, requests_per_minute=2))
        assert [await status(app, key) for key in (WEB, NEW)] == [401, 200]
        assert named(app).accounts == (account,)


def empty(path: Path) -> None:
    path.write_text("")


def cut(path: Path) -> None:
    path.write_text(text_of(*BOTH)[:-20])


def open_to_all(path: Path) -> None:
    other = write(path.with_name("other"), entry("new", NEW))
    other.chmod(0o646)
    other.rename(path)


BREAK: dict[str, Callable[[Path], object]] = {
    "empty": empty,
    "cut": cut,
    "removed": Path.unlink,
    "writable for all": open_to_all,
}


@pytest.mark.parametrize("how", BREAK)
async def test_a_broken_file_changes_nothing_and_is_reported_once(
    how: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_app(settings_with(path, *BOTH)) as app:
        assert (await read(app))[STALE] == 0
        BREAK[how](path)
        await until(lambda: named(app).is_stale)
        assert (await read(app))[STALE] == 1
        assert [await status(app, key) for key in (WEB, SHOP, NEW)] == [200, 200, 401]
        await asyncio.sleep(0.1)  # some looks later
        (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert "its last keys are still taken" in line.getMessage()
        await rewrite(app, path, entry("new", NEW))
        assert (await read(app))[STALE] == 0
        assert [await status(app, key) for key in (WEB, SHOP, NEW)] == [401, 401, 200]
    assert not any(secret in caplog.text for key in (WEB, SHOP, NEW) for secret in (key, hash_of(key)))


async def test_a_key_sees_and_uses_its_models_only(path: Path) -> None:
    entries = (entry("web", WEB, models=["whisper-1"]), entry("shop", SHOP, models=["turbo"]))
    async with run_app(settings_with(path, *entries)) as app:
        listed = {}
        for key in (WEB, SHOP):
            app.client.headers.update(bearer(key))
            listed[key] = [model["id"] for model in (await app.client.get("/v1/models")).json()["data"]]
            one = await app.client.get("/v1/models/whisper-1")
            answers = [await app.post(model=name) for name in ("whisper-1", "")]
            statuses = {reply.status_code for reply in (one, *answers)}
            assert statuses == ({200} if key == WEB else {404})
        assert "whisper-1" in listed[WEB]
        assert listed[SHOP] == []
        refusal = await refused(app.url, additional_headers=bearer(SHOP))
        assert (refusal.status, refusal.error["code"]) == (404, "model_not_found")


async def unload_status(app: RunningApp, key: str) -> int:
    return (await app.client.post("/v1/models/whisper-1/unload", headers=bearer(key))).status_code


async def test_an_admin_key_unloads_models_and_no_other_key_does(path: Path) -> None:
    of_turbo = entry("turbo", SHOP, models=["turbo"], admin=True)
    entries = (entry("web", WEB), entry("root", NEW, admin=True), of_turbo)
    async with run_app(settings_with(path, *entries)) as app:
        assert [await unload_status(app, key) for key in (WEB, "wrong", SHOP, NEW)] == [403, 401, 404, 200]
        await rewrite(app, path, entry("web", WEB), entry("root", NEW))
        assert [await unload_status(app, key) for key in (WEB, NEW)] == [403, 403]


async def test_a_shorter_file_that_is_still_being_written_does_not_count(path: Path) -> None:
    async with run_app(settings_with(path, *BOTH)) as app:
        file = named(app)
        callers = file.callers
        for size in range(2, 40):  # each look sees another version
            write(path, entry("web", WEB, requests_per_minute=size))
            file._take(file._look())
            assert file.callers is callers
        await until(lambda: file.callers is not callers)


async def secret_of(app: RunningApp, key: str) -> str:
    made = await app.client.post("/v1/realtime/client_secrets", headers=bearer(key))
    value: str = made.json()["value"]
    return value


async def test_a_client_secret_counts_for_the_key_that_made_it_and_ends_with_it(path: Path) -> None:
    entries = (entry("web", WEB, concurrent_requests=1), entry("shop", SHOP))
    async with run_app(settings_with(path, *entries)) as app:
        url = app.url
        secrets = {key: bearer(await secret_of(app, key)) for key in (WEB, SHOP)}
        async with open_session(url, additional_headers=secrets[WEB]):
            refusal = await refused(url, additional_headers=secrets[WEB])
            assert (refusal.status, refusal.error["code"]) == (429, "rate_limit_exceeded")
            async with open_session(url, additional_headers=secrets[SHOP]):
                pass
        await rewrite(app, path, entry("shop", SHOP))
        assert (await refused(url, additional_headers=secrets[WEB])).status == 401
        async with open_session(url, additional_headers=secrets[SHOP]):
            pass
