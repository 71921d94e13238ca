"""Who has used what: the log line of each request, and the metrics of each key."""

import logging
from pathlib import Path

import httpx
import pytest

from asr_server.telemetry import FIGURES
from tests import conftest
from tests.unit.api.figures import figures_of, read
from tests.unit.api.named_keys import NEW, SHOP, WEB, bearer, entry, hash_of, rewrite, settings_with, write
from tests.unit.api.running_app import SECOND, RunningApp, run_app
from tests.unit.realtime.realtime_client import open_session

REQUESTS = 'asr_key_requests_total{{key="{}",status="{}"}}'
AUDIO = 'asr_key_audio_seconds_total{{key="{}"}}'


async def post(app: RunningApp, key: str, file: bytes = SECOND, request_id: str = "a") -> int:
    app.client.headers.update(bearer(key) | {"x-request-id": request_id})
    return (await app.post(file)).status_code


async def test_each_finished_request_is_a_line_with_key_model_audio_and_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    entries = (entry("web", WEB, requests_per_minute=2), entry("shop", SHOP))
    async with run_app(settings_with(tmp_path / "keys", *entries)) as app:
        statuses = [await post(app, WEB), await post(app, WEB, b"no audio"), await post(app, WEB)]
        assert statuses == [200, 400, 429]
        async with open_session(app.url, additional_headers=bearer(SHOP)):
            pass
    figures = [record.__dict__[FIGURES] for record in caplog.records if FIGURES in record.__dict__]
    names = ("key", "model", "audio_s", "status", "close_code")
    assert [{name: line[name] for name in names if name in line} for line in figures if "key" in line] == [
        {"key": "web", "model": "whisper-1", "audio_s": 1.0, "status": 200},
        {"key": "web", "model": "whisper-1", "status": 400},
        {"key": "web", "status": 429},
        {"key": "shop", "model": "whisper-digits", "close_code": 1000},
    ]


async def test_the_log_line_names_the_key_and_no_log_has_a_key_or_hash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with run_app(settings_with(tmp_path / "keys", entry("web", WEB))) as app:
        assert await post(app, WEB) == 200
        assert await post(app, "a-wrong-key-that-is-long") == 401
    by_status = {
        record.__dict__[FIGURES]["status"]: record
        for record in caplog.records
        if record.__dict__.get(FIGURES, {}).get("route") == "/v1/audio/transcriptions"
    }
    assert "; key web, audio 1.0 s, chunks 1" in by_status[200].getMessage()
    assert by_status[200].__dict__[FIGURES]["key"] == "web"
    assert "key" not in by_status[401].__dict__[FIGURES]
    for secret in (WEB, hash_of(WEB), "a-wrong-key-that-is-long"):
        assert secret not in caplog.text


async def test_metrics_name_the_files_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_server.annexes.keys.api_keys.LOOK_EVERY_S", 0.01)
    path = tmp_path / "keys"
    async with run_app(settings_with(path, entry("web", WEB), entry("shop", SHOP))) as app:
        for number in range(20):
            assert await post(app, f"guess-{number}") == 401
        assert [await post(app, WEB), await post(app, WEB, b"no audio")] == [200, 400]
        figures = await read(app)
        assert {name: value for name, value in figures.items() if "asr_key_" in name} == {
            REQUESTS.format("web", 200): 1,
            REQUESTS.format("web", 400): 1,
            AUDIO.format("web"): 1,
            AUDIO.format("shop"): 0,
        }
        await rewrite(app, path, entry("shop", SHOP))
        figures = await read(app)
        assert [name for name in figures if "asr_key_" in name] == [AUDIO.format("shop")]


@pytest.mark.slow
def test_the_server_takes_files_and_keys_from_flags_and_variables(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry("web", WEB))
    with conftest.run_server("--keys-file", str(path), ASR_SERVER_API_KEY=NEW) as server:
        replies = {
            key: httpx.post(
                f"{server.url}/v1/audio/transcriptions",
                files={"file": SECOND},
                headers=bearer(key),
                timeout=60,
            ).status_code
            for key in (WEB, NEW, SHOP)
        }
        assert replies == {WEB: 200, NEW: 200, SHOP: 401}
        assert figures_of(server.get("/metrics"))[REQUESTS.format("web", 200)] == 1
        assert len([line for line in server.lines() if ": 200 in " in line and "; key web, " in line]) == 1
        assert not any(key in server.written() for key in (WEB, NEW, hash_of(WEB)))
