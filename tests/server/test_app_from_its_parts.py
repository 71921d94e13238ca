"""What the application is put together from, and what it starts and ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.to_thread import current_default_thread_limiter

from asr_server.api import watched_file
from asr_server.api.models import ModelRegistry
from asr_server.api.plain_routes import PlainRoutes
from asr_server.api.served_model import ServedModel
from asr_server.api.usage import UsageLog
from asr_server.audio.pool import PreprocessPool
from asr_server.checkpoint.files import AudioWindow
from asr_server.config import MIB
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.server import app as module
from asr_server.server.app import (
    FILE_THREADS,
    OWN_HEADERS,
    create_app,
    create_metrics_app,
    release_memory_when_idle,
)
from tests.api.named_keys import WEB, bearer, entry, rewrite, settings_with
from tests.api.running_app import MODEL, SECOND, RunningApp, number_of_the_chunk, run_app, until
from tests.embedded import embedded
from tests.fake_replica import FakeReplica
from tests.loop_clock import loop_clock
from tests.vocabulary import make_tokenizer

BROWSER = {"origin": "https://a.example"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 200) for path in ("/", "/docs", "/metrics", "/v1/activity", "/load")),
        *(("GET", path, 200) for path in ("/health", "/health/", "/v1/activity", "/v1/models/")),
        *(("GET", path, 404) for path in ("/redoc", "/static", "/v1", "/nowhere/", "/static-offline-docs")),
        *(("POST", path, 400) for path in ("/asr", "/inference", "/v1/audio/transcriptions/")),
        ("POST", "/openai/deployments/whisper-1/audio/transcriptions", 400),
        ("POST", "/v1/realtime/client_secrets", 200),
        ("GET", "/v1/realtime", 426),
        ("POST", "/v1/models/whisper-1/load", 403),
    ],
)
async def test_each_part_answers_and_nothing_else(
    app: RunningApp, method: str, path: str, status: int
) -> None:
    assert (await app.client.request(method, path)).status_code == status


async def test_errors_of_every_part_have_openais_body(app: RunningApp) -> None:
    for path in ("/nowhere", "/v1/models/none", "/asr"):
        assert set((await app.client.get(path)).json()["error"]) == {"message", "type", "param", "code"}
    from_the_end = {"range": "bytes=999999999-"}
    reply = await app.client.get("/static-offline-docs/favicon.png", headers=from_the_end)
    assert (reply.status_code, reply.json()["error"]["code"]) == (416, None), "which Starlette refuses itself"


async def test_a_body_that_nobody_reads_ends_its_connection_behind_the_reply(app: RunningApp) -> None:
    reply = await app.client.post("/nowhere", content=b"x" * 100_000)
    assert (reply.status_code, reply.headers["connection"]) == (404, "close")


async def test_the_document_has_the_errors_of_each_path_and_recordings_go_past_fastapi(
    app: RunningApp,
) -> None:
    operation = (await app.client.get("/openapi.json")).json()["paths"]["/v1/audio/transcriptions"]["post"]
    assert {"200", "400", "413", "429", "503"} <= set(operation["responses"])
    innermost: object = app.app.user_middleware[-1].cls
    assert innermost is PlainRoutes, "all others are around it"


async def test_the_load_is_sampled_from_the_start_on(app: RunningApp) -> None:
    await until(lambda: app.app.state.server.activity._samples)


async def test_the_figures_have_a_port_of_their_own_where_one_is_set() -> None:
    async with run_app(embedded(metrics_port=0)) as app:
        assert (await app.client.get("/metrics")).status_code == 404
        metrics = create_metrics_app(app.app.state.server, app.app.state.server.settings)
        transport = httpx.ASGITransport(metrics)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            paths = (
                "/metrics",
                "/health",
                "/ready",
                "/health/",
                "/openapi.json",
                "/docs",
                "/redoc",
                "/v1/models",
            )
            statuses = {path: (await client.get(path)).status_code for path in paths}
            assert set((await client.get("/docs")).json()["error"]) == {"message", "type", "param", "code"}
    assert list(statuses.values()) == [200] * 4 + [404] * 4


async def test_names_of_other_machines_are_refused_on_a_server_for_this_one_alone() -> None:
    for values, status in (({}, 421), ({"api_key": "right"}, 200), ({"host": "0.0.0.0"}, 200)):
        async with run_app(embedded(**values)) as app:
            reply = await app.client.get("/health", headers={"host": "evil.example"})
            assert (reply.status_code == 200) == (status == 200), values


async def test_browsers_of_named_origins_alone_may_read_answers_and_their_headers() -> None:
    async with run_app(embedded()) as app:
        assert "access-control-allow-origin" not in (await app.client.get("/health", headers=BROWSER)).headers
    async with run_app(embedded(cors_origins="https://a.example")) as app:
        reply = await app.client.get("/health", headers=BROWSER)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
        assert {*OWN_HEADERS, "retry-after", "x-ratelimit-reset-requests"} <= set(exposed)
        asked = BROWSER | {
            "access-control-request-method": "DELETE",
            "access-control-request-headers": "x-own",
        }
        preflight = await app.client.options("/v1/models", headers=asked)
        assert preflight.status_code == 200
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "x-own"


async def test_names_of_keys_share_the_places_and_their_use_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 0.01)
    keys, log = tmp_path / "keys", tmp_path / "use"
    settings = settings_with(keys, entry("web", WEB), usage_log=str(log), max_concurrent_requests=4)
    async with run_app(settings) as app:
        app.client.headers.update(bearer(WEB))
        assert await app.still_works()
        await rewrite(app, keys)  # it is watched
        assert (await app.client.get("/v1/models")).status_code == 401
        state = app.app.state.server
        state.admission._places.take("web")
        state.admission._places.take("web")
        state.admission._places.take("web")
        assert state.admission._places.are_taken("web")
        assert not state.admission._places.are_taken("shop")
    assert '"key": "web"' in log.read_text()  # written by the end


async def test_places_without_names_are_not_shared(app: RunningApp) -> None:
    places = app.app.state.server.admission._places
    for _ in range(places.num_free - 1):
        places.take("web")
    assert not places.are_taken("web")


async def test_reading_files_takes_few_threads(app: RunningApp) -> None:
    assert (await app.client.get("/")).status_code == 200
    assert current_default_thread_limiter().total_tokens == FILE_THREADS == 4


async def test_everything_that_was_started_ends_with_the_server() -> None:
    before = asyncio.all_tasks()
    async with run_app(embedded()) as app:
        assert await app.still_works()
        assert {task.get_name() for task in asyncio.all_tasks()} >= {"unload idle models"}
    await until(lambda: {task for task in asyncio.all_tasks() - before if not task.done()} == set())
    with pytest.raises(RuntimeError):
        await app.pool.run(len, b"")


async def test_a_request_is_shown_on_the_page_of_activity(app: RunningApp) -> None:
    reply = await app.client.post("/v1/audio/transcriptions", files={"file": SECOND}, data=MODEL)
    activity: Any = app.app.state.server.activity
    await until(lambda: activity._answers)
    (answer,) = activity._answers
    assert answer.request_id == reply.headers["x-request-id"]


async def test_the_port_of_the_figures_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_app(embedded(metrics_port=0)):
        line = capsys.readouterr().out
    assert re.fullmatch(r"metrics on http://127\.0\.0\.1:\d+/metrics\n", line)


@pytest.mark.parametrize("shares", [True, False])
async def test_a_server_that_shares_its_port_listens_once_its_models_are_ready(shares: bool) -> None:
    settings, replica, may_launch = (
        embedded(reuse_port=shares),
        FakeReplica(number_of_the_chunk),
        asyncio.Event(),
    )
    replica.before_launch = may_launch.wait
    dispatcher, pool = Dispatcher(settings, replica), PreprocessPool(1)
    model = ServedModel(settings, dispatcher, pool, make_tokenizer(), AudioWindow())
    app = create_app(settings, ModelRegistry([model]), pool)
    lifespan = app.router.lifespan_context(app)
    opening = asyncio.create_task(lifespan.__aenter__())
    if shares:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not opening.done()
        may_launch.set()
    await opening
    assert dispatcher.ready == shares
    may_launch.set()
    await lifespan.__aexit__(None, None, None)


# -- Memory --


class Memory:
    """The process's memory, which grows as the test says, and what was given back of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.trims: list[int] = []
        self.is_idle = True
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(module, "resident_bytes", self.resident_bytes)
        monkeypatch.setattr("asr_server.server.app.ctypes.CDLL", lambda name: self)

    def resident_bytes(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def malloc_trim(self, kept: int) -> None:
        self.trims.append(kept)

    async def watched(self, *sizes: int) -> list[int]:
        self.sizes = list(sizes)
        watching = asyncio.create_task(release_memory_when_idle(lambda: self.is_idle))
        await until(lambda: len(self.sizes) == 1)
        await asyncio.sleep(0.01)
        watching.cancel()
        return self.trims


async def test_the_last_lines_of_the_usage_log_are_written_before_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[UsageLog] = []
    close = UsageLog.close

    def noted(log: UsageLog) -> None:
        close(log)
        closed.append(log)

    monkeypatch.setattr(UsageLog, "close", noted)
    async with run_app(embedded(usage_log=str(tmp_path / "usage"))) as app:
        log = app.app.state.server.usage
        await app.post(SECOND)
        assert closed == []
    assert closed == [log]
    assert len((tmp_path / "usage").read_text().splitlines()) == 1


async def test_the_memory_is_looked_at_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look() -> int:
        looks.append(MIB)
        return MIB

    monkeypatch.setattr(module, "resident_bytes", look)
    with loop_clock() as clock:
        watching = asyncio.create_task(release_memory_when_idle(lambda: False))
        await clock.advance(1.9)
        assert len(looks) == 1  # at the start
        await clock.advance(0.2)
        assert len(looks) == 2
        watching.cancel()


async def test_memory_that_grew_by_more_than_4_mib_is_given_back_while_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, grown, low = 100 * MIB, 104 * MIB, 90 * MIB
    assert await Memory(monkeypatch).watched(start, grown, grown, start) == []
    assert await Memory(monkeypatch).watched(start, grown + 1, start, start) == [0]
    assert await Memory(monkeypatch).watched(start, low, low, low + 4 * MIB + 1, low) == [0]
    busy = Memory(monkeypatch)
    busy.is_idle = False
    assert await busy.watched(start, 2 * grown, 2 * grown, start) == []


async def test_where_memory_cannot_be_given_back_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.sizes = [1]
    monkeypatch.setattr("asr_server.server.app.ctypes.CDLL", lambda name: object())
    await asyncio.wait_for(release_memory_when_idle(lambda: True), 60)
    monkeypatch.setattr("asr_server.server.app.ctypes.CDLL", lambda name: memory)
    monkeypatch.setattr(module, "STATM", Path("/nowhere"))
    await asyncio.wait_for(release_memory_when_idle(lambda: True), 60)
