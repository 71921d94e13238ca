"""The official client on a real server with the embedded model; every event valid under its types."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import soundfile
import soxr
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.websocket_reconnection import ReconnectingEvent
from websockets.exceptions import InvalidStatus

from asr_server.core import SAMPLE_RATE, Samples
from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.unit.api.running_app import run_app
from tests.unit.realtime.realtime_client import (
    EVENTS,
    MANUAL,
    of_type,
    open_manual,
    open_session,
    pcm24,
    transcripts,
)

INTENT = {"intent": "transcription"}
TWO_TURNS = say("31415", gap_s=[0.2, 0.2, 1.2, 0.2, 1.0])


async def stream(connection: AsyncRealtimeConnection, data: bytes, pace_s: float = 0.0) -> None:
    for at in range(0, len(data), 4800):  # 100 ms
        await connection.input_audio_buffer.append(audio=base64.b64encode(data[at : at + 4800]).decode())
        await asyncio.sleep(pace_s)


async def events_until(
    connection: AsyncRealtimeConnection, last_word: str, count: int = 1
) -> AsyncIterator[dict[str, Any]]:
    while count:
        event = json.loads(await connection.recv_bytes())
        EVENTS.validate_python(event)
        yield event
        count -= event["type"].endswith(last_word)


async def test_a_stream_of_digits_is_transcribed_turn_by_turn(client: AsyncOpenAI) -> None:
    async with client.realtime.connect(extra_query=INTENT) as connection:
        streaming = asyncio.create_task(stream(connection, pcm24(TWO_TURNS.samples), pace_s=0.02))
        events = [event async for event in events_until(connection, ".completed", count=2)]
        await streaming
    started, stopped = of_type(events, "speech_started"), of_type(events, "speech_stopped")
    assert [event["item_id"] for event in started] == [event["item_id"] for event in stopped]
    texts = transcripts(events)
    assert [texts[event["item_id"]] for event in started] == ["three one four", "one five"]
    assert started[1]["audio_start_ms"] == pytest.approx((TWO_TURNS.times[3][0] - 0.3) * 1000, abs=150)
    deltas = dict.fromkeys(texts, "")
    for event in of_type(events, ".delta"):
        deltas[event["item_id"]] += event["delta"]
    assert deltas == texts


async def test_manual_commit_after_turning_detection_off(client: AsyncOpenAI) -> None:
    async with client.realtime.connect(extra_query=INTENT) as connection:
        audio_input: Any = {"transcription": {"model": "whisper-1", "language": "en"}, **MANUAL}
        await connection.session.update(session={"type": "transcription", "audio": {"input": audio_input}})
        await stream(connection, pcm24(TWO_TURNS.samples))
        await connection.input_audio_buffer.commit()
        events = [event async for event in events_until(connection, ".completed")]
    assert list(transcripts(events).values()) == [TWO_TURNS.text]
    assert not of_type(events, "speech_started")


@pytest.mark.parametrize(("format", "subtype"), [("audio/pcmu", "ULAW"), ("audio/pcma", "ALAW")])
async def test_telephone_audio_of_both_laws(server: Server, format: str, subtype: str) -> None:
    async with open_session(server.url) as session:
        await session.update(format={"type": format}, **MANUAL)
        await session.append(telephone(TWO_TURNS.samples, subtype), size=400)
        await session.commit()
        assert list(transcripts(await session.until(".completed")).values()) == [TWO_TURNS.text]


def telephone(samples: Samples, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, soxr.resample(samples, SAMPLE_RATE, 8000), 8000, format="RAW", subtype=subtype)
    return file.getvalue()


async def test_sessions_at_once_hear_their_own(server: Server) -> None:
    async def hear(digits: str, voice: str) -> str:
        async with open_session(server.url) as session:
            spoken = say(digits, voice, gap_s=[*[0.2] * (len(digits) - 1), 1.0])
            await session.append(pcm24(spoken.samples), pace_s=0.01)
            return str((await session.until(".completed"))[-1]["transcript"])

    heard = await asyncio.gather(hear("314", "f3"), hear("27", "m5"))
    assert list(heard) == [say("314").text, say("27").text]


async def test_a_turn_longer_than_the_models_window_is_heard_whole(server: Server) -> None:
    spoken = say("3141592653" * 2, gap_s=0.45)
    async with open_manual(server.url) as session:
        await session.say(pcm24(spoken.samples))
        events = await session.until(".completed")
        text = transcripts(events)[events[-1]["item_id"]]
    assert len(set(text.split()) - set(spoken.text.split())) == 0
    assert len(text.split()) == pytest.approx(20, abs=2)


async def test_a_killed_replica_in_the_middle_loses_no_turn(server: Server) -> None:
    spoken = say("314", gap_s=[0.2, 0.2, 0.5])
    async with open_manual(server.url) as session:
        for turn in range(4):
            await session.say(pcm24(spoken.samples))
            if turn == 1:
                kill_a_replica(server)
        events = await session.until(".completed", ".failed", count=4)
    assert list(transcripts(events).values()) == [spoken.text] * 4


def kill_a_replica(server: Server) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    replicas = [p for p in processes if any("replica" in part for part in p.cmdline())]
    replicas[0].kill()


async def test_the_secret_that_the_official_client_is_given_opens_a_session(client: AsyncOpenAI) -> None:
    secret = await client.realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60},
        session={"type": "transcription", "audio": {"input": {"turn_detection": None}}},
    )
    assert secret.value.startswith("ek_")
    assert secret.session.type == "transcription"
    async with client.with_options(api_key=secret.value).realtime.connect() as connection:
        created = json.loads(await connection.recv_bytes())
        assert created["session"]["audio"]["input"]["turn_detection"] is None


@pytest.mark.slow
async def test_the_client_connects_again_where_the_close_code_says_so_and_not_where_it_is_refused() -> None:
    """It goes by a list of its own of codes after which a session is worth another try."""
    codes: list[int] = []

    def note(event: ReconnectingEvent) -> None:
        codes.append(event.close_code)

    async with run_app(embedded(max_realtime_session_s=0.3, api_key="s3cret")) as app:
        url = f"{app.url}/v1"
        async with (
            AsyncOpenAI(base_url=url, api_key="s3cret") as client,
            client.realtime.connect(extra_query=INTENT, on_reconnecting=note) as connection,
        ):
            created = [await anext(aiter(connection)) for _ in range(2)]
        assert ([event.type for event in created], codes) == (["session.created"] * 2, [1001])
        async with AsyncOpenAI(base_url=url, api_key="wrong") as client:
            with pytest.raises(InvalidStatus, match="HTTP 401") as caught:
                async with client.realtime.connect(extra_query=INTENT, on_reconnecting=note):
                    pass
        error = json.loads(caught.value.response.body)["error"]
        assert (error["message"], codes) == ("Incorrect API key.", [1001])
