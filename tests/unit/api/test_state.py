"""Places of realtime sessions, the caller of a request, and when the server is idle."""

from __future__ import annotations

import asyncio
import time

import pytest

from asr_server.api.state import SERVICE_RESTART, AppState, RealtimeSessions
from asr_server.errors import SessionsTaken
from tests.unit.api.running_app import RunningApp


class Session:
    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def end(self, code: int, reason: str) -> None:
        self.ended.append((code, reason))


# -- Sessions --


def test_sessions_are_counted_and_refused_beyond_the_limit_by_the_settings_name() -> None:
    sessions = RealtimeSessions(2)
    with sessions.enter(Session().end, "web"), sessions.enter(Session().end, "shop"):
        with pytest.raises(SessionsTaken) as caught, sessions.enter(Session().end, "news"):
            pass
        assert caught.value.message == (
            "2 realtime sessions are open: --max-realtime-sessions (ASR_SERVER_MAX_REALTIME_SESSIONS)."
        )
        assert caught.value.retry_after_s == 5
        assert (sessions.num_active, sessions.num_started, sessions.num_rejected) == (2, 2, 1)
    assert (sessions.num_active, sessions.num_started, sessions.num_turns) == (0, 2, 0)
    with sessions.enter(Session().end, "news"):
        assert (sessions.num_started, sessions.num_rejected, sessions.is_draining) == (3, 1, False)


def test_a_key_that_shares_the_places_is_refused_while_others_are_free() -> None:
    sessions = RealtimeSessions(4, is_shared=True)
    with (
        sessions.enter(Session().end, "web"),
        sessions.enter(Session().end, "web"),
        sessions.enter(Session().end, "web"),
    ):
        with pytest.raises(SessionsTaken, match="This key's share of 4 realtime sessions is open: --max"):
            sessions.require_place("web")
        sessions.require_place("shop")
        assert sessions.num_rejected == 0  # asked only


async def test_a_drain_ends_each_session_and_waits_until_they_have_left() -> None:
    sessions, session = RealtimeSessions(2), Session()
    with sessions.enter(session.end):
        draining = asyncio.create_task(sessions.drain(60))
        await asyncio.sleep(0)
        assert sessions.is_draining
        assert session.ended == [(SERVICE_RESTART, "The server is shutting down.")]
        assert SERVICE_RESTART == 1012
        with sessions.enter(Session().end):
            pass
        await asyncio.sleep(0)
        assert not draining.done()  # the other one has not left
    await asyncio.wait_for(draining, 60)


async def test_a_server_is_idle_without_requests_and_sessions(app: RunningApp) -> None:
    server: AppState = app.app.state.server
    assert server.is_idle
    with server.admission.enter():
        assert not server.is_idle
    with server.realtime.enter(Session().end):
        assert not server.is_idle
    assert server.is_idle
    assert abs(server.started_at - time.time()) < 3600


# -- The caller of a request --
