"""The ids, times and close codes that a session gives out, and what it does once its end has begun."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from asr_server.api.models.served_model import ServedModel
from asr_server.checkpoint.files import AudioWindow
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.realtime import session
from asr_server.telemetry import FIGURES
from tests.api.named_keys import WEB, bearer, entry, settings_with
from tests.api.running_app import RunningApp, run_app, until
from tests.embedded import embedded
from tests.fake_replica import FakeReplica, noise, say
from tests.realtime.realtime_client import MANUAL, Client, of_type, open_session, pcm24
from tests.speech import say as say_digits
from tests.speech import silence
from tests.vocabulary import make_tokenizer, words

SECOND = pcm24(noise(1.0))


def url(app: RunningApp) -> str:
    return f"http://{app.host}:{app.port}"


def test_sessions_close_by_the_protocols_own_numbers() -> None:
    """RFC 6455, section 7.4.1."""
    codes = (session.NORMAL, session.GOING_AWAY, session.POLICY)
    assert (*codes, session.INTERNAL_ERROR) == (1000, 1001, 1008, 1011)


async def test_events_and_items_are_numbered_under_the_sessions_own_letters() -> None:
    async with (
        run_app(embedded(max_realtime_session_s=1000)) as app,
        connect(url(app).replace("http", "ws") + "/v1/realtime") as socket,
    ):
        created = json.loads(await socket.recv())
        now = time.time()
        client = Client(socket)
        await client.update(**MANUAL)
        for _ in range(2):
            await client.append(SECOND)
            await client.commit()
        events = await client.until(".completed", count=2)
        tag = created["session"]["id"].removeprefix("sess_")[:8]
        assert created["event_id"] == f"event_{tag}000001"
        assert [event["event_id"] for event in events] == [
            f"event_{tag}{number:06d}" for number in range(3, 3 + len(events))
        ]
        items = [event["item_id"] for event in of_type(events, ".committed")]
        assert items == [f"item_{tag}000000", f"item_{tag}000001"]
        assert now + 990 < created["session"]["expires_at"] <= now + 1000


async def test_a_key_whose_audio_is_used_up_ends_its_session_behind_the_turn(tmp_path: Path) -> None:
    key = entry("web", WEB, audio_seconds_per_minute=1)
    async with (
        run_app(settings_with(tmp_path / "keys", key)) as app,
        open_session(url(app), additional_headers=bearer(WEB)) as client,
    ):
        await client.update(**MANUAL)
        await client.append(SECOND * 3)
        await client.commit()
        *_, error = await client.until("error")
        assert error["error"]["code"] == "rate_limit_exceeded"
        assert await client.closed() == session.POLICY
        assert client.socket.close_reason == "The audio of this key is used up for now."


async def test_later_turns_are_read_by_the_version_that_took_a_models_place(app: RunningApp) -> None:
    registry = app.app.state.server.models
    old = registry.default

    def version(languages: tuple[str, ...], digits: str) -> ServedModel:
        replica = FakeReplica(lambda _: say(*words(digits)))
        dispatcher = Dispatcher(old.settings, replica)
        return ServedModel(old.settings, dispatcher, app.pool, make_tokenizer(languages), AudioWindow())

    new, foreign = version(("en", "de"), "7"), version(("de", "zh"), "8")
    async with open_session(url(app)) as client:
        await client.update(**MANUAL, transcription={"model": "whisper-1", "language": "en"})
        texts = []
        for model in (old, new, foreign):  # the last one does not know the session's language
            if model is not old:
                await model.start()
                registry._replace(registry.default, model)
            await client.append(SECOND)
            await client.commit()
            texts.append((await client.until(".completed"))[-1]["transcript"])
    assert texts == ["zero", "seven", "seven"]
    await new.stop()
    await foreign.stop()


async def test_a_silence_is_committed_with_its_padding_and_timed_from_the_last_turn(app: RunningApp) -> None:
    detection = {"type": "server_vad", "idle_timeout_ms": 2000, "prefix_padding_ms": 600}
    async with open_session(url(app)) as client:
        await client.update(turn_detection=detection)
        await client.append(pcm24(silence(5.0)))
        events = await client.until(".completed", count=2)
        first, second = of_type(events, ".timeout_triggered")
        assert first["audio_start_ms"] == 0
        assert second["audio_start_ms"] == first["audio_end_ms"]
        for timeout in (first, second):  # noticed with the next block of 100 ms
            assert 2000 <= timeout["audio_end_ms"] - timeout["audio_start_ms"] <= 2100
        assert [event["usage"]["seconds"] for event in of_type(events, ".completed")] == [0.6, 0.6]


async def test_a_turn_holds_all_that_was_said_and_its_padding(app: RunningApp) -> None:
    detection = {"type": "server_vad", "prefix_padding_ms": 1000, "silence_duration_ms": 500}
    spoken = say_digits("31", gap_s=[0.2, 1.0], lead_s=2.0)
    async with open_session(url(app)) as client:
        await client.update(turn_detection=detection)
        await client.append(pcm24(spoken.samples))
        events = await client.until(".completed")
    (started,), (stopped,) = of_type(events, ".speech_started"), of_type(events, ".speech_stopped")
    assert started["audio_start_ms"] == pytest.approx(1000 * spoken.times[0][0] - 1000, abs=130)
    length_s = (stopped["audio_end_ms"] - started["audio_start_ms"]) / 1000
    assert events[-1]["usage"]["seconds"] == pytest.approx(length_s, abs=0.01)
    assert len(app.replica.submits[-1].samples) <= 16_000 * length_s


async def test_the_first_end_counts_and_the_committed_turn_is_still_read(app: RunningApp) -> None:
    app.replica.holding = True
    async with open_session(url(app)) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.commit()
        await until(lambda: app.replica.held)
        (own,) = app.app.state.server.realtime._active
        own.end(4000, "first")
        own.end(4001, "second")
        await client.send({"type": "session.update", "session": {"audio": {"input": MANUAL}}})
        await client.append(SECOND)
        for submit in app.replica.held:
            app.replica.release(submit)
        events = await client.until(".completed")
        assert not of_type(events, "session.updated")
        assert await client.closed() == 4000
        assert client.socket.close_reason == "first"


async def test_an_open_turn_is_committed_by_the_end_with_the_last_sample(app: RunningApp) -> None:
    async with open_session(url(app)) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        (own,) = app.app.state.server.realtime._active
        await until(lambda: own._buffer.end >= 15_000)
        own.end(4000, "the end")
        events = await client.until(".completed")
        assert events[-1]["usage"]["seconds"] == 1.0
        assert await client.closed() == 4000


async def test_the_line_of_a_session_names_the_model_that_it_asked_for_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.middleware.request_log")
    async with run_app(embedded(model_alias="whisper-1,live")) as app:
        async with open_session(url(app)) as client:
            await client.update(transcription={"model": "live"}, **MANUAL)
        await until(lambda: [each for each in caplog.messages if each.startswith("WebSocket")])
    figures: dict[str, Any] = getattr(caplog.records[-1], FIGURES)
    assert (figures["model"], figures["stream"]) == ("live", True)


async def test_a_binary_message_is_told_from_text(app: RunningApp) -> None:
    async with open_session(url(app)) as client:
        await client.send(b"{}")
        (error,) = await client.until("error")
        assert error["error"]["message"] == "Events are JSON text; this message was binary."
        await client.send("{}")
        (error,) = await client.until("error")
        assert "required" in error["error"]["message"]


async def test_turns_are_counted_once_each_be_they_read_or_failed() -> None:
    async with run_app(answer=lambda _: ValueError("broken")) as app, open_session(url(app)) as client:
        await client.update(**MANUAL)
        for _ in range(2):
            await client.append(SECOND)
            await client.commit()
            await client.until(".failed")
        assert app.app.state.server.realtime.num_turns == 2


async def test_a_session_that_asks_for_nothing_is_of_the_default_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api.middleware.request_log")
    async with run_app() as app:
        async with open_session(url(app)):
            pass
        await until(lambda: [each for each in caplog.messages if each.startswith("WebSocket")])
    figures: dict[str, Any] = getattr(caplog.records[-1], FIGURES)
    assert (figures["model"], figures["stream"]) == ("whisper-digits", True)


async def test_what_was_cleared_leaves_no_sample_to_the_next_turn(app: RunningApp) -> None:
    async with open_session(url(app)) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.send({"type": "input_audio_buffer.clear"})
        await client.append(SECOND)
        await client.commit()
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.0


async def test_a_new_format_loses_no_sample_of_the_one_before(app: RunningApp) -> None:
    async with open_session(url(app)) as client:
        await client.update(**MANUAL)
        await client.append(SECOND)
        await client.update(format={"type": "audio/pcmu"})
        await client.append(bytes(range(128)) * 50)
        await client.commit()
        assert (await client.until(".completed"))[-1]["usage"]["seconds"] == 1.8


async def test_a_session_with_too_much_to_read_takes_no_further_event_until_some_is_read(
    app: RunningApp,
) -> None:
    async with open_session(url(app)) as client:
        (own,) = app.app.state.server.realtime._active
        own._backlog.add(8)
        for _ in range(2):
            await client.send({"type": "input_audio_buffer.clear"})
        await client.until(".cleared")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.until(".cleared")
        own._backlog.add(-8)
        await client.until(".cleared")
