"""What `/v1/activity` tells of requests that were answered before anybody looked."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest

from asr_server import __version__, metrics
from asr_server.annexes.monitoring.activity import MAX_SAMPLES, Sample
from asr_server.metrics import RequestStats
from tests.conftest import Server
from tests.support.speech import say
from tests.support.until import until
from tests.unit.api.named_keys import SHOP, WEB, bearer, entry, settings_with
from tests.unit.api.running_app import SECOND, THREE_CHUNKS, RunningApp, run_app
from tests.unit.api.sample_files import sound_file

ROUTE = "/v1/audio/transcriptions"


async def activity_of(app: RunningApp) -> dict[str, Any]:
    reply = await app.client.get("/v1/activity")
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


async def test_requests_are_told_by_status_and_the_last_ones_with_id_length_and_time(app: RunningApp) -> None:
    app.client.headers["x-request-id"] = "mine"
    await app.post(THREE_CHUNKS)
    await app.post(b"no audio")
    await app.client.get("/v1/models")
    told = await activity_of(app)
    assert told["statuses"] == {"200": 1, "400": 1}
    assert [(last["status"], last["audio_s"], last["route"]) for last in told["last"]] == [
        (400, 0, ROUTE),
        (200, 75, ROUTE),
    ]
    assert {last["id"] for last in told["last"]} == {"mine"}
    assert told["latency"]["p50"] == told["latency"]["p99"] == told["last"][1]["seconds"]
    assert 0 < told["first_text"]["p50"] <= told["latency"]["p50"]
    assert told["version"] == __version__
    assert told["models"][0] == {"name": "whisper-digits", "state": "ready", "device": None, "dtype": None}


async def test_times_are_told_as_the_median_the_95th_and_the_99th_percentile(app: RunningApp) -> None:
    figures = {"route": ROUTE, "status": 200, "chunks": 2}
    for seconds in range(101):
        stages_s = {"chunks_queued": 20.0 * seconds}
        transcribed = {"seconds": seconds, "audio_s": 1.0, "first_text_s": seconds / 10}
        for more in (transcribed, {"seconds": 1000, "stages_s": stages_s}):
            app.app.state.server.history.add("POST /", RequestStats(), figures | more)
    told = await activity_of(app)
    assert told["latency"] == {"p50": 50, "p95": 95, "p99": 99}  # of those with a transcript
    assert told["first_text"] == {"p50": 5, "p95": 9.5, "p99": 9.9}
    assert told["queue"] == {"p50": 500, "p95": 950, "p99": 990}


async def test_the_timeline_grows_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_server.annexes.monitoring.activity.SAMPLE_EVERY_S", 0.05)
    async with run_app() as app:
        samples = app.app.state.samples
        await app.post(THREE_CHUNKS)
        answered_at = time.monotonic()
        await until(lambda: samples[-1].at > answered_at)
        timeline = (await activity_of(app))["timeline"]
    lengths = {len(values) for values in timeline.values()}
    assert len(lengths) == 1
    assert max(timeline["speed"]) > 0
    assert timeline["seconds_ago"] == sorted(timeline["seconds_ago"], reverse=True)


async def test_a_key_with_a_name_sees_its_own_requests_and_an_admins_sees_all(tmp_path: Path) -> None:
    keys = entry("web", WEB, admin=True), entry("shop", SHOP)
    async with run_app(settings_with(tmp_path / "keys.yaml", *keys)) as app:
        for key in (WEB, SHOP):
            app.client.headers.update(bearer(key) | {"x-request-id": f"of-{key[:4]}"})
            await app.post(SECOND)
        assert [last["id"] for last in (await activity_of(app))["last"]] == ["of-shop"]
        app.client.headers.update(bearer(WEB))
        assert [last["id"] for last in (await activity_of(app))["last"]] == ["of-shop", "of-web-"]


def test_a_real_server_tells_its_replicas_memory_and_waits(server: Server) -> None:
    reply = httpx.post(server.url + ROUTE, files={"file": sound_file(say("314").samples)}, timeout=60)
    assert reply.status_code == 200
    told = server.get("/v1/activity").json()
    (replica,) = told["replicas"]
    assert (replica["model"], replica["name"], replica["ready"]) == ("whisper-digits", "replica 0", True)
    assert replica["slots"] > 0
    assert min(replica["resident_bytes"], told["resident_bytes"], told["decoding_bytes"]) > 1 << 20
    assert told["models"][0]["device"] == "cpu"
    assert told["queue"]["p50"] <= told["queue"]["p99"]
    assert told["uptime_s"] >= 0


async def test_the_time_since_the_start_and_the_restarts_are_counted(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the wall clock says: one set by an hour, as after a boot without network."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3600)
    app.app.state.server.history.began_at -= 7
    before = (await activity_of(app))["restarts"].get("hung", 0)
    metrics.replica_restarts.labels("hung").inc()
    told = await activity_of(app)
    assert 7 <= told["uptime_s"] < 600
    assert told["restarts"]["hung"] == before + 1
    assert 0 not in told["restarts"].values()


async def test_a_window_of_fifteen_minutes_and_4096_requests_is_remembered(app: RunningApp) -> None:
    now, history = time.monotonic(), app.app.state.server.history
    app.app.state.samples = deque(maxlen=MAX_SAMPLES)
    for age_s in (901, 899, 0):
        app.app.state.samples.append(Sample(now - age_s, 0.0, 0, 0, 0, 0, 0))
    for _ in range(5000):
        history.add("POST /", RequestStats(), {"route": "/", "status": 200, "seconds": 1.0})
    history.recent[0] = history.recent[0]._replace(at=now - 901)
    told = await activity_of(app)
    assert len(told["timeline"]["sessions"]) == 2
    assert told["statuses"] == {"200": 4095}
