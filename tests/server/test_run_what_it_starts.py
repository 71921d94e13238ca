"""What a run gives uvicorn, starts before the engine, and leaves when it is hurried."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from asr_server.api.served_model import ServedModel
from asr_server.audio.pool import PreprocessPool
from asr_server.server import run as run_module
from tests.api.running_app import served, until
from tests.embedded import embedded
from tests.server.test_run_in_one_process import Session, serving_app, sessions_of


@pytest.mark.parametrize(
    ("level", "uvicorns"),
    [("debug", "warning"), ("info", "warning"), ("warning", "warning"), ("error", "error")],
)
def test_uvicorn_says_nothing_that_is_said_elsewhere_and_libraries_load_before_the_engine(
    level: Any, uvicorns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    class Served:
        exit_status = 7

        def __init__(self, config: SimpleNamespace, state: object) -> None:
            happened.append((config.log_level, config.access_log))

        def run(self, sockets: object) -> None: ...

    monkeypatch.setattr(run_module, "Server", Served)
    monkeypatch.setattr(run_module, "raise_open_files_limit", lambda: 1 << 20)
    monkeypatch.setattr(run_module, "_sockets", lambda settings: None)
    monkeypatch.setattr(ServedModel, "from_checkpoint", lambda settings, pool: served(settings))
    monkeypatch.setattr(uvicorn, "Config", lambda app, **options: SimpleNamespace(**options))
    monkeypatch.setattr(PreprocessPool, "warm_up", lambda pool: happened.append("libraries"))
    assert run_module.run([embedded(port=0, log_level=level)]) == 7
    assert happened == ["libraries", (uvicorns, False)]


async def test_no_collection_looks_at_what_was_there_when_the_server_listens() -> None:
    gc.unfreeze()
    async with serving_app(embedded()):
        assert gc.get_freeze_count() > 10_000


async def test_a_drain_that_is_hurried_leaves_nothing_that_waits_for_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "CLOSE_LIMIT_S", 0.05)
    async with serving_app(embedded(drain_s=3600)) as app:
        session = Session(leaves_at=99)
        staying = asyncio.create_task(session.stay_in(sessions_of(app)))
        await until(lambda: sessions_of(app).num_active)
        app.signal()
        await until(lambda: app.dispatcher.draining)
        app.signal()
        await app.serving
        await asyncio.sleep(0)
        waiting = [each for each in asyncio.all_tasks() if "RealtimeSessions.drain" in repr(each.get_coro())]
        session.left.set()
        await staying
        assert waiting == []
