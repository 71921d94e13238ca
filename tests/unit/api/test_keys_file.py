"""The file changes while the server runs: nobody comes in who should not, and nobody is thrown out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from asr_server.annexes.keys import api_keys
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
from tests.unit.realtime.realtime_client import open_session, refused

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
        refusal = await refused(f"http://{app.host}:{app.port}", additional_headers=bearer(SHOP))
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
        url = f"http://{app.host}:{app.port}"
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
