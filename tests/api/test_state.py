"""Places of realtime sessions, the caller of a request, and when the server is idle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.requests import Request

from asr_server import metrics
from asr_server.api import state
from asr_server.api.state import SERVICE_RESTART, AppState, Caller, RealtimeSessions
from asr_server.errors import InvalidApiKey, ModelNotFound, RateLimited, SessionsTaken
from asr_server.keys.accounts import Account
from asr_server.keys.keys_file import Key
from tests.api.running_app import RunningApp, run_app
from tests.embedded import embedded


class Session:
    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def end(self, code: int, reason: str) -> None:
        self.ended.append((code, reason))


# -- Sessions --


def test_sessions_are_counted_and_refused_beyond_the_limit_by_the_settings_name() -> None:
    sessions = RealtimeSessions(2)
    with sessions.enter(Session(), "web"), sessions.enter(Session(), "shop"):
        with pytest.raises(SessionsTaken) as caught, sessions.enter(Session(), "news"):
            pass
        assert caught.value.message == (
            "2 realtime sessions are open: --max-realtime-sessions (ASR_SERVER_MAX_REALTIME_SESSIONS)."
        )
        assert caught.value.retry_after_s == 5
        assert (sessions.num_active, sessions.num_started, sessions.num_rejected) == (2, 2, 1)
    assert (sessions.num_active, sessions.num_started, sessions.num_turns) == (0, 2, 0)
    with sessions.enter(Session(), "news"):
        assert (sessions.num_started, sessions.num_rejected, sessions.is_draining) == (3, 1, False)


def test_a_key_that_shares_the_places_is_refused_while_others_are_free() -> None:
    sessions = RealtimeSessions(4, is_shared=True)
    with sessions.enter(Session(), "web"), sessions.enter(Session(), "web"), sessions.enter(Session(), "web"):
        with pytest.raises(SessionsTaken, match="This key's share of 4 realtime sessions is open: --max"):
            sessions.require_place("web")
        sessions.require_place("shop")
        assert sessions.num_rejected == 0  # asked only


async def test_a_drain_ends_each_session_and_waits_until_they_have_left() -> None:
    sessions, session = RealtimeSessions(2), Session()
    with sessions.enter(session):
        draining = asyncio.create_task(sessions.drain(60))
        await asyncio.sleep(0)
        assert sessions.is_draining
        assert session.ended == [(SERVICE_RESTART, "The server is shutting down.")]
        assert SERVICE_RESTART == 1012
        with sessions.enter(Session()):
            pass
        await asyncio.sleep(0)
        assert not draining.done()  # the other one has not left
    await asyncio.wait_for(draining, 60)


async def test_a_drain_waits_for_sessions_that_came_after_others_had_left() -> None:
    sessions = RealtimeSessions(2)
    with sessions.enter(Session()):
        pass
    with sessions.enter(Session()):
        draining = asyncio.create_task(sessions.drain(60.0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not draining.done()
    await draining


async def test_a_drain_waits_no_longer_than_its_limit_and_not_at_all_without_sessions() -> None:
    sessions = RealtimeSessions(2)
    with sessions.enter(Session()):
        pass  # one that has come and gone
    with sessions.enter(Session()):
        await sessions.drain(0.01)
        assert sessions.num_active == 1
    empty = RealtimeSessions(2)
    await asyncio.wait_for(empty.drain(3600), 60)


async def test_a_server_is_idle_without_requests_and_sessions(app: RunningApp) -> None:
    server: AppState = app.app.state.server
    assert server.is_idle
    with server.admission.enter():
        assert not server.is_idle
    with server.realtime.enter(Session()):
        assert not server.is_idle
    assert server.is_idle
    assert abs(server.started_at - time.time()) < 3600


# -- The caller of a request --


def request_to(app: RunningApp, **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "app": app.app, "headers": raw, "state": {}}
    return Request(scope)


async def test_azures_header_comes_before_the_usual_one() -> None:
    async with run_app(embedded(api_key="right")) as app:
        for headers, is_right in (
            ({"api_key": "right"}, True),
            ({"api_key": "right", "authorization": "Bearer wrong"}, True),
            ({"api_key": "wrong", "authorization": "Bearer right"}, False),
            ({"authorization": "Bearer right"}, True),
            ({}, False),
        ):
            try:
                await state.require_azure_key(request_to(app, **headers))
            except InvalidApiKey:
                assert not is_right, headers
            else:
                assert is_right, headers


async def test_a_request_sees_the_models_of_its_key() -> None:
    async with run_app() as app:
        request = request_to(app)
        assert state.models_of(request).default.name == "whisper-digits"
        for models, is_served in ((None, True), (("whisper-digits",), True), (("other",), False)):
            account = Account(Key("web", "0" * 64, models=models))
            state.set_caller(request, Caller(b"", account))
            try:
                assert state.models_of(request).choose("whisper-digits")
            except ModelNotFound:
                assert not is_served
            else:
                assert is_served


def test_a_metered_request_is_held_to_its_keys_limits_and_counts_as_use() -> None:
    request = Request({"type": "http", "headers": [], "state": {}})
    stats = metrics.begin_request_stats(lambda: "/")
    assert not stats.is_metered
    with state.metered(request):  # of nobody: no limit
        assert stats.is_metered
    account = Account(Key("web", "0" * 64, concurrent_requests=1))
    state.set_caller(request, Caller(b"", account))
    with state.metered(request):
        assert account.num_open == 1
        with pytest.raises(RateLimited, match="1 requests at once"), state.metered(request):
            pass
    assert account.num_open == 0
