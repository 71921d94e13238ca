"""Who has used what: a JSON line a request, the log line, and the metrics of each key."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from asr_server.annexes.keys import usage_log
from asr_server.telemetry import FIGURES
from tests import conftest
from tests.support.embedded import embedded
from tests.support.until import until
from tests.unit.api.figures import figures_of, growth, read
from tests.unit.api.named_keys import NEW, SHOP, WEB, bearer, entry, hash_of, rewrite, settings_with, write
from tests.unit.api.running_app import SECOND, RunningApp, run_app
from tests.unit.realtime.realtime_client import open_session

REQUESTS = 'asr_key_requests_total{{key="{}",status="{}"}}'
AUDIO = 'asr_key_audio_seconds_total{{key="{}"}}'


async def post(app: RunningApp, key: str, file: bytes = SECOND, request_id: str = "a") -> int:
    app.client.headers.update(bearer(key) | {"x-request-id": request_id})
    return (await app.post(file)).status_code


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_finished_request_is_a_line_with_key_model_audio_and_status(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    entries = (entry("web", WEB, requests_per_minute=2), entry("shop", SHOP))
    settings = settings_with(tmp_path / "keys", *entries, usage_log=str(path), api_key=NEW)
    async with run_app(settings) as app:
        statuses = [await post(app, WEB, request_id="r1"), await post(app, WEB, b"no audio", "r2")]
        statuses += [await post(app, WEB, request_id="r3"), await post(app, NEW, request_id="r4")]
        assert statuses == [200, 400, 429, 200]
        assert await post(app, "wrong") == 401
        assert (await app.client.get("/v1/models", headers=bearer(WEB))).status_code == 200
        headers = bearer(SHOP) | {"x-request-id": "r5"}
        async with open_session(f"http://{app.host}:{app.port}", additional_headers=headers):
            pass
    lines = {line.pop("request_id"): line for line in lines_of(path)}
    assert all(datetime.fromisoformat(line.pop("time")).utcoffset() is not None for line in lines.values())
    model = "whisper-digits"
    assert lines == {
        "r1": {"key": "web", "model": model, "audio_s": 1.0, "status": 200},
        "r2": {"key": "web", "model": model, "audio_s": 0, "status": 400},
        "r3": {"key": "web", "model": None, "audio_s": 0, "status": 429},
        "r4": {"key": None, "model": model, "audio_s": 1.0, "status": 200},
        "r5": {"key": "shop", "model": model, "audio_s": 0, "status": 101, "close_code": 1000},
    }
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_rotated_usage_log_goes_on_in_a_new_file_and_its_last_line_is_written(tmp_path: Path) -> None:
    path, old = tmp_path / "usage", tmp_path / "usage.1"
    async with run_app(embedded(usage_log=str(path))) as app:
        await post(app, "none")
        await until(path.exists)
        path.rename(old)
        await post(app, "none", b"no audio")
    assert [line["status"] for each in (old, path) for line in lines_of(each)] == [200, 400]


async def test_a_full_disk_costs_lines_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async with run_app(embedded(usage_log="/dev/full")) as app:
        before = await read(app)
        assert [await post(app, "none") for _ in range(3)] == [200] * 3
    async with run_app() as app:
        assert growth(before, await read(app), "asr_usage_lines_lost_total") == 3
    assert caplog.text.count("/dev/full cannot be written, its lines are lost: No space left") == 1


async def test_a_disk_that_hangs_costs_lines_beyond_those_that_may_wait_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log, "MAX_WAITING", 2)
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader
    async with run_app(embedded(usage_log=str(path))) as app:
        before = await read(app)
        assert [await post(app, "none") for _ in range(6)] == [200] * 6
        num_lost = growth(before, await read(app), "asr_usage_lines_lost_total")
        assert num_lost in (3, 4)  # two wait, and the first or the first two are being written
        reader, written = os.open(path, os.O_RDONLY | os.O_NONBLOCK), bytearray()

        def all_have_come() -> bool:
            with contextlib.suppress(BlockingIOError):
                written.extend(os.read(reader, 1 << 16))
            return written.count(b"\n") == 6 - num_lost

        await until(all_have_come)
        os.close(reader)


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


async def test_metrics_name_the_keys_of_the_file_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asr_server.annexes.keys.watched_keys.LOOK_EVERY_S", 0.01)
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
    path, log = write(tmp_path / "keys.yaml", entry("web", WEB)), tmp_path / "usage"
    with conftest.run_server(
        "--keys-file", str(path), ASR_SERVER_API_KEY=NEW, ASR_SERVER_USAGE_LOG=str(log)
    ) as server:
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
    assert [line["key"] for line in lines_of(log)] == ["web", None]
