"""What an utterance may take, and who makes room for whom."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from tests.api.running_app import until
from tests.wyoming.wyoming_client import (
    FORMAT,
    SECOND,
    AudioChunk,
    AudioStop,
    WyomingConnection,
    answers_to,
    client_at,
    door,
    event_of,
    heard_by,
    next_event,
    say_to,
    wire,
)


async def test_a_recording_over_the_limit_is_refused_while_it_arrives() -> None:
    async with door(max_upload_bytes=40_000) as (app, port):
        chunk = wire("audio-chunk", SECOND, **FORMAT)
        (error,) = await answers_to(port, chunk * 3)
        assert error.data["code"] == "request_too_large"
        assert "--max-upload-bytes" in error.data["text"]
        assert app.app.state.server.uploads.memory_bytes == 0


async def test_a_recording_is_on_disk_where_memory_has_no_room_for_it() -> None:
    async with door(max_upload_memory_bytes=0) as (app, port), client_at(port) as client:
        uploads = app.app.state.server.uploads
        await client.write_event(event_of("audio-start", **FORMAT))
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await until(lambda: uploads.disk_bytes >= len(SECOND) and not uploads.memory_bytes)
        await client.write_event(event_of("audio-stop"))
        assert (await heard_by(client)).text == "zero"
        await until(lambda: uploads.disk_bytes == 0)


async def test_who_sends_all_before_reading_still_reads_why_it_was_refused() -> None:
    """More than the system's buffers hold: a server that closes on it resets the connection."""
    async with door(max_upload_bytes=40_000) as (_, port):
        client = client_at(port)
        await client.connect()
        await say_to(client, SECOND * 500, chunk_bytes=1 << 15)
        error = await next_event(client)
        assert error is not None
        assert (error.type, error.data["code"]) == ("error", "request_too_large")
        assert await next_event(client) is None
        await client.disconnect()


async def test_without_a_place_it_is_refused_as_by_http() -> None:
    async with door(max_concurrent_requests=1) as (app, port):
        app.replica.holding = True
        first, second = (asyncio.create_task(app.post()) for _ in range(2))
        await until(lambda: app.app.state.server.admission.num_waiting)
        (error,) = await answers_to(port, wire("audio-chunk", SECOND, **FORMAT))
        assert error.data["code"] == "server_overloaded"
        await until(lambda: app.replica.held)
        app.replica.holding = False
        app.replica.release(app.replica.held[0])
        assert [(await reply).status_code for reply in (first, second)] == [200, 200]


@pytest.mark.slow
async def test_a_client_that_says_nothing_is_closed() -> None:
    async with door(keep_alive_s=1) as (_, port):
        started_at = time.monotonic()
        (error,) = await answers_to(port, wire("audio-start", **FORMAT))
        assert error.data["code"] == "request_timeout"
        assert time.monotonic() - started_at >= 0.9


async def test_idle_connections_make_room_before_the_utterance_that_has_stalled_though_they_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asr_server.wyoming.LEAST_SILENCE_S", 0.05)
    async with door(max_connections=3) as (_, port), client_at(port) as speaking:
        await speaking.write_event(AudioChunk(audio=SECOND, **FORMAT).event())
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        async with contextlib.AsyncExitStack() as newcomers:
            for reader, writer in silent:
                await asyncio.sleep(0.1)
                writer.write(wire("ping"))
                newcomer = await newcomers.enter_async_context(client_at(port))
                await newcomer.write_event(event_of("ping"))
                assert await next_event(newcomer) is not None
                async with asyncio.timeout(60):
                    assert b"pong" in await reader.read()
        await speaking.write_event(AudioStop().event())
        assert (await heard_by(speaking)).text == "zero"
        for _, writer in silent:
            writer.close()


async def test_who_has_just_come_is_about_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        monkeypatch.setattr(time, "monotonic", lambda: 100.0)
        connection = WyomingConnection(app.app.state.server, reader, writer)
        monkeypatch.undo()
        assert connection.to_leave(100.9) is None
        assert connection.to_leave(101.0) == (False, 100.0)
        writer.close()


async def test_an_utterance_that_has_stalled_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_server.wyoming.LEAST_SILENCE_S", 0.05)
    async with door(max_connections=1) as (_, port), client_at(port) as stalling:
        await stalling.write_event(AudioChunk(audio=SECOND, **FORMAT).event())
        await asyncio.sleep(0.2)
        async with client_at(port) as newcomer:
            await newcomer.write_event(event_of("ping"))
            assert await next_event(newcomer) is not None
        assert await next_event(stalling) is None


async def test_connections_beyond_the_limit_are_closed_as_they_come_where_all_are_at_work() -> None:
    async with door(max_connections=1) as (_, port), client_at(port) as client:
        await client.write_event(event_of("ping"))
        assert await next_event(client) is not None
        assert await answers_to(port, b"") == []
        await client.write_event(event_of("ping"))
        assert await next_event(client) is not None


async def test_who_leaves_gives_up_the_place_and_the_work() -> None:
    async with door() as (app, port):
        app.replica.holding = True
        async with client_at(port) as client:
            await say_to(client, SECOND)
            await until(lambda: app.replica.held)
        state = app.app.state.server
        await until(lambda: app.replica.cancelled)
        await until(lambda: state.admission.num_in_flight == state.admission.num_open == 0)
        assert state.uploads.memory_bytes == 0


async def test_a_drain_waits_for_what_was_said_and_refuses_what_comes() -> None:
    async with door() as (app, port):
        state = app.app.state.server
        async with client_at(port) as client, client_at(port) as late:
            app.replica.holding = True
            await say_to(client, SECOND)
            await until(lambda: app.replica.held)
            app.dispatcher.drain()
            assert state.admission.num_open == 1  # what the drain of the server waits for
            await say_to(late, SECOND)
            refused = await next_event(late)
            assert refused is not None
            assert refused.data["code"] == "engine_unavailable"
            app.replica.release(app.replica.held[0])
            assert (await heard_by(client)).text == "zero"
