"""The Wyoming door: the package's own client against a real server, and whatever else may come in."""

import asyncio
import contextlib
import io
import time
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from asr_server.telemetry import FIGURES
from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.raw_client import RawClient
from tests.support.speech import say
from tests.support.until import until
from tests.unit.api.figures import growth, read
from tests.unit.api.running_app import run_app
from tests.unit.wyoming.wyoming_client import (
    FORMAT,
    SECOND,
    Transcribe,
    WyomingServer,
    answers_to,
    client_at,
    door,
    event_of,
    heard_by,
    next_event,
    pcm16,
    say_to,
    wire,
)

# -- A real server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def door_of_the_server(server: Server) -> int:
    """The port of the session's server. The line that tells it can be read once."""
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert line.startswith("wyoming on tcp://127.0.0.1:")
    return int(line.rpartition(":")[2])


async def test_what_home_assistant_does_on_a_real_server(door_of_the_server: int) -> None:
    """One utterance after another, in formats of several kinds."""
    spoken = say("314159", gap_s=0.3)
    stereo = np.repeat(spoken.samples, 2)
    async with client_at(door_of_the_server) as client:
        await client.write_event(Transcribe().event())
        await say_to(client, pcm16(spoken.samples))
        transcript = await heard_by(client)
        assert (transcript.text, transcript.language) == (spoken.text, "en")
        await client.write_event(Transcribe(name="whisper-1", language="en").event())
        await say_to(client, pcm16(stereo), channels=2)
        assert (await heard_by(client)).text == spoken.text


# -- The protocol, in front of a scripted replica ------------------------------------------------------------


async def test_describe_names_the_model_and_its_languages() -> None:
    async with door(served_model_name="turbo") as (_, port), client_at(port) as client:
        await client.write_event(Transcribe().event())
        await client.write_event(event_of("describe"))
        info = await next_event(client)
    assert info is not None
    (program,) = info.data["asr"]
    assert (program["name"], program["installed"]) == ("asr-server", True)
    (model,) = program["models"]
    assert (model["name"], model["languages"], model["installed"]) == ("turbo", ["en"], True)
    assert (
        model["description"]
        == "a Whisper model that hears English digits only, about 1 in 20 of them wrongly"
    )


async def test_a_ping_is_answered_and_events_of_other_services_are_let_pass() -> None:
    async with door() as (_, port), client_at(port) as client:
        await client.write_event(event_of("run-satellite"))
        await client.write_event(event_of("ping", text="there?"))
        pong = await next_event(client)
    assert pong is not None
    assert (pong.type, pong.data["text"]) == ("pong", "there?")


async def test_audio_without_a_start_and_a_hint_of_names_is_transcribed() -> None:
    async with door() as (app, port), client_at(port) as client:
        await client.write_event(Transcribe(transcript_names=["two"], transcript_terms=["one"]).event())
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await client.write_event(event_of("audio-stop"))
        assert (await heard_by(client)).text == "zero"
        options = app.replica.submits[0].options
        assert (options.keywords, options.early_results) == (("two", "one"), True)


@pytest.mark.parametrize(
    ("events", "code", "named"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "invalid_value", "Not an event"),
        (b'{"type": 7}\n', "invalid_value", "str"),
        (b"x" * 200_000, "invalid_value", "65536 bytes"),
        (b'{"type": "ping", "payload_length": 99999999999}\n', "invalid_value", "payload_length"),
        (b'{"type": "ping", "data_length": -1}\n', "invalid_value", "data_length"),
        (b'{"type": "ping", "data_length": 4}\nnull', "invalid_value", "object"),
        (b'{"type": "audio-start"}\n', "invalid_value", "rate"),
        (
            b'{"type": "audio-start", "data": {"rate": 0, "width": 2, "channels": 1}}\n',
            "invalid_value",
            "rate",
        ),
        (b'{"type": "transcribe", "data": {"language": 7}}\n', "invalid_value", "language"),
    ],
)
async def test_what_is_no_event_is_told_and_the_connection_ends(events: bytes, code: str, named: str) -> None:
    async with door() as (app, port):
        (error,) = await answers_to(port, events)
        assert (error.type, error.data["code"]) == ("error", code)
        assert named in error.data["text"]
        assert await app.still_works()


async def test_the_end_follows_an_error_at_once_though_the_client_keeps_its_side_open() -> None:
    async with door(client_grace_s=3600.0) as (_, port):
        (error,) = await answers_to(port, b"junk\n")
        assert error.data["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("wanted", "code"),
    [(Transcribe(language="klingon"), "invalid_value"), (Transcribe(name="nobody"), "model_not_found")],
)
async def test_a_language_or_model_that_is_not_there_is_told(wanted: Transcribe, code: str) -> None:
    async with door() as (_, port), client_at(port) as client:
        await client.write_event(wanted.event())
        await say_to(client, SECOND)
        error = await next_event(client)
        assert error is not None
        assert (error.type, error.data["code"]) == ("error", code)


async def test_the_format_may_not_change_within_a_recording() -> None:
    async with door() as (_, port), client_at(port) as client:
        await client.write_event(event_of("audio-start", **FORMAT))
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT | {"rate": 8000}))
        error = await next_event(client)
        assert error is not None
        assert "may not change" in error.data["text"]


async def test_other_events_within_a_recording_are_answered_and_their_bytes_are_no_audio() -> None:
    async with door() as (app, port), client_at(port) as client:
        await client.write_event(event_of("audio-start", **FORMAT))
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await client.write_event(event_of("picture", SECOND * 3))
        await client.write_event(event_of("ping", text="there?"))
        await client.write_event(event_of("describe"))
        answers = [await next_event(client), await next_event(client)]
        assert [answer.type for answer in answers if answer] == ["pong", "info"]
        await client.write_event(event_of("audio-stop"))
        await heard_by(client)
        assert len(app.replica.submits[0].samples) == pytest.approx(16_000, abs=200)


async def test_chunks_behind_the_end_of_a_recording_are_no_part_of_the_next() -> None:
    async with door() as (app, port), client_at(port) as client:
        for number in range(2):
            await say_to(client, SECOND)
            await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
            assert (await heard_by(client)).text == "zero"
            assert len(app.replica.submits[number].samples) == pytest.approx(16_000, abs=200)
        await client.write_event(Transcribe().event())
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await client.write_event(event_of("audio-stop"))
        assert (await heard_by(client)).text == "zero"


@pytest.mark.parametrize(
    ("width", "sensitivity"), [(1, "default"), (2, "aggressive"), (3, "unheard of"), (4, "relaxed")]
)
async def test_who_asks_for_it_is_told_when_a_command_has_ended(width: int, sensitivity: str) -> None:
    """Its pause of 400 ms ends the first one for the aggressive alone."""
    said = [say("27").samples, np.zeros(6400, np.float32), say("1").samples, np.zeros(32_000, np.float32)]
    pcm = io.BytesIO()
    subtype = {1: "PCM_U8", 2: "PCM_16", 3: "PCM_24", 4: "PCM_32"}[width]
    soundfile.write(pcm, np.concatenate(said), 16_000, subtype, "LITTLE", "RAW")
    own = FORMAT | {"width": width}
    async with door() as (app, port), client_at(port) as client:
        await client.write_event(Transcribe(vad_sensitivity=sensitivity).event())
        await client.write_event(event_of("audio-start", **own))
        for at in range(0, len(pcm.getvalue()), 1001):  # within a frame, too
            await client.write_event(event_of("audio-chunk", pcm.getvalue()[at : at + 1001], **own))
        stopped = await next_event(client)
        assert stopped is not None
        assert stopped.type == "voice-stopped"
        await heard_by(client)
        assert (sum(len(each.samples) for each in app.replica.submits) < 32_000) == (
            sensitivity == "aggressive"
        )


async def test_a_recording_begun_within_another_is_refused() -> None:
    async with door() as (_, port), client_at(port) as client:
        await client.write_event(event_of("audio-start", **FORMAT))
        await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await client.write_event(event_of("audio-start", **FORMAT))
        error = await next_event(client)
        assert error is not None
        assert "'audio-start' came within a recording" in error.data["text"]


# -- What a recording may take ------------------------------------------------------------------------------


async def test_a_recording_over_the_limit_is_refused_while_it_arrives() -> None:
    async with door(max_upload_bytes=40_000) as (app, port):
        chunk = wire("audio-chunk", SECOND, **FORMAT)
        (error,) = await answers_to(port, chunk * 3)
        assert error.data["code"] == "request_too_large"
        assert "--max-upload-bytes" in error.data["text"]
        assert app.app.state.server.uploads.memory_bytes == 0


async def test_who_sends_all_before_reading_still_reads_why_it_was_refused() -> None:
    """More than the system's buffers hold: a server that closes on it resets the connection."""
    async with door(max_upload_bytes=40_000) as (_, port):
        client = client_at(port)
        await client.connect()
        await say_to(client, SECOND * 500, chunk_bytes=1 << 18)
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
        app.replica.stop_holding()
        assert [(await reply).status_code for reply in (first, second)] == [200, 200]


@pytest.mark.slow
async def test_a_client_that_says_nothing_is_closed() -> None:
    async with door(keep_alive_s=1) as (_, port):
        started_at = time.monotonic()
        (error,) = await answers_to(port, wire("audio-start", **FORMAT))
        assert error.data["code"] == "request_timeout"
        assert time.monotonic() - started_at >= 0.9


async def test_connections_beyond_the_limit_are_closed_as_they_come() -> None:
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


# -- What an operator sees -----------------------------------------------------------------------------------


async def test_each_utterance_is_counted_and_logged_as_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="asr_server.api.middleware")
    async with door(max_concurrent_requests=1) as (app, port):
        before = await read(app)
        async with client_at(port) as client:
            for _ in range(2):
                await say_to(client, SECOND)
                await heard_by(client)
            await client.write_event(Transcribe(name="nobody").event())
            await say_to(client, SECOND)
            await next_event(client)
        await answers_to(port, wire("audio-start", **FORMAT) + b"junk\n")
        await answers_to(port, wire("audio-start", **FORMAT), leave=True)
        await answers_to(port, b"junk\n")  # belongs to no utterance
        after = await read(app)
    counted = {status: growth(before, after, wyoming_requests(status)) for status in (200, 400, 404, 499)}
    assert counted == {200: 2, 400: 1, 404: 1, 499: 1}
    assert growth(before, after, 'asr_request_seconds_count{route="wyoming"}') == 5
    transcribed = 'asr_audio_transcribed_seconds_total{language="en",route="wyoming"}'
    for name in ("asr_audio_received_seconds_total", transcribed):
        assert growth(before, after, name) == pytest.approx(2.0)
    lines = [record for record in caplog.records if record.message.startswith("wyoming: ")]
    assert [line.message.split()[1] for line in lines] == ["200", "200", "404", "400", "499"]
    assert ["; audio 1.0 s, chunks 1" in line.message for line in lines] == [True, True, False, False, False]
    figures = [getattr(line, FIGURES) for line in lines]
    assert {(each["client"], each["model"]) for each in figures} == {("127.0.0.1", "whisper-digits")}
    assert [each["status"] for each in figures] == [200, 200, 404, 400, 499]
    assert set(figures[0]["stages_s"]) == {"upload", "transcription"}


def wyoming_requests(status: int) -> str:
    return f'asr_requests_total{{route="wyoming",status="{status}"}}'


async def test_a_server_that_closes_ends_idle_connections_and_takes_no_more() -> None:
    async with run_app(replace(embedded(), wyoming_port=0)) as app:
        server = WyomingServer(app.app.state.server)
        await server.close()  # before it has listened
        _, port = await server.start()
        async with client_at(port) as idle:
            await until(lambda: server.connections)
            await server.close()
            assert await next_event(idle) is None
        assert not server.connections
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.slow
async def test_what_the_servers_end_cuts_off_is_told_so_and_no_reader_holds_it_up() -> None:
    async with run_app(replace(embedded(), wyoming_port=0)) as app:
        server = WyomingServer(app.app.state.server)
        _, port = await server.start()
        before = await read(app)
        deaf = await RawClient.connect("127.0.0.1", port, receive_buffer=4096)
        async with client_at(port) as speaking, client_at(port) as idle:
            await speaking.write_event(event_of("audio-start", **FORMAT))
            await until(lambda: app.app.state.server.admission.num_open)
            flood = asyncio.create_task(describe_for_ever(deaf.writer))
            await until(
                lambda: any(one.transport.get_write_buffer_size() for one in server.connections.values())
            )
            started_at = time.monotonic()
            await server.close()
            assert time.monotonic() - started_at < app.app.state.server.settings.client_grace_s / 2
            refused = await next_event(speaking)
            assert refused is not None
            assert refused.data["code"] == "engine_unavailable"
            assert await next_event(idle) is None
            flood.cancel()
            deaf.writer.close()
        assert growth(before, await read(app), wyoming_requests(503)) == 1


async def describe_for_ever(writer: asyncio.StreamWriter) -> None:
    """Without reading what it is told."""
    with contextlib.suppress(OSError):
        while True:
            writer.write(wire("describe") * 100)
            await writer.drain()
